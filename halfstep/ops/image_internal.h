// SPDX-License-Identifier: Apache-2.0
// What the ops on images share; not for users.
//
// The attributes of a call carry the image's sizes and strides, so that the backward pass makes a gradient that lies in
// memory as the image did. The gradient that comes in often can't tell: a mean of the whole image has one place.
#pragma once

#include <cstdint>

#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/view.h"

namespace halfstep::detail {

/// `sizes`, then `strides`.
inline IntList geometry(const Shape& sizes, const Shape& strides) {
  Shape both = sizes;
  for (const std::int64_t s : strides) both.push_back(s);
  return int_list(both);
}
/// The `n` strides at the end of geometry().
inline Shape strides_in(const IntList& list, int n = 4) {
  return std::span<const std::int64_t>(list.values + list.size - n, static_cast<std::size_t>(n));
}

/// The output of a backward pass: `list` is the geometry of an image [N, C, H, W].
inline void output_like_image(InferContext& ctx, const IntList& list, DType dtype) {
  const Shape sizes(std::span<const std::int64_t>(list.values, 4));
  ctx.output(sizes, strides_like(sizes, strides_in(list)), dtype);
}
/// The output of a forward pass: input 0 with another height and width.
inline void output_resized(InferContext& ctx, std::int64_t height, std::int64_t width, DType dtype) {
  const Tensor& x = ctx.input(0);
  const Shape sizes{x.size(0), x.size(1), height, width};
  ctx.output(sizes, strides_like(sizes, x.strides()), dtype);
}

/// Whether an image has integers of 8 bits: those of quantized networks.
inline bool is_byte_image(const Tensor& input) { return input.dtype() == DType::u8 || input.dtype() == DType::i8; }

/// Throws unless input is [N, C, H, W] or [C, H, W] (`dims` 2; [N, C, L] or [C, L] for 1) of a floating dtype (or, with
/// `bytes`, u8 or i8), with places.
inline void check_image(const Tensor& input, const char* op, int dims = 2, bool bytes = false) {
  check_defined(input, op, "an input");
  if (!bytes || !is_byte_image(input)) check_floating(input, op);
  const Shape& sizes = input.sizes();
  bool fits = sizes.size() == dims + 1 || sizes.size() == dims + 2;
  for (int i = sizes.size() - dims; fits && i < sizes.size(); ++i) fits = sizes[i] > 0;
  if (!fits) {
    fail<ShapeError>("{}: expected an input {} with at least one place, got {}", op,
                     dims == 2 ? "[N, C, H, W] or [C, H, W]" : "[N, C, L] or [C, L]", sizes.str());
  }
}

/// f([N, C, H, W]) of an image that may come without the first dimension, or (`dims` 1) as a sequence without the
/// third.
template <class F>
Tensor as_images(const Tensor& input, int dims, F&& f) {
  const bool single = input.dim() == dims + 1;
  Tensor x = single ? input.unsqueeze(0) : input;
  if (dims == 1) x = x.unsqueeze(2);
  Tensor y = f(x);
  if (dims == 1) y = y.squeeze(2);
  return single ? y.squeeze(0) : y;
}

/// Throws where a number of a window is none: beyond this sums of them, and products with sizes, might not fit.
inline void check_number(std::int64_t v, const Shape& list, const char* op, const char* what, std::int64_t least) {
  if (v < least) fail<ShapeError>("{}: expected {} of at least {}, got {}", op, what, least, list.str());
  if (v > INT32_MAX) fail<ShapeError>("{}: expected {} of at most {}, got {}", op, what, INT32_MAX, list.str());
}

/// One number for all, or one for each of `dims` dimensions, as [height, width]. Throws when there are others.
inline void numbers_for(const Shape& list, const char* op, const char* what, int dims, std::int64_t least,
                        std::int64_t (&to)[2]) {
  if (list.size() != 1 && list.size() != dims) {
    fail<ShapeError>("{}: expected {} {} for {}, got {}", op, dims == 1 ? "1" : "1 or 2",
                     dims == 1 ? "number" : "numbers", what, list.str());
  }
  for (const std::int64_t v : list) check_number(v, list, op, what, least);
  // A sequence is an image of height 1: the caller has put there what leaves it alone.
  if (dims == 2) to[0] = list[0];
  to[1] = list.back();
}

}  // namespace halfstep::detail
