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
namespace {

template <class C>
void huber_block_of(HuberPart part, const C* x, const C* y, C parameter, std::int64_t n, C* to) {
  const ComputeTag<C> d;
  using V = hn::Vec<ComputeTag<C>>;
  const V limit = hn::Set(d, parameter), half = hn::Set(d, C(0.5)), below = hn::Set(d, C(0.5) * parameter);
  const auto of_difference = [&](auto f) HWY_ATTR {
    map_run(
        d, to, n, [f](V a, V b) HWY_ATTR { return f(hn::Sub(a, b)); }, Run(x), Run(y));
  };
  switch (part) {
    case HuberPart::smooth_l1_terms:
      return of_difference([=](V v) HWY_ATTR {
        const V a = hn::Abs(v), near = hn::Div(hn::Mul(hn::Mul(half, a), a), limit);
        return hn::IfThenElse(hn::Lt(a, limit), near, hn::Sub(a, below));
      });
    case HuberPart::smooth_l1_slopes:
      return of_difference([=](V v) HWY_ATTR {
        const V a = hn::Abs(v), far = hn::CopySign(hn::Set(d, C(1)), v);
        const V slope = hn::IfThenElse(hn::Lt(a, limit), hn::Div(v, limit), far);
        return hn::IfThenElse(hn::Gt(a, hn::Zero(d)), slope, v);  // zero and NaN stay
      });
    case HuberPart::huber_terms:
      return of_difference([=](V v) HWY_ATTR {
        const V a = hn::Abs(v), far = hn::Mul(limit, hn::Sub(a, below));
        return hn::IfThenElse(hn::Le(a, limit), hn::Mul(hn::Mul(half, a), a), far);
      });
    case HuberPart::huber_slopes:
      return of_difference(
          [=](V v) HWY_ATTR { return hn::IfThenElse(hn::Gt(hn::Abs(v), limit), hn::CopySign(limit, v), v); });
  }
}

}  // namespace

void huber_block_of_floats(HuberPart part, const float* x, const float* y, float parameter, std::int64_t n, float* to) {
  huber_block_of(part, x, y, parameter, n, to);
}
void huber_block_of_doubles(HuberPart part, const double* x, const double* y, double parameter, std::int64_t n,
                            double* to) {
  huber_block_of(part, x, y, parameter, n, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {

HWY_EXPORT(huber_block_of_floats);
HWY_EXPORT(huber_block_of_doubles);

void huber_block(HuberPart part, const float* x, const float* y, float parameter, std::int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(huber_block_of_floats)(part, x, y, parameter, n, to);
}
void huber_block(HuberPart part, const double* x, const double* y, double parameter, std::int64_t n, double* to) {
  HWY_DYNAMIC_DISPATCH(huber_block_of_doubles)(part, x, y, parameter, n, to);
}

}  // namespace halfstep::cpu
#endif
