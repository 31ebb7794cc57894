// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/copy.h"

namespace halfstep::optim {

/// A flag as kernels take it: f32 of one element on `device`, which `flag` is, or a bool that becomes it. An undefined
/// one stays so. Throws Error for any other.
inline Tensor step_flag(const Tensor& flag, Device device, const std::string& who, const char* what) {
  if (!flag.defined()) return flag;
  if (flag.numel() != 1 || (flag.dtype() != DType::f32 && flag.dtype() != DType::boolean) || flag.device() != device) {
    fail<Error>("{}: expected `{}` to be f32 or bool of one element on {}, got {} {} on {}", who, what, device.str(),
                name(flag.dtype()), flag.sizes().str(), flag.device().str());
  }
  return flag.dtype() == DType::boolean ? cast_unrecorded(flag, DType::f32) : flag;
}

}  // namespace halfstep::optim
