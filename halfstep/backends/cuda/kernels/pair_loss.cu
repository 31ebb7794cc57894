// SPDX-License-Identifier: Apache-2.0
// Losses of two tensors of one shape. A sum is made in two stages: blocks sum their share, one block adds those, always
// in the same order.
#include "device/block.cuh"
#include "device/elementwise.cuh"
#include "device/fault.cuh"
#include "device/math.cuh"

namespace hscuda {
namespace {

template <class C>
__device__ __forceinline__ C sign_of(C v) {
  return v > 0 ? C{1} : v < 0 ? C{-1} : v;  // NaN stays
}
template <class C>
__device__ __forceinline__ C log_at_least(C logarithm) {
  return logarithm < C{-100} ? C{-100} : logarithm;  // NaN stays
}
/// log(1 + e^-x), without overflow.
template <class C>
__device__ __forceinline__ C negative_softplus(C x) {
  return std::log1p(std::exp(-std::fabs(x))) + (x > 0 ? C{0} : -x);
}
template <class C>
__device__ __forceinline__ C sigmoid_of_negative(C x) {
  const C e = std::exp(-std::fabs(x));
  return (x > 0 ? e : C{1}) / (C{1} + e);
}

// Called, not repeated for each element of a pack.
template <class C>
[[gnu::noinline]] __device__ C rare_term(int kind, C p, C x, C y, C pos_weight) {
  const C d = std::fabs(x - y);
  switch (kind) {
    case HALFSTEP_LOSS_L1:
      return d;
    case HALFSTEP_LOSS_SMOOTH_L1:
      return d < p ? C{0.5} * d * d / p : d - C{0.5} * p;
    case HALFSTEP_LOSS_HUBER:
      return d <= p ? C{0.5} * d * d : p * (d - C{0.5} * p);
    case HALFSTEP_LOSS_KL_DIV:
      if (p != 0) return std::exp(y) * (y - x);
      return (y == 0 ? C{0} : y * std::log(y)) - y * x;
    case HALFSTEP_LOSS_BCE_WITH_LOGITS:
      return (C{1} - y) * x + (C{1} + (pos_weight - C{1}) * y) * negative_softplus(x);
    default:
      return -(y * log_at_least(std::log(x)) + (C{1} - y) * log_at_least(std::log1p(-x)));
  }
}
/// The derivative by x, or by y.
template <class C>
[[gnu::noinline]] __device__ C rare_slope(int kind, C p, bool by_y, C x, C y, C pos_weight) {
  const C d = by_y ? y - x : x - y;
  switch (kind) {
    case HALFSTEP_LOSS_L1:
      return sign_of(d);
    case HALFSTEP_LOSS_SMOOTH_L1:
      return std::fabs(d) < p ? d / p : sign_of(d);
    case HALFSTEP_LOSS_HUBER:
      return std::fabs(d) <= p ? d : p * sign_of(d);
    case HALFSTEP_LOSS_KL_DIV:
      if (p != 0) return by_y ? std::exp(y) * (y - x + C{1}) : -std::exp(y);
      return by_y ? std::log(y) + C{1} - x : -y;
    case HALFSTEP_LOSS_BCE_WITH_LOGITS:
      if (by_y) return pos_weight == C{1} ? -x : (pos_weight - C{1}) * negative_softplus(x) - x;
      // 1 - sigmoid(-x) would leave nothing of the slope of a confident negative.
      return (C{1} - y) * sigmoid_of_negative(-x) - pos_weight * y * sigmoid_of_negative(x);
    default: {
      if (by_y) return log_at_least(std::log1p(-x)) - log_at_least(std::log(x));
      const C variance = (C{1} - x) * x, least = static_cast<C>(1e-12f);
      return (x - y) / (variance < least ? least : variance);
    }
  }
}

template <class T>
struct Operands {
  const T *x, *y, *weight, *pos_weight;  ///< the weights may be null
  int64_t n;
  bool packs;  ///< whether all begin where packs do
};
/// Elements i to i + kWidth - 1, where there are so many.
template <int kWidth, class T>
__device__ __forceinline__ Pack<T, kWidth> load_some(const T* data, int64_t i, int64_t n, bool packs) {
  if (packs && i + kWidth <= n) return load_pack<kWidth>(data + i);
  Pack<T, kWidth> pack;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) pack.values[j] = data[i + j < n ? i + j : n - 1];
  return pack;
}
template <int kWidth, class T>
__device__ __forceinline__ void store_some(T* data, const Pack<T, kWidth>& pack, int64_t i, int64_t n, bool packs) {
  if (packs && i + kWidth <= n) {
    *reinterpret_cast<Pack<T, kWidth>*>(data + i) = pack;
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (i + j < n) data[i + j] = pack.values[j];
  }
}

/// A pack of all operands; 1 where there is no weight.
template <class T, int kWidth>
struct Loaded {
  using C = Compute<T>;
  Pack<T, kWidth> x, y, weight, pos_weight;
  bool weighted, pos_weighted;
  __device__ __forceinline__ Loaded(const Operands<T>& o, int64_t i)
      : x(load_some<kWidth>(o.x, i, o.n, o.packs)),
        y(load_some<kWidth>(o.y, i, o.n, o.packs)),
        weighted(o.weight != nullptr),
        pos_weighted(o.pos_weight != nullptr) {
    if (weighted) weight = load_some<kWidth>(o.weight, i, o.n, o.packs);
    if (pos_weighted) pos_weight = load_some<kWidth>(o.pos_weight, i, o.n, o.packs);
  }
  __device__ __forceinline__ C scaled(int j, C v) const { return weighted ? value_of(weight.values[j]) * v : v; }
  __device__ __forceinline__ C term(int kind, C p, int j) const {
    const C a = value_of(x.values[j]), b = value_of(y.values[j]);
    if (kind == HALFSTEP_LOSS_MSE) return scaled(j, (a - b) * (a - b));
    return scaled(j, rare_term(kind, p, a, b, pos_weighted ? value_of(pos_weight.values[j]) : C{1}));
  }
  __device__ __forceinline__ C slope(int kind, C p, bool by_y, int j) const {
    const C a = value_of(x.values[j]), b = value_of(y.values[j]);
    if (kind == HALFSTEP_LOSS_MSE) return scaled(j, C{2} * (by_y ? b - a : a - b));
    return scaled(j, rare_slope(kind, p, by_y, a, b, pos_weighted ? value_of(pos_weight.values[j]) : C{1}));
  }
};

/// What happens to the sum of all terms.
template <class T>
__device__ __forceinline__ void finish(double total, double divisor, T* loss) {
  *loss = convert<T>(total / divisor);
}

// With `sums` each block writes the sum of its terms there, or, if it is the only one, the loss; without, `loss` gets
// the terms.
template <class T>
__global__ void __launch_bounds__(kThreads)
    pair_terms(Operands<T> o, int kind, Compute<T> p, double divisor, bool reduce, double* sums, T* loss, Fault* fault,
               unsigned long long call) {
  using C = Compute<T>;
  constexpr int kWidth = kPackWidth<T>;
  double total = 0;
  for (int64_t i = thread_index() * kWidth; i < o.n; i += grid_threads() * kWidth) {
    const Loaded<T, kWidth> operands(o, i);
    Pack<T, kWidth> terms;
    C sum = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (i + j >= o.n) continue;
      if (kind == HALFSTEP_LOSS_BCE) {
        const C x = value_of(operands.x.values[j]);
        if (x < 0 || x > 1) report(fault, call, kProbability);
      }
      const C term = operands.term(kind, p, j);
      sum += term;
      terms.values[j] = convert<T>(term);
    }
    total += static_cast<double>(sum);
    if (!reduce) store_some<kWidth>(loss, terms, i, o.n, o.packs);
  }
  if (!reduce) return;
  total = block_reduce(total, Sum{}, 0.0);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    finish(total, divisor, loss);
  } else {
    sums[blockIdx.x] = total;
  }
}
template <class T>
__global__ void __launch_bounds__(kThreads) add_sums(int count, const double* sums, double divisor, T* loss) {
  double total = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) total += sums[i];
  total = block_reduce(total, Sum{}, 0.0);
  if (threadIdx.x == 0) finish(total, divisor, loss);
}

