// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/error.h"
#include "halfstep/core/export.h"
#include "halfstep/core/scalar.h"
#include "halfstep/core/shape.h"
#include "halfstep/core/storage.h"

namespace halfstep {

class TensorImpl;
class Tensor;

/// Autograd's data for a tensor: its gradient and the node that produced it. Core only provides the slot.
class HS_API GradSlot {
 public:
  virtual ~GradSlot() = default;
  /// Name of the op that made the tensor, for printing; empty for a leaf.
  virtual std::string made_by() const { return {}; }
};

/// Options of the functions that make tensors.
struct TensorOptions {
  DType dtype = f32;                 ///< element type
  Device device = default_device();  ///< where it lives
  bool requires_grad = false;        ///< whether operations on it are recorded
};

/// Options of Tensor::to.
struct ToOptions {
  /// Return before the copy is done, if the device supports it: from and to pinned memory. Do not modify the source, or
  /// read a result on the CPU, before synchronize().
  bool non_blocking = false;
  bool copy = false;  ///< a new tensor even when nothing changes
  MemoryFormat memory_format = MemoryFormat::preserve;
};

/// Options of Tensor::backward.
struct BackwardOptions {
  bool retain_graph = false;  ///< keep the saved tensors, so that the graph can be run again
  bool create_graph = false;  ///< record the backward pass too, for second derivatives
};

/// An n-dimensional array: a cheap handle on shared storage with sizes, strides, dtype and device. Copies of a Tensor
/// are the same tensor; views share storage. A default-constructed Tensor is undefined: it stands for "none". Reading
/// from several threads is safe; one thread at a time may write.
///
/// Methods that compute are declared here and defined with their ops (ops/, autograd/).
class HS_API Tensor {
 public:
  Tensor() = default;
  explicit Tensor(Ref<TensorImpl> impl) : impl_(std::move(impl)) {}

  /// Whether this refers to a tensor at all.
  bool defined() const { return static_cast<bool>(impl_); }
  explicit operator bool() const = delete;  // ask defined() or item<bool>()

  /// Number of elements along each dimension.
  const Shape& sizes() const;
  const Shape& strides() const;  ///< in elements
  /// Size of one dimension, counted from the end when negative. Throws ShapeError.
  std::int64_t size(std::int64_t dim) const;
  std::int64_t stride(std::int64_t dim) const;
  int dim() const { return sizes().size(); }
  std::int64_t numel() const;
  DType dtype() const;
  Device device() const;
  /// Offset of the first element in the storage, in elements.
  std::int64_t storage_offset() const;
  const Ref<Storage>& storage() const;
  std::size_t item_size() const { return halfstep::item_size(dtype()); }
  bool is_floating() const { return halfstep::is_floating(dtype()); }
  /// Whether the elements are laid out in this format without gaps.
  bool is_contiguous(MemoryFormat format = MemoryFormat::contiguous) const;
  /// Incremented by every in-place write through any tensor of this storage.
  std::uint32_t version() const { return storage()->version(); }
  /// Whether two handles are the same tensor (not: equal values).
  bool is_same(const Tensor& other) const { return impl_ == other.impl_; }

  /// The first element. Memory of a device other than the CPU must not be accessed through it. Code that has this
  /// address may write at any time, so the library stops caching anything derived from the contents between calls, such
  /// as a weight's 16-bit copy. To keep such caches, read through const_raw_data() and write with copy_().
  void* raw_data() const;
  /// The first element, for reading only.
  const void* const_raw_data() const;
  /// The first element, as `T`; `const T` is for reading only (const_raw_data()). Throws DTypeError when the tensor
  /// holds something else, DeviceError when it is not on the CPU.
  template <class T>
  T* data() const {
    check_dtype(dtype_of<T>);
    if constexpr (std::is_const_v<T>) {
      return static_cast<T*>(const_raw_data());
    } else {
      return static_cast<T*>(raw_data());
    }
  }
  /// The single element, converted to `T`; waits for the device. Throws ShapeError when there is not exactly one.
  template <class T>
  T item() const {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(item_scalar().to_int());
    } else {
      return static_cast<T>(item_scalar().to_double());
    }
  }
  Scalar item_scalar() const;
  /// All elements in row-major order, converted to `T` (float, double or std::int64_t); waits for the device.
  template <class T>
  std::vector<T> to_vector() const;
  /// Text as PyTorch users expect it: values in aligned columns, abbreviated in the middle if there are over 1,000.
  std::string str() const;

  // --- Conversions and copies (ops/copy.cpp). Recorded.
  /// This tensor with another dtype, on another device or both; itself where nothing changes. Conversion rounds to
  /// nearest even.
  Tensor to(DType dtype, const ToOptions& options = {}) const;
  Tensor to(Device device, const ToOptions& options = {}) const;
  Tensor to(Device device, DType dtype, const ToOptions& options = {}) const;
  /// A copy in pinned host memory, so that to(device, {.non_blocking = true}) doesn't wait; itself if it is already
  /// pinned. `device`: the kind of device (by default the first one present); on a machine without a device it is an
  /// ordinary copy. Throws DeviceError for a tensor that is not on the CPU.
  Tensor pin_memory(std::optional<Device> device = {}) const;
  bool is_pinned() const;
  /// A copy with its own storage.
  Tensor clone(MemoryFormat format = MemoryFormat::preserve) const;
  /// Itself if dense in that format, else a copy that is.
  Tensor contiguous(MemoryFormat format = MemoryFormat::contiguous) const;
  /// Writes `source` (broadcast, converted) into this tensor.
  Tensor& copy_(const Tensor& source);
  Tensor& fill_(Scalar value);
  Tensor& zero_();

