// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/sgd.h"

#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::optim {

SGD::SGD(const NamedTensors& parameters, const SGDOptions& options) : Optimizer(options.low_precision) {
  add_param_group(parameters, options);
}

void SGD::add_param_group(const NamedTensors& parameters, const SGDOptions& o) {
  if (!(o.momentum >= 0)) fail<Error>("SGD: expected momentum of at least 0, got {}", o.momentum);
  if (!(o.weight_decay >= 0)) fail<Error>("SGD: expected weight decay of at least 0, got {}", o.weight_decay);
  if (o.nesterov && (o.momentum <= 0 || o.dampening != 0)) {
    fail<Error>("SGD: nesterov needs momentum above 0 and dampening 0, got {} and {}", o.momentum, o.dampening);
  }
  options_.push_back({.momentum = o.momentum,
                      .dampening = o.dampening,
                      .weight_decay = o.weight_decay,
                      .nesterov = o.nesterov,
                      .maximize = o.maximize});
  try {
    add_group(parameters, o.lr);
  } catch (...) {
    options_.pop_back();
    throw;
  }
}

double SGD::momentum(int group) const { return options_.at(static_cast<std::size_t>(group)).momentum; }
void SGD::set_momentum(int group, double value) {
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it sets a momentum; do that between steps, or by a Schedule");
  options_.at(static_cast<std::size_t>(group)).momentum = value;
}

std::vector<std::string> SGD::state_names(int group) const {
  if (options_[static_cast<std::size_t>(group)].momentum == 0) return {};
  return {"momentum_buffer"};
}
const KernelTable* SGD::kernel() const {
  static const KernelTable& table = kernel_table("sgd_step");
  return &table;
}
std::span<const std::byte> SGD::attributes(int group) {
  return std::as_bytes(std::span(&options_[static_cast<std::size_t>(group)], 1));
}

std::map<std::string, double> SGD::numbers(int group) const {
  const SgdAttributes& o = options_[static_cast<std::size_t>(group)];
  return {{"momentum", o.momentum},
          {"dampening", o.dampening},
          {"weight_decay", o.weight_decay},
          {"nesterov", o.nesterov ? 1.0 : 0.0},
          {"maximize", o.maximize ? 1.0 : 0.0}};
}
void SGD::load_numbers(int group, const std::map<std::string, double>& n) {
  const auto get = [&](const char* key) {
    const auto it = n.find(key);
    if (it == n.end()) fail<Error>("SGD: the state has no '{}'; is it of another optimizer?", key);
    return it->second;
  };
  options_[static_cast<std::size_t>(group)] = {.momentum = get("momentum"),
                                               .dampening = get("dampening"),
                                               .weight_decay = get("weight_decay"),
                                               .nesterov = get("nesterov") != 0,
                                               .maximize = get("maximize") != 0};
}

}  // namespace halfstep::optim
