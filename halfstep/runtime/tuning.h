// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/export.h"

namespace halfstep {

/// Whether the CPU chooses how to compute a convolution by timing (true) or by a model of shape, dtype and instruction
/// set (false, the default). As `torch.backends.cudnn.benchmark`, for all convolutions of the program from now on.
///
///     set_tuning(true);
///
/// With it the first call of each different convolution (part, sizes, strides, dtypes, layout) runs every kernel that
/// serves it a few times, on the call's own operands; the fastest one computes it from then on. Choices are kept for
/// the machine in `$XDG_CACHE_HOME/halfstep/choices` (`~/.cache/halfstep/choices`), in a file for each processor
/// model, instruction set and number of threads, so that later runs measure nothing and have the same bits as each
/// other. Kernels round differently: bits may differ from those without tuning, and from one machine to another of the
/// same kind; every kernel keeps the documented bounds. Winograd's tiles take part only as far as set_winograd() allows
/// them. Measuring takes memory for the workspace of the largest kernel tried.
HS_API void set_tuning(bool on);
/// The current setting: off, or on if HALFSTEP_TUNE is `1` and the program has not changed it.
HS_API bool tuning();

}  // namespace halfstep
