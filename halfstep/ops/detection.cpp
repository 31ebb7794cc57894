// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/detection.h"

#include <numbers>

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/image_internal.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/pointwise.h"

namespace halfstep {
namespace {

using detail::geometry;
using detail::strides_in;

void check_boxes(const Tensor& boxes, const char* op, const char* what = "boxes") {
  check_defined(boxes, op, what);
  check_floating(boxes, op);
  if (boxes.dim() < 1 || boxes.size(-1) != 4) {
    fail<ShapeError>("{}: expected {} [..., 4], got {}", op, what, boxes.sizes().str());
  }
}
void check_list(const Tensor& list, int dims, std::int64_t width, const char* op, const char* what) {
  check_defined(list, op, what);
  if (list.dim() == dims && (dims == 1 || list.size(1) == width)) return;
  if (dims == 1) fail<ShapeError>("{}: expected {} [N], got {}", op, what, list.sizes().str());
  fail<ShapeError>("{}: expected {} [N, {}], got {}", op, what, width, list.sizes().str());
}

// 16-bit boxes are computed in float32: their areas leave the range of f16, and bf16 has no whole pixels above 256.
Tensor wide(const Tensor& t) { return is_low_precision(t.dtype()) ? t.to(DType::f32) : t; }
DType wide_dtype(const Tensor& a, const Tensor& b, const char* op) {
  const Tensor* both[] = {&a, &b};
  const DType dtype = result_type(both, op);
  return is_low_precision(dtype) ? DType::f32 : dtype;
}

Tensor first_two(const Tensor& boxes) { return boxes.narrow(-1, 0, 2); }
Tensor last_two(const Tensor& boxes) { return boxes.narrow(-1, 2, 2); }
Tensor product_of_two(const Tensor& sides) { return sides.select(-1, 0) * sides.select(-1, 1); }

// `area_eps` is added to areas that divide, `eps` to the other divisors.
Tensor overlap(const Tensor& a, const Tensor& b, BoxIou kind, double area_eps, double eps) {
  const auto plus = [](const Tensor& t, double e) { return e == 0 ? t : t + e; };
  const Tensor a0 = first_two(a), a1 = last_two(a), b0 = first_two(b), b1 = last_two(b);
  const Tensor a_sides = a1 - a0, b_sides = b1 - b0;
  const Tensor both = product_of_two(clamp_min(minimum(a1, b1) - maximum(a0, b0), 0));
  const Tensor either = product_of_two(a_sides) + product_of_two(b_sides) - both;
  Tensor iou = both / plus(either, area_eps);
  if (kind == BoxIou::iou) return iou;
  const Tensor around = clamp_min(maximum(a1, b1) - minimum(a0, b0), 0);
  if (kind == BoxIou::giou) {
    const Tensor hull = product_of_two(around);
    return iou - (hull - either) / plus(hull, area_eps);
  }
  const auto squared = [](const Tensor& t) { return square(t.select(-1, 0)) + square(t.select(-1, 1)); };
  Tensor diou = iou - squared((a0 + a1 - b0 - b1) * 0.5) / (squared(around) + eps);
  if (kind == BoxIou::diou) return diou;
  // atan2(w, h) is atan(w / h), with a gradient where h is 0.
  const auto angle = [](const Tensor& sides) { return atan2(sides.select(-1, 0), sides.select(-1, 1)); };
  const Tensor aspect = square(angle(a_sides) - angle(b_sides)) * (4 / (std::numbers::pi * std::numbers::pi));
  const Tensor still = aspect.detach();
  return diou - still / (1 - iou.detach() + still + eps) * aspect;
}

const Op& box_iou_op =
    define_op({.name = "box_iou", .signature = "box_iou(a, b, kind=iou, format=xyxy)", .composite = true});
const Op& paired_box_iou_op = define_op({.name = "paired_box_iou",
                                         .signature = "paired_box_iou(a, b, kind=iou, format=xyxy, eps=1e-7)",
                                         .composite = true});

// Inputs: boxes, scores, classes (or none), all in float32 or float64. Outputs: as many numbers as there are boxes, of
// which the first are the result, and how many those are.
const Op& nms_op = define_op({
    .name = "nms",
    .signature = "nms(boxes, scores, classes=none, iou_threshold=0.5, limit=-1)",
    .infer =
        [](InferContext& ctx) {
          const DType dtype = wide_dtype(ctx.input(0), ctx.input(1), ctx.name());
          ctx.cast(dtype, 0b011);
          ctx.output({ctx.input(0).size(0)}, DType::i64);
          ctx.output({}, DType::i64);
        },
    .attributes = &attribute_struct<NmsAttributes>(),
});

const Op& roi_align_backward_op();
// `sizes`: the result's height and width, then the input's strides.
const Op& roi_align_op() {
  static const Op& op = define_op({
      .name = "roi_align",
      .signature = "roi_align(input, boxes, output_size, spatial_scale=1, sampling_ratio=0, aligned=false)",
      .infer =
          [](InferContext& ctx) {
            const Tensor& x = ctx.input(0);
            const IntList& list = ctx.attributes<RoiAlignAttributes>().sizes;
            const Shape sizes{ctx.input(1).size(0), x.size(1), list.values[0], list.values[1]};
            ctx.output(sizes, strides_like(sizes, x.strides()), x.dtype());
          },
      .grad =
          [](GradContext& c) {
            if (!c.needs(0)) return;
            RoiAlignAttributes a = c.attributes<RoiAlignAttributes>();
            a.sizes = geometry(c.input_sizes(0), strides_in(a.sizes));
            c.set(0, call(roi_align_backward_op(), {&c.grad(), &c.input(1)}, a));
          },
      .saves = {in(1)},
      .attributes = &attribute_struct<RoiAlignAttributes>(),
  });
  return op;
}
// `sizes`: the result's sizes and strides.
const Op& roi_align_backward_op() {
  static const Op& op = define_op({
      .name = "roi_align_backward",
      .signature = "roi_align_backward(gradient, boxes, spatial_scale, sampling_ratio, aligned)",
      .infer =
          [](InferContext& ctx) {
            detail::output_like_image(ctx, ctx.attributes<RoiAlignAttributes>().sizes, ctx.input(0).dtype());
          },
      .grad =
          [](GradContext& c) {
            if (!c.needs(0)) return;
            RoiAlignAttributes a = c.attributes<RoiAlignAttributes>();
            const Shape& pooled = c.input_sizes(0);
            a.sizes = geometry({pooled[2], pooled[3]}, strides_in(a.sizes));
            c.set(0, call(roi_align_op(), {&c.grad(), &c.input(1)}, a));
          },
      .saves = {in(1)},
      .attributes = &attribute_struct<RoiAlignAttributes>(),
      .backward = true,
  });
  return op;
}
[[maybe_unused]] const Op* const roi_ops[] = {&roi_align_op(), &roi_align_backward_op()};

Tensor kept(const Tensor& boxes, const Tensor& scores, const Tensor& classes, const NmsOptions& options,
            const char* op) {
  check_list(boxes, 2, 4, op, "boxes");
  check_values(boxes, op);
  check_floating(boxes, op);
  check_list(scores, 1, 0, op, "scores");
  check_floating(scores, op);
  if (scores.size(0) != boxes.size(0)) {
    fail<ShapeError>("{}: expected a score for each of {} boxes, got {}", op, boxes.size(0), scores.size(0));
  }
  if (!(options.iou_threshold >= 0 && options.iou_threshold <= 1)) {
    fail<Error>("{}: expected an iou_threshold from 0 to 1, got {}", op, options.iou_threshold);
  }
  if (options.limit < -1) fail<Error>("{}: expected a limit of at least -1, got {}", op, options.limit);
  const auto [numbers, count] =
      call_n<2>(nms_op, {&boxes, &scores, &classes},
                NmsAttributes{.iou_threshold = options.iou_threshold, .limit = options.limit});
  return numbers.narrow(0, 0, count.item<std::int64_t>());
}

}  // namespace

Tensor box_convert(const Tensor& boxes, BoxFormat from, BoxFormat to) {
  check_boxes(boxes, "box_convert");
  if (from == to) return boxes;
  const Tensor p = first_two(boxes), q = last_two(boxes);
  const auto joined = [](const Tensor& left, const Tensor& right) { return cat({left, right}, -1); };
  if (from == BoxFormat::xyxy) {
    const Tensor sides = q - p;
    return joined(to == BoxFormat::xywh ? p : (p + q) * 0.5, sides);
  }
  const Tensor corner = from == BoxFormat::cxcywh ? p - q * 0.5 : p;
  if (to == BoxFormat::xyxy) return joined(corner, from == BoxFormat::cxcywh ? p + q * 0.5 : p + q);
  return joined(to == BoxFormat::xywh ? corner : p + q * 0.5, q);
}

Tensor box_area(const Tensor& boxes, BoxFormat format) {
  check_boxes(boxes, "box_area");
  const Tensor b = wide(boxes);
  return product_of_two(format == BoxFormat::xyxy ? last_two(b) - first_two(b) : last_two(b));
}

Tensor clip_boxes_to_image(const Tensor& boxes, double height, double width) {
  check_boxes(boxes, "clip_boxes_to_image");
  if (!(height >= 0 && width >= 0)) {
    fail<Error>("clip_boxes_to_image: expected a height and a width of at least 0, got {} and {}", height, width);
  }
  const auto inside = [&](int i, double most) { return clamp(boxes.select(-1, i), 0.0, most); };
  return stack({inside(0, width), inside(1, height), inside(2, width), inside(3, height)}, -1);
}

Tensor box_iou(const Tensor& a, const Tensor& b, const BoxIouOptions& options) {
  check_list(a, 2, 4, "box_iou", "boxes a");
  check_list(b, 2, 4, "box_iou", "boxes b");
  check_floating(a, "box_iou");
  check_floating(b, "box_iou");
  return composite(box_iou_op, {&a, &b}, [&](std::span<const Tensor> t) {
    const DType dtype = wide_dtype(t[0], t[1], "box_iou");
    const auto corners = [&](const Tensor& boxes) {
      return box_convert(boxes.to(dtype), options.format, BoxFormat::xyxy);
    };
    return overlap(corners(t[0]).unsqueeze(1), corners(t[1]).unsqueeze(0), options.kind, 0, 1e-7);
  });
}

Tensor paired_box_iou(const Tensor& a, const Tensor& b, const PairedBoxIouOptions& options) {
  check_boxes(a, "paired_box_iou", "boxes a");
  check_boxes(b, "paired_box_iou", "boxes b");
  if (!(options.eps >= 0)) fail<Error>("paired_box_iou: expected an eps of at least 0, got {}", options.eps);
  return composite(paired_box_iou_op, {&a, &b}, [&](std::span<const Tensor> t) {
    broadcast_shapes(t[0].sizes(), t[1].sizes(), "paired_box_iou");
    const DType dtype = wide_dtype(t[0], t[1], "paired_box_iou");
    const auto corners = [&](const Tensor& boxes) {
      return box_convert(boxes.to(dtype), options.format, BoxFormat::xyxy);
    };
    return overlap(corners(t[0]), corners(t[1]), options.kind, options.eps, options.eps);
  });
}

Tensor nms(const Tensor& boxes, const Tensor& scores, const NmsOptions& options) {
  return kept(boxes, scores, {}, options, "nms");
}

Tensor batched_nms(const Tensor& boxes, const Tensor& scores, const Tensor& classes, const NmsOptions& options) {
  check_list(classes, 1, 0, "batched_nms", "classes");
  if (classes.dtype() != DType::i64) {
    fail<DTypeError>("batched_nms: expected classes of int64, got {}", name(classes.dtype()));
  }
  if (boxes.defined() && boxes.dim() == 2 && classes.size(0) != boxes.size(0)) {
    fail<ShapeError>("batched_nms: expected a class for each of {} boxes, got {}", boxes.size(0), classes.size(0));
  }
  return kept(boxes, scores, classes, options, "batched_nms");
}

Tensor roi_align(const Tensor& input, const Tensor& boxes, const RoiAlignOptions& options) {
  const char* op = "roi_align";
  detail::check_image(input, op);
  if (input.dim() != 4) fail<ShapeError>("roi_align: expected an input [N, C, H, W], got {}", input.sizes().str());
  check_list(boxes, 2, 5, op, "boxes");
  check_floating(boxes, op);
  std::int64_t size[2] = {};
  detail::numbers_for(options.output_size, op, "output_size", 2, 1, size);
  if (!(options.spatial_scale > 0)) {
    fail<Error>("roi_align: expected a spatial_scale above 0, got {}", options.spatial_scale);
  }
  if (options.sampling_ratio < 0 || options.sampling_ratio > 1024) {
    fail<Error>("roi_align: expected a sampling_ratio from 0 to 1024, got {}", options.sampling_ratio);
  }
  const Tensor x = wide(input), rois = boxes.detach().to(x.dtype()).contiguous();
  const RoiAlignAttributes a{.sizes = geometry({size[0], size[1]}, x.strides()),
                             .spatial_scale = options.spatial_scale,
                             .sampling_ratio = options.sampling_ratio,
                             .aligned = options.aligned};
  return call(roi_align_op(), {&x, &rois}, a).to(input.dtype());
}

}  // namespace halfstep
