// SPDX-License-Identifier: Apache-2.0
// Exchange of tensors through DLPack, without a copy. The structs have the layout of DLPack's C ABI (dlpack.h of
// versions 0.8 and 1.x; https://dmlc.github.io/dlpack/latest/c_api.html), so that pointers to them and to dlpack.h's
// may be cast to each other.
#pragma once

#include <cstdint>

#include "halfstep/core/tensor.h"

namespace halfstep {
namespace dlpack {

/// DLDevice: where memory is.
struct DeviceInfo {
  std::int32_t device_type;  ///< 1 CPU, 2 CUDA, 3 CUDA's pinned memory
  std::int32_t device_id;
};
/// DLDataType: an element.
struct DataType {
  std::uint8_t code;  ///< 0 int, 1 unsigned, 2 float, 4 bfloat, 6 bool, 10 float8 e4m3fn, 12 float8 e5m2
  std::uint8_t bits;
  std::uint16_t lanes;
};
/// DLTensor: memory with a shape.
struct TensorInfo {
  void* data;
  DeviceInfo device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  ///< in elements; null for row-major
  std::uint64_t byte_offset;
};
/// DLManagedTensor: a tensor and its deleter. Used by protocols before 1.0.
struct ManagedTensor {
  TensorInfo tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor* self);
};
/// DLPackVersion.
struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
/// DLManagedTensorVersioned, since 1.0.
struct ManagedTensorVersioned {
  Version version;
  void* manager_context;
  void (*deleter)(ManagedTensorVersioned* self);
  std::uint64_t flags;  ///< bit 0: read only, bit 1: a copy was made
  TensorInfo tensor;
};
inline constexpr std::uint64_t kReadOnly = 1, kIsCopied = 2;

}  // namespace dlpack

/// The tensor for another library, which calls the result's deleter once; the memory lives until then. Throws
/// AutogradError for a tensor that requires grad (detach it), Error for a device that DLPack does not know.
HS_API dlpack::ManagedTensor* to_dlpack(const Tensor& tensor);
/// The same, in the struct of DLPack 1.0.
HS_API dlpack::ManagedTensorVersioned* to_dlpack_versioned(const Tensor& tensor);

/// Another library's tensor; its deleter is called when the last tensor on its memory is gone. When this throws (an
/// element type or device that Halfstep does not have, negative strides, read-only memory, another major version), the
/// caller still owns it.
HS_API Tensor from_dlpack(dlpack::ManagedTensor* managed);
HS_API Tensor from_dlpack(dlpack::ManagedTensorVersioned* managed);

}  // namespace halfstep
