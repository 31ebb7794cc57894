// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/huber_block.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/huber_block.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

void smooth_l1_terms_of(const float* x, const float* y, float beta, std::int64_t n, float* terms) {
  const F32Tag d;
  const auto half = hn::Set(d, 0.5f), limit = hn::Set(d, beta), below = hn::Set(d, 0.5f * beta);
  map_run(
      d, terms, n,
      [&](F32Vec xv, F32Vec yv) HWY_ATTR {
        const auto a = hn::Abs(hn::Sub(xv, yv));
        const auto near = hn::Div(hn::Mul(hn::Mul(half, a), a), limit);
        return hn::IfThenElse(hn::Lt(a, limit), near, hn::Sub(a, below));
      },
      Run(x), Run(y));
}
void smooth_l1_slopes_of(const float* x, const float* y, float beta, std::int64_t n, float* slopes) {
  const F32Tag d;
  const auto one = hn::Set(d, 1.0f), limit = hn::Set(d, beta), zero = hn::Zero(d);
  map_run(
      d, slopes, n,
      [&](F32Vec xv, F32Vec yv) HWY_ATTR {
        const auto v = hn::Sub(xv, yv), a = hn::Abs(v);
        const auto slope = hn::IfThenElse(hn::Lt(a, limit), hn::Div(v, limit), hn::CopySign(one, v));
        return hn::IfThenElse(hn::Gt(a, zero), slope, v);  // zero and NaN stay
      },
      Run(x), Run(y));
}
void huber_terms_of(const float* x, const float* y, float delta, std::int64_t n, float* terms) {
  const F32Tag d;
  const auto half = hn::Set(d, 0.5f), limit = hn::Set(d, delta), below = hn::Set(d, 0.5f * delta);
  map_run(
      d, terms, n,
      [&](F32Vec xv, F32Vec yv) HWY_ATTR {
        const auto a = hn::Abs(hn::Sub(xv, yv));
        const auto far = hn::Mul(limit, hn::Sub(a, below));
        return hn::IfThenElse(hn::Le(a, limit), hn::Mul(hn::Mul(half, a), a), far);
      },
      Run(x), Run(y));
}
void huber_slopes_of(const float* x, const float* y, float delta, std::int64_t n, float* slopes) {
  const F32Tag d;
  const auto limit = hn::Set(d, delta);
  map_run(
      d, slopes, n,
      [&](F32Vec xv, F32Vec yv) HWY_ATTR {
        const auto v = hn::Sub(xv, yv);
        return hn::IfThenElse(hn::Gt(hn::Abs(v), limit), hn::CopySign(limit, v), v);
      },
      Run(x), Run(y));
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(smooth_l1_terms_of);
HWY_EXPORT(smooth_l1_slopes_of);
HWY_EXPORT(huber_terms_of);
HWY_EXPORT(huber_slopes_of);

void smooth_l1_terms(const float* x, const float* y, float beta, std::int64_t n, float* terms) {
  HWY_DYNAMIC_DISPATCH(smooth_l1_terms_of)(x, y, beta, n, terms);
}
void smooth_l1_slopes(const float* x, const float* y, float beta, std::int64_t n, float* slopes) {
  HWY_DYNAMIC_DISPATCH(smooth_l1_slopes_of)(x, y, beta, n, slopes);
}
void huber_terms(const float* x, const float* y, float delta, std::int64_t n, float* terms) {
  HWY_DYNAMIC_DISPATCH(huber_terms_of)(x, y, delta, n, terms);
}
void huber_slopes(const float* x, const float* y, float delta, std::int64_t n, float* slopes) {
  HWY_DYNAMIC_DISPATCH(huber_slopes_of)(x, y, delta, n, slopes);
}

}  // namespace halfstep::cpu
#endif
