// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/quantize.h"

#include <charconv>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/overloaded_internal.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/quantize.h"
#include "halfstep/quant/calibrate.h"
#include "halfstep/train/flags.h"
#include "halfstep/train/trace_step.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {
namespace {

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> result;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    if (end > at) result.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return result;
}

// The value of a flag from what recipe() made of it.
void take_saved(const Flag& flag, const std::string& text) {
  const auto refuse = [&] { fail<Error>("--{}: expected a value that was saved, got '{}'", flag.key(), text); };
  const auto number = [&](auto* value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    if (error != std::errc() || end != text.data() + text.size()) refuse();
  };
  const bool yes = text == "yes";
  if (flag.is_switch() && !yes && text != "no") refuse();
  std::visit(halfstep::detail::Overloaded{
                 [&](bool* value) { *value = yes; }, [&](const TurnsOff& value) { *value.on = !yes; },
                 [&](std::string* value) { *value = text; }, [&](int* value) { number(value); }, [](const auto&) {}},
             flag.field);
  check_value(flag);
  if (flag.check) flag.check();
}

constexpr std::string_view kScale = ".scale";

class QuantizationSchedule final : public CallbackBase {
 public:
  QuantizationSchedule(const QuantizationConfig& config, TrainStep& step) : config_(config), step_(step) {}

  // Also of an epoch that is gone on with: what is frozen is no part of a checkpoint.
  void on_epoch_begin(TrainContext& context) override {
    const std::shared_ptr<quant::Quantization> quantization = quant::quantization_of(*context.network);
    const auto after = [&](int epochs) { return epochs > 0 && context.epoch > epochs; };
    if (quantization && after(config_.freeze_ranges)) {
      for (const quant::QuantizedTensor& t : quantization->tensors()) {
        const quant::FakeQuantize& quantizer = quantization->at(t.name);
        if (!t.weight && quantizer.is_observer_enabled()) quantizer.enable_observer(false);
      }
    }
    if (!after(config_.freeze_norms)) return;
    bool changed = false;
    context.network->apply([&](const std::string&, const nn::ModuleBase& module) {
      if (!dynamic_cast<const nn::BatchNormBase*>(&module) || !module.is_training()) return;
      module.train(false);
      changed = true;
    });
    if (changed) step_.release_captured();  // recorded steps normalise as they did
  }

 private:
  const QuantizationConfig config_;
  TrainStep& step_;
};

}  // namespace

quant::QuantizationOptions quantization_options(const QuantizationConfig& config) {
  const auto observer = quant::parse_observer_kind(config.observer);
  if (!observer) fail<Error>("--quant-observer: expected the name of an observer, got '{}'", config.observer);
  return {.weight_bits = config.weight_bits,
          .activation_bits = config.activation_bits,
          .symmetric = config.symmetric,
          .reduce_range = config.reduce_range,
          .observer = *observer,
          .learned = config.learned,
          .skip = words_of(config.skip),
          .first = config.first,
          .last = config.last};
}

void prepare_quantization(const TrainConfig& config, Task& task) {
  if (!config.quantization.is_on()) return;
  const PhiloxState random = default_generator().state();
  constexpr std::int64_t kSamples = 2;  // of one, a task may have no loss
  data::Batch batch = random_batch(config.model, kSamples, config.images.image_size);
  // Classes and tokens of the customary data may be none of these.
  if (!batch.input.is_floating()) batch.input.zero_();
  if (batch.target.defined()) batch.target.zero_();
  const auto forward = [&](std::span<const Tensor> inputs) {
    batch.input = inputs[0];
    return std::vector<Tensor>{task.loss(batch).loss};
  };
  quant::prepare(task.network(), forward, {batch.input}, quantization_options(config.quantization));
  default_generator().set_state(random);
}

void prepare_random_quantization(TrainConfig config, const RunData& data, const Network& network) {
  constexpr int kBatches = 2;
  constexpr std::int64_t kSamples = 4;
  config.quantization.on = true;
  prepare_quantization(config, *make_task(config, data, network));
  int seen = 0;
  quant::calibrate(*network.module, [&] {
    (void)network.forward(random_batch(config.model, kSamples, config.images.image_size).input);
    return ++seen < kBatches;
  });
}

std::size_t load_ranges(const nn::ModuleBase& network, const NamedTensors& tensors) {
  if (!quant::quantization_of(network)) return 0;
  const NoGrad no_grad;
  std::map<std::string_view, const Tensor*> given;
  for (const NamedTensor& t : tensors) given.emplace(t.name, &t.tensor);
  std::size_t count = 0;
  for (NamedTensor& own : network.state_dict()) {
    const auto it = given.find(own.name);
    if (!own.name.starts_with(kQuantizationPrefix) || it == given.end()) continue;
    if (it->second->sizes() != own.tensor.sizes() || it->second->is_floating() != own.tensor.is_floating()) continue;
    own.tensor.copy_(*it->second);
    ++count;
  }
  return count;
}

