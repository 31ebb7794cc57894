// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/shape.h"

#include <algorithm>

#include "halfstep/core/fail.h"

namespace halfstep {
namespace {

// Stable insertion sort: at most kMaxDims values.
template <class Less>
void sort_dims(int* order, int n, Less less) {
  for (int i = 1; i < n; ++i) {
    const int value = order[i];
    int j = i;
    for (; j > 0 && less(value, order[j - 1]); --j) order[j] = order[j - 1];
    order[j] = value;
  }
}

// A stride past a dimension of this size. Where that is more than fits it is of no use, and refused where memory for
// such sizes is asked for: the product wraps round.
std::int64_t times(std::int64_t step, std::int64_t size) {
  std::int64_t result;
  __builtin_mul_overflow(step, std::max<std::int64_t>(size, 1), &result);
  return result;
}

}  // namespace

void Shape::too_many(int n) { fail<ShapeError>("shape: expected at most {} dimensions, got {}", kMaxDims, n); }

std::int64_t Shape::too_large() const {
  if (std::find(begin(), end(), 0) != end()) return 0;
  fail<ShapeError>("shape: {} has too many elements", str());
}

std::string Shape::str() const { return fmt::format("[{}]", fmt::join(begin(), end(), ", ")); }

Shape contiguous_strides(const Shape& sizes) {
  Shape strides = sizes;
  std::int64_t step = 1;
  for (int i = sizes.size() - 1; i >= 0; --i) {
    strides[i] = step;
    step = times(step, sizes[i]);
  }
  return strides;
}

Shape channels_last_strides(const Shape& sizes) {
  if (sizes.size() != 4) fail<ShapeError>("channels_last: expected 4 dimensions [N, C, H, W], got {}", sizes.str());
  const std::int64_t column = times(1, sizes[1]), row = times(column, sizes[3]);
  return {times(row, sizes[2]), 1, row, column};
}

bool is_contiguous(const Shape& sizes, const Shape& strides) {
  std::int64_t step = 1;
  for (int i = sizes.size() - 1; i >= 0; --i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) {
      if (strides[i] != step) return false;
      step *= sizes[i];
    }
  }
  return true;
}

bool is_dense(const Shape& sizes, const Shape& strides) {
  if (is_contiguous(sizes, strides)) return true;
  int order[kMaxDims];
  int n = 0;
  for (int i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) order[n++] = i;
  }
  sort_dims(order, n, [&](int a, int b) { return strides[a] < strides[b]; });
  std::int64_t step = 1;
  for (int i = 0; i < n; ++i) {
    if (strides[order[i]] != step) return false;
    step *= sizes[order[i]];
  }
  return true;
}

Shape strides_like(const Shape& sizes, const Shape& like) {
  // Channels-last strides are kept even where only the strides of dimensions of size 1 tell them from row-major.
  if (sizes.size() == 4 && like[1] == 1 && like == channels_last_strides(sizes)) return like;
  int order[kMaxDims];
  const int n = sizes.size();
  for (int i = 0; i < n; ++i) order[i] = n - 1 - i;
  // Innermost first; equal strides (size 1 or expanded dimensions) keep the row-major order.
  sort_dims(order, n, [&](int a, int b) {
    if (like[a] == 0 || like[b] == 0 || sizes[a] == 1 || sizes[b] == 1) return false;
    return like[a] < like[b];
  });
  Shape strides = sizes;
  std::int64_t step = 1;
  for (int i = 0; i < n; ++i) {
    strides[order[i]] = step;
    step = times(step, sizes[order[i]]);
  }
  return strides;
}

Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op) {
  const Shape& longer = a.size() >= b.size() ? a : b;
  const Shape& shorter = a.size() >= b.size() ? b : a;
  Shape result = longer;
  const int offset = longer.size() - shorter.size();
  for (int i = 0; i < shorter.size(); ++i) {
    const std::int64_t x = longer[i + offset], y = shorter[i];
    if (x == y || y == 1) continue;
    if (x != 1) {
      fail<ShapeError>("{}: expected shapes that broadcast together, got {} and {} (dimension {} has {} and {})", op,
                       a.str(), b.str(), i + offset, a.size() >= b.size() ? x : y, a.size() >= b.size() ? y : x);
    }
    result[i + offset] = y;
  }
  return result;
}

Shape broadcast_strides(const Shape& sizes, const Shape& strides, const Shape& target) {
  Shape result = Shape::filled(target.size(), 0);
  const int offset = target.size() - sizes.size();
  for (int i = 0; i < sizes.size(); ++i) result[i + offset] = sizes[i] == 1 && target[i + offset] != 1 ? 0 : strides[i];
  return result;
}

int wrap_dim(std::int64_t dim, int ndim, const char* op) {
  const int n = std::max(ndim, 1);
  if (dim < -n || dim >= n) fail<ShapeError>("{}: expected a dimension from {} to {}, got {}", op, -n, n - 1, dim);
  return static_cast<int>(dim < 0 ? dim + n : dim);
}

}  // namespace halfstep
