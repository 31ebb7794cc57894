// SPDX-License-Identifier: Apache-2.0
// Reductions of some dimensions of a tensor.
//
// A thread adds up blocks of at most 128 elements in float32 (float64 for float64) and the blocks in float64; threads
// and blocks are joined in float64 too, by trees that depend on shape and GPU only. So the error grows with the block,
// not with the length, and the same call gives the same bits.
#pragma once

#include <cmath>
#include <limits>

#include "rows.cuh"

namespace hscuda {

/// What is folded.
enum FoldKind : int {
  kFoldSum,
  kFoldProduct,
  kFoldMax,
  kFoldMin,
  kFoldNonzero,
  // The rest are for floating types only.
  kFoldAbs,
  kFoldSquares,
  kFoldPowers,
  kFoldMaxAbs,
  kFoldMinAbs,
  kFoldDistances,     ///< squares of the distances from the output's shift
  kFoldExponentials,  ///< of x - shift
  kFoldEqual,         ///< how many are equal to the shift, NaN to NaN
  kFoldEqualAbs       ///< how many magnitudes are
};

/// What becomes of a result v.
enum FinishKind : int {
  kFinishSame,
  kFinishDivide,      ///< v / a
  kFinishRoot,        ///< sqrt(v)
  kFinishRootDivide,  ///< sqrt(v / a)
  kFinishAny,         ///< v > 0
  kFinishAll,         ///< v == a
  kFinishFinite,      ///< v, or 0 where it is an infinity or NaN
  // These take long enough to be left to a kernel of their own.
  kFinishPower,     ///< v^(1 / a)
  kFinishLogarithm  ///< shift + log(v)
};

struct Finish {
  int kind = kFinishSame;
  double a = 0;
  bool late() const { return kind >= kFinishPower; }
};

/// An output: row-major over the kept dimensions.
struct ReduceResult {
  void* data;
  int dtype;
  bool note = false;  ///< for a next pass: f64 is no reason to add up in it
};

namespace reduction {

constexpr int kUnroll = 4;  // accesses of a thread that are under way together
constexpr int kFlush = 32;  // rounds of them in a block of the sum

template <class Total>
__host__ __device__ constexpr Total identity(int kind) {
  using Limits = std::numeric_limits<Total>;
  switch (kind) {
    case kFoldProduct:
      return Total{1};
    case kFoldMax:
      return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    case kFoldMin:
    case kFoldMinAbs:
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
    default:
      return Total{0};
  }
}

__device__ __forceinline__ int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
__device__ __forceinline__ int64_t wrapping_multiply(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <class C>
__device__ __forceinline__ C plus(C a, C b) {
  if constexpr (std::is_integral_v<C>) {
    return wrapping_add(a, b);
  } else {
    return a + b;
  }
}
template <class C>
__device__ __forceinline__ C times(C a, C b) {
  if constexpr (std::is_integral_v<C>) {
    return wrapping_multiply(a, b);
  } else {
    return a * b;
  }
}

/// Joins two results.
struct Join {
  int kind;
  template <class Total>
  __device__ __forceinline__ Total operator()(Total a, Total b) const {
    switch (kind) {
      case kFoldProduct:
        return times(a, b);
      case kFoldMax:
      case kFoldMaxAbs:
        return Largest{}(a, b);
      case kFoldMin:
      case kFoldMinAbs:
        return Smallest{}(a, b);
      default:
        return plus(a, b);
    }
  }
};

// fold(acc, v, shift): v[u][j] goes into acc[j], for each u; shift[j] belongs to it.
struct FoldSum {
  static constexpr bool kShifted = false;
  __host__ __device__ constexpr int kind() const { return kFoldSum; }
  __device__ constexpr bool slow() const { return false; }
  __host__ __device__ constexpr const double* shift() const { return nullptr; }
  template <int m, int n, class C, class Shift>
  __device__ __forceinline__ void fold(C* acc, const C (&v)[m][n], const Shift&) const {
#pragma unroll
    for (int u = 0; u < m; ++u) {
#pragma unroll
      for (int j = 0; j < n; ++j) acc[j] += v[u][j];
    }
  }
};
/// The others share their kernels: which it is, is asked once for some packs.
class FoldAny {
 public:
  static constexpr bool kShifted = true;
  FoldAny(int kind, double p, const double* shift) : kind_(kind), p_(p), shift_(shift) {}
  __host__ __device__ int kind() const { return kind_; }
  /// Takes so long that it isn't worth its code to do several at once.
  __device__ bool slow() const { return kind_ == kFoldPowers || kind_ == kFoldExponentials; }
  __host__ __device__ const double* shift() const { return shift_; }
  template <int m, int n, class C, class Shift>
  __device__ __forceinline__ void fold(C* acc, const C (&v)[m][n], const Shift& shift) const {
    const auto each = [&](auto f) {
#pragma unroll
      for (int u = 0; u < m; ++u) {
#pragma unroll
        for (int j = 0; j < n; ++j) acc[j] = f(acc[j], v[u][j], shift[j]);
      }
    };
    if constexpr (std::is_integral_v<C>) {
      switch (kind_) {
        case kFoldSum:
          return each([](C a, C x, C) { return wrapping_add(a, x); });
        case kFoldProduct:
          return each([](C a, C x, C) { return wrapping_multiply(a, x); });
        case kFoldMax:
          return each([](C a, C x, C) { return a > x ? a : x; });
        case kFoldMin:
          return each([](C a, C x, C) { return a < x ? a : x; });
        default:
          return each([](C a, C x, C) { return a + (x != 0 ? 1 : 0); });
      }
    } else {
      switch (kind_) {
        case kFoldMax:
          return each([](C a, C x, C) { return Largest{}(a, x); });
        case kFoldMin:
          return each([](C a, C x, C) { return Smallest{}(a, x); });
        case kFoldNonzero:
          return each([](C a, C x, C) { return a + (x != 0 ? C(1) : C(0)); });
        case kFoldAbs:
          return each([](C a, C x, C) { return a + std::fabs(x); });
        case kFoldSquares:
          return each([](C a, C x, C) { return a + x * x; });
        case kFoldDistances:
          return each([](C a, C x, C s) { return a + (x - s) * (x - s); });
        default:
          if constexpr (n == 1) fold_single<m == 1>(each);
      }
    }
  }

 private:
  // What has no kernel that reads packs; `kOne`: comes alone, as what is slow does.
  template <bool kOne, class Each>
  __device__ __forceinline__ void fold_single(const Each& each) const {
    switch (kind_) {
      case kFoldSum:
        return each([](auto a, auto x, auto) { return a + x; });
      case kFoldProduct:
        return each([](auto a, auto x, auto) { return a * x; });
      case kFoldMaxAbs:
        return each([](auto a, auto x, auto) { return Largest{}(a, std::fabs(x)); });
      case kFoldMinAbs:
        return each([](auto a, auto x, auto) { return Smallest{}(a, std::fabs(x)); });
      case kFoldEqual:
        return each([](auto a, auto x, auto s) {
          return a + (x == s || (x != x && s != s) ? decltype(a)(1) : decltype(a)(0));
        });
      case kFoldEqualAbs:
        return each([](auto a, auto x, auto s) {
          return a + (std::fabs(x) == s || (x != x && s != s) ? decltype(a)(1) : decltype(a)(0));
        });
      case kFoldPowers:
        if constexpr (kOne) {
          each([power = p_](auto a, auto x, auto) {
            return a + std::pow(std::fabs(x), static_cast<decltype(x)>(power));
          });
        }
        return;
      default:
        if constexpr (kOne) each([](auto a, auto x, auto s) { return a + std::exp(x - s); });
    }
  }

  int kind_;
  double p_;
  const double* shift_;  ///< one a result, row-major
};

template <class Total>
__device__ __forceinline__ Total finished(const Finish& how, Total v, double shift) {
  switch (how.kind) {
    case kFinishAny:
      return static_cast<Total>(v > 0);
    case kFinishAll:
      return static_cast<Total>(v == static_cast<Total>(how.a));
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<Total>) {
    switch (how.kind) {
      case kFinishDivide:
        return v / how.a;
      case kFinishRoot:
        return std::sqrt(v);
      case kFinishRootDivide:
        return std::sqrt(v / how.a);
      case kFinishFinite:
        return v - v == 0 ? v : 0;
      default:
        return v;
    }
  }
  (void)shift;
  return v;
}

/// Stores a result in the output's dtype, rounded once.
template <class Total>
__device__ __forceinline__ void store(const ReduceResult& to, int64_t place, Total v) {
  const auto put = [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(to.data)[place] = convert<T>(v);
  };
  if constexpr (std::is_floating_point_v<Total>) {
    if (is_floating(to.dtype)) {
      with_floating(to.dtype, put);
    } else if (to.dtype == HALFSTEP_BOOL) {
      put(Bool{});
    } else {
      put(int64_t{});
    }
  } else {
    with_integer(to.dtype, put);
  }
}

/// One value for all.
template <class C>
struct Same {
  C value;
  __device__ __forceinline__ C operator[](int) const { return value; }
};

/// Where results go: to the output, or as they are to `partial` [part][output], to be joined later.
template <class Total>
struct Target {
  ReduceResult result;
  Finish finish;
  Total* partial;
  __device__ __forceinline__ void put(int64_t part, int64_t outputs, int64_t output, int64_t place, Total v) const {
    if (partial) {
      partial[part * outputs + output] = v;
    } else {
      store(result, place, finished(finish, v, 0));
    }
  }
};

template <class C>
using TotalOf = std::conditional_t<std::is_integral_v<C>, int64_t, double>;

template <class T, class C, int kWidth>
__device__ __forceinline__ void widen_pack(const Pack<T, kWidth>& pack, C (&v)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) v[j] = static_cast<C>(value_of(pack.values[j]));
}

/// Integers and flags of any dtype, which share their kernels.
struct AnyInteger {};
template <class T>
using ElementOf = std::conditional_t<std::is_same_v<T, AnyInteger>, int64_t, T>;

/// The elements of a tensor, from its first on.
template <class T>
struct Source {
  const void* data;
  int dtype;
  template <int kWidth>
  __device__ __forceinline__ Pack<ElementOf<T>, kWidth> at(int64_t place) const {
    if constexpr (std::is_same_v<T, AnyInteger>) {
      switch (dtype) {
        case HALFSTEP_I64:
          return {static_cast<const int64_t*>(data)[place]};
        case HALFSTEP_I32:
          return {static_cast<const int32_t*>(data)[place]};
        case HALFSTEP_I8:
          return {static_cast<const int8_t*>(data)[place]};
        case HALFSTEP_U8:
          return {static_cast<const uint8_t*>(data)[place]};
        default:
          return {static_cast<const uint8_t*>(data)[place] != 0};
      }
    } else {
      return *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(data) + place);
    }
  }
  /// How far an element is behind the last whole pack's place in memory.
  template <int kWidth>
  __device__ __forceinline__ int64_t misplaced(int64_t place) const {
    return static_cast<int64_t>((reinterpret_cast<uintptr_t>(data) / sizeof(ElementOf<T>) + place) % kWidth);
  }
};

/// Folds packs begin, begin + step, ... below end. The loads of a round are all under way before the first is used.
template <class T, class C, int kWidth, class Fold, class Shift, class PackAt, class Flush>
__device__ __forceinline__ void fold_packs(const Fold& fold, C* acc, const Shift& shift, int64_t begin, int64_t end,
                                           int64_t step, const PackAt& pack_at, const Flush& flush) {
  int rounds = 0;
  int64_t i = begin;
  for (; !fold.slow() && i + (kUnroll - 1) * step < end; i += kUnroll * step) {
    Pack<ElementOf<T>, kWidth> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = pack_at(i + u * step);
    C v[kUnroll][kWidth];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) widen_pack(loaded[u], v[u]);
    fold.fold(acc, v, shift);
    if (++rounds == kFlush) {
      flush();
      rounds = 0;
    }
  }
#pragma unroll 1
  for (; i < end; i += step) {
    C v[1][kWidth];
    widen_pack(pack_at(i), v[0]);
    fold.fold(acc, v, shift);
    if (++rounds == kFlush) {
      flush();
      rounds = 0;
    }
  }
}