void check_ranges(const nn::ModuleBase& network) {
  const std::shared_ptr<quant::Quantization> quantization = quant::quantization_of(network);
  if (!quantization) return;
  for (const quant::QuantizedTensor& t : quantization->tensors()) {
    const quant::FakeQuantize& grid = quantization->at(t.name);
    for (const double scale : grid.scale.detach().to(f64).to_vector<double>()) {
      if (std::isfinite(scale) && scale > 0) continue;
      fail<Error>("'{}{}{}': expected numbers above 0, got {}", kQuantizationPrefix, t.name, kScale, scale);
    }
    const double least = t.weight ? 0 : static_cast<double>(grid.quant_min());
    const double most = t.weight ? 0 : static_cast<double>(grid.quant_max());
    for (const double zero : grid.zero_point.detach().to(f64).to_vector<double>()) {
      if (zero >= least && zero <= most) continue;
      fail<Error>("'{}{}.zero_point': expected {}, got {}", kQuantizationPrefix, t.name,
                  t.weight ? std::string("0 for a weight") : fmt::format("{} to {}", least, most), zero);
    }
  }
}

NamedTensors with_integers(const nn::ModuleBase& network) {
  const NoGrad no_grad;
  NamedTensors state = network.state_dict();
  const std::shared_ptr<quant::Quantization> quantization = quant::quantization_of(network);
  if (!quantization) return state;
  for (const quant::QuantizedTensor& q : quantization->tensors()) {
    const auto weight =
        std::find_if(state.begin(), state.end(), [&](const NamedTensor& t) { return t.name == q.name; });
    const quant::FakeQuantize& grid = quantization->at(q.name);
    if (!q.weight || weight == state.end() || grid.quant_min() < -128 || grid.quant_max() > 127) continue;
    weight->tensor = quantize(
        weight->tensor.detach().to(f32), grid.scale.detach(),
        zeros(grid.scale.sizes(), {.dtype = i32, .device = grid.scale.device()}),
        {.dtype = i8, .quant_min = grid.quant_min(), .quant_max = grid.quant_max(), .axis = grid.options.axis});
  }
  return state;
}

namespace {

// Integers that a weight of so many bits doesn't have: the recipe or the data is another's.
void check_integers(const NamedTensor& weight, int bits) {
  if (bits > 8) fail<Error>("'{}': expected floating weights, whose recipe says {} bits, got i8", weight.name, bits);
  const std::int64_t most = (std::int64_t{1} << (bits - 1)) - 1;
  for (const std::int64_t q : weight.tensor.to_vector<std::int64_t>()) {
    if (q >= -most && q <= most) continue;
    fail<Error>("'{}': expected integers from {} to {}, of the {} bits that its recipe says, got {}", weight.name,
                -most, most, bits, q);
  }
}

}  // namespace

void restore_weights(NamedTensors& tensors, const std::map<std::string, std::string>& recipe) {
  const NoGrad no_grad;
  const QuantizationConfig config = saved_quantization(recipe);
  std::map<std::string_view, const Tensor*> scales;
  for (const NamedTensor& t : tensors) {
    if (t.name.starts_with(kQuantizationPrefix) && t.name.ends_with(kScale)) scales.emplace(t.name, &t.tensor);
  }
  for (NamedTensor& t : tensors) {
    if (t.tensor.is_floating()) continue;
    const std::string name = fmt::format("{}{}{}", kQuantizationPrefix, t.name, kScale);
    const auto found = scales.find(name);
    if (found == scales.end()) continue;
    if (t.tensor.dtype() != i8) {
      fail<Error>("'{}': expected i8, or a floating dtype, for a quantized weight, got {}", t.name,
                  halfstep::name(t.tensor.dtype()));
    }
    const Tensor& scale = *found->second;
    const bool by_channel = scale.numel() != 1;
    if (scale.dtype() != f32 || (by_channel && (t.tensor.dim() == 0 || scale.numel() != t.tensor.size(0)))) {
      fail<Error>("'{}': expected scales in f32, one for each output channel of '{}' {} or one for all, got {} {}",
                  name, t.name, t.tensor.sizes().str(), halfstep::name(scale.dtype()), scale.sizes().str());
    }
    if (config.is_on()) check_integers(t, config.weight_bits);
    const std::optional<std::int64_t> axis = by_channel ? std::optional<std::int64_t>(0) : std::nullopt;
    t.tensor = dequantize(t.tensor, scale, zeros(scale.sizes(), {.dtype = i32}), {.axis = axis});
  }
}

QuantizationConfig saved_quantization(const std::map<std::string, std::string>& recipe) {
  QuantizationConfig config;
  for (const Flag& flag : flags(config)) {
    if (const auto saved = recipe.find(flag.key()); saved != recipe.end()) take_saved(flag, saved->second);
  }
  return config;
}

std::map<std::string, std::string> quantization_recipe(const QuantizationConfig& config) {
  QuantizationConfig copy = config;
  return recipe(flags(copy));
}

std::shared_ptr<CallbackBase> quantization_schedule(const QuantizationConfig& config, TrainStep& step) {
  if (!config.is_on() || (config.freeze_ranges == 0 && config.freeze_norms == 0)) return nullptr;
  return std::make_shared<QuantizationSchedule>(config, step);
}

NamedTensors without_activation_ranges(const nn::ModuleBase& network) {
  std::vector<std::string> prefixes;
  if (const auto quantization = quant::quantization_of(network)) {
    for (const quant::QuantizedTensor& t : quantization->tensors()) {
      if (!t.weight) prefixes.push_back(fmt::format("{}{}.", kQuantizationPrefix, t.name));
    }
  }
  NamedTensors result;
  for (const NamedTensor& t : network.state_dict()) {
    const bool range = std::any_of(prefixes.begin(), prefixes.end(),
                                   [&](const std::string& prefix) { return t.name.starts_with(prefix); });
    if (!range) result.push_back(t);
  }
  return result;
}

}  // namespace halfstep::training
