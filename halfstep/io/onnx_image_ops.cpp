// SPDX-License-Identifier: Apache-2.0
// How convolution, pooling, resizing and padding are written in ONNX's operators.
#include <algorithm>
#include <cmath>

#include "halfstep/io/onnx_internal.h"

namespace halfstep::io::detail {
namespace {

using B = OnnxBuilder;
using Ints = std::vector<std::int64_t>;
using std::int64_t;

Ints pair(const int64_t (&v)[2]) { return {v[0], v[1]}; }
// Before height and width, then after them.
Ints pads(const int64_t (&v)[2]) { return {v[0], v[1], v[0], v[1]}; }
Ints window(const Shape& weight) { return {weight[2], weight[3]}; }

void conv2d(B& b) {
  const auto& a = b.attributes<ConvAttributes>();
  std::vector<std::string> inputs{b.in(0), b.in(1)};
  if (b.has(2)) inputs.push_back(b.in(2));
  b.result("Conv", inputs,
           {{"dilations", pair(a.dilation)},
            {"group", a.groups},
            {"kernel_shape", window(b.in_sizes(1))},
            {"pads", pads(a.padding)},
            {"strides", pair(a.stride)}});
}

void conv_transpose2d(B& b) {
  const auto& a = b.attributes<ConvAttributes>();
  const Shape &in = b.in_sizes(0), &out = b.out_sizes();
  const Ints kernel = window(b.in_sizes(1));
  Ints extra;
  for (int i = 0; i < 2; ++i) {
    const int64_t reach = a.dilation[i] * (kernel[static_cast<std::size_t>(i)] - 1) + 1;
    extra.push_back(out[i + 2] - ((in[i + 2] - 1) * a.stride[i] - 2 * a.padding[i] + reach));
  }
  std::vector<std::string> inputs{b.in(0), b.in(1)};
  if (b.has(2)) inputs.push_back(b.in(2));
  b.result("ConvTranspose", inputs,
           {{"dilations", pair(a.dilation)},
            {"group", a.groups},
            {"kernel_shape", kernel},
            {"output_padding", extra},
            {"pads", pads(a.padding)},
            {"strides", pair(a.stride)}});
}

// Windows that begin in the padding behind the input are left out here, and by ONNX counted by its sizes alone: where
// both come to the same number, it is the same.
bool ceil_mode(B& b, const PoolAttributes& a) {
  bool rounds_up = false;
  for (int i = 0; i < 2; ++i) {
    const int64_t room = b.in_sizes(0)[i + 2] + 2 * a.padding[i] - a.dilation[i] * (a.kernel[i] - 1) - 1;
    const int64_t down = room / a.stride[i] + 1, up = (room + a.stride[i] - 1) / a.stride[i] + 1;
    const int64_t out = b.out_sizes()[i + 2];
    if (out != down && out != up) b.refuse("its sizes can't be had from ONNX's pooling");
    rounds_up |= out != down;
  }
  if (!rounds_up) return false;
  for (int i = 0; i < 2; ++i) {
    const int64_t room = b.in_sizes(0)[i + 2] + 2 * a.padding[i] - a.dilation[i] * (a.kernel[i] - 1) - 1;
    if (b.out_sizes()[i + 2] != (room + a.stride[i] - 1) / a.stride[i] + 1) {
      b.refuse("its sizes can't be had from ONNX's pooling");
    }
  }
  return true;
}

void max_pool2d(B& b) {
  const auto& a = b.attributes<PoolAttributes>();
  b.result("MaxPool", {b.in(0)},
           {{"ceil_mode", int64_t{ceil_mode(b, a)}},
            {"dilations", pair(a.dilation)},
            {"kernel_shape", pair(a.kernel)},
            {"pads", pads(a.padding)},
            {"strides", pair(a.stride)}});
}

void avg_pool2d(B& b) {
  const auto& a = b.attributes<PoolAttributes>();
  if (ceil_mode(b, a)) b.refuse("averages windows that reach over the padding, on which ONNX's programs disagree");
  // With a divisor of its own it is a sum: all places of a window count.
  OnnxAttributes attributes{{"count_include_pad", int64_t{a.count_include_pad || a.divisor != 0}},
                            {"kernel_shape", pair(a.kernel)},
                            {"pads", pads(a.padding)},
                            {"strides", pair(a.stride)}};
  if (a.divisor == 0) return b.result("AveragePool", {b.in(0)}, attributes);
  const double factor = static_cast<double>(a.kernel[0] * a.kernel[1]) / static_cast<double>(a.divisor);
  b.result("Mul", {b.node("AveragePool", {b.in(0)}, attributes), b.number(factor, b.out_tensor().dtype())});
}

void adaptive_pool(B& b, const char* global, const char* windows) {
  const Shape &in = b.in_sizes(0), &out = b.out_sizes();
  if (out[2] == 1 && out[3] == 1) return b.result(global, {b.in(0)});
  if (in[2] % out[2] != 0 || in[3] % out[3] != 0) {
    b.refuse("windows of different sizes have no form in ONNX; use sizes that divide the input's " + in.str());
  }
  const Ints kernel{in[2] / out[2], in[3] / out[3]};
  b.result(windows, {b.in(0)}, {{"kernel_shape", kernel}, {"strides", kernel}});
}

void interpolate(B& b) {
  const auto& a = b.attributes<InterpolateAttributes>();
  const Shape &in = b.in_sizes(0), &out = b.out_sizes();
  OnnxAttributes attributes;
  if (a.mode == 0) {
    attributes = {{"coordinate_transformation_mode", std::string("asymmetric")},
                  {"mode", std::string("nearest")},
                  {"nearest_mode", std::string("floor")}};
  } else if (a.mode == 1) {
    attributes = {{"coordinate_transformation_mode", std::string("half_pixel")},
                  {"mode", std::string("nearest")},
                  {"nearest_mode", std::string("round_prefer_ceil")}};
  } else {
    attributes = {{"coordinate_transformation_mode", std::string(a.align_corners ? "align_corners" : "half_pixel")},
                  {"mode", std::string("linear")}};
  }
  // Factors, where they are whole or the steps aren't the ratio of the sizes; otherwise the sizes.
  std::vector<float> factors;
  bool by_factors = true, by_sizes = true;
  for (int i = 0; i < 2; ++i) {
    const double ratio = static_cast<double>(in[i + 2]) / static_cast<double>(out[i + 2]);
    const double step = a.align_corners || a.scale[i] == 0 ? ratio : a.scale[i];
    const auto factor = static_cast<float>(1 / step);
    factors.push_back(factor);
    by_factors = by_factors && std::floor(static_cast<float>(in[i + 2]) * factor) == static_cast<float>(out[i + 2]);
    by_sizes = by_sizes && std::fabs(step - ratio) <= 1e-6 * ratio;
  }
  const bool whole = by_factors && factors[0] == std::floor(factors[0]) && factors[1] == std::floor(factors[1]);
  if (!whole && by_sizes) return b.result("Resize", {b.in(0), "", "", b.shape_tensor(b.out_dims())}, attributes);
  if (!by_factors) b.refuse("its sizes can't be had from ONNX's Resize; give sizes in place of factors");
  b.result("Resize", {b.in(0), "", b.floats({1, 1, factors[0], factors[1]})}, attributes);
}

// Evaluators differ on negative numbers of Pad, so what is cut off is cut off by Slice: behind Pad, as it may have been
// mirrored, but before Pad of mode `circular`, where it doesn't come back at the other side.
void pad(B& b) {
  const auto& a = b.attributes<PadAttributes>();
  const bool circular = a.mode == 3;
  if (circular && b.opset() < 19) b.refuse("circular padding needs opset 19");
  const int dims = a.before.size;
  Ints added(static_cast<std::size_t>(2 * dims), 0), starts, ends, axes;
  bool adds = false;
  for (int i = 0; i < dims; ++i) {
    const int64_t before = a.before.values[i], after = a.after.values[i];
    if ((before != 0 || after != 0) && b.in_dims(0)[static_cast<std::size_t>(i)].per_batch != 0) {
      b.refuse("adds to the batch or cuts off of it; export with a fixed batch");
    }
    added[static_cast<std::size_t>(i)] = std::max<int64_t>(before, 0);
    added[static_cast<std::size_t>(dims + i)] = std::max<int64_t>(after, 0);
    adds |= before > 0 || after > 0;
    if (before >= 0 && after >= 0) continue;
    const int64_t start = std::max<int64_t>(-before, 0);
    const int64_t kept = b.in_sizes(0)[i] - start - std::max<int64_t>(-after, 0);
    if (circular && std::max(before, after) > kept) b.refuse("goes round more than once, which has no form in ONNX");
    axes.push_back(i);
    starts.push_back(start);
    ends.push_back(start + (circular ? kept : b.out_sizes()[i]));
  }
  std::string x = b.in(0);
  if (!adds && axes.empty()) return b.same(x);
  const auto cut = [&] { return std::vector<std::string>{x, b.ints(starts), b.ints(ends), b.ints(axes)}; };
  if (!adds) return b.result("Slice", cut());
  if (circular && !axes.empty()) x = b.node("Slice", cut());
  constexpr const char* kModes[] = {"constant", "reflect", "edge", "wrap"};
  std::vector<std::string> inputs{x, b.ints(added)};
  if (a.mode == 0) inputs.push_back(b.number(a.value, b.out_tensor().dtype()));
  const OnnxAttributes mode{{"mode", std::string(kModes[a.mode])}};
  if (circular || axes.empty()) return b.result("Pad", inputs, mode);
  x = b.node("Pad", inputs, mode);
  b.result("Slice", cut());
}

}  // namespace

void add_image_translators(OnnxTranslators& t) {
  t["conv2d"] = conv2d;
  t["conv_transpose2d"] = conv_transpose2d;
  t["max_pool2d"] = max_pool2d;
  t["avg_pool2d"] = avg_pool2d;
  t["adaptive_avg_pool2d"] = [](B& b) { adaptive_pool(b, "GlobalAveragePool", "AveragePool"); };
  t["adaptive_max_pool2d"] = [](B& b) { adaptive_pool(b, "GlobalMaxPool", "MaxPool"); };
  t["interpolate"] = interpolate;
  t["pad"] = pad;
}

}  // namespace halfstep::io::detail