template <class T, class C, class Fold, int kWidth>
__global__ void __launch_bounds__(kThreads)
    reduce_rows(Reduction plan, Fold fold, Source<T> x, Target<TotalOf<C>> target) {
  using Total = TotalOf<C>;
  const int lanes = plan.lanes, lane = lane_of_thread(lanes);
  const int64_t row = row_of_thread(lanes);
  const Join join{fold.kind()};
  Total total = identity<Total>(fold.kind());
  const bool exists = row < plan.kept.numel;
  int64_t at[2] = {0, 0};
  if (exists) {
    walk_places(plan.kept, row, at);
    Same<C> shift{};
    if constexpr (Fold::kShifted && std::is_floating_point_v<C>) {
      if (fold.shift()) shift.value = static_cast<C>(fold.shift()[at[1]]);
    }
    const int64_t length = plan.reduced.numel;
    // The run's first elements up to a whole pack, and the last ones behind the packs, go one by one.
    int64_t head = 0;
    if (kWidth > 1 && plan.reduced.ndim == 1) {
      const int64_t misplaced = x.template misplaced<kWidth>(at[0]);
      head = misplaced == 0 ? 0 : kWidth - misplaced;
      if (head > length) head = length;
    }
    const int64_t packs = (length - head) / kWidth;
    const int64_t first = blockIdx.y * (plan.part_length / kWidth);
    int64_t end = first + plan.part_length / kWidth;
    if (end > packs) end = packs;
    C acc[kWidth];
#pragma unroll
    for (C& a : acc) a = identity<C>(fold.kind());
    const auto flush = [&] {
#pragma unroll
      for (C& a : acc) {
        total = join(total, static_cast<Total>(a));
        a = identity<C>(fold.kind());
      }
    };
    const auto pack_at = [&](int64_t pack) {
      return x.template at<kWidth>(at[0] + head + walk_place(plan.reduced, pack * kWidth));
    };
    fold_packs<T, C, kWidth>(fold, acc, shift, first + lane, end, lanes, pack_at, flush);
    if (kWidth > 1 && blockIdx.y == 0) {
      const auto single = [&](int64_t i) {
        const C v[1][1] = {{static_cast<C>(value_of(x.template at<1>(at[0] + i).values[0]))}};
        fold.fold(acc, v, shift);
      };
      for (int64_t i = lane; i < head; i += lanes) single(i);
      for (int64_t i = head + packs * kWidth + lane; i < length; i += lanes) single(i);
    }
    flush();
  }
  total = row_reduce(total, join, identity<Total>(fold.kind()), lanes);
  if (exists && lane == 0) target.put(blockIdx.y, plan.kept.numel, row, at[1], total);
}

