// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/pad.h"

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index_detail.h"
#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

Shape padded(const Shape& sizes, const PadAttributes& a, int sign) {
  Shape result = sizes;
  for (int i = 0; i < sizes.size(); ++i) result[i] += sign * (a.before.values[i] + a.after.values[i]);
  return result;
}

const Op& pad_backward_op();
const Op& pad_op() {
  static const Op& op = define_op({
      .name = "pad",
      .signature = "pad(input, pads, mode=constant, value=0)",
      .infer =
          [](InferContext& ctx) {
            const Tensor& x = ctx.input(0);
            const Shape sizes = padded(x.sizes(), ctx.attributes<PadAttributes>(), 1);
            ctx.output(sizes, strides_like(sizes, x.strides()), x.dtype());
          },
      .grad =
          [](GradContext& c) {
            PadAttributes a = c.attributes<PadAttributes>();
            if (static_cast<PadMode>(a.mode) != PadMode::constant) {
              a.dtype = dtype_code(c.grad_dtype(0));
              return c.set(0, call(pad_backward_op(), {&c.grad()}, a));
            }
            // Cut off what was added, and zeros where something was cut off.
            for (int i = 0; i < a.before.size; ++i) {
              a.before.values[i] = -a.before.values[i];
              a.after.values[i] = -a.after.values[i];
            }
            a.value = {};
            c.set(0, call(pad_op(), {&c.grad()}, a));
          },
      .attributes = &attribute_struct<PadAttributes>(),
  });
  return op;
}
const Op& pad_backward_op() {
  static const Op& op = define_op({
      .name = "pad_backward",
      .signature = "pad_backward(gradient, pads, mode)",
      .infer =
          [](InferContext& ctx) {
            const Tensor& g = ctx.input(0);
            const auto& a = ctx.attributes<PadAttributes>();
            const Shape sizes = padded(g.sizes(), a, -1);
            ctx.output(sizes, strides_like(sizes, g.strides()), dtype_or(a.dtype, g.dtype()));
          },
      .grad =
          [](GradContext& c) {
            PadAttributes a = c.attributes<PadAttributes>();
            a.dtype = kNoDType;
            c.set(0, call(pad_op(), {&c.grad()}, a));
          },
      .attributes = &attribute_struct<PadAttributes>(),
      .backward = true,
  });
  return op;
}
[[maybe_unused]] const Op* const pad_ops[] = {&pad_op(), &pad_backward_op()};

const char* name_of(PadMode mode) {
  constexpr const char* kNames[] = {"constant", "reflect", "replicate", "circular"};
  return kNames[static_cast<int>(mode)];
}

void check_pads(const Shape& sizes, const std::vector<std::int64_t>& pads, PadMode mode) {
  const std::size_t most = 2 * static_cast<std::size_t>(mode == PadMode::constant ? sizes.size() : 3);
  if (pads.size() % 2 != 0 || pads.size() > most || pads.size() > 2 * static_cast<std::size_t>(sizes.size())) {
    fail<ShapeError>(
        "pad: expected a pair of numbers for each of at most {} dimensions from the last on, got {} numbers for {} in "
        "the mode {}",
        std::min<std::size_t>(most / 2, static_cast<std::size_t>(sizes.size())), pads.size(), sizes.str(),
        name_of(mode));
  }
}

}  // namespace

Tensor pad(const Tensor& input, const std::vector<std::int64_t>& pads, PadMode mode, Scalar value) {
  check_defined(input, "pad", "an input");
  const Shape& sizes = input.sizes();
  check_pads(sizes, pads, mode);
  PadAttributes a{.before = int_list(Shape::filled(sizes.size(), 0)),
                  .after = int_list(Shape::filled(sizes.size(), 0)),
                  .value = detail::scalar_value(value),
                  .mode = static_cast<std::int32_t>(mode)};
  for (std::size_t i = 0; i < pads.size() / 2; ++i) {
    const int d = sizes.size() - 1 - static_cast<int>(i);
    const std::int64_t before = pads[2 * i], after = pads[2 * i + 1], size = sizes[d];
    a.before.values[d] = before;
    a.after.values[d] = after;
    constexpr std::int64_t kMost = std::int64_t{1} << 60;  // sums fit
    if (std::min(before, after) < -kMost || std::max(before, after) > kMost) {
      fail<ShapeError>("pad: expected numbers of at most {}, got {} and {}", kMost, before, after);
    }
    const bool constant = mode == PadMode::constant;
    // What is left of the input, and what comes of it.
    const std::int64_t kept = size + std::min<std::int64_t>(before, 0) + std::min<std::int64_t>(after, 0);
    if (kept < (constant ? 0 : 1) || size + before + after < (constant ? 0 : 1)) {
      fail<ShapeError>("pad: expected to leave {} of dimension {} of {}, got {} and {}",
                       constant ? "no less than nothing" : "at least one element", d, sizes.str(), before, after);
    }
    const std::int64_t most = mode == PadMode::reflect ? size - 1 : mode == PadMode::circular ? size : INT64_MAX;
    if (!constant && std::max(before, after) > most) {
      fail<ShapeError>(
          "pad: expected at most {} elements on a side of dimension {} of {} in the mode {}, got {} and {}", most, d,
          sizes.str(), name_of(mode), before, after);
    }
  }
  return call(pad_op(), {&input}, a);
}

}  // namespace halfstep
