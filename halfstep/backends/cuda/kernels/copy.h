// SPDX-License-Identifier: Apache-2.0
// Copies for kernels that are made of others.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "host/kernel.h"

namespace hscuda {

/// Enqueues to = from, converted with one rounding and broadcast; any strides.
void copy_view(const Call& call, const Tensor& to, const Tensor& from);

/// A tensor of our own making, over memory of anyone.
class View {
 public:
  View(const void* data, int dtype, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides)
      : tensor_{const_cast<void*>(data),     sizes_, strides_, 1, static_cast<int32_t>(sizes.size()),
                static_cast<uint8_t>(dtype), 1,      0,        0} {
    std::copy(sizes.begin(), sizes.end(), sizes_);
    std::copy(strides.begin(), strides.end(), strides_);
    for (const int64_t size : sizes) tensor_.numel *= size;
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  operator const Tensor&() const { return tensor_; }

 private:
  int64_t sizes_[HALFSTEP_MAX_DIMS], strides_[HALFSTEP_MAX_DIMS];
  Tensor tensor_;
};

}  // namespace hscuda
