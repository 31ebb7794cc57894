// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/bce_block.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/bce_block.h"
#include "halfstep/backends/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

void bce_terms_of_floats(const float* x, const float* y, const float* w, std::int64_t n, float* terms) {
  const F32Tag d;
  const auto one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  map_run<1>(
      d, terms, n,
      [&](F32Vec xv, F32Vec yv, F32Vec wv) HWY_ATTR {
        // softplus(-x); a NaN that Max drops is in the other product.
        const auto softplus = hn::Add(log1p_exp_minus_abs(xv), hn::Max(hn::Neg(xv), zero));
        const auto factor = hn::MulAdd(hn::Sub(wv, one), yv, one);
        return hn::MulAdd(hn::Sub(one, yv), xv, hn::Mul(factor, softplus));
      },
      Run(x), Run(y), Run(w));
}

void bce_of_probabilities(const float* x, const float* y, std::int64_t n, float* terms) {
  const F32Tag d;
  const auto one = hn::Set(d, 1.0f), least = hn::Set(d, -100.0f);
  map_run<1>(
      d, terms, n,
      [&](F32Vec xv, F32Vec yv) HWY_ATTR {
        const auto of_x = hn::Max(log(xv), least), of_rest = hn::Max(log1p(hn::Neg(xv)), least);
        const auto term = hn::MulAdd(yv, of_x, hn::Mul(hn::Sub(one, yv), of_rest));
        return hn::IfThenElse(hn::IsNaN(xv), xv, hn::Neg(term));  // Max drops a NaN
      },
      Run(x), Run(y));
}

void bce_slopes_of_floats(const float* x, const float* y, const float* w, std::int64_t n, float* slopes) {
  const F32Tag d;
  const auto one = hn::Set(d, 1.0f);
  map_run<1>(
      d, slopes, n,
      [&](F32Vec xv, F32Vec yv, F32Vec wv) HWY_ATTR {
        // Each from its own side: 1 - sigmoid(-x) would leave nothing of the slope of a confident negative.
        const auto s = sigmoid_pair(xv);
        return hn::MulSub(hn::Sub(one, yv), s.up, hn::Mul(hn::Mul(wv, yv), s.down));
      },
      Run(x), Run(y), Run(w));
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(bce_terms_of_floats);
HWY_EXPORT(bce_of_probabilities);
HWY_EXPORT(bce_slopes_of_floats);

void bce_with_logits_terms(const float* x, const float* y, const float* w, std::int64_t n, float* terms) {
  HWY_DYNAMIC_DISPATCH(bce_terms_of_floats)(x, y, w, n, terms);
}
void bce_terms(const float* x, const float* y, const float*, std::int64_t n, float* terms) {
  HWY_DYNAMIC_DISPATCH(bce_of_probabilities)(x, y, n, terms);
}
void bce_with_logits_slopes(const float* x, const float* y, const float* w, std::int64_t n, float* slopes) {
  HWY_DYNAMIC_DISPATCH(bce_slopes_of_floats)(x, y, w, n, slopes);
}

}  // namespace halfstep::cpu
#endif
