// SPDX-License-Identifier: Apache-2.0
// Internal: the kernel that GradScaler and LossScaler divide gradients with.
#pragma once

#include "halfstep/runtime/kernel.h"

namespace halfstep::amp::detail {

inline const KernelTable& unscale_kernels() {
  static const KernelTable& table = kernel_table("amp_unscale");
  return table;
}

}  // namespace halfstep::amp::detail
