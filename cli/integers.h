// SPDX-License-Identifier: Apache-2.0
// `--int8`: a network with weights in integers of 8 bits.
#pragma once

#include <string>

#include "cli/options.h"
#include "halfstep/core/dtype.h"

namespace halfstep::cli {

inline constexpr const char* kInt8Flag = "--int8";
/// Adds the flag of verbs that run trained networks.
void add_int8(const Verb& verb, bool& int8);

/// What files say of layers that stay in floating point, beside the flags of their training: bf16 or f16.
inline constexpr const char* kLeftPrecision = "quant-amp";
/// The dtype of layers that stay in floating point: what `amp` says, off, bf16 or f16; if that is empty, what the file
/// says, where the CPU has units for it; else float32. Throws UsageError for an `amp` that is none of these, IoError
/// for a file that says something else.
DType left_dtype(const Loaded& loaded, const std::string& amp);

/// `halfstep quantize` and `bench --inference`: weights of linear layers in integers, activations as they are.
inline constexpr const char *kWeightOnlyFlag = "--weight-only", *kGroupSizeFlag = "--group-size";

/// Lets evaluations and predictions of the network be those of sessions in integers (infer/session.h), one for each
/// size of pictures that comes. `amp` is the value of --amp, see left_dtype(). Returns `, in 8-bit integers` for the
/// line that says what runs. Throws UsageError where the weights know nothing of quantization, and as left_dtype().
std::string use_integers(Loaded& loaded, const std::string& amp);

}  // namespace halfstep::cli
