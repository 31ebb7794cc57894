// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/resample.h"

#include <cmath>

#include "halfstep/ops/image_internal.h"

namespace halfstep {
namespace {

using detail::geometry;
using detail::strides_in;

const Op& interpolate_backward_op();
// `sizes`: the result's height and width, then the input's strides.
const Op& interpolate_op() {
  static const Op& op = define_op({
      .name = "interpolate",
      .signature = "interpolate(input, size or scale_factor, mode=nearest, align_corners=false, "
                   "recompute_scale_factor=false)",
      .infer =
          [](InferContext& ctx) {
            const IntList& sizes = ctx.attributes<InterpolateAttributes>().sizes;
            detail::output_resized(ctx, sizes.values[0], sizes.values[1], ctx.input(0).dtype());
          },
      .grad =
          [](GradContext& c) {
            InterpolateAttributes a = c.attributes<InterpolateAttributes>();
            a.sizes = geometry(c.input_sizes(0), strides_in(a.sizes));
            a.dtype = dtype_code(c.grad_dtype(0));
            c.set(0, call(interpolate_backward_op(), {&c.grad()}, a));
          },
      .attributes = &attribute_struct<InterpolateAttributes>(),
  });
  return op;
}
// `sizes`: the result's sizes and strides.
const Op& interpolate_backward_op() {
  static const Op& op = define_op({
      .name = "interpolate_backward",
      .signature = "interpolate_backward(gradient, scale, mode, align_corners)",
      .infer =
          [](InferContext& ctx) {
            const auto& a = ctx.attributes<InterpolateAttributes>();
            detail::output_like_image(ctx, a.sizes, dtype_or(a.dtype, ctx.input(0).dtype()));
          },
      .grad =
          [](GradContext& c) {
            InterpolateAttributes a = c.attributes<InterpolateAttributes>();
            const Shape& pooled = c.input_sizes(0);
            a.sizes = geometry({pooled[2], pooled[3]}, strides_in(a.sizes));
            a.dtype = kNoDType;
            c.set(0, call(interpolate_op(), {&c.grad()}, a));
          },
      .attributes = &attribute_struct<InterpolateAttributes>(),
      .backward = true,
  });
  return op;
}
[[maybe_unused]] const Op* const resample_ops[] = {&interpolate_op(), &interpolate_backward_op()};

}  // namespace

Tensor interpolate(const Tensor& input, const InterpolateOptions& options) {
  const char* op = "interpolate";
  detail::check_image(input, op, 2, options.mode != InterpolateMode::bilinear);
  const bool by_size = !options.size.empty();
  if (by_size == !options.scale_factor.empty()) {
    fail<Error>("interpolate: expected either size or scale_factor, got {}", by_size ? "both" : "neither");
  }
  if (options.align_corners && options.mode != InterpolateMode::bilinear) {
    fail<Error>("interpolate: expected align_corners with the mode bilinear only");
  }
  if (by_size && options.recompute_scale_factor) {
    fail<Error>("interpolate: expected recompute_scale_factor with scale_factor only, got a size");
  }
  std::int64_t wanted[2] = {};
  double factors[2] = {};
  if (by_size) {
    detail::numbers_for(options.size, op, "size", 2, 1, wanted);
  } else {
    const auto& f = options.scale_factor;
    if (f.size() > 2) fail<ShapeError>("interpolate: expected 1 or 2 numbers for scale_factor, got {}", f.size());
    for (int d = 0; d < 2; ++d) {
      factors[d] = f[f.size() == 1 ? 0 : static_cast<std::size_t>(d)];
      const double size = static_cast<double>(input.size(d - 2)) * factors[d];
      if (!(size >= 1) || !(size < 0x1p40)) {
        fail<ShapeError>("interpolate: expected a scale_factor that leaves at least one place, got {} for {}",
                         factors[d], input.sizes().str());
      }
      wanted[d] = static_cast<std::int64_t>(std::floor(size));
    }
  }
  return detail::as_images(input, 2, [&](const Tensor& x) {
    InterpolateAttributes a{.sizes = geometry({wanted[0], wanted[1]}, x.strides()),
                            .mode = static_cast<std::int32_t>(options.mode),
                            .align_corners = options.align_corners};
    for (int d = 0; d < 2; ++d) {
      const auto from = static_cast<double>(x.size(2 + d)), to = static_cast<double>(wanted[d]);
      if (options.align_corners) {
        a.scale[d] = wanted[d] > 1 ? (from - 1) / (to - 1) : 0;
      } else if (by_size || options.recompute_scale_factor) {
        a.scale[d] = from / to;
      } else {
        a.scale[d] = 1 / factors[d];
      }
    }
    return call(interpolate_op(), {&x}, a);
  });
}

}  // namespace halfstep
