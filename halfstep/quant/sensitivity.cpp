// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/sensitivity.h"

#include <algorithm>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/quant/quantization.h"

namespace halfstep::quant {
namespace {

// Which fake quantizations are on, to be put back.
class SwitchesKept {
 public:
  explicit SwitchesKept(const Quantization& quantization) {
    for (const QuantizedTensor& t : quantization.tensors()) {
      const FakeQuantize& f = quantization.at(t.name);
      was_.emplace_back(&f, f.is_fake_quant_enabled());
    }
  }
  ~SwitchesKept() {
    for (const auto& [quantizer, on] : was_) quantizer->enable_fake_quant(on);
  }
  SwitchesKept(const SwitchesKept&) = delete;
  SwitchesKept& operator=(const SwitchesKept&) = delete;

 private:
  std::vector<std::pair<const FakeQuantize*, bool>> was_;
};

// What is switched on together.
struct Layer {
  std::string module = {};
  std::vector<std::string> names = {};
};

std::vector<Layer> layers_of(const Quantization& quantization) {
  std::vector<Layer> layers(1);  // of the first, activations may come before its weight
  for (const QuantizedTensor& t : quantization.tensors()) {
    if (t.weight) {
      if (!layers.back().module.empty()) layers.emplace_back();
      layers.back().module = t.module.empty() ? t.name : t.module;
    }
    layers.back().names.push_back(t.name);
  }
  return layers;
}

}  // namespace

std::vector<LayerSensitivity> sensitivity(const nn::ModuleBase& network, const std::function<double()>& loss) {
  const std::shared_ptr<Quantization> quantization = quantization_of(network);
  if (!quantization) fail<Error>("sensitivity: expected a network that quant::prepare() has prepared");
  const SwitchesKept kept(*quantization);
  enable_fake_quant(*quantization, false);
  const double whole = loss();
  std::vector<LayerSensitivity> result;
  for (const Layer& layer : layers_of(*quantization)) {
    for (const std::string& name : layer.names) quantization->at(name).enable_fake_quant(true);
    const double with = loss();
    result.push_back({layer.module, with, with - whole, layer.names.size() == 1});
    for (const std::string& name : layer.names) quantization->at(name).enable_fake_quant(false);
  }
  std::stable_sort(result.begin(), result.end(), [](const LayerSensitivity& a, const LayerSensitivity& b) {
    const auto size = [](const LayerSensitivity& s) { return std::isnan(s.increase) ? HUGE_VAL : s.increase; };
    return size(a) > size(b);
  });
  return result;
}

}  // namespace halfstep::quant
