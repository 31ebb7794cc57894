// SPDX-License-Identifier: Apache-2.0
// Reductions of some dimensions of a tensor.
//
// A thread adds up blocks of at most 128 elements in float32 (float64 for float64) and the blocks in float64; threads
// and blocks are joined in float64 too, by trees that depend on shape and GPU only. So the error grows with the block,
// not with the length, and the same call gives the same bits. A block whose terms leave float32's range is read again,
// in float64.
#pragma once

#include <cmath>

#include "device/fold.cuh"

namespace hscuda {

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

/// The packs of one output, or of neighbours: number i lies `apart` i elements of the reduced dimensions behind
/// `first`.
template <class T>
struct Packs {
  Source<T> x;
  const Layout<1>* reduced;
  int64_t first, apart;
  template <int kWidth>
  __device__ __forceinline__ Pack<ElementOf<T>, kWidth> at(int64_t i) const {
    return x.template at<kWidth>(first + walk_place(*reduced, i * apart));
  }
};

/// Whether a block in float32 can be spoilt: in packs f16 has sums and squares only, which are well in range.
template <class T, class C, int kWidth>
inline constexpr bool kMaySpoil = std::is_same_v<C, float> && (kWidth == 1 || !std::is_same_v<T, Half>);

/// A block in float64. Called, not inlined: the registers are needed for what is common.
template <class T, int kWidth, class Fold>
[[gnu::noinline]] __device__ void fold_again(const Fold& fold, const float* shift, const Packs<T>& packs, int64_t begin,
                                             int64_t end, int64_t step, double* sum) {
  for (int j = 0; j < kWidth; ++j) sum[j] = 0;
#pragma unroll 1
  for (int64_t i = begin; i < end; i += step) {
    float v[kWidth];
    widen_pack(packs.template at<kWidth>(i), v);
    for (int j = 0; j < kWidth; ++j) {
      sum[j] = fold.again(sum[j], static_cast<double>(v[j]), static_cast<double>(shift[j]));
    }
  }
}

/// Folds packs begin, begin + step, ... below end, and calls add(j, sum) for each block's results. The loads of a round
/// are all under way before the first is used.
template <class T, class C, int kWidth, class Fold, class Shift, class Add>
__device__ __forceinline__ void fold_packs(const Fold& fold, const Shift& shift, int64_t begin, int64_t end,
                                           int64_t step, const Packs<T>& packs, const Add& add) {
  C acc[kWidth];
#pragma unroll
  for (C& a : acc) a = identity<C>(fold.kind());
  int rounds = 0;
  int64_t i = begin, block = begin;
  const auto flush = [&] {
    if constexpr (kMaySpoil<T, C, kWidth>) {
      bool spoilt = false;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) spoilt |= fold.spoilt(acc[j]);
      if (spoilt) {
        const Fold own_fold = fold;
        const Packs<T> own_packs = packs;
        float shifts[kWidth];
        double wide[kWidth];
        for (int j = 0; j < kWidth; ++j) shifts[j] = shift[j];
        fold_again<T, kWidth>(own_fold, shifts, own_packs, block, i, step, wide);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          add(j, fold.spoilt(acc[j]) ? wide[j] : static_cast<double>(acc[j]));
          acc[j] = 0;
        }
        block = i;
        rounds = 0;
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      add(j, static_cast<TotalOf<C>>(acc[j]));
      acc[j] = identity<C>(fold.kind());
    }
    block = i;
    rounds = 0;
  };
  while (!fold.slow() && i + (kUnroll - 1) * step < end) {
    Pack<ElementOf<T>, kWidth> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = packs.template at<kWidth>(i + u * step);
    C v[kUnroll][kWidth];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) widen_pack(loaded[u], v[u]);
    fold.fold(acc, v, shift);
    i += kUnroll * step;
    if (++rounds == kFlush) flush();
  }
#pragma unroll 1
  while (i < end) {
    C v[1][kWidth];
    widen_pack(packs.template at<kWidth>(i), v[0]);
    fold.fold(acc, v, shift);
    i += step;
    if (++rounds == kFlush) flush();
  }
  flush();
}
/// The same for a single element.
template <class C, class Fold, class Shift>
__device__ __forceinline__ TotalOf<C> fold_one(const Fold& fold, const Shift& shift, C x) {
  const C v[1][1] = {{x}};
  C acc[1] = {identity<C>(fold.kind())};
  fold.fold(acc, v, shift);
  if constexpr (std::is_same_v<C, float>) {
    if (fold.spoilt(acc[0])) return fold.again(0, static_cast<double>(x), static_cast<double>(shift[0]));
  }
  return static_cast<TotalOf<C>>(acc[0]);
}

template <class T, class C, class Fold, int kWidth>
__global__ void __launch_bounds__(kThreads)
    reduce_rows(const __grid_constant__ Reduction plan, Fold fold, Source<T> x, Target<TotalOf<C>> target) {
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
    const auto add = [&](int, Total sum) { total = join(total, sum); };
    fold_packs<T, C, kWidth>(fold, shift, first + lane, end, lanes, Packs<T>{x, &plan.reduced, at[0] + head, kWidth},
                             add);
    if (kWidth > 1 && blockIdx.y == 0) {
      const auto single = [&](int64_t i) {
        add(0, fold_one(fold, shift, static_cast<C>(value_of(x.template at<1>(at[0] + i).values[0]))));
      };
      for (int64_t i = lane; i < head; i += lanes) single(i);
      for (int64_t i = head + packs * kWidth + lane; i < length; i += lanes) single(i);
    }
  }
  total = row_reduce(total, join, identity<Total>(fold.kind()), lanes);
  if (exists && lane == 0) target.put(blockIdx.y, plan.kept.numel, row, at[1], total);
}

template <class T, class C, class Fold, int kWidth>
__global__ void __launch_bounds__(kThreads)
    reduce_columns(const __grid_constant__ Reduction plan, Fold fold, Source<T> x, Target<TotalOf<C>> target) {
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
    C shift[kWidth] = {};
    if constexpr (Fold::kShifted && std::is_floating_point_v<C>) {
      if (fold.shift()) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) shift[j] = static_cast<C>(fold.shift()[at[1] + j * plan.kept.strides[0][1]]);
      }
    }
    const auto add = [&](int j, Total sum) { total[j] = join(total[j], sum); };
    const int64_t first = blockIdx.y * plan.part_length;
    int64_t end = first + plan.part_length;
    if (end > plan.reduced.numel) end = plan.reduced.numel;
    fold_packs<T, C, kWidth>(fold, shift, first + down, end, height, Packs<T>{x, &plan.reduced, at[0], 1}, add);
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