template <class T>
Operands<T> operands(const Call& call, int first, const void* also = nullptr) {
  const auto data = [&](int i) { return call.has(i) ? static_cast<const T*>(call.in[i].data) : nullptr; };
  Operands<T> o{data(first), data(first + 1), data(first + 2), data(first + 3), call.in[first].numel, true};
  const T* const all[] = {o.x, o.y, o.weight, o.pos_weight, static_cast<const T*>(also)};
  for (const T* p : all) o.packs = o.packs && aligned(p, kPackWidth<T>);
  return o;
}

halfstep_status forward(Call& call) {
  const auto& a = call.attributes<halfstep_pair_loss_attributes>();
  const bool reduce = a.reduction != 0;
  if (!reduce && call.out[0].numel == 0) return HALFSTEP_OK;
  double* sums = nullptr;
  bool memory = true;
  with_floating(call.in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    T* loss = static_cast<T*>(call.out[0].data);
    const Operands<T> o = operands<T>(call, 0, reduce ? nullptr : loss);
    // So many blocks that every processor has work, and so few that one block adds their sums in no time.
    const unsigned blocks =
        grid_size(o.n, int64_t{kThreads} * kPackWidth<T> * (reduce ? 4 : 1), reduce ? 1024 : INT32_MAX);
    if (blocks > 1 && reduce) {
      sums = call.workspace<double>(blocks);
      memory = sums != nullptr;
      if (!memory) return;
    }
    launch(call, {.grid = blocks, .alone = !reduce}, pair_terms<T>, o, static_cast<int>(a.kind),
           static_cast<Compute<T>>(a.parameter), a.divisor, reduce, sums, loss, call.fault(), call.number());
    if (sums != nullptr) launch(call, {}, add_sums<T>, static_cast<int>(blocks), sums, a.divisor, loss);
  });
  return memory ? call.launched() : call.no_memory();
}

