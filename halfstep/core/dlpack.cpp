// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/dlpack.h"

#include <cstddef>
#include <memory>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"

namespace halfstep {
namespace {

using dlpack::DataType;
using dlpack::ManagedTensor;
using dlpack::ManagedTensorVersioned;
using dlpack::TensorInfo;

// The layout that the C ABI has on 64-bit machines.
static_assert(sizeof(void*) != 8 ||
              (sizeof(TensorInfo) == 48 && offsetof(TensorInfo, shape) == 24 && sizeof(ManagedTensor) == 64 &&
               sizeof(ManagedTensorVersioned) == 80 && offsetof(ManagedTensorVersioned, tensor) == 32));

struct Row {
  DType dtype;
  std::uint8_t code, bits;
};
constexpr Row kTypes[] = {
    {DType::f32, 2, 32},    {DType::f64, 2, 64},    {DType::f16, 2, 16},    {DType::bf16, 4, 16},
    {DType::i64, 0, 64},    {DType::i32, 0, 32},    {DType::i8, 0, 8},      {DType::u8, 1, 8},
    {DType::boolean, 6, 8}, {DType::f8e4m3, 10, 8}, {DType::f8e5m2, 12, 8},
};

DataType type_of(DType dtype) {
  for (const Row& r : kTypes) {
    if (r.dtype == dtype) return {r.code, r.bits, 1};
  }
  fail<InternalError>("to_dlpack: no type for {}", name(dtype));
}

DType dtype_of_type(const DataType& type) {
  if (type.lanes == 1) {
    for (const Row& r : kTypes) {
      if (r.code == type.code && r.bits == type.bits) return r.dtype;
    }
  }
  fail<DTypeError>("from_dlpack: no dtype for elements of code {}, {} bits, {} lanes", type.code, type.bits,
                   type.lanes);
}

constexpr std::int32_t kCpu = 1, kCuda = 2, kCudaHost = 3;

dlpack::DeviceInfo device_of(Device device) {
  if (device.is_cpu()) return {kCpu, 0};
  if (device.is_meta()) fail<DeviceError>("to_dlpack: tensors of the device meta have no values");
  const std::string text = device.str();
  if (text.starts_with("cuda")) return {kCuda, device.index};
  fail<DeviceError>("to_dlpack: expected a tensor of cpu or cuda, got {}; copy it to the CPU first", text);
}

Device device_of_info(const dlpack::DeviceInfo& info) {
  if (info.device_type == kCpu || info.device_type == kCudaHost) return {};
  if (info.device_type == kCuda && info.device_id >= 0 && info.device_id < 256) {
    return Device(fmt::format("cuda:{}", info.device_id));
  }
  fail<DeviceError>("from_dlpack: no device for type {}, number {}", info.device_type, info.device_id);
}

// What a tensor given away keeps alive, with room for shape and strides.
template <class Managed>
struct Given {
  Managed managed;
  Ref<TensorImpl> tensor;
  std::int64_t shape[kMaxDims], strides[kMaxDims];
};

template <class Managed>
Managed* give(const Tensor& tensor) {
  if (!tensor.defined()) fail<Error>("to_dlpack: expected a tensor, got an undefined one");
  if (tensor.requires_grad()) {
    fail<AutogradError>("to_dlpack: the tensor requires grad, which the other side can't record; use detach()");
  }
  const dlpack::DeviceInfo device = device_of(tensor.device());
  auto given = std::make_unique<Given<Managed>>();
  const TensorImpl& t = *tensor.impl();
  for (int d = 0; d < t.sizes.size(); ++d) {
    given->shape[d] = t.sizes[d];
    // Some readers refuse other strides than row-major ones where nothing hangs on them.
    given->strides[d] = t.sizes[d] < 2 && t.contiguous ? contiguous_strides(t.sizes)[d] : t.strides[d];
  }
  TensorInfo& info = given->managed.tensor;
  t.storage->lend_address();
  info.data = t.data();
  info.device = device;
  info.ndim = t.sizes.size();
  info.dtype = type_of(t.dtype);
  info.shape = given->shape;
  info.strides = given->strides;
  info.byte_offset = 0;
  given->tensor = tensor.impl_ref();
  given->managed.manager_context = given.get();
  given->managed.deleter = [](Managed* self) {
    if (!self) return;
    auto* given = static_cast<Given<Managed>*>(self->manager_context);
    given->tensor->storage->return_address();
    delete given;
  };
  return &given.release()->managed;
}

template <class Managed>
Tensor take(Managed* managed) {
  const TensorInfo& info = managed->tensor;
  const DType dtype = dtype_of_type(info.dtype);
  const Device device = device_of_info(info.device);
  if (info.ndim < 0 || info.ndim > kMaxDims || (info.ndim > 0 && !info.shape)) {
    fail<ShapeError>("from_dlpack: expected 0 to {} dimensions, got {}", kMaxDims, info.ndim);
  }
  Shape sizes, strides;
  std::int64_t numel = 1;
  for (int d = 0; d < info.ndim; ++d) {
    sizes.push_back(info.shape[d]);
    if (info.shape[d] < 0 || __builtin_mul_overflow(numel, info.shape[d], &numel)) {
      fail<ShapeError>("from_dlpack: dimension {} has the impossible size {}", d, info.shape[d]);
    }
  }
  if (info.strides) {
    for (int d = 0; d < info.ndim; ++d) strides.push_back(info.strides[d]);
  } else {
    strides = contiguous_strides(sizes);
  }
  std::int64_t last = 0;
  for (int d = 0; d < info.ndim && numel != 0; ++d) {
    std::int64_t step = 0;
    if (strides[d] < 0 && sizes[d] > 1) {
      fail<ShapeError>("from_dlpack: expected strides of at least 0, got {}; copy the array first", strides.str());
    }
    if (strides[d] < 0) strides[d] = 0;
    if (__builtin_mul_overflow(sizes[d] - 1, strides[d], &step) || __builtin_add_overflow(last, step, &last)) {
      fail<ShapeError>("from_dlpack: {} with strides {} is too large", sizes.str(), strides.str());
    }
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(numel == 0 ? 0 : last + 1, static_cast<std::int64_t>(item_size(dtype)), &bytes)) {
    fail<ShapeError>("from_dlpack: {} with strides {} is too large", sizes.str(), strides.str());
  }
  if (!info.data && numel != 0) fail<Error>("from_dlpack: expected memory for {}, got a null pointer", sizes.str());
  void* data = info.data ? static_cast<char*>(info.data) + info.byte_offset : nullptr;
  if (reinterpret_cast<std::uintptr_t>(data) % item_size(dtype) != 0) {
    fail<Error>("from_dlpack: expected memory aligned to its {} elements", name(dtype));
  }
  return Tensor(TensorImpl::make(Storage::wrap(data, static_cast<std::size_t>(bytes), device,
                                               [managed] {
                                                 if (managed->deleter) managed->deleter(managed);
                                               }),
                                 0, sizes, strides, dtype));
}

}  // namespace

dlpack::ManagedTensor* to_dlpack(const Tensor& tensor) { return give<ManagedTensor>(tensor); }

dlpack::ManagedTensorVersioned* to_dlpack_versioned(const Tensor& tensor) {
  auto* managed = give<ManagedTensorVersioned>(tensor);
  managed->version = {1, 1};
  managed->flags = 0;
  return managed;
}

Tensor from_dlpack(dlpack::ManagedTensor* managed) {
  if (!managed) fail<Error>("from_dlpack: expected a tensor, got a null pointer");
  return take(managed);
}

Tensor from_dlpack(dlpack::ManagedTensorVersioned* managed) {
  if (!managed) fail<Error>("from_dlpack: expected a tensor, got a null pointer");
  if (managed->version.major != 1) {
    fail<Error>("from_dlpack: expected DLPack version 1, got {}.{}", managed->version.major, managed->version.minor);
  }
  if (managed->flags & dlpack::kReadOnly) {
    fail<Error>("from_dlpack: the memory is read-only, and tensors may be written; ask the other side for a copy");
  }
  return take(managed);
}

}  // namespace halfstep