template <class T, class C, class Fold, int kWidth>
__global__ void __launch_bounds__(kThreads)
    reduce_columns(Reduction plan, Fold fold, Source<T> x, Target<TotalOf<C>> target) {
  using Total = TotalOf<C>;
  __shared__ Total storage[kWidth][kThreads];
  const int me = static_cast<int>(threadIdx.x), lanes = plan.lanes;
  const int across = me & (lanes - 1), down = me / lanes, height = kThreads / lanes;
  const int64_t column = (int64_t{blockIdx.x} * lanes + across) * kWidth;
  const Join join{fold.kind()};
  const bool exists = column < plan.kept.numel;
  int64_t at[2] = {0, 0};
  Total total[kWidth];
#pragma unroll
  for (Total& t : total) t = identity<Total>(fold.kind());
  if (exists) {
    walk_places(plan.kept, column, at);
    C acc[kWidth], shift[kWidth] = {};
    if constexpr (Fold::kShifted && std::is_floating_point_v<C>) {
      if (fold.shift()) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) shift[j] = static_cast<C>(fold.shift()[at[1] + j * plan.kept.strides[0][1]]);
      }
    }
#pragma unroll
    for (C& a : acc) a = identity<C>(fold.kind());
    const auto flush = [&] {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        total[j] = join(total[j], static_cast<Total>(acc[j]));
        acc[j] = identity<C>(fold.kind());
      }
    };
    const int64_t first = blockIdx.y * plan.part_length;
    int64_t end = first + plan.part_length;
    if (end > plan.reduced.numel) end = plan.reduced.numel;
    const auto pack_at = [&](int64_t r) { return x.template at<kWidth>(at[0] + walk_place(plan.reduced, r)); };
    fold_packs<T, C, kWidth>(fold, acc, shift, first + down, end, height, pack_at, flush);
    flush();
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) storage[j][me] = total[j];
  for (int step = height / 2; step > 0; step /= 2) {
    __syncthreads();
    if (down >= step) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) storage[j][me] = join(storage[j][me], storage[j][me + step * lanes]);
  }
  if (!exists || down != 0) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    target.put(blockIdx.y, plan.kept.numel, column + j, at[1] + j * plan.kept.strides[0][1], storage[j][me]);
  }
}