/// Floating elements of a dtype that is known at run time only.
struct Loose {
  void* data;
  int dtype;
};
template <class C>
__device__ __forceinline__ C load_loose(const Loose& from, int64_t i) {
  return with_floating(from.dtype, [&](auto zero) {
    return static_cast<C>(value_of(static_cast<const decltype(zero)*>(from.data)[i]));
  });
}
template <class C>
__device__ __forceinline__ void store_loose(const Loose& to, int64_t i, C value) {
  with_floating(to.dtype,
                [&](auto zero) { static_cast<decltype(zero)*>(to.data)[i] = convert<decltype(zero)>(value); });
}

template <class T>
__global__ void __launch_bounds__(kThreads) pair_slopes(Operands<T> o, int kind, Compute<T> p, double divisor,
                                                        bool reduced, Loose g, Loose x_grad, bool x_packs, T* y_grad) {
  using C = Compute<T>;
  constexpr int kWidth = kPackWidth<T>;
  const int64_t i = thread_index() * kWidth;
  if (i >= o.n) return;
  const Loaded<T, kWidth> operands(o, i);
  C factor[kWidth];
  const C same = reduced ? static_cast<C>(static_cast<double>(load_loose<C>(g, 0)) / divisor) : C{0};
#pragma unroll
  for (int j = 0; j < kWidth; ++j) factor[j] = reduced || i + j >= o.n ? same : load_loose<C>(g, i + j);
  for (const bool by_y : {false, true}) {
    if ((by_y ? y_grad : x_grad.data) == nullptr) continue;
    Pack<T, kWidth> result;
    if (by_y || x_packs) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) result.values[j] = convert<T>(factor[j] * operands.slope(kind, p, by_y, j));
      store_some<kWidth>(by_y ? y_grad : static_cast<T*>(x_grad.data), result, i, o.n, o.packs);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (i + j < o.n) store_loose(x_grad, i + j, factor[j] * operands.slope(kind, p, by_y, j));
      }
    }
  }
}

halfstep_status backward(Call& call) {
  const auto& a = call.attributes<halfstep_pair_loss_attributes>();
  const Tensor &g = call.in[0], &x_grad = call.out[0], &y_grad = call.out[1];
  if (call.in[1].numel == 0) return HALFSTEP_OK;
  with_floating(call.in[1].dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool same = x_grad.dtype == call.in[1].dtype;
    Operands<T> o = operands<T>(call, 1, a.want_input && same ? x_grad.data : nullptr);
    T* by_y = a.want_target ? static_cast<T*>(y_grad.data) : nullptr;
    o.packs = o.packs && aligned(by_y, kPackWidth<T>);
    launch(call, {.grid = grid_size(o.n, kThreads * kPackWidth<T>, INT32_MAX), .alone = true}, pair_slopes<T>, o,
           static_cast<int>(a.kind), static_cast<Compute<T>>(a.parameter), a.divisor, a.reduction != 0,
           Loose{g.data, g.dtype}, Loose{a.want_input ? x_grad.data : nullptr, x_grad.dtype}, same, by_y);
  });
  return call.launched();
}

constexpr KernelDef kernel(const char* op, halfstep_status (*run)(Call&)) {
  return {.op = op, .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = run};
}
constexpr KernelDef kKernels[] = {
    kernel("mse_loss", forward),
    kernel("l1_loss", forward),
    kernel("smooth_l1_loss", forward),
    kernel("huber_loss", forward),
    kernel("kl_div", forward),
    kernel("binary_cross_entropy_with_logits", forward),
    kernel("binary_cross_entropy", forward),
    kernel("pair_loss_backward", backward),
};

}  // namespace

std::span<const KernelDef> pair_loss_kernels() { return kKernels; }

}  // namespace hscuda
