// SPDX-License-Identifier: Apache-2.0
// ONNX's convolutions, pooling, resizing and padding as recorded ops.
#include <algorithm>
#include <cmath>
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/io/onnx_import_internal.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/resample.h"

namespace halfstep::io::detail {
namespace {

using C = OnnxCall;
using Ints = std::vector<std::int64_t>;
using std::int64_t;

// Windows over the last one or two dimensions.
struct Windows {
  int dims = 2;
  Shape kernel, stride, dilation, padding;
  Ints uneven;  // for pad(), before the window's own padding; empty: none
};

Shape window_numbers(C& c, const char* name, int dims, int64_t standard) {
  const Ints given = c.list(name).value_or(Ints(static_cast<std::size_t>(dims), standard));
  if (given.size() != static_cast<std::size_t>(dims)) c.refuse(fmt::format("{}: expected {} numbers", name, dims));
  return given;
}

Windows windows_of(C& c, const Tensor& x, const Shape& kernel) {
  Windows w;
  w.dims = x.dim() - 2;
  if (w.dims != 1 && w.dims != 2) c.refuse(fmt::format("expected an input of 3 or 4 dimensions, got {}", x.dim()));
  if (kernel.size() != w.dims) c.refuse(fmt::format("expected a window of {} dimensions", w.dims));
  w.kernel = kernel;
  w.stride = window_numbers(c, "strides", w.dims, 1);
  w.dilation = window_numbers(c, "dilations", w.dims, 1);
  for (int i = 0; i < w.dims; ++i) {
    if (w.kernel[i] < 1 || w.stride[i] < 1 || w.dilation[i] < 1 ||
        std::max({w.kernel[i], w.stride[i], w.dilation[i]}) > std::numeric_limits<std::int32_t>::max()) {
      c.refuse("expected windows, strides and dilations from 1 on");
    }
  }
  Ints pads = c.list("pads").value_or(Ints(static_cast<std::size_t>(2 * w.dims), 0));
  if (pads.size() != static_cast<std::size_t>(2 * w.dims)) c.refuse("pads: expected two numbers for each dimension");
  const std::string automatic = c.text("auto_pad", "NOTSET");
  const bool upper = automatic == "SAME_UPPER", lower = automatic == "SAME_LOWER";
  for (int i = 0; i < w.dims && (upper || lower); ++i) {
    const int64_t in = x.size(i + 2), out = (in + w.stride[i] - 1) / w.stride[i];
    const int64_t total = std::max<int64_t>((out - 1) * w.stride[i] + (w.kernel[i] - 1) * w.dilation[i] + 1 - in, 0);
    const auto before = static_cast<std::size_t>(i), after = static_cast<std::size_t>(i + w.dims);
    pads[before] = upper ? total / 2 : total - total / 2;
    pads[after] = total - pads[before];
  }
  if (automatic == "VALID") std::fill(pads.begin(), pads.end(), 0);
  if (!upper && !lower && automatic != "VALID" && automatic != "NOTSET") c.refuse("auto_pad: unknown word");
  bool uneven = false;
  for (int i = 0; i < w.dims; ++i) {
    const int64_t before = pads[static_cast<std::size_t>(i)], after = pads[static_cast<std::size_t>(i + w.dims)];
    if (std::max(std::abs(before), std::abs(after)) > std::numeric_limits<std::int32_t>::max()) c.refuse("huge pads");
    uneven |= before != after || before < 0;
    w.padding.push_back(before);
  }
  if (!uneven) return w;
  for (int i = w.dims; i-- > 0;) {
    w.uneven.push_back(pads[static_cast<std::size_t>(i)]);
    w.uneven.push_back(pads[static_cast<std::size_t>(i + w.dims)]);
  }
  w.padding = Shape::filled(w.dims, 0);
  return w;
}

Shape window_of(C& c, const Tensor& weight) {
  if (weight.dim() < 3) c.refuse("expected a weight of 3 or 4 dimensions");
  Shape kernel;
  for (int i = 2; i < weight.dim(); ++i) kernel.push_back(weight.size(i));
  return kernel;
}

void conv(C& c) {
  Tensor x = c.in(0);
  const Tensor weight = c.in(1), bias = c.has(2) ? c.in(2) : Tensor();
  const Windows w = windows_of(c, x, window_of(c, weight));
  if (!w.uneven.empty()) x = pad(x, w.uneven);
  const ConvFuncOptions options{
      .stride = w.stride, .padding = w.padding, .dilation = w.dilation, .groups = c.integer("group", 1)};
  c.out(w.dims == 2 ? conv2d(x, weight, bias, options) : conv1d(x, weight, bias, options));
}

void conv_transpose(C& c) {
  const Tensor x = c.in(0), weight = c.in(1), bias = c.has(2) ? c.in(2) : Tensor();
  if (c.list("output_shape")) c.refuse("output_shape isn't read; expected pads and output_padding");
  if (c.text("auto_pad", "NOTSET") != "NOTSET") c.refuse("auto_pad: expected NOTSET");
  const Windows w = windows_of(c, x, window_of(c, weight));
  if (!w.uneven.empty()) c.refuse("expected the same padding on both sides");
  const ConvTransposeFuncOptions options{.stride = w.stride,
                                         .padding = w.padding,
                                         .output_padding = window_numbers(c, "output_padding", w.dims, 0),
                                         .groups = c.integer("group", 1),
                                         .dilation = w.dilation};
  c.out(w.dims == 2 ? conv_transpose2d(x, weight, bias, options) : conv_transpose1d(x, weight, bias, options));
}

Shape kernel_of(C& c) {
  const auto kernel = c.list("kernel_shape");
  if (!kernel) c.refuse("expected kernel_shape");
  return *kernel;
}

void max_pool(C& c) {
  if (c.wanted(1)) c.refuse("its indices are read");
  if (c.integer("storage_order", 0) != 0) c.refuse("storage_order: expected 0");
  Tensor x = c.in(0);
  Windows w = windows_of(c, x, kernel_of(c));
  bool wide = !w.uneven.empty();
  for (int i = 0; i < w.dims; ++i) wide |= w.padding[i] > w.kernel[i] / 2;
  if (wide) {
    if (w.uneven.empty()) {
      for (int i = w.dims; i-- > 0;) w.uneven.insert(w.uneven.end(), 2, w.padding[i]);
      w.padding = Shape::filled(w.dims, 0);
    }
    x = pad(x, w.uneven, PadMode::constant, -std::numeric_limits<double>::infinity());
  }
  const MaxPoolFuncOptions options{
      .stride = w.stride, .padding = w.padding, .dilation = w.dilation, .ceil_mode = c.integer("ceil_mode", 0) != 0};
  c.out(w.dims == 2 ? max_pool2d(x, w.kernel, options) : max_pool1d(x, w.kernel, options));
}

void average_pool(C& c) {
  Tensor x = c.in(0);
  Windows w = windows_of(c, x, kernel_of(c));
  for (int i = 0; i < w.dims; ++i) {
    if (w.dilation[i] != 1) c.refuse("expected dilations of 1");
  }
  const bool counts = c.integer("count_include_pad", 0) != 0;
  if (!w.uneven.empty()) {
    if (!counts) c.refuse("different padding on both sides needs count_include_pad of 1");
    x = pad(x, w.uneven);
  }
  const AvgPoolFuncOptions options{.stride = w.stride,
                                   .padding = w.padding,
                                   .ceil_mode = c.integer("ceil_mode", 0) != 0,
                                   .count_include_pad = counts};
  c.out(w.dims == 2 ? avg_pool2d(x, w.kernel, options) : avg_pool1d(x, w.kernel, options));
}

void global_pool(C& c) {
  const Tensor x = c.in(0);
  if (x.dim() != 4) c.refuse(fmt::format("expected an input of 4 dimensions, got {}", x.dim()));
  c.out(c.type() == "GlobalAveragePool" ? adaptive_avg_pool2d(x, {1}) : adaptive_max_pool2d(x, {1}));
}

void resize(C& c) {
  const Tensor x = c.in(0);
  if (x.dim() != 4) c.refuse(fmt::format("expected an input of 4 dimensions, got {}", x.dim()));
  if (c.integer("antialias", 0) != 0 || c.integer("exclude_outside", 0) != 0 || c.list("axes") ||
      c.text("keep_aspect_ratio_policy", "stretch") != "stretch") {
    c.refuse("antialias, exclude_outside, axes and keep_aspect_ratio_policy aren't read");
  }
  InterpolateOptions options;
  bool whole = true;
  if (c.has(3)) {
    const Ints sizes = c.ints(3);
    if (sizes.size() != 4 || sizes[0] != x.size(0) || sizes[1] != x.size(1)) c.refuse("expected sizes of images");
    options.size = {sizes[2], sizes[3]};
    whole = sizes[2] % x.size(2) == 0 && sizes[3] % x.size(3) == 0;
  } else if (c.has(2)) {
    const OnnxHost& scales = c.host(2);
    if (scales.size() != 4 || scales.number(0) != 1 || scales.number(1) != 1) c.refuse("expected scales of images");
    for (std::size_t i = 2; i < 4; ++i) {
      const double s = scales.number(i);
      if (!(s > 0 && s < 1 << 16)) c.refuse("expected scales above 0");
      options.scale_factor.push_back(s);
      whole &= s == std::floor(s);
    }
  } else {
    c.refuse("expected scales or sizes");
  }
  const std::string mode = c.text("mode", "nearest");
  const std::string places = c.text("coordinate_transformation_mode", "half_pixel");
  if (mode == "nearest") {
    const std::string rounding = c.text("nearest_mode", "round_prefer_floor");
    // With whole factors no place lies in the middle of two.
    const bool middle =
        places == "half_pixel" && (rounding == "round_prefer_ceil" || (whole && rounding == "round_prefer_floor"));
    if (middle) {
      options.mode = InterpolateMode::nearest_exact;
    } else if (places != "asymmetric" || rounding != "floor") {
      c.refuse(fmt::format("nearest with {} and {} has no form here", places, rounding));
    }
  } else if (mode == "linear") {
    options.mode = InterpolateMode::bilinear;
    options.align_corners = places == "align_corners";
    if (places != "align_corners" && places != "half_pixel" && places != "pytorch_half_pixel") {
      c.refuse(fmt::format("linear with {} has no form here", places));
    }
  } else {
    c.refuse(fmt::format("mode: expected nearest or linear, got {}", mode));
  }
  c.out(interpolate(x, options));
}

void pad_op(C& c) {
  const Tensor x = c.in(0);
  const Ints pads = c.ints(1);
  Ints axes;
  for (int i = 0; i < x.dim(); ++i) axes.push_back(i);
  if (c.has(3)) axes = c.ints(3);
  if (pads.size() != 2 * axes.size()) c.refuse("expected two numbers for each dimension");
  Ints list(static_cast<std::size_t>(2 * x.dim()), 0);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const int d = c.dim(axes[i], x.dim());
    const auto at = static_cast<std::size_t>(2 * (x.dim() - 1 - d));
    list[at] = pads[i];
    list[at + 1] = pads[i + axes.size()];
  }
  while (!list.empty() && list.back() == 0 && list[list.size() - 2] == 0) list.resize(list.size() - 2);
  if (list.empty()) return c.out(x);
  const std::string mode = c.text("mode", "constant");
  const std::pair<const char*, PadMode> modes[] = {{"constant", PadMode::constant},
                                                   {"reflect", PadMode::reflect},
                                                   {"edge", PadMode::replicate},
                                                   {"wrap", PadMode::circular}};
  for (const auto& [name, known] : modes) {
    if (mode != name) continue;
    const double value = known == PadMode::constant && c.has(2) ? c.number(2) : 0;
    return c.out(pad(x, list, known, value));
  }
  c.refuse("mode: expected constant, reflect, edge or wrap");
}

}  // namespace

