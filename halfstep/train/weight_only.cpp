// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/weight_only.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"

namespace halfstep::training {
namespace {

constexpr const char *kSwitch = "weight-only", *kBits = "quant-weight-bits", *kGroup = "group-size",
                     *kSkip = "quant-skip";
constexpr std::string_view kScaleEnd = "_quantizer.scale";

std::int64_t whole(const std::map<std::string, std::string>& recipe, const char* key, std::int64_t standard) {
  const auto saved = recipe.find(key);
  if (saved == recipe.end()) return standard;
  std::int64_t value = -1;
  const std::string& text = saved->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    fail<Error>("--{}: expected a number that was saved, got '{}'", key, text);
  }
  return value;
}

// Calls use(integers, scale) for each scale that stands beside a tensor.
template <class Use>
void for_pairs(NamedTensors& tensors, Use&& use) {
  std::map<std::string_view, NamedTensor*> by_name;
  for (NamedTensor& t : tensors) by_name.emplace(t.name, &t);
  for (NamedTensor& t : tensors) {
    if (!t.name.ends_with(kScaleEnd)) continue;
    const auto own = by_name.find(std::string_view(t.name).substr(0, t.name.size() - kScaleEnd.size()));
    if (own != by_name.end()) use(*own->second, t);
  }
}

}  // namespace

std::optional<quant::WeightOnlyOptions> saved_weight_only(const std::map<std::string, std::string>& recipe) {
  const auto saved = recipe.find(kSwitch);
  if (saved == recipe.end()) return std::nullopt;
  if (saved->second != "yes") fail<Error>("--{}: expected a value that was saved, got '{}'", kSwitch, saved->second);
  const std::int64_t bits = whole(recipe, kBits, 8);
  if (bits != 8 && bits != 4) fail<Error>("--{}: expected 8 or 4 with --{}, got {}", kBits, kSwitch, bits);
  quant::WeightOnlyOptions options{.bits = static_cast<int>(bits), .group_size = whole(recipe, kGroup, 0)};
  if (const auto skip = recipe.find(kSkip); skip != recipe.end()) {
    const std::string& text = skip->second;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find(',', at), text.size());
      if (end > at) options.skip.push_back(text.substr(at, end - at));
      at = end + 1;
    }
  }
  return options;
}

std::map<std::string, std::string> weight_only_recipe(const quant::WeightOnlyOptions& options) {
  std::map<std::string, std::string> recipe{
      {kSwitch, "yes"}, {kBits, fmt::format("{}", options.bits)}, {kGroup, fmt::format("{}", options.group_size)}};
  if (!options.skip.empty()) recipe[kSkip] = fmt::format("{}", fmt::join(options.skip, ","));
  return recipe;
}

void check_weight_only(const NamedTensors& tensors, const quant::WeightOnlyOptions& options) {
  NamedTensors handles = tensors;
  for_pairs(handles, [&](const NamedTensor& weight, const NamedTensor& scale) {
    const DType expected = options.bits == 4 ? u8 : i8;
    const Tensor &q = weight.tensor, &s = scale.tensor;
    if (q.dtype() != expected || q.dim() != 2) {
      fail<Error>("'{}': expected a matrix of {} for weights of {} bits, got {} {}", weight.name, name(expected),
                  options.bits, name(q.dtype()), q.sizes().str());
    }
    const std::int64_t k = q.size(1) * (options.bits == 4 ? 2 : 1);
    Shape sizes{q.size(0)};
    if (options.group_size > 0) sizes.push_back(k / options.group_size);
    if (s.dtype() != f32 || s.sizes() != sizes || (options.group_size > 0 && k % options.group_size != 0)) {
      fail<Error>("'{}': expected f32 {} for '{}' of {} weights a row{}, got {} {}", scale.name, sizes.str(),
                  weight.name, k,
                  options.group_size > 0 ? fmt::format(" in groups of {}", options.group_size) : std::string(),
                  name(s.dtype()), s.sizes().str());
    }
    for (const double number : s.to_vector<double>()) {
      if (!std::isfinite(number) || number <= 0) {
        fail<Error>("'{}': expected numbers above 0, got {}", scale.name, number);
      }
    }
  });
}

void widen_weights(NamedTensors& tensors) {
  const NoGrad no_grad;
  std::vector<std::string> scales;
  for_pairs(tensors, [&](NamedTensor& weight, const NamedTensor& scale) {
    if (weight.tensor.is_floating()) return;  // somebody else's names
    try {
      weight.tensor = quant::dequantize_weight({weight.tensor, scale.tensor});
    } catch (const Error& e) {
      fail<Error>("'{}': {}", weight.name, e.what());
    }
    scales.push_back(scale.name);
  });
  std::erase_if(tensors,
                [&](const NamedTensor& t) { return std::find(scales.begin(), scales.end(), t.name) != scales.end(); });
}

}  // namespace halfstep::training
