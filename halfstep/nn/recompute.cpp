// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/recompute.h"

#include <memory>

#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/module.h"

namespace halfstep::nn {

void detail::run_recomputed(const std::vector<Tensor>& inputs, const std::function<void()>& first,
                            std::function<void(const std::vector<Tensor>&)> again) {
  // checkpoint() keeps the function longer than `first` lives.
  const auto run = [first = &first, again = std::move(again),
                    begun = std::make_shared<bool>(false)](const std::vector<Tensor>& given) {
    if (!std::exchange(*begun, true)) {
      (*first)();
    } else {
      again(given);
    }
    return std::vector<Tensor>();
  };
  checkpoint(run, inputs);
}

void detail::refuse_to_recompute(const std::string& kind) {
  fail<Error>(
      "recompute: {} is called with an argument that can't be kept for the backward pass: a pointer, a view of memory "
      "(std::span, std::string_view) or what can't be copied; pass tensors, numbers and containers of them",
      kind);
}

const ModuleBase& ModuleBase::recompute(bool on) const {
  if (std::exchange(state_->recomputed, on) != on) ++capture_generation();
  return *this;
}
bool ModuleBase::is_recomputed() const { return state_->recomputed; }
bool ModuleBase::recomputes_now() const { return state_->training && GradMode::is_enabled(); }

}  // namespace halfstep::nn