  // --- Views (ops/view.cpp). Recorded; they share storage.
  Tensor view(const Shape& sizes) const;     ///< one size may be -1; throws ShapeError when strides don't allow it
  Tensor reshape(const Shape& sizes) const;  ///< a view if possible, else a copy
  Tensor t() const;                          ///< transpose of a matrix
  Tensor transpose(std::int64_t dim0, std::int64_t dim1) const;
  Tensor permute(const Shape& dims) const;
  Tensor expand(const Shape& sizes) const;  ///< repeats dimensions of size 1 without copying; -1 keeps a size
  Tensor squeeze(std::int64_t dim) const;
  Tensor squeeze() const;
  Tensor unsqueeze(std::int64_t dim) const;
  Tensor select(std::int64_t dim, std::int64_t index) const;
  /// Elements start, start + step, ... below end along `dim`; negative bounds count from the end, bounds are clipped.
  Tensor slice(std::int64_t dim, std::int64_t start, std::int64_t end = INT64_MAX, std::int64_t step = 1) const;
  Tensor narrow(std::int64_t dim, std::int64_t start, std::int64_t length) const;
  Tensor operator[](std::int64_t index) const { return select(0, index); }

  // --- Arithmetic in place (ops/arithmetic.cpp).
  /// Computes as the function without the underscore does, and writes the result, rounded to this tensor's dtype, here.
  Tensor& add_(const Tensor& other, Scalar alpha = 1);
  Tensor& add_(Scalar other);
  Tensor& sub_(const Tensor& other, Scalar alpha = 1);
  Tensor& sub_(Scalar other);
  Tensor& mul_(const Tensor& other);
  Tensor& mul_(Scalar other);
  Tensor& div_(const Tensor& other);
  Tensor& div_(Scalar other);

  // --- Autograd (autograd/variable.cpp).
  /// Whether operations on this tensor are recorded: set on it, or it came from such tensors.
  bool requires_grad() const;
  /// Turns recording on or off for a leaf of a floating dtype; throws AutogradError otherwise.
  Tensor& requires_grad_(bool on = true);
  bool is_leaf() const;
  /// The gradient that backward passes have added up here; undefined before the first.
  Tensor grad() const;
  /// Sets the gradient (undefined: none). Throws when shape or device don't fit.
  void set_grad(const Tensor& grad) const;
  /// Runs the backward pass from this tensor; a tensor of one element needs no `gradient`.
  void backward(const Tensor& gradient = {}, const BackwardOptions& options = {}) const;
  /// The same data without history.
  Tensor detach() const;
  /// Retains the gradient of a non-leaf tensor.
  void retain_grad() const;
  /// `hook` is called with each gradient of this tensor before it is used and may return a replacement (or an undefined
  /// tensor to keep it). Returns a number for remove_hook.
  std::uint64_t register_hook(std::function<Tensor(const Tensor&)> hook) const;
  /// For leaves: `hook` runs after a gradient was added to grad().
  std::uint64_t register_post_accumulate_grad_hook(std::function<void(const Tensor&)> hook) const;
  void remove_hook(std::uint64_t id) const;

  /// What the handle points to; for the library and for extensions.
  TensorImpl* impl() const { return impl_.get(); }
  const Ref<TensorImpl>& impl_ref() const { return impl_; }

 private:
  void check_dtype(DType wanted) const;
  Ref<TensorImpl> impl_;
};

extern template HS_API std::vector<float> Tensor::to_vector<float>() const;
extern template HS_API std::vector<double> Tensor::to_vector<double>() const;
extern template HS_API std::vector<std::int64_t> Tensor::to_vector<std::int64_t>() const;

HS_API std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

/// Uninitialised memory, row-major.
HS_API Tensor empty(const Shape& sizes, const TensorOptions& options = {});
/// Uninitialised memory with these strides (in elements).
HS_API Tensor empty_strided(const Shape& sizes, const Shape& strides, const TensorOptions& options = {});
/// Uninitialised memory of the same sizes, dtype, device and, if dense, layout.
HS_API Tensor empty_like(const Tensor& other);
HS_API Tensor empty_like(const Tensor& other, DType dtype);
/// A tensor on memory of the caller's, row-major unless strides are given; `deleter` runs when the last tensor on it is
/// gone.
HS_API Tensor from_blob(void* data, const Shape& sizes, DType dtype = f32, std::function<void()> deleter = {});
HS_API Tensor from_blob(void* data, const Shape& sizes, const Shape& strides, DType dtype,
                        std::function<void()> deleter = {});

}  // namespace halfstep

#include "halfstep/core/tensor_impl.h"  // handles are copied inline
