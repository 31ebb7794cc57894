// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/weight_only.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/weight_only_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/quant/path_pattern_internal.h"
#include "halfstep/quant/quantization.h"

namespace halfstep::quant {
namespace {

void check_options(const WeightOnlyOptions& o, const char* who) {
  if (o.bits != 8 && o.bits != 4) fail<Error>("{}: expected bits of 8 or 4, got {}", who, o.bits);
  if (o.group_size < 0) fail<Error>("{}: expected a group_size of at least 0, got {}", who, o.group_size);
}

// What of `o` doesn't fit rows of `k` weights; empty: nothing.
std::string misfit(const WeightOnlyOptions& o, std::int64_t k) {
  const std::int64_t unit = o.bits == 4 ? 2 : 1;
  if (o.group_size == 0) {
    return k % unit == 0 ? "" : fmt::format("expected an even number of inputs for weights of 4 bits, got {}", k);
  }
  if (k % o.group_size == 0 && o.group_size % unit == 0) return "";
  // The nearest ones on either side that do.
  const auto fits = [&](std::int64_t g) { return k % g == 0 && g % unit == 0; };
  std::vector<std::int64_t> instead;
  for (std::int64_t g = std::min(o.group_size, k); g >= 1; --g) {
    if (!fits(g)) continue;
    instead.push_back(g);
    break;
  }
  for (std::int64_t g = o.group_size + 1; g <= k; ++g) {
    if (!fits(g)) continue;
    instead.push_back(g);
    break;
  }
  return fmt::format("expected {} group_size that divides its {} inputs, got {}{}", unit == 2 ? "an even" : "a", k,
                     o.group_size, instead.empty() ? "" : fmt::format("; {} would do", fmt::join(instead, " and ")));
}

// The scales of a layer, under the name by which it finds them.
struct WeightQuantizer final : nn::Module<WeightQuantizer> {
  explicit WeightQuantizer(Tensor given) : scale(buffer(nn::detail::kWeightScale, std::move(given))) {}
  std::string kind() const override { return "WeightQuantizer"; }
  std::string describe() const override { return scale.sizes().str(); }
  nn::Buffer scale;
};

WeightOnlyLayer layer_of(const std::string& path, const nn::Linear& linear, const Tensor& scale) {
  const Tensor& w = linear.weight;
  return {.path = path,
          .bits = w.dtype() == u8 ? 4 : 8,
          .group_size = scale.dim() == 2 && scale.size(1) > 0 ? linear.options.in / scale.size(1) : 0,
          .bytes = w.numel() + scale.numel() * static_cast<std::int64_t>(sizeof(float))};
}

// Layers by path; one that is held twice comes once.
std::vector<std::pair<std::string, const nn::Linear*>> linear_layers(const nn::ModuleBase& network) {
  std::vector<std::pair<std::string, const nn::Linear*>> result;
  network.apply([&](const std::string& path, const nn::ModuleBase& module) {
    if (const auto* linear = dynamic_cast<const nn::Linear*>(&module)) result.emplace_back(path, linear);
  });
  return result;
}

Tensor scale_of(const nn::Linear& linear) {
  const std::shared_ptr<nn::ModuleBase> quantizer = linear.attached(nn::detail::kWeightQuantizer);
  return quantizer ? quantizer->own_tensor(nn::detail::kWeightScale) : Tensor();
}

}  // namespace

QuantizedWeight quantize_weight(const Tensor& weight, const WeightOnlyOptions& options) {
  const char* who = "quantize_weight";
  check_options(options, who);
  check_defined(weight, who, "a weight");
  if (weight.dim() != 2 || !weight.is_floating()) {
    fail<Error>("{}: expected a floating weight [O, K], got {} {}", who, name(weight.dtype()), weight.sizes().str());
  }
  const std::int64_t outputs = weight.size(0), k = weight.size(1);
  if (const std::string why = misfit(options, k); !why.empty()) fail<Error>("{}: {}", who, why);
  const NoGrad no_grad;
  const std::int64_t group = options.group_size > 0 ? options.group_size : std::max<std::int64_t>(k, 1);
  const std::int64_t groups = options.group_size > 0 ? k / group : 1, most = options.bits == 8 ? 127 : 7;
  const Tensor w = weight.detach().to(Device{}).to(f32).contiguous();
  Tensor scale =
      empty(options.group_size > 0 ? Shape{outputs, groups} : Shape{outputs}, {.dtype = f32, .device = Device{}});
  Tensor integers = options.bits == 8 ? empty({outputs, k}, {.dtype = i8, .device = Device{}})
                                      : zeros({outputs, k / 2}, {.dtype = u8, .device = Device{}});
  const auto* from = static_cast<const float*>(w.const_raw_data());
  auto* s = write_data<float>(scale);
  auto* to = static_cast<std::uint8_t*>(write_raw_data(integers));
  for (std::int64_t g = 0; g < outputs * groups; ++g) {
    const std::int64_t begin = g * group, end = std::min(begin + group, outputs * k);
    float largest = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      if (!std::isfinite(from[i])) fail<Error>("{}: expected finite weights, got {}", who, from[i]);
      largest = std::max(largest, std::fabs(from[i]));
    }
    // A scale below float32's normal numbers would stand for a group of zeros.
    const float own = largest / static_cast<float>(most);
    s[g] = std::isnormal(own) ? own : 1.0F;
    for (std::int64_t i = begin; i < end; ++i) {
      const auto q = std::clamp(static_cast<std::int64_t>(std::nearbyint(from[i] / s[g])), -most, most);
      if (options.bits == 8) {
        to[i] = static_cast<std::uint8_t>(q);
      } else {
        to[i / 2] = static_cast<std::uint8_t>(to[i / 2] | (q & 15) << (i % 2 * 4));
      }
    }
  }
  return {integers.to(weight.device()), scale.to(weight.device())};
}

