// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/join.h"

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

bool is_skipped(const Shape& sizes) { return sizes.size() == 1 && sizes[0] == 0; }

void infer_cat(InferContext& ctx) {
  const auto wanted = ctx.attributes<AlongAttributes>().dim;
  DType dtype = DType::f32;
  bool same = true;
  const Tensor* first = nullptr;
  for (int i = 0; i < ctx.size(); ++i) {
    check_defined(ctx.input(i), ctx.name(), "tensors");
    if (i == 0) dtype = ctx.input(0).dtype();
    same &= ctx.input(i).dtype() == dtype;
    if (!first && !is_skipped(ctx.input(i).sizes())) first = &ctx.input(i);
  }
  if (!same) {
    std::vector<const Tensor*> all;
    for (int i = 0; i < ctx.size(); ++i) all.push_back(&ctx.input(i));
    dtype = result_type(all, ctx.name());
    ctx.cast(dtype);
  }
  if (!first) {
    ctx.output({0}, dtype);
    return;
  }
  Shape sizes = first->sizes();
  if (sizes.empty()) fail<ShapeError>("cat: expected at least one dimension, got a 0-d tensor; use stack");
  const int dim = wrap_dim(wanted, sizes.size(), ctx.name());
  sizes[dim] = 0;
  bool channels_last = true;
  for (int i = 0; i < ctx.size(); ++i) {
    const Shape& s = ctx.input(i).sizes();
    if (is_skipped(s)) continue;
    bool fits = s.size() == sizes.size();
    for (int d = 0; fits && d < s.size(); ++d) fits = d == dim || s[d] == sizes[d];
    if (!fits) {
      fail<ShapeError>("cat: expected sizes like {} but in dimension {}, got {} for tensor {}", first->sizes().str(),
                       dim, s.str(), i);
    }
    if (__builtin_add_overflow(sizes[dim], s[dim], &sizes[dim])) {
      fail<ShapeError>("cat: {} tensors are too long together in dimension {}", ctx.size(), dim);
    }
    channels_last &=
        s.size() == 4 && !ctx.input(i).is_contiguous() && ctx.input(i).is_contiguous(MemoryFormat::channels_last);
  }
  if (channels_last) {
    ctx.output(sizes, channels_last_strides(sizes), dtype);
  } else {
    ctx.output(sizes, dtype);
  }
}

const Op& cat_op = define_op({
    .name = "cat",
    .signature = "cat(tensors, dim=0)",
    .infer = infer_cat,
    .grad =
        [](GradContext& c) {
          const int n = c.grad().dim();
          const int dim = wrap_dim(c.attributes<AlongAttributes>().dim, n, "cat");
          std::int64_t at = 0;
          for (int i = 0; i < c.size(); ++i) {
            const Shape& sizes = c.input_sizes(i);
            const std::int64_t length = is_skipped(sizes) ? 0 : sizes[dim];
            if (c.needs(i)) {
              c.set(i, is_skipped(sizes) ? zeros(sizes, {.dtype = c.input_dtype(i), .device = c.device(i)})
                                         : c.grad().slice(dim, at, at + length));
            }
            at += length;
          }
        },
    .attributes = &attribute_struct<AlongAttributes>(),
});

const Op& flip_op = define_op({
    .name = "flip",
    .signature = "flip(input, dims)",
    .infer =
        [](InferContext& ctx) {
          const Tensor& x = ctx.input(0);
          ctx.output(x.sizes(), strides_like(x.sizes(), x.strides()), x.dtype());
        },
    .grad = [](GradContext& c) { c.set(0, flip(c.grad(), shape_of(c.attributes<DimsAttributes>().dims))); },
    .attributes = &attribute_struct<DimsAttributes>(),
});

// Each dimension once, counted from the front.
Shape wrap_dims(const Shape& dims, int n, const char* op) {
  Shape result;
  unsigned seen = 0;
  for (std::int64_t d : dims) {
    const int i = wrap_dim(d, n, op);
    if (seen >> i & 1) fail<ShapeError>("{}: expected each dimension at most once, got {}", op, dims.str());
    seen |= 1u << i;
    result.push_back(i);
  }
  return result;
}

