// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/tensor.h"
#include "halfstep/core/capture.h"

#include "halfstep/core/fail.h"
#include "halfstep/core/pool.h"
#include "halfstep/core/tensor_impl.h"

namespace halfstep {
namespace {

TensorImpl& get(const Ref<TensorImpl>& impl, const char* what) {
  if (!impl) fail<Error>("tensor.{}: expected a tensor, got an undefined one", what);
  return *impl;
}

std::size_t checked_bytes(const Shape& sizes, DType dtype) {
  std::int64_t bytes = static_cast<std::int64_t>(item_size(dtype));
  for (std::int64_t n : sizes) {
    if (n < 0) fail<ShapeError>("empty: expected sizes of at least 0, got {}", sizes.str());
    if (__builtin_mul_overflow(bytes, n, &bytes)) fail<ShapeError>("empty: {} has too many elements", sizes.str());
  }
  return static_cast<std::size_t>(bytes);
}

// The number of elements of storage that these strides reach, from the first element on.
std::int64_t extent(const Shape& sizes, const Shape& strides, const char* op) {
  if (strides.size() != sizes.size()) {
    fail<ShapeError>("{}: expected as many strides as sizes, got {} for {}", op, strides.str(), sizes.str());
  }
  std::int64_t last = 0;
  for (int i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0) {
      fail<ShapeError>("{}: expected sizes and strides of at least 0, got {} and {}", op, sizes.str(), strides.str());
    }
    if (sizes[i] == 0) return 0;
    std::int64_t step;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) || __builtin_add_overflow(last, step, &last)) {
      fail<ShapeError>("{}: {} with strides {} has too many elements", op, sizes.str(), strides.str());
    }
  }
  return last + 1;
}

}  // namespace

TensorImpl::TensorImpl(Ref<Storage> storage, std::int64_t offset, const Shape& sizes, const Shape& strides, DType dtype)
    : storage(std::move(storage)),
      offset(offset),
      sizes(sizes),
      strides(strides),
      numel(sizes.numel()),
      dtype(dtype),
      contiguous(halfstep::is_contiguous(sizes, strides)) {}

Ref<TensorImpl> TensorImpl::make(Ref<Storage> storage, std::int64_t offset, const Shape& sizes, const Shape& strides,
                                 DType dtype) {
  // Views take no memory, so that nothing else keeps a number that wraps round from being their size.
  sizes.numel();
  return Ref<TensorImpl>::adopt(new (pool_allocate<TensorImpl>())
                                    TensorImpl(std::move(storage), offset, sizes, strides, dtype));
}

void TensorImpl::destroy() {
  this->~TensorImpl();
  pool_deallocate<TensorImpl>(this);
}

const Shape& Tensor::sizes() const { return get(impl_, "sizes").sizes; }
const Shape& Tensor::strides() const { return get(impl_, "strides").strides; }
std::int64_t Tensor::size(std::int64_t dim) const { return sizes()[wrap_dim(dim, sizes().size(), "size")]; }
std::int64_t Tensor::stride(std::int64_t dim) const { return strides()[wrap_dim(dim, sizes().size(), "stride")]; }
std::int64_t Tensor::numel() const { return get(impl_, "numel").numel; }
DType Tensor::dtype() const { return get(impl_, "dtype").dtype; }
Device Tensor::device() const { return get(impl_, "device").storage->device(); }
std::int64_t Tensor::storage_offset() const { return get(impl_, "storage_offset").offset; }
const Ref<Storage>& Tensor::storage() const { return get(impl_, "storage").storage; }
void* Tensor::raw_data() const {
  const TensorImpl& p = get(impl_, "data");
  p.storage->give_address();
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it takes the address of a tensor with data()");
  return p.data();
}
const void* Tensor::const_raw_data() const {
  const TensorImpl& p = get(impl_, "data");
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it takes the address of a tensor with data()");
  return p.data();
}
bool Tensor::requires_grad() const { return get(impl_, "requires_grad").requires_grad; }

bool Tensor::is_contiguous(MemoryFormat format) const {
  const TensorImpl& t = get(impl_, "is_contiguous");
  switch (format) {
    case MemoryFormat::contiguous:
      return t.contiguous;
    case MemoryFormat::channels_last: {
      if (t.sizes.size() != 4) return false;
      const Shape wanted = channels_last_strides(t.sizes);
      for (int i = 0; i < 4; ++i) {
        if (t.sizes[i] != 1 && t.strides[i] != wanted[i]) return false;
      }
      return true;
    }
    case MemoryFormat::preserve:
      return is_dense(t.sizes, t.strides);
  }
  return false;
}

void Tensor::check_dtype(DType wanted) const {
  if (dtype() != wanted) {
    fail<DTypeError>("tensor.data: expected a {} tensor, got {} {}", name(wanted), name(dtype()), sizes().str());
  }
  if (device().is_meta()) {
    fail<DeviceError>("tensor.data: {} {} is of the device meta, where tensors have no values", name(dtype()),
                      sizes().str());
  }
  if (!device().is_cpu()) {
    fail<DeviceError>("tensor.data: expected a tensor of the CPU, got one of {}; copy it with .to(Device(\"cpu\"))",
                      device().str());
  }
}

Tensor empty_strided(const Shape& sizes, const Shape& strides, const TensorOptions& options) {
  std::int64_t bytes = extent(sizes, strides, "empty_strided");
  if (__builtin_mul_overflow(bytes, static_cast<std::int64_t>(item_size(options.dtype)), &bytes)) {
    fail<ShapeError>("empty_strided: {} with strides {} has too many elements", sizes.str(), strides.str());
  }
  Tensor result(TensorImpl::make(Storage::allocate(static_cast<std::size_t>(bytes), options.device), 0, sizes, strides,
                                 options.dtype));
  if (options.requires_grad) result.requires_grad_();
  return result;
}

Tensor empty(const Shape& sizes, const TensorOptions& options) {
  const std::size_t bytes = checked_bytes(sizes, options.dtype);
  Tensor result(
      TensorImpl::make(Storage::allocate(bytes, options.device), 0, sizes, contiguous_strides(sizes), options.dtype));
  if (options.requires_grad) result.requires_grad_();
  return result;
}

Tensor empty_like(const Tensor& other) { return empty_like(other, other.dtype()); }

Tensor empty_like(const Tensor& other, DType dtype) {
  return empty_strided(other.sizes(), strides_like(other.sizes(), other.strides()),
                       {.dtype = dtype, .device = other.device()});
}

Tensor from_blob(void* data, const Shape& sizes, DType dtype, std::function<void()> deleter) {
  return from_blob(data, sizes, contiguous_strides(sizes), dtype, std::move(deleter));
}

Tensor from_blob(void* data, const Shape& sizes, const Shape& strides, DType dtype, std::function<void()> deleter) {
  const std::int64_t elements = extent(sizes, strides, "from_blob");
  if (!data && elements) fail<Error>("from_blob: expected memory for {}, got a null pointer", sizes.str());
  return Tensor(TensorImpl::make(
      Storage::wrap(data, static_cast<std::size_t>(elements) * item_size(dtype), Device{}, std::move(deleter)), 0,
      sizes, strides, dtype));
}

}  // namespace halfstep
