// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/pooling.h"

#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"

namespace halfstep::nn {
namespace {

halfstep::MaxPoolFuncOptions of(const MaxPoolOptions& o) {
  return {.stride = o.stride, .padding = o.padding, .dilation = o.dilation, .ceil_mode = o.ceil_mode};
}
halfstep::AvgPoolFuncOptions of(const AvgPoolOptions& o) {
  return {.stride = o.stride,
          .padding = o.padding,
          .ceil_mode = o.ceil_mode,
          .count_include_pad = o.count_include_pad,
          .divisor_override = o.divisor_override};
}

template <class O>
std::string window(const O& o) {
  return fmt::format("kernel={}, stride={}, padding={}", o.kernel.str(), (o.stride.empty() ? o.kernel : o.stride).str(),
                     o.padding.str());
}
std::string describe_max(const MaxPoolOptions& o) {
  return fmt::format("{}, dilation={}{}", window(o), o.dilation.str(), o.ceil_mode ? ", ceil_mode" : "");
}
std::string describe_avg(const AvgPoolOptions& o) {
  return fmt::format("{}{}{}", window(o), o.ceil_mode ? ", ceil_mode" : "",
                     o.count_include_pad ? "" : ", without padding");
}

Shape four_sides(const PaddingOptions& o, const char* module) {
  if (o.padding.size() == 1) return Shape::filled(4, o.padding[0]);
  if (o.padding.size() != 4) {
    fail<ShapeError>("{}: expected one number of padding or four (left, right, top, bottom), got {}", module,
                     o.padding.str());
  }
  return o.padding;
}
Tensor pad_sides(const Tensor& input, const Shape& sides, PadMode mode, const char* module) {
  if (input.dim() != 3 && input.dim() != 4) {
    fail<ShapeError>("{}: expected an input [N, C, H, W] or [C, H, W], got {}", module, input.sizes().str());
  }
  return pad(input, std::vector<std::int64_t>(sides.begin(), sides.end()), mode);
}

}  // namespace

MaxPool1d::MaxPool1d(const MaxPoolOptions& o) : options(o) {
  check_given(o.kernel, "MaxPool1d", "kernel", ".kernel = {2}");
}
Tensor MaxPool1d::forward(const Tensor& input) const { return max_pool1d(input, options.kernel, of(options)); }
std::string MaxPool1d::describe() const { return describe_max(options); }
MaxPool2d::MaxPool2d(const MaxPoolOptions& o) : options(o) {
  check_given(o.kernel, "MaxPool2d", "kernel", ".kernel = {2}");
}
Tensor MaxPool2d::forward(const Tensor& input) const { return max_pool2d(input, options.kernel, of(options)); }
std::string MaxPool2d::describe() const { return describe_max(options); }

AvgPool1d::AvgPool1d(const AvgPoolOptions& o) : options(o) {
  check_given(o.kernel, "AvgPool1d", "kernel", ".kernel = {2}");
}
Tensor AvgPool1d::forward(const Tensor& input) const { return avg_pool1d(input, options.kernel, of(options)); }
std::string AvgPool1d::describe() const { return describe_avg(options); }
AvgPool2d::AvgPool2d(const AvgPoolOptions& o) : options(o) {
  check_given(o.kernel, "AvgPool2d", "kernel", ".kernel = {2}");
}
Tensor AvgPool2d::forward(const Tensor& input) const { return avg_pool2d(input, options.kernel, of(options)); }
std::string AvgPool2d::describe() const { return describe_avg(options); }

AdaptiveAvgPool1d::AdaptiveAvgPool1d(const AdaptivePoolOptions& o) : options(o) {
  check_given(o.output_size, "AdaptiveAvgPool1d", "output_size", ".output_size = {1}");
}
Tensor AdaptiveAvgPool1d::forward(const Tensor& input) const { return adaptive_avg_pool1d(input, options.output_size); }
std::string AdaptiveAvgPool1d::describe() const { return options.output_size.str(); }
AdaptiveAvgPool2d::AdaptiveAvgPool2d(const AdaptivePoolOptions& o) : options(o) {
  check_given(o.output_size, "AdaptiveAvgPool2d", "output_size", ".output_size = {1}");
}
Tensor AdaptiveAvgPool2d::forward(const Tensor& input) const { return adaptive_avg_pool2d(input, options.output_size); }
std::string AdaptiveAvgPool2d::describe() const { return options.output_size.str(); }
AdaptiveMaxPool2d::AdaptiveMaxPool2d(const AdaptivePoolOptions& o) : options(o) {
  check_given(o.output_size, "AdaptiveMaxPool2d", "output_size", ".output_size = {1}");
}
Tensor AdaptiveMaxPool2d::forward(const Tensor& input) const { return adaptive_max_pool2d(input, options.output_size); }
std::string AdaptiveMaxPool2d::describe() const { return options.output_size.str(); }

Upsample::Upsample(const InterpolateOptions& o) : options(o) {
  check_given(!o.size.empty() || !o.scale_factor.empty(), "Upsample", "size or .scale_factor", ".scale_factor = {2}");
}
Tensor Upsample::forward(const Tensor& input) const { return interpolate(input, options); }
std::string Upsample::describe() const {
  constexpr const char* kModes[] = {"nearest", "nearest_exact", "bilinear"};
  std::string what = "size=" + options.size.str();
  if (options.size.empty()) {
    what = "scale_factor=";
    for (std::size_t i = 0; i < options.scale_factor.size(); ++i) {
      what += fmt::format("{}{}", i == 0 ? "" : " x ", options.scale_factor[i]);
    }
  }
  return fmt::format("{}, mode={}{}", what, kModes[static_cast<int>(options.mode)],
                     options.align_corners ? ", align_corners" : "");
}

ZeroPad2d::ZeroPad2d(const PaddingOptions& o) : options{four_sides(o, "ZeroPad2d")} {}
Tensor ZeroPad2d::forward(const Tensor& input) const {
  return pad_sides(input, options.padding, PadMode::constant, "ZeroPad2d");
}
std::string ZeroPad2d::describe() const { return options.padding.str(); }
ReflectionPad2d::ReflectionPad2d(const PaddingOptions& o) : options{four_sides(o, "ReflectionPad2d")} {}
Tensor ReflectionPad2d::forward(const Tensor& input) const {
  return pad_sides(input, options.padding, PadMode::reflect, "ReflectionPad2d");
}
std::string ReflectionPad2d::describe() const { return options.padding.str(); }
ReplicationPad2d::ReplicationPad2d(const PaddingOptions& o) : options{four_sides(o, "ReplicationPad2d")} {}
Tensor ReplicationPad2d::forward(const Tensor& input) const {
  return pad_sides(input, options.padding, PadMode::replicate, "ReplicationPad2d");
}
std::string ReplicationPad2d::describe() const { return options.padding.str(); }

}  // namespace halfstep::nn