Tensor repeat_dim(const Tensor& x, int dim, std::int64_t times, const char* op) {
  if (times == 1) return x;
  Shape sizes = x.sizes();
  const Shape once = sizes;
  std::int64_t all;
  if (__builtin_mul_overflow(sizes[dim], times, &sizes[dim]) || __builtin_mul_overflow(x.numel(), times, &all)) {
    fail<ShapeError>("{}: {} times dimension {} of {} has too many elements", op, times, dim, once.str());
  }
  if (sizes.size() == kMaxDims) {
    // No dimension is left for the repeats.
    if (x.numel() == 0) return empty(sizes, {.dtype = x.dtype(), .device = x.device()});
    if (times == 0) return cat({x.slice(dim, 0, 0)}, dim);
    return cat(std::vector<Tensor>(static_cast<std::size_t>(times), x), dim);
  }
  Shape repeated = once;
  repeated.insert(dim, times);
  return x.unsqueeze(dim).expand(repeated).reshape(sizes);
}

void check_dims(const Tensor& x, const char* op) {
  check_defined(x, op, "a tensor");
  if (x.dim() == 0) fail<ShapeError>("{}: expected at least one dimension, got a 0-d tensor", op);
}

}  // namespace

Tensor cat(std::span<const Tensor> tensors, std::int64_t dim) {
  if (tensors.empty()) fail<Error>("cat: expected at least one tensor");
  return call(cat_op, tensors, AlongAttributes{.dim = dim});
}

Tensor stack(std::span<const Tensor> tensors, std::int64_t dim) {
  if (tensors.empty()) fail<Error>("stack: expected at least one tensor");
  check_defined(tensors[0], "stack", "tensors");
  const int d = wrap_dim(dim, tensors[0].dim() + 1, "stack");
  std::vector<Tensor> parts;
  parts.reserve(tensors.size());
  for (const Tensor& t : tensors) {
    check_defined(t, "stack", "tensors");
    if (t.sizes() != tensors[0].sizes()) {
      fail<ShapeError>("stack: expected tensors of one shape, got {} and {}", tensors[0].sizes().str(),
                       t.sizes().str());
    }
    parts.push_back(t.unsqueeze(d));
  }
  return cat(parts, d);
}

std::vector<Tensor> split(const Tensor& input, const std::vector<std::int64_t>& sizes, std::int64_t dim) {
  check_dims(input, "split");
  const int d = wrap_dim(dim, input.dim(), "split");
  std::vector<Tensor> result;
  result.reserve(sizes.size());
  std::int64_t at = 0;
  bool fits = true;
  for (std::int64_t n : sizes) fits = fits && n >= 0 && n <= input.sizes()[d] - at && ((at += n), true);
  if (!fits || at != input.sizes()[d]) {
    fail<ShapeError>("split: expected sizes that add up to {} (dimension {} of {}), got {}", input.sizes()[d], d,
                     input.sizes().str(), fmt::format("[{}]", fmt::join(sizes, ", ")));
  }
  at = 0;
  for (std::int64_t n : sizes) {
    result.push_back(input.slice(d, at, at + n));
    at += n;
  }
  return result;
}

std::vector<Tensor> split(const Tensor& input, std::int64_t size, std::int64_t dim) {
  check_dims(input, "split");
  const int d = wrap_dim(dim, input.dim(), "split");
  const std::int64_t n = input.sizes()[d];
  if (size < 0 || (size == 0 && n != 0)) fail<ShapeError>("split: expected a size of at least 1, got {}", size);
  std::vector<Tensor> result;
  // An empty dimension gives one empty part.
  for (std::int64_t at = 0; at < std::max<std::int64_t>(n, 1); at += std::max<std::int64_t>(size, 1)) {
    result.push_back(input.slice(d, at, n - at < size ? n : at + size));
  }
  return result;
}

