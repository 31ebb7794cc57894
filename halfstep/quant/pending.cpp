// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/optim/flag_internal.h"
#include "halfstep/quant/pending_internal.h"

namespace halfstep::quant {

void Pending::hold(std::initializer_list<const Tensor*> values) {
  const Device device = (*values.begin())->device();
  bool fits = flag_.defined() && flag_.device() == device && kept_.size() == values.size();
  for (std::size_t i = 0; fits && i < kept_.size(); ++i) {
    const Tensor& value = *values.begin()[i];
    fits = kept_[i].sizes() == value.sizes() && kept_[i].dtype() == value.dtype();
  }
  if (!fits) {
    const NoGrad no_grad;
    flag_ = zeros({1}, {.device = device});
    kept_.clear();
    for (const Tensor* value : values) kept_.push_back(value->detach().clone());
  }
  static const KernelTable& table = kernel_table("hold_pending");
  std::vector<const Tensor*> in(values), out{&flag_};
  for (const Tensor& kept : kept_) out.push_back(&kept);
  run_kernel(table, "hold_pending", device, DType::f32, in, out);
}

void Pending::settle(const Tensor& found_inf, std::initializer_list<const Tensor*> values) {
  if (!flag_.defined()) return;
  const Device device = (*values.begin())->device();
  // Moved since: what it has is all there is.
  if (device != flag_.device()) {
    flag_ = Tensor();
    return;
  }
  const Tensor unless = optim::step_flag(found_inf, device, "commit", "found_inf");
  static const KernelTable& table = kernel_table("settle_pending");
  std::vector<const Tensor*> in{&unless}, out{&flag_};
  for (const Tensor& kept : kept_) in.push_back(&kept);
  out.insert(out.end(), values.begin(), values.end());
  run_kernel(table, "settle_pending", device, DType::f32, in, out);
  for (const Tensor* value : values) value->storage()->bump_version();
}

}  // namespace halfstep::quant
