// SPDX-License-Identifier: Apache-2.0
// Internal: how the library itself writes to a tensor's memory on the CPU. Tensor::data() and raw_data() count the
// address as given away for good, after which nothing made of the contents is kept; who lets go of it before anybody
// else runs, and says that it writes, need not have that. (To read: Tensor::const_raw_data(), data<const T>().)
#pragma once

#include "halfstep/core/storage.h"
#include "halfstep/core/tensor.h"

namespace halfstep {

/// The first element, to be written now, before the caller returns; the write is counted already.
inline void* write_raw_data(const Tensor& tensor) {
  void* data = const_cast<void*>(tensor.const_raw_data());
  tensor.storage()->bump_version();
  return data;
}
/// The same as `T`. Throws DTypeError when the tensor holds something else, DeviceError when it is not on the CPU.
template <class T>
T* write_data(const Tensor& tensor) {
  T* data = const_cast<T*>(tensor.data<const T>());
  tensor.storage()->bump_version();
  return data;
}

}  // namespace halfstep