Tensor dequantize_weight(const QuantizedWeight& weight) {
  const char* who = "dequantize_weight";
  check_defined(weight.integers, who, "integers");
  check_defined(weight.scale, who, "a scale");
  const Tensor &q = weight.integers, &s = weight.scale;
  const std::int64_t outputs = q.dim() == 2 ? q.size(0) : -1,
                     k = q.dim() == 2 ? q.size(1) * (q.dtype() == u8 ? 2 : 1) : 0;
  const std::int64_t groups = s.dim() == 1 ? 1 : s.dim() == 2 ? s.size(1) : 0;
  const bool fits = (q.dtype() == i8 || q.dtype() == u8) && s.dtype() == f32 && (s.dim() == 1 || s.dim() == 2) &&
                    s.size(0) == outputs && (groups == 1 || (groups > 1 && k % groups == 0));
  if (!fits) {
    fail<Error>(
        "{}: expected integers i8 [O, K] or u8 [O, K / 2] and a scale f32 [O] or [O, K / group], got {} {} and {} {}",
        who, name(q.dtype()), q.sizes().str(), name(s.dtype()), s.sizes().str());
  }
  const Tensor integers = q.to(Device{}).contiguous(), scale = s.detach().to(Device{}).contiguous();
  Tensor result = empty({outputs, k}, {.dtype = f32, .device = Device{}});
  const auto* from = static_cast<const std::uint8_t*>(integers.const_raw_data());
  const auto* by = static_cast<const float*>(scale.const_raw_data());
  auto* to = write_data<float>(result);
  const std::int64_t group = std::max<std::int64_t>(k / groups, 1);
  for (std::int64_t i = 0; i < outputs * k; ++i) {
    int n;
    if (q.dtype() == i8) {
      n = static_cast<std::int8_t>(from[i]);
    } else {
      n = from[i / 2] >> (i % 2 * 4) & 15;
      if (n > 7) n -= 16;
    }
    to[i] = static_cast<float>(n) * by[i / group];
  }
  return result.to(q.device());
}

std::vector<WeightOnlyLayer> quantize_weights(const nn::ModuleBase& network, const WeightOnlyOptions& options) {
  const char* who = "quantize_weights";
  check_options(options, who);
  if (quantization_of(network)) {
    fail<Error>("{}: expected a network in floating point, got one that quant::prepare() has prepared", who);
  }
  const auto layers = linear_layers(network);
  for (const std::string& pattern : options.skip) {
    if (std::none_of(layers.begin(), layers.end(), [&](const auto& l) { return detail::matches(pattern, l.first); })) {
      fail<Error>("{}: expected the paths of linear layers in `skip`, got '{}', which is none", who, pattern);
    }
  }
  struct Change {
    const std::string& path;
    const nn::Linear& linear;
    std::shared_ptr<WeightQuantizer> quantizer;
    Tensor integers;
  };
  std::vector<Change> changes;
  std::map<const void*, std::size_t> by_weight;  // of shared ones the first
  for (const auto& [path, linear] : layers) {
    if (std::any_of(options.skip.begin(), options.skip.end(),
                    [&](const std::string& pattern) { return detail::matches(pattern, path); })) {
      continue;
    }
    if (!linear->weight.is_floating()) fail<Error>("{}: '{}': its weight is integers already", who, path);
    if (const std::string why = misfit(options, linear->options.in); !why.empty()) {
      fail<Error>("{}: '{}': {}", who, path, why);
    }
    if (const auto known = by_weight.find(linear->weight.impl()); known != by_weight.end()) {
      changes.push_back({path, *linear, changes[known->second].quantizer, Tensor()});
      continue;
    }
    QuantizedWeight q;
    try {
      q = quantize_weight(linear->weight, options);
    } catch (const Error& e) {
      fail<Error>("{}: '{}': {}", who, path, e.what());
    }
    by_weight.emplace(linear->weight.impl(), changes.size());
    changes.push_back({path, *linear, std::make_shared<WeightQuantizer>(q.scale), q.integers});
  }
  if (changes.empty()) {
    fail<Error>("{}: expected linear layers (nn::Linear) to convert, got {}", who,
                layers.empty() ? "a network without any" : "a network whose linear layers are all in `skip`");
  }
  std::vector<WeightOnlyLayer> result;
  for (const Change& c : changes) {
    if (c.integers.defined()) {
      Tensor weight = c.linear.weight;
      weight.requires_grad_(false);
      nn::detail::replace_tensor(weight, c.integers);
    }
    // A handle of its own: an attached module knows its name.
    if (!c.linear.attached(nn::detail::kWeightQuantizer)) {
      c.linear.attach(std::string(nn::detail::kWeightQuantizer), std::make_shared<WeightQuantizer>(*c.quantizer));
    }
    result.push_back(layer_of(c.path, c.linear, c.quantizer->scale));
  }
  ++capture_generation();
  return result;
}

std::vector<WeightOnlyLayer> weight_only_layers(const nn::ModuleBase& network) {
  std::vector<WeightOnlyLayer> result;
  for (const auto& [path, linear] : linear_layers(network)) {
    if (linear->weight.is_floating()) continue;
    if (const Tensor scale = scale_of(*linear); scale.defined()) result.push_back(layer_of(path, *linear, scale));
  }
  return result;
}

}  // namespace halfstep::quant
