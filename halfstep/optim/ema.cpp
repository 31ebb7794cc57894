// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/ema.h"

#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/optim/flag_internal.h"

namespace halfstep::optim {

EMA::EMA(const NamedTensors& parameters, const EMAOptions& options) : options_(options) {
  if (!(options.decay >= 0 && options.decay <= 1)) {
    fail<Error>("EMA: expected a decay from 0 to 1, got {}", options.decay);
  }
  if (!(options.warmup >= 0)) fail<Error>("EMA: expected a warm-up of at least 0 updates, got {}", options.warmup);
  if (parameters.empty()) fail<Error>("EMA: expected parameters to average, got none");
  const NoGrad no_grad;
  for (const NamedTensor& p : parameters) {
    check_defined(p.tensor, "EMA", "a parameter");
    if (!p.tensor.is_floating()) continue;
    if (!p.tensor.is_contiguous(MemoryFormat::preserve)) {
      fail<Error>("EMA: expected dense parameters, got {} {} with strides {}", p.name, p.tensor.sizes().str(),
                  p.tensor.strides().str());
    }
    Tensor average = empty_like(p.tensor, accumulate_dtype(p.tensor.dtype()));
    copy_unrecorded(average, p.tensor);
    parameters_.push_back(p);
    averages_.push_back({p.name, average});
  }
  const Device device = parameters_.empty() ? Device{} : parameters_[0].tensor.device();
  count_ = zeros({1}, {.dtype = i64, .device = device});
}

void EMA::update_unless(const Tensor& found_inf) {
  if (is_swapped()) fail<Error>("EMA: update() while the parameters hold the averages; call swap() first");
  if (parameters_.empty()) return;
  const Tensor unless = step_flag(found_inf, count_.device(), "EMA", "found_inf");
  const Tensor hyper =
      tensor({options_.decay, options_.warmup, options_.equal ? 1.0 : 0.0}, {.dtype = f64, .device = count_.device()});
  static const KernelTable& table = kernel_table("ema_update");
  std::vector<const Tensor*> in{&unless, &hyper}, out{&count_};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    in.push_back(&parameters_[i].tensor);
    out.push_back(&averages_[i].tensor);
  }
  run_kernel(table, "ema_update", count_.device(), DType::f32, in, out);
}

std::int64_t EMA::updates() const { return count_.item<std::int64_t>(); }

void EMA::swap() {
  const NoGrad no_grad;
  ++capture_generation();
  if (is_swapped()) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) Tensor(parameters_[i].tensor).copy_(kept_[i]);
    kept_.clear();
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    kept_.push_back(parameters_[i].tensor.detach().clone());
    Tensor(parameters_[i].tensor).copy_(averages_[i].tensor);
  }
}

OptimizerState EMA::state_dict() const {
  OptimizerState state{.tensors = averages_, .numbers = {{"updates", static_cast<double>(updates())}}};
  return state;
}

void EMA::load_state_dict(const OptimizerState& state) {
  std::map<std::string, Tensor> given;
  for (const NamedTensor& t : state.tensors) given.emplace(t.name, t.tensor);
  const auto updates = state.numbers.find("updates");
  if (updates == state.numbers.end()) fail<Error>("EMA: the state has no 'updates'");
  if (!(updates->second >= 0 && updates->second <= 0x1p53) || updates->second != std::floor(updates->second)) {
    fail<Error>("EMA: expected a number of updates, got {}", updates->second);
  }
  for (const NamedTensor& a : averages_) {
    const auto it = given.find(a.name);
    if (it == given.end()) fail<Error>("EMA: the state has no '{}'; is it of another network?", a.name);
    if (it->second.sizes() != a.tensor.sizes()) {
      fail<ShapeError>("EMA: expected {} {}, got {}", a.name, a.tensor.sizes().str(), it->second.sizes().str());
    }
  }
  if (given.size() != averages_.size()) {
    fail<Error>("EMA: expected {} tensors, got {}", averages_.size(), given.size());
  }
  const NoGrad no_grad;
  for (NamedTensor& a : averages_) a.tensor.copy_(given.at(a.name));
  count_.fill_(static_cast<std::int64_t>(updates->second));
}

}  // namespace halfstep::optim