/// Joins the parts of each output: a thread or a block an output.
template <class Total>
__global__ void __launch_bounds__(kThreads)
    join_parts(Layout<2> kept, int64_t parts, int lanes, const Total* partial, Join join, Finish finish,
               const double* shift, ReduceResult result) {
  const int64_t output = lanes == 1 ? thread_index() : int64_t{blockIdx.x};
  const int64_t first = lanes == 1 ? 0 : threadIdx.x;
  const Total none = identity<Total>(join.kind);
  Total v = none;
  if (output < kept.numel) {
    for (int64_t p = first; p < parts; p += lanes) v = join(v, partial[p * kept.numel + output]);
  }
  if (lanes > 1) v = block_reduce(v, join, none);
  if (output >= kept.numel || first != 0) return;
  int64_t at[2];
  walk_places(kept, output, at);
  if constexpr (std::is_floating_point_v<Total>) {
    if (finish.kind == kFinishPower) return store(result, at[1], std::pow(v, 1 / finish.a));
    if (finish.kind == kFinishLogarithm) return store(result, at[1], shift[at[1]] + std::log(v));
  }
  store(result, at[1], finished(finish, v, 0));
}

template <class Total>
void join_outputs(const Call& call, const Layout<2>& kept, int64_t parts, const Total* partial, int kind,
                  const Finish& finish, const double* shift, const ReduceResult& result) {
  const bool whole = parts > 16;
  launch(call,
         {.grid = whole ? static_cast<unsigned>(kept.numel) : grid_size(kept.numel, kThreads, int64_t{1} << 31),
          .alone = !whole},
         join_parts<Total>, kept, parts, whole ? kThreads : 1, partial, Join{kind}, finish, shift, result);
}

