// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/conv.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/init.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pad.h"

namespace halfstep::nn {
namespace {

// One number for all dimensions or one for each: one for each.
Shape per_dim(const Shape& given, int dims, const char* kind, const char* what, std::int64_t least) {
  const Shape sizes = given.size() == 1 ? Shape::filled(dims, given[0]) : given;
  if (sizes.size() != dims || std::any_of(sizes.begin(), sizes.end(), [&](std::int64_t s) { return s < least; })) {
    fail<Error>("{}: expected {} of {} of at least {}, got {}", kind, what,
                dims == 1 ? "1 number" : fmt::format("1 or {} numbers", dims), least, given.str());
  }
  return sizes;
}

template <class O>
void check_all_given(const O& o, const char* kind) {
  constexpr const char* kExample = ".in = 3, .out = 64, .kernel = {3}";
  check_given(o.in, kind, "in", kExample);
  check_given(o.out, kind, "out", kExample);
  check_given(o.kernel, kind, "kernel", kExample);
}

void check_channels(std::int64_t in, std::int64_t out, std::int64_t groups, const char* kind) {
  if (in < 0 || out < 0 || groups < 1 || in % groups != 0 || out % groups != 0) {
    fail<Error>("{}: expected in and out to be multiples of groups, got in {}, out {} and groups {}", kind, in, out,
                groups);
  }
}

ConvOptions checked(ConvOptions o, int dims, const char* kind) {
  check_all_given(o, kind);
  check_channels(o.in, o.out, o.groups, kind);
  o.kernel = per_dim(o.kernel, dims, kind, "a kernel", 1);
  o.stride = per_dim(o.stride, dims, kind, "a stride", 1);
  o.dilation = per_dim(o.dilation, dims, kind, "a dilation", 1);
  if (!o.padding.is_same()) {
    o.padding = per_dim(o.padding.sizes(), dims, kind, "a padding", 0);
  } else if (o.stride != Shape::filled(dims, 1)) {
    fail<Error>("{}: padding \"same\" needs stride 1, got {}", kind, o.stride.str());
  }
  return o;
}

ConvTransposeOptions checked(ConvTransposeOptions o, int dims, const char* kind) {
  check_all_given(o, kind);
  check_channels(o.in, o.out, o.groups, kind);
  o.kernel = per_dim(o.kernel, dims, kind, "a kernel", 1);
  o.stride = per_dim(o.stride, dims, kind, "a stride", 1);
  o.padding = per_dim(o.padding, dims, kind, "a padding", 0);
  o.output_padding = per_dim(o.output_padding, dims, kind, "an output_padding", 0);
  o.dilation = per_dim(o.dilation, dims, kind, "a dilation", 1);
  for (int d = 0; d < dims; ++d) {
    if (o.output_padding[d] >= std::max(o.stride[d], o.dilation[d])) {
      fail<Error>("{}: expected an output_padding under stride or dilation, got {} with stride {} and dilation {}",
                  kind, o.output_padding.str(), o.stride.str(), o.dilation.str());
    }
  }
  return o;
}

// [first, second, kernel...]
Shape weight_sizes(std::int64_t first, std::int64_t second, const Shape& kernel) {
  Shape sizes = {first, second};
  for (const std::int64_t k : kernel) sizes.push_back(k);
  return sizes;
}

std::int64_t fan_in(std::int64_t channels, const Shape& kernel) { return channels * kernel.numel(); }

PadMode pad_mode(PaddingMode mode) {
  switch (mode) {
    case PaddingMode::zeros:
      return PadMode::constant;
    case PaddingMode::reflect:
      return PadMode::reflect;
    case PaddingMode::replicate:
      return PadMode::replicate;
    case PaddingMode::circular:
      return PadMode::circular;
  }
  fail<Error>("Conv: unknown padding mode {}", static_cast<int>(mode));
}

template <class O>
std::string described(const O& o, const std::string& padding) {
  const Shape ones = Shape::filled(o.kernel.size(), 1);
  std::string text = fmt::format("{}, {}, kernel={}", o.in, o.out, o.kernel.str());
  if (o.stride != ones) text += fmt::format(", stride={}", o.stride.str());
  if (padding != Shape::filled(o.kernel.size(), 0).str()) text += fmt::format(", padding={}", padding);
  if (o.dilation != ones) text += fmt::format(", dilation={}", o.dilation.str());
  if (o.groups != 1) text += fmt::format(", groups={}", o.groups);
  if (!o.bias) text += ", bias=false";
  return text;
}

}  // namespace

Padding::Padding(const char* word) : same_(std::string_view(word) == "same") {
  if (!same_ && std::string_view(word) != "valid") {
    fail<Error>("padding: expected numbers, \"same\" or \"valid\", got \"{}\"", word);
  }
}

ConvBase::ConvBase(const ConvOptions& o, int dims, const char* kind)
    : options(checked(o, dims, kind)),
      weight(parameter("weight", init::uniform_fan_in(weight_sizes(o.out, o.in / o.groups, options.kernel),
                                                      fan_in(o.in / o.groups, options.kernel), o.dtype, o.initialise))),
      bias(parameter("bias", o.bias ? init::uniform_fan_in({o.out}, fan_in(o.in / o.groups, options.kernel), o.dtype)
                                    : Tensor())) {}

Tensor ConvBase::convolve(const Tensor& input) const {
  const int dims = options.kernel.size();
  const auto conv = [&](const Tensor& x, const Shape& padding) {
    const halfstep::ConvFuncOptions o{
        .stride = options.stride, .padding = padding, .dilation = options.dilation, .groups = options.groups};
    return dims == 1 ? conv1d(x, weight, bias, o) : conv2d(x, weight, bias, o);
  };
  // Before and after each dimension; where "same" can't be halved the end gets one more.
  Shape before, after;
  for (int d = 0; d < dims; ++d) {
    const std::int64_t both =
        options.padding.is_same() ? options.dilation[d] * (options.kernel[d] - 1) : 2 * options.padding.sizes()[d];
    before.push_back(both / 2);
    after.push_back(both - both / 2);
  }
  if (options.padding_mode == PaddingMode::zeros && before == after) return conv(input, before);
  std::vector<std::int64_t> pads;
  for (int d = dims - 1; d >= 0; --d) {
    pads.push_back(before[d]);
    pads.push_back(after[d]);
  }
  return conv(pad(input, pads, pad_mode(options.padding_mode)), {0});
}

std::string ConvBase::describe() const {
  std::string text = described(options, options.padding.str());
  if (options.padding_mode != PaddingMode::zeros) {
    constexpr const char* kNames[] = {"zeros", "reflect", "replicate", "circular"};
    text += fmt::format(", padding_mode={}", kNames[static_cast<int>(options.padding_mode)]);
  }
  return text;
}

ConvTransposeBase::ConvTransposeBase(const ConvTransposeOptions& o, int dims, const char* kind)
    : options(checked(o, dims, kind)),
      weight(parameter("weight", init::uniform_fan_in(weight_sizes(o.in, o.out / o.groups, options.kernel),
                                                      fan_in(o.out / o.groups, options.kernel), o.dtype))),
      bias(parameter("bias", o.bias ? init::uniform_fan_in({o.out}, fan_in(o.out / o.groups, options.kernel), o.dtype)
                                    : Tensor())) {}

Tensor ConvTransposeBase::convolve(const Tensor& input) const {
  const halfstep::ConvTransposeFuncOptions o{.stride = options.stride,
                                             .padding = options.padding,
                                             .output_padding = options.output_padding,
                                             .groups = options.groups,
                                             .dilation = options.dilation};
  return options.kernel.size() == 1 ? conv_transpose1d(input, weight, bias, o)
                                    : conv_transpose2d(input, weight, bias, o);
}

std::string ConvTransposeBase::describe() const {
  std::string text = described(options, options.padding.str());
  if (options.output_padding != Shape::filled(options.kernel.size(), 0)) {
    text += fmt::format(", output_padding={}", options.output_padding.str());
  }
  return text;
}

}  // namespace halfstep::nn
