// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/adam.h"

#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::optim {
namespace {

template <class Options>
AdamAttributes attributes_of(const Options& o, bool decoupled) {
  return {.beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay,
          .amsgrad = o.amsgrad,
          .maximize = o.maximize,
          .decoupled = decoupled};
}

}  // namespace

Adam::Adam(const NamedTensors& parameters, const AdamOptions& options) : Optimizer(options.low_precision) {
  add_param_group(parameters, options);
}
void Adam::add_param_group(const NamedTensors& parameters, const AdamOptions& options) {
  add(parameters, options.lr, attributes_of(options, false));
}

AdamW::AdamW(const NamedTensors& parameters, const AdamWOptions& options) : Adam(options.low_precision) {
  add_param_group(parameters, options);
}
void AdamW::add_param_group(const NamedTensors& parameters, const AdamWOptions& options) {
  add(parameters, options.lr, attributes_of(options, true));
}

void Adam::add(const NamedTensors& parameters, double lr, const AdamAttributes& o) {
  for (double beta : {o.beta1, o.beta2}) {
    if (!(beta >= 0) || !(beta < 1)) fail<Error>("{}: expected betas from 0 to under 1, got {}", kind(), beta);
  }
  if (!(o.eps >= 0)) fail<Error>("{}: expected eps of at least 0, got {}", kind(), o.eps);
  if (!(o.weight_decay >= 0)) fail<Error>("{}: expected weight decay of at least 0, got {}", kind(), o.weight_decay);
  options_.push_back(o);
  try {
    add_group(parameters, lr);
  } catch (...) {
    options_.pop_back();
    throw;
  }
}

double Adam::momentum(int group) const { return options_.at(static_cast<std::size_t>(group)).beta1; }
void Adam::set_momentum(int group, double value) {
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("it sets a momentum; do that between steps, or by a Schedule");
  options_.at(static_cast<std::size_t>(group)).beta1 = value;
}

std::vector<std::string> Adam::state_names(int group) const {
  if (options_[static_cast<std::size_t>(group)].amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"exp_avg", "exp_avg_sq"};
}
const KernelTable* Adam::kernel() const {
  static const KernelTable& table = kernel_table("adam_step");
  return &table;
}
std::span<const std::byte> Adam::attributes(int group) {
  return std::as_bytes(std::span(&options_[static_cast<std::size_t>(group)], 1));
}

std::map<std::string, double> Adam::numbers(int group) const {
  const AdamAttributes& o = options_[static_cast<std::size_t>(group)];
  return {{"beta1", o.beta1},
          {"beta2", o.beta2},
          {"eps", o.eps},
          {"weight_decay", o.weight_decay},
          {"amsgrad", o.amsgrad ? 1.0 : 0.0},
          {"maximize", o.maximize ? 1.0 : 0.0},
          {"decoupled", o.decoupled ? 1.0 : 0.0}};
}
void Adam::load_numbers(int group, const std::map<std::string, double>& n) {
  const auto get = [&](const char* key) {
    const auto it = n.find(key);
    if (it == n.end()) fail<Error>("{}: the state has no '{}'; is it of another optimizer?", kind(), key);
    return it->second;
  };
  options_[static_cast<std::size_t>(group)] = {.beta1 = get("beta1"),
                                               .beta2 = get("beta2"),
                                               .eps = get("eps"),
                                               .weight_decay = get("weight_decay"),
                                               .amsgrad = get("amsgrad") != 0,
                                               .maximize = get("maximize") != 0,
                                               .decoupled = get("decoupled") != 0};
}

}  // namespace halfstep::optim
