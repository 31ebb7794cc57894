// SPDX-License-Identifier: Apache-2.0
// From arithmetic on vectors to the ops of a family.
//
// A family of ops is a file with the functors of its ops and one table, which names each op with its functor.
//
// A functor is a template on the scalar that is computed in: `F<float>` and `F<double>` are called with a tag and
// vectors, F<integer> has `scalar(...)`. It is made from the kernel's attributes, once a run, and says in kIntegers,
// kBool and kUnroll what it can do and how many vectors a turn of the loop takes.

// The include guard of a header that is compiled once for each target.
#if defined(HALFSTEP_BACKENDS_CPU_RUNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFSTEP_BACKENDS_CPU_RUNS_INL_H_
#undef HALFSTEP_BACKENDS_CPU_RUNS_INL_H_
#else
#define HALFSTEP_BACKENDS_CPU_RUNS_INL_H_
#endif

#include <algorithm>
#include <array>

#include "halfstep/backends/cpu/elementwise.h"
#include "halfstep/backends/cpu/math-inl.h"
#include "halfstep/backends/cpu/simd-inl.h"
#include "halfstep/core/dtype.h"
#include "halfstep/ops/attributes.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

/// What most functors are: cheap, for floating dtypes only, without attributes.
struct FloatingFunctor {
  static constexpr bool kIntegers = false;
  static constexpr bool kBool = false;
  static constexpr int kUnroll = 2;
  static constexpr int kGrain = 32768;
};
/// For functors of integers too.
struct NumericFunctor : FloatingFunctor {
  static constexpr bool kIntegers = true;
};
/// For functors of dozens of instructions: no unrolling, fewer elements a thread.
struct HeavyFunctor : FloatingFunctor {
  static constexpr int kUnroll = 1;
  static constexpr int kGrain = 8192;
};

/// A number of the program's own as C.
template <class C>
C number(const ScalarValue& value) {
  if constexpr (std::is_same_v<C, bool>) {
    return value.kind == 2 ? value.floating != 0 : value.integer != 0;
  } else if constexpr (std::is_integral_v<C>) {
    return value.kind == 2 ? convert<C>(value.floating) : convert<C>(value.integer);
  } else {
    return convert<C>(value.floating);
  }
}

/// The unsigned type that C wraps around in.
template <class C>
struct Unsigned : std::make_unsigned<C> {};
template <>
struct Unsigned<bool> : std::type_identity<unsigned> {};
template <class C>
using unsigned_t = typename Unsigned<C>::type;

/// Applies a scalar function to each lane: for functions that are too rare to have a vector form.
template <class D, class F>
HWY_INLINE hn::Vec<D> by_lane(D d, F&& f, hn::Vec<D> v) {
  alignas(64) hn::TFromD<D> lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  for (auto& x : lanes) x = f(x);
  return hn::Load(d, lanes);
}
template <class D, class F>
HWY_INLINE hn::Vec<D> by_lane(D d, F&& f, hn::Vec<D> a, hn::Vec<D> b) {
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  alignas(64) hn::TFromD<D> x[kLanes];
  alignas(64) hn::TFromD<D> y[kLanes];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  for (std::size_t i = 0; i < kLanes; ++i) x[i] = f(x[i], y[i]);
  return hn::Load(d, x);
}

/// Vectors a turn: two at least of 16 bits, which are rounded and stored as one.
template <class T, template <class> class F>
constexpr int kUnrollOf = sizeof(T) == 2 ? std::max(2, F<float>::kUnroll) : F<float>::kUnroll;

template <class T, template <class> class F, std::size_t... K>
void floating_run(const void* state, void* out, const void* const* in, std::int64_t n) {
  const ComputeTag<T> d;
  const F<ComputeScalar<T>> f(state);
  map_run<kUnrollOf<T, F>>(
      d, static_cast<T*>(out), n, [&](auto... v) { return f(d, v...); }, Run<T>{static_cast<const T*>(in[K])}...);
}
/// Input `R` of two is one value.
template <class T, template <class> class F, int R>
void repeated_run(const void* state, void* out, const void* const* in, std::int64_t n) {
  const ComputeTag<T> d;
  const F<ComputeScalar<T>> f(state);
  const Same<ComputeScalar<T>> same{convert<ComputeScalar<T>>(*static_cast<const T*>(in[R]))};
  const Run<T> run{static_cast<const T*>(in[1 - R])};
  const auto body = [&](auto a, auto b) { return f(d, a, b); };
  if constexpr (R == 0) {
    map_run<kUnrollOf<T, F>>(d, static_cast<T*>(out), n, body, same, run);
  } else {
    map_run<kUnrollOf<T, F>>(d, static_cast<T*>(out), n, body, run, same);
  }
}
template <class T, template <class> class F, std::size_t... K>
void integer_run(const void* state, void* out, const void* const* in, std::int64_t n) {
  const F<T> f(state);
  T* to = static_cast<T*>(out);
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(f.scalar(static_cast<const T*>(in[K])[i]...));
}

template <class T, template <class> class F, bool kRepeated, std::size_t... K>
constexpr Runs make_runs(std::index_sequence<K...>) {
  Runs runs;
  using G = F<float>;
  runs.grain = G::kGrain;
  if constexpr (std::is_integral_v<T>) {
    if constexpr (std::is_same_v<T, bool> ? G::kBool : G::kIntegers) runs.straight = integer_run<T, F, K...>;
  } else {
    runs.straight = floating_run<T, F, K...>;
    if constexpr (kRepeated) {
      runs.repeated[0] = repeated_run<T, F, 0>;
      runs.repeated[1] = repeated_run<T, F, 1>;
    }
  }
  return runs;
}

template <template <class> class F, template <class> class Low, bool kRepeated, std::size_t... K>
constexpr std::array<Runs, kNumDTypes> make_table(std::index_sequence<K...> inputs) {
  return {
      make_runs<float, F, kRepeated>(inputs),
      make_runs<double, F, kRepeated>(inputs),
      make_runs<Half, Low, kRepeated>(inputs),
      make_runs<BFloat16, Low, kRepeated>(inputs),
      Runs{},
      Runs{},
      make_runs<std::int64_t, F, kRepeated>(inputs),
      make_runs<std::int32_t, F, kRepeated>(inputs),
      make_runs<std::int8_t, F, kRepeated>(inputs),
      make_runs<std::uint8_t, F, kRepeated>(inputs),
      make_runs<bool, F, kRepeated>(inputs),
  };
}

/// The runs of functor F with N inputs for each dtype; kRepeated: also with one input repeated.
template <template <class> class F, int N, bool kRepeated = false>
constexpr std::array<Runs, kNumDTypes> kRuns = make_table<F, F, kRepeated>(std::make_index_sequence<N>());
/// Those with another functor for 16 bits, which need not be as exact.
template <template <class> class F, template <class> class Low, int N>
constexpr std::array<Runs, kNumDTypes> kRunsWithLow = make_table<F, Low, false>(std::make_index_sequence<N>());

/// A row of a family's table: the op that functor F computes from N inputs.
template <template <class> class F, int N, bool kRepeated = false>
constexpr ElementwiseOp op_of(const char* name, std::initializer_list<DType> dtypes) {
  return {name, dtypes, N, kRuns<F, N, kRepeated>.data()};
}
template <template <class> class F, template <class> class Low, int N>
constexpr ElementwiseOp op_with_low(const char* name, std::initializer_list<DType> dtypes) {
  return {name, dtypes, N, kRunsWithLow<F, Low, N>.data()};
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
