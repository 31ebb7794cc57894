// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep {

/// The largest number of dimensions of a tensor.
inline constexpr int kMaxDims = 8;

/// Up to kMaxDims integers held in place: sizes, strides, lists of dimensions. Throws ShapeError if it would hold more.
class HS_API Shape {
 public:
  constexpr Shape() = default;
  Shape(std::initializer_list<std::int64_t> values) { assign(values.begin(), values.size()); }
  Shape(std::span<const std::int64_t> values) { assign(values.data(), values.size()); }
  Shape(const std::vector<std::int64_t>& values) { assign(values.data(), values.size()); }
  /// `n` times `value`.
  static Shape filled(int n, std::int64_t value) {
    Shape s;
    for (int i = 0; i < n; ++i) s.push_back(value);
    return s;
  }

  int size() const { return n_; }
  bool empty() const { return n_ == 0; }
  std::int64_t operator[](int i) const { return v_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return v_[static_cast<std::size_t>(i)]; }
  std::int64_t back() const { return v_[static_cast<std::size_t>(n_ - 1)]; }
  std::int64_t& back() { return v_[static_cast<std::size_t>(n_ - 1)]; }
  const std::int64_t* data() const { return v_.data(); }
  const std::int64_t* begin() const { return v_.data(); }
  const std::int64_t* end() const { return v_.data() + n_; }
  std::int64_t* begin() { return v_.data(); }
  std::int64_t* end() { return v_.data() + n_; }

  void push_back(std::int64_t value) {
    if (n_ == kMaxDims) too_many(n_ + 1);
    v_[static_cast<std::size_t>(n_++)] = value;
  }
  void pop_back() { --n_; }
  /// Inserts `value` before position `i` (0 to size()).
  void insert(int i, std::int64_t value) {
    push_back(0);
    for (int j = n_ - 1; j > i; --j) (*this)[j] = (*this)[j - 1];
    (*this)[i] = value;
  }
  /// Removes position `i`.
  void erase(int i) {
    for (int j = i; j + 1 < n_; ++j) (*this)[j] = (*this)[j + 1];
    --n_;
  }

  /// The product of all values: the number of elements of a tensor of these sizes (1 for none). Throws ShapeError when
  /// it doesn't fit in 64 bits.
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (std::int64_t v : *this) {
      if (__builtin_mul_overflow(n, v, &n)) [[unlikely]]
        return too_large();
    }
    return n;
  }
  /// `[2, 3]`
  std::string str() const;

  operator std::span<const std::int64_t>() const { return {v_.data(), static_cast<std::size_t>(n_)}; }
  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.n_ != b.n_) return false;
    for (int i = 0; i < a.n_; ++i) {
      if (a[i] != b[i]) return false;
    }
    return true;
  }

 private:
  void assign(const std::int64_t* values, std::size_t n) {
    if (n > kMaxDims) too_many(static_cast<int>(n));
    for (std::size_t i = 0; i < n; ++i) v_[i] = values[i];
    n_ = static_cast<int>(n);
  }
  [[noreturn]] static void too_many(int n);
  // What numel() returns where a product of the first values doesn't fit: 0 when another value is 0.
  std::int64_t too_large() const;

  std::array<std::int64_t, kMaxDims> v_{};
  int n_ = 0;
};

/// How the elements of a dense tensor are laid out in memory.
enum class MemoryFormat : std::uint8_t {
  contiguous,     ///< row-major: the last dimension is contiguous
  channels_last,  ///< NHWC strides under NCHW sizes (4 dimensions)
  preserve,       ///< as the source, if that is dense; otherwise contiguous
};

/// Row-major strides, in elements, of a dense tensor of these sizes.
HS_API Shape contiguous_strides(const Shape& sizes);
/// NHWC strides under NCHW sizes; `sizes` has 4 dimensions.
HS_API Shape channels_last_strides(const Shape& sizes);
/// Whether a tensor with these sizes and strides is row-major without gaps.
HS_API bool is_contiguous(const Shape& sizes, const Shape& strides);
/// Whether the elements fill one block of memory without gaps or overlap, in any order of dimensions.
HS_API bool is_dense(const Shape& sizes, const Shape& strides);
/// Dense strides for `sizes` in the order of dimensions that `like` has (a dense or strided tensor of the same sizes).
/// Channels-last strides stay as they are, also of one channel or place.
HS_API Shape strides_like(const Shape& sizes, const Shape& like);
/// The common shape of two shapes under NumPy's broadcasting rules. Throws ShapeError, naming `op`, when there is none.
HS_API Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op);
/// Strides of a tensor of `sizes` and `strides` broadcast to the shape `target` (0 where it is repeated).
HS_API Shape broadcast_strides(const Shape& sizes, const Shape& strides, const Shape& target);
/// A dimension counted from the end when negative, as a number from 0 to ndim-1 (0-d tensors take 0 and -1). Throws
/// ShapeError, naming `op`.
HS_API int wrap_dim(std::int64_t dim, int ndim, const char* op);

}  // namespace halfstep