template <class T, class C, int kWidth, class Fold>
void start(const Call& call, const Reduction& plan, const Fold& fold, const Source<T>& x,
           const Target<TotalOf<C>>& target) {
  const Launch how{.grid = dim3(plan.blocks, static_cast<unsigned>(plan.parts)),
                   .alone = !plan.columns && plan.lanes == 1};
  launch(call, how, plan.columns ? reduce_columns<T, C, Fold, kWidth> : reduce_rows<T, C, Fold, kWidth>, plan, fold, x,
         target);
}

// Integers are rare, and float64 fills an access well enough: they come one by one, as rare kinds do.
template <class T, class C>
inline constexpr int kPack = std::is_same_v<C, float> ? static_cast<int>(16 / sizeof(T)) : 1;

template <class T, class C>
Reduction plan_for(const Call& call, const Tensor& x, uint32_t mask, int kind) {
  const bool packs = kind == kFoldSum || kind == kFoldMax || kind == kFoldMin || kind == kFoldNonzero ||
                     kind == kFoldAbs || kind == kFoldSquares || kind == kFoldDistances;
  int widest = 1;
  if constexpr (kPack < T, C >> 1) widest = packs ? kPack<T, C> : 1;
  return plan_reduction(x, mask, widest, call.device().processors());
}
/// How many results wait to be joined, of 8 bytes each.
inline int64_t partial_results(const Reduction& plan, const Finish& finish) {
  return plan.parts > 1 || finish.late() ? plan.parts * plan.outputs() : 0;
}

/// `partial`: room for partial_results().
template <class T, class C>
void reduce_as(const Call& call, const Tensor& x, uint32_t mask, int kind, double p, const double* shift,
               const Finish& finish, const ReduceResult& result, void* partial) {
  using Total = TotalOf<C>;
  constexpr int kWidth = kPack<T, C>;
  const Reduction plan = plan_for<T, C>(call, x, mask, kind);
  if (plan.outputs() == 0) return;
  static_assert(sizeof(Total) == sizeof(double));
  const Target<Total> target{result, finish,
                             partial_results(plan, finish) > 0 ? static_cast<Total*>(partial) : nullptr};
  const FoldAny any(kind, p, shift);
  const Source<T> source{x.data, x.dtype};
  if constexpr (kWidth > 1) {
    if (plan.width > 1 && kind == kFoldSum) {
      start<T, C, kWidth>(call, plan, FoldSum{}, source, target);
    } else if (plan.width > 1) {
      start<T, C, kWidth>(call, plan, any, source, target);
    } else {
      start<T, C, 1>(call, plan, any, source, target);
    }
  } else {
    start<T, C, 1>(call, plan, any, source, target);
  }
  if (target.partial) {
    join_outputs(call, plan.kept, plan.parts, target.partial, kind, finish, shift, result);
  }
}

}  // namespace reduction

/// How many doubles reduce() needs for what its blocks find, if that must be joined.
int64_t partial_results(const Call& call, const Tensor& x, uint32_t mask, int kind, const Finish& finish,
                        const ReduceResult& result);
/// Reduces the dimensions of `mask` (dims_mask()). `shift`: one number a result, row-major, where `kind` needs them, on
/// the device. `partial`: workspace for partial_results(), which calls of several passes ask for before the first.
void reduce(const Call& call, const Tensor& x, uint32_t mask, int kind, const Finish& finish,
            const ReduceResult& result, double* partial, const double* shift = nullptr, double p = 0);
/// The same for a call of one pass. False: no workspace.
bool reduce(const Call& call, const Tensor& x, uint32_t mask, int kind, const Finish& finish,
            const ReduceResult& result, double p = 0);

}  // namespace hscuda