std::vector<Tensor> chunk(const Tensor& input, std::int64_t chunks, std::int64_t dim) {
  check_dims(input, "chunk");
  if (chunks < 1) fail<ShapeError>("chunk: expected at least 1 chunk, got {}", chunks);
  const std::int64_t n = input.size(dim);
  if (n == 0) return std::vector<Tensor>(static_cast<std::size_t>(chunks), input.slice(dim, 0, 0));
  return split(input, (n - 1) / chunks + 1, dim);
}

std::vector<Tensor> unbind(const Tensor& input, std::int64_t dim) {
  check_dims(input, "unbind");
  const int d = wrap_dim(dim, input.dim(), "unbind");
  std::vector<Tensor> result;
  for (std::int64_t i = 0; i < input.sizes()[d]; ++i) result.push_back(input.select(d, i));
  return result;
}

Tensor repeat(const Tensor& input, const Shape& repeats) {
  check_defined(input, "repeat", "a tensor");
  const int extra = repeats.size() - input.dim();
  bool fits = extra >= 0;
  for (std::int64_t r : repeats) fits &= r >= 0;
  if (!fits) {
    fail<ShapeError>("repeat: expected at least {} repeats of at least 0 for {}, got {}", input.dim(),
                     input.sizes().str(), repeats.str());
  }
  Shape sizes = input.sizes();
  for (int i = 0; i < extra; ++i) sizes.insert(0, 1);
  Tensor result = input.reshape(sizes);
  // The innermost first: later copies then move longer runs.
  for (int d = repeats.size() - 1; d >= 0; --d) result = repeat_dim(result, d, repeats[d], "repeat");
  return result.impl()->storage == input.impl()->storage ? result.clone() : result;
}

Tensor tile(const Tensor& input, const Shape& repeats) {
  check_defined(input, "tile", "a tensor");
  Shape all = repeats;
  while (all.size() < input.dim()) all.insert(0, 1);
  return repeat(input, all);
}

Tensor repeat_interleave(const Tensor& input, std::int64_t repeats, std::int64_t dim) {
  check_dims(input, "repeat_interleave");
  const int d = wrap_dim(dim, input.dim(), "repeat_interleave");
  if (repeats < 0) fail<ShapeError>("repeat_interleave: expected at least 0 repeats, got {}", repeats);
  if (repeats == 1) return input.clone();
  Shape sizes = input.sizes(), repeated = sizes;
  repeated.insert(d + 1, repeats);
  if (__builtin_mul_overflow(sizes[d], repeats, &sizes[d])) {
    fail<ShapeError>("repeat_interleave: {} times dimension {} of {} has too many elements", repeats, d,
                     input.sizes().str());
  }
  return input.unsqueeze(d + 1).expand(repeated).reshape(sizes);
}

Tensor roll(const Tensor& input, const Shape& shifts, const Shape& dims) {
  check_defined(input, "roll", "a tensor");
  if (dims.empty() && shifts.size() == 1) return roll(input.reshape({-1}), shifts, {0}).reshape(input.sizes());
  if (shifts.size() != dims.size() || shifts.empty()) {
    fail<ShapeError>("roll: expected one shift for each dimension, got shifts {} for dims {}", shifts.str(),
                     dims.str());
  }
  Tensor result = input;
  for (int i = 0; i < dims.size(); ++i) {
    const int d = wrap_dim(dims[i], input.dim(), "roll");
    const std::int64_t n = input.dim() == 0 ? 1 : input.sizes()[d];
    const std::int64_t shift = n == 0 ? 0 : (shifts[i] % n + n) % n;
    if (shift != 0) result = cat({result.slice(d, n - shift, n), result.slice(d, 0, n - shift)}, d);
  }
  return result.is_same(input) ? input.clone() : result;
}

Tensor flip(const Tensor& input, const Shape& dims) {
  check_defined(input, "flip", "a tensor");
  return call(flip_op, {&input}, DimsAttributes{.dims = int_list(wrap_dims(dims, input.dim(), "flip"))});
}

}  // namespace halfstep
