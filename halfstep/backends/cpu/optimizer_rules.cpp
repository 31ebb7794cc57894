// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/optimizer_rules.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/optimizer_rules.h"
#include "halfstep/backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

/// Calls f(read, write) for each vector of n values, where read(p) loads from p and write(v, p) stores to it.
template <class D, class F>
HWY_INLINE void each_vector(D d, std::int64_t count, F&& f) {
  using T = hn::TFromD<D>;
  const std::size_t lanes = hn::Lanes(d), n = static_cast<std::size_t>(count);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    f([&](const T* p) HWY_ATTR { return hn::LoadU(d, p + i); },
      [&](auto v, T* p) HWY_ATTR { hn::StoreU(v, d, p + i); });
  }
  if (i < n) {
    f([&](const T* p) HWY_ATTR { return load_n(d, p + i, n - i); },
      [&](auto v, T* p) HWY_ATTR { store_n(v, d, p + i, n - i); });
  }
}

template <class T>
void sgd(const SgdRule& rule, T* p, const T* g, T* const* states, std::int64_t n) {
  const ComputeTag<T> d;
  const auto set = [&](double v) { return hn::Set(d, static_cast<T>(v)); };
  const auto lr = set(rule.lr), decay = set(rule.weight_decay), sign = set(rule.sign);
  const auto direction = [&](auto value, auto gradient) { return hn::MulAdd(decay, value, hn::Mul(sign, gradient)); };
  if (rule.momentum == 0) {
    each_vector(d, n, [&](auto read, auto write) {
      const auto value = read(p);
      write(hn::NegMulAdd(lr, direction(value, read(g)), value), p);
    });
    return;
  }
  const auto rate = set(rule.rate), kept = set(rule.kept);
  // Nesterov looks a step of the buffer ahead.
  const auto ahead = set(rule.nesterov ? rule.momentum : 1), own = set(rule.nesterov ? 1 : 0);
  T* const b = states[0];
  each_vector(d, n, [&](auto read, auto write) {
    const auto value = read(p), to = direction(value, read(g));
    const auto buffer = hn::MulAdd(kept, read(b), hn::Mul(rate, to));
    write(buffer, b);
    write(hn::NegMulAdd(lr, hn::MulAdd(ahead, buffer, hn::Mul(own, to)), value), p);
  });
}

template <class T>
void adam(const AdamRule& rule, T* p, const T* g, T* const* states, std::int64_t n) {
  const ComputeTag<T> d;
  const auto set = [&](double v) { return hn::Set(d, static_cast<T>(v)); };
  const auto b1 = set(rule.beta1), b2 = set(rule.beta2), r1 = set(1 - rule.beta1), r2 = set(1 - rule.beta2);
  const auto eps = set(rule.eps), step_size = set(rule.step_size), root = set(rule.root);
  const auto shrink = set(rule.shrink), decay = set(rule.decay), sign = set(rule.sign);
  T *const m = states[0], *const v = states[1], *const top = states[2];
  const auto run = [&](auto read, auto write, auto&& largest) {
    const auto value = hn::Mul(read(p), shrink);
    const auto gradient = hn::MulAdd(decay, value, hn::Mul(sign, read(g)));
    const auto first = hn::MulAdd(b1, read(m), hn::Mul(r1, gradient));
    const auto second = hn::MulAdd(b2, read(v), hn::Mul(hn::Mul(r2, gradient), gradient));
    write(first, m);
    write(second, v);
    const auto scale = hn::MulAdd(hn::Sqrt(largest(second)), root, eps);
    write(hn::Sub(value, hn::Div(hn::Mul(step_size, first), scale)), p);
  };
  if (!rule.amsgrad) {
    each_vector(d, n, [&](auto read, auto write) { run(read, write, [](auto second) { return second; }); });
    return;
  }
  each_vector(d, n, [&](auto read, auto write) {
    run(read, write, [&](auto second) {
      // In this order a NaN of v comes through.
      const auto before = read(top);
      const auto larger = hn::IfThenElse(hn::Lt(second, before), before, second);
      write(larger, top);
      return larger;
    });
  });
}

void sgd_f32(const SgdRule& r, float* p, const float* g, float* const* s, std::int64_t n) { sgd(r, p, g, s, n); }
void sgd_f64(const SgdRule& r, double* p, const double* g, double* const* s, std::int64_t n) { sgd(r, p, g, s, n); }
void adam_f32(const AdamRule& r, float* p, const float* g, float* const* s, std::int64_t n) { adam(r, p, g, s, n); }
void adam_f64(const AdamRule& r, double* p, const double* g, double* const* s, std::int64_t n) { adam(r, p, g, s, n); }

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(sgd_f32);
HWY_EXPORT(sgd_f64);
HWY_EXPORT(adam_f32);
HWY_EXPORT(adam_f64);

void sgd_block(const SgdRule& r, float* p, const float* g, float* const* s, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(sgd_f32)(r, p, g, s, n);
}
void sgd_block(const SgdRule& r, double* p, const double* g, double* const* s, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(sgd_f64)(r, p, g, s, n);
}
void adam_block(const AdamRule& r, float* p, const float* g, float* const* s, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(adam_f32)(r, p, g, s, n);
}
void adam_block(const AdamRule& r, double* p, const double* g, double* const* s, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(adam_f64)(r, p, g, s, n);
}
}  // namespace halfstep::cpu
#endif
