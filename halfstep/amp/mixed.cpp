// SPDX-License-Identifier: Apache-2.0
// A word on 16-bit inputs that meet float32 weights outside of a region: they are promoted, so that the product is
// computed in float32, which few who give 16-bit inputs have in mind.
#include <algorithm>
#include <array>
#include <atomic>

#include "halfstep/amp/cast_cache.h"
#include "halfstep/amp/mixed_internal.h"
#include "halfstep/amp/policy.h"
#include "halfstep/autograd/engine_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/mixed_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::amp {
namespace {

// By the op's number; those beyond share the last.
std::array<std::atomic<bool>, 1024> g_said;

bool is_weight(const TensorImpl& t) {
  const TensorImpl& root = t.base ? *t.base : t;
  return t.dtype == DType::f32 && root.requires_grad &&
         Tensor(Ref<TensorImpl>::share(const_cast<TensorImpl*>(&root))).is_leaf();
}

void warn(const Op& op, std::span<const Tensor* const> inputs, DType dtype) {
  std::atomic<bool>& said = g_said[std::min(static_cast<std::size_t>(op.id), g_said.size() - 1)];
  if (dtype != DType::f32 || said.load(std::memory_order_relaxed)) return;
  // Elsewhere 16 bits would change nothing, or the mixing is the library's own.
  if (policy_of(op) != Policy::lower_precision || in_region() || halfstep::detail::backward_depth() != 0) return;
  const TensorImpl* low = nullptr;
  bool weight = false;
  for (const Tensor* t : inputs) {
    const TensorImpl* p = t->impl();
    if (!p) continue;
    if (is_low_precision(p->dtype)) low = p;
    weight |= is_weight(*p);
  }
  if (!low || !weight || said.exchange(true)) return;
  const char* const given = name(low->dtype);
  log(LogLevel::warning,
      fmt::format("{0}: an input of {1} meets a weight of f32 outside of an autocast region, so that it is computed in "
                  "f32; for 16 bits, put forward pass and loss into a region, `amp::Autocast autocast{{{{.dtype = "
                  "{1}}}}};`, or turn the module's weights to {1} with `to({1})` (said once for each op)",
                  op.name, given));
}

[[maybe_unused]] const bool warning_installed = (halfstep::detail::mixed_hook() = warn, true);

}  // namespace

void detail::forget_mixed_warnings() {
  for (auto& said : g_said) said = false;
}

}  // namespace halfstep::amp
