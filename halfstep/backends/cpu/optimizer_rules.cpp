// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/optimizer_rules.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cstddef>

#include "halfstep/backends/cpu/optimizer_rules.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

/// One vector of a run: elements [i, i + lanes), or the first n of them.
template <class D>
struct Place {
  using T = hn::TFromD<D>;
  std::size_t i;
  HWY_INLINE hn::Vec<D> read(const T* p) const { return hn::LoadU(D(), p + i); }
  template <class To>
  HWY_INLINE void write(hn::Vec<D> v, To* p) const {
    store(v, D(), p + i);
  }
  HWY_INLINE void write(hn::Vec<D>, std::nullptr_t) const {}
};
template <class D>
struct PartialPlace {
  using T = hn::TFromD<D>;
  std::size_t i, n;
  HWY_INLINE hn::Vec<D> read(const T* p) const { return load_n(D(), p + i, n); }
  template <class To>
  HWY_INLINE void write(hn::Vec<D> v, To* p) const {
    store_n(v, D(), p + i, n);
  }
  HWY_INLINE void write(hn::Vec<D>, std::nullptr_t) const {}
};

/// Calls f for each vector of n values.
template <class D, class F>
HWY_INLINE void rule_vectors(D d, std::int64_t count, F&& f) {
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) f(Place<D>{i});
  if (i < n) f(PartialPlace<D>{i, n - i});
}

template <class T, class Copy>
void sgd(const SgdRule& rule, T* p, const T* g, T* const* states, std::int64_t n, Copy copy) {
  const ComputeTag<T> d;
  const auto set = [&](double v) { return hn::Set(d, static_cast<T>(v)); };
  const auto lr = set(rule.lr), decay = set(rule.weight_decay), sign = set(rule.sign);
  // A term whose factor is 0 isn't there: 0 times an infinite weight would be NaN. The branches go the same way in
  // every turn of the loops.
  const bool decays = rule.weight_decay != 0, nesterov = rule.nesterov;
  const auto direction = [&](auto value, auto gradient) {
    const auto signed_gradient = hn::Mul(sign, gradient);
    return decays ? hn::MulAdd(decay, value, signed_gradient) : signed_gradient;
  };
  if (rule.momentum == 0) {
    rule_vectors(d, n, [&](auto at) {
      const auto value = at.read(p), updated = hn::NegMulAdd(lr, direction(value, at.read(g)), value);
      at.write(updated, p);
      at.write(updated, copy);
    });
    return;
  }
  const auto rate = set(rule.rate), kept = set(rule.kept);
  const auto momentum = set(rule.momentum);
  T* const b = states[0];
  rule_vectors(d, n, [&](auto at) {
    const auto value = at.read(p), to = direction(value, at.read(g));
    const auto buffer = hn::MulAdd(kept, at.read(b), hn::Mul(rate, to));
    // Nesterov looks a step of the buffer ahead.
    const auto updated = hn::NegMulAdd(lr, nesterov ? hn::MulAdd(momentum, buffer, to) : buffer, value);
    at.write(buffer, b);
    at.write(updated, p);
    at.write(updated, copy);
  });
}

template <class T, class Copy>
void adam(const AdamRule& rule, T* p, const T* g, T* const* states, std::int64_t n, Copy copy) {
  const ComputeTag<T> d;
  const auto set = [&](double v) { return hn::Set(d, static_cast<T>(v)); };
  const auto b1 = set(rule.beta1), b2 = set(rule.beta2), r1 = set(1 - rule.beta1), r2 = set(1 - rule.beta2);
  const auto eps = set(rule.eps), step_size = set(rule.step_size), root = set(rule.root);
  const auto shrink = set(rule.shrink), decay = set(rule.decay), sign = set(rule.sign);
  const bool decays = rule.decay != 0;  // see sgd
  T *const m = states[0], *const v = states[1], *const top = states[2];
  const auto run = [&](auto at, auto&& largest) {
    const auto value = hn::Mul(at.read(p), shrink);
    const auto signed_gradient = hn::Mul(sign, at.read(g));
    const auto gradient = decays ? hn::MulAdd(decay, value, signed_gradient) : signed_gradient;
    const auto first = hn::MulAdd(b1, at.read(m), hn::Mul(r1, gradient));
    const auto second = hn::MulAdd(b2, at.read(v), hn::Mul(hn::Mul(r2, gradient), gradient));
    at.write(first, m);
    at.write(second, v);
    const auto scale = hn::MulAdd(hn::Sqrt(largest(second)), root, eps);
    const auto updated = hn::Sub(value, hn::Div(hn::Mul(step_size, first), scale));
    at.write(updated, p);
    at.write(updated, copy);
  };
  if (!rule.amsgrad) {
    rule_vectors(d, n, [&](auto at) { run(at, [](auto second) { return second; }); });
    return;
  }
  rule_vectors(d, n, [&](auto at) {
    run(at, [&](auto second) {
      // In this order a NaN of v comes through.
      const auto before = at.read(top);
      const auto larger = hn::IfThenElse(hn::Lt(second, before), before, second);
      at.write(larger, top);
      return larger;
    });
  });
}

/// Calls f with the copy as a pointer of its type.
template <class F>
void with_copy(RoundedCopy copy, F&& f) {
  if (copy.data == nullptr) return f(nullptr);
  if (copy.dtype == DType::f16) return f(static_cast<Half*>(copy.data));
  f(static_cast<BFloat16*>(copy.data));
}

void sgd_f32(const SgdRule& r, float* p, const float* g, float* const* s, std::int64_t n, RoundedCopy copy) {
  with_copy(copy, [&](auto to) { sgd(r, p, g, s, n, to); });
}
void sgd_f64(const SgdRule& r, double* p, const double* g, double* const* s, std::int64_t n) {
  sgd(r, p, g, s, n, nullptr);
}
void adam_f32(const AdamRule& r, float* p, const float* g, float* const* s, std::int64_t n, RoundedCopy copy) {
  with_copy(copy, [&](auto to) { adam(r, p, g, s, n, to); });
}
void adam_f64(const AdamRule& r, double* p, const double* g, double* const* s, std::int64_t n) {
  adam(r, p, g, s, n, nullptr);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(sgd_f32);
HWY_EXPORT(sgd_f64);
HWY_EXPORT(adam_f32);
HWY_EXPORT(adam_f64);

void sgd_block(const SgdRule& r, float* p, const float* g, float* const* s, std::int64_t n, RoundedCopy copy) {
  HWY_DYNAMIC_DISPATCH(sgd_f32)(r, p, g, s, n, copy);
}
void sgd_block(const SgdRule& r, double* p, const double* g, double* const* s, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(sgd_f64)(r, p, g, s, n);
}
void adam_block(const AdamRule& r, float* p, const float* g, float* const* s, std::int64_t n, RoundedCopy copy) {
  HWY_DYNAMIC_DISPATCH(adam_f32)(r, p, g, s, n, copy);
}
void adam_block(const AdamRule& r, double* p, const double* g, double* const* s, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(adam_f64)(r, p, g, s, n);
}
}  // namespace halfstep::cpu
#endif