void add_image_operators(OnnxOperators& t) {
  t["Conv"] = {.least_inputs = 2,
               .most_inputs = 3,
               .attributes = "auto_pad:s dilations:I group:i kernel_shape:I pads:I strides:I",
               .run = conv};
  t["ConvTranspose"] = {
      .least_inputs = 2,
      .most_inputs = 3,
      .attributes = "auto_pad:s dilations:I group:i kernel_shape:I output_padding:I output_shape:I pads:I strides:I",
      .run = conv_transpose};
  t["MaxPool"] = {.attributes = "auto_pad:s ceil_mode:i dilations:I kernel_shape:I pads:I storage_order:i strides:I",
                  .run = max_pool};
  t["AveragePool"] = {
      .attributes = "auto_pad:s ceil_mode:i count_include_pad:i dilations:I kernel_shape:I pads:I strides:I",
      .run = average_pool};
  t["GlobalAveragePool"].run = global_pool;
  t["GlobalMaxPool"].run = global_pool;
  t["Resize"] = {.most_inputs = 4,
                 .attributes =
                     "antialias:i axes:I coordinate_transformation_mode:s cubic_coeff_a:f exclude_outside:i "
                     "extrapolation_value:f keep_aspect_ratio_policy:s mode:s nearest_mode:s",
                 .run = resize};
  t["Pad"] = {.least_inputs = 2, .most_inputs = 4, .attributes = "mode:s", .run = pad_op};
}

}  // namespace halfstep::io::detail
