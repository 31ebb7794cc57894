// SPDX-License-Identifier: Apache-2.0
// Reductions to one number an output: sums, means, products, extremes, norms, variances, logsumexp, dot products.
#include <cmath>

#include "device/reduce.cuh"
#include "halfstep/runtime/plugin_attributes.h"

namespace hscuda {

namespace {

/// Calls f(element, compute) with what a reduction of x reads and computes in.
template <class F>
void with_element(const Tensor& x, const ReduceResult& result, const F& f) {
  switch (x.dtype) {
    case HALFSTEP_F32:
      // A sum that is kept in float64 is taken in it.
      return result.dtype == HALFSTEP_F64 && !result.note ? f(float{}, double{}) : f(float{}, float{});
    case HALFSTEP_F64:
      return f(double{}, double{});
    case HALFSTEP_F16:
      return f(Half{}, float{});
    case HALFSTEP_BF16:
      return f(BFloat16{}, float{});
    default:
      return f(reduction::AnyInteger{}, int64_t{});
  }
}

}  // namespace

int64_t partial_results(const Call& call, const Tensor& x, uint32_t mask, int kind, const Finish& finish,
                        const ReduceResult& result) {
  int64_t count = 0;
  with_element(x, result, [&](auto zero, auto compute) {
    const Reduction plan = reduction::plan_for<decltype(zero), decltype(compute)>(call, x, mask, kind);
    count = reduction::partial_results(plan, finish);
  });
  return count;
}

void reduce(const Call& call, const Tensor& x, uint32_t mask, int kind, const Finish& finish,
            const ReduceResult& result, double* partial, const double* shift, double p) {
  with_element(x, result, [&](auto zero, auto compute) {
    reduction::reduce_as<decltype(zero), decltype(compute)>(call, x, mask, kind, p, shift, finish, result, partial);
  });
}

bool reduce(const Call& call, const Tensor& x, uint32_t mask, int kind, const Finish& finish,
            const ReduceResult& result, double p) {
  const int64_t count = partial_results(call, x, mask, kind, finish, result);
  auto* partial = count > 0 ? call.workspace<double>(count) : nullptr;
  if (count > 0 && !partial) return false;
  reduce(call, x, mask, kind, finish, result, partial, nullptr, p);
  return true;
}

namespace {

template <class A>
uint32_t reduced_dims(const A& a, const Tensor& x) {
  return dims_mask(a.dims.values, a.dims.size, x.ndim);
}

halfstep_status reduce_to(Call& call, uint32_t mask, int kind, const Finish& finish, double p = 0) {
  const ReduceResult result{call.out[0].data, call.out[0].dtype};
  if (!reduce(call, call.in[0], mask, kind, finish, result, p)) return call.no_memory();
  return call.launched();
}

/// A result for a next pass, wherever it will be.
constexpr ReduceResult kNote{nullptr, HALFSTEP_F64, true};

/// Elements that each output is made of.
double length_of(const Call& call) {
  return static_cast<double>(call.in[0].numel) / static_cast<double>(std::max<int64_t>(call.out[0].numel, 1));
}

template <int kKind, int kFinish>
halfstep_status simple(Call& call) {
  const auto& a = call.attributes<halfstep_reduce_attributes>();
  return reduce_to(call, reduced_dims(a, call.in[0]), kKind, {.kind = kFinish, .a = length_of(call)});
}

halfstep_status norm(Call& call) {
  const auto& a = call.attributes<halfstep_norm_attributes>();
  const uint32_t mask = reduced_dims(a, call.in[0]);
  if (a.p == 2) return reduce_to(call, mask, kFoldSquares, {.kind = kFinishRoot});
  if (a.p == 1) return reduce_to(call, mask, kFoldAbs, {});
  if (a.p == 0) return reduce_to(call, mask, kFoldNonzero, {});
  if (std::isinf(a.p)) return reduce_to(call, mask, a.p > 0 ? kFoldMaxAbs : kFoldMinAbs, {});
  return reduce_to(call, mask, kFoldPowers, {.kind = kFinishPower, .a = a.p}, a.p);
}

// Two passes: the means in float64, then the squares of the distances from them.
template <int kFinish>
halfstep_status variance(Call& call) {
  const auto& a = call.attributes<halfstep_var_attributes>();
  const Tensor& x = call.in[0];
  const uint32_t mask = reduced_dims(a, x);
  const int64_t outputs = call.out[0].numel;
  if (outputs == 0) return HALFSTEP_OK;
  const double n = length_of(call);
  const Finish mean{.kind = kFinishDivide, .a = n};
  const Finish spread{.kind = kFinish, .a = std::max(n - a.correction, 0.0)};
  const ReduceResult result{call.out[0].data, call.out[0].dtype};
  const bool both = call.m > 1;
  const ReduceResult own_mean = both ? ReduceResult{call.out[1].data, call.out[1].dtype} : ReduceResult{};
  // The passes come one after the other, and so share what they need.
  int64_t most = std::max(partial_results(call, x, mask, kFoldSum, mean, kNote),
                          partial_results(call, x, mask, kFoldDistances, spread, result));
  if (both) most = std::max(most, partial_results(call, x, mask, kFoldSum, mean, own_mean));
  auto* means = call.workspace<double>(outputs + most);
  if (!means) return call.no_memory();
  double* partial = means + outputs;
  reduce(call, x, mask, kFoldSum, mean, {means, HALFSTEP_F64, true}, partial);
  reduce(call, x, mask, kFoldDistances, spread, result, partial, means);
  if (both) reduce(call, x, mask, kFoldSum, mean, own_mean, partial);
  return call.launched();
}

halfstep_status logsumexp(Call& call) {
  const auto& a = call.attributes<halfstep_reduce_attributes>();
  const Tensor& x = call.in[0];
  const uint32_t mask = reduced_dims(a, x);
  const int64_t outputs = call.out[0].numel;
  if (outputs == 0) return HALFSTEP_OK;
  // An infinite shift would give inf - inf: such rows are summed as they are.
  const Finish finite{.kind = kFinishFinite}, logarithm{.kind = kFinishLogarithm};
  const ReduceResult result{call.out[0].data, call.out[0].dtype};
  const int64_t most = std::max(partial_results(call, x, mask, kFoldMax, finite, kNote),
                                partial_results(call, x, mask, kFoldExponentials, logarithm, result));
  auto* shift = call.workspace<double>(outputs + most);
  if (!shift) return call.no_memory();
  double* partial = shift + outputs;
  reduce(call, x, mask, kFoldMax, finite, {shift, HALFSTEP_F64, true}, partial);
  reduce(call, x, mask, kFoldExponentials, logarithm, result, partial, shift);
  return call.launched();
}

// --- Dot products ---

constexpr int kDotBlock = 64;  // products of a thread that are added up before they go into the total

template <class T>
__global__ void __launch_bounds__(kThreads) dot_parts(int64_t n, const T* a, int64_t a_step, const T* b, int64_t b_step,
                                                      reduction::TotalOf<Accumulate<T>>* partial) {
  using C = Accumulate<T>;
  using Total = reduction::TotalOf<C>;
  Total total = 0;
  C acc = 0;
  int held = 0;
  for (int64_t i = thread_index(); i < n; i += grid_threads()) {
    const C x = static_cast<C>(value_of(a[i * a_step])), y = static_cast<C>(value_of(b[i * b_step]));
    acc = reduction::plus(acc, reduction::times(x, y));
    if (++held == kDotBlock) {
      total = reduction::plus(total, static_cast<Total>(acc));
      acc = 0;
      held = 0;
    }
  }
  total = reduction::plus(total, static_cast<Total>(acc));
  total = block_reduce(total, reduction::Join{kFoldSum}, Total{0});
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

halfstep_status dot(Call& call) {
  const Tensor &a = call.in[0], &b = call.in[1];
  const unsigned parts = grid_size(a.numel, kThreads * 8, call.device().processors() * 8);
  bool done = true;
  with_numeric(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Total = reduction::TotalOf<Accumulate<T>>;
    auto* partial = call.workspace<Total>(parts);
    done = partial != nullptr;
    if (!done) return;
    launch(call, {.grid = parts}, dot_parts<T>, a.numel, static_cast<const T*>(a.data), a.strides[0],
           static_cast<const T*>(b.data), b.strides[0], partial);
    Layout<2> one;
    one.numel = 1;
    close_dimensions(one);
    reduction::join_outputs<Total>(call, one, parts, partial, kFoldSum, {}, nullptr,
                                   {call.out[0].data, call.out[0].dtype});
  });
  return done ? call.launched() : call.no_memory();
}

// --- The share that each element has in an extreme ---

// Tensors of the layout: weights, x, result, ties; the last two are repeated along the reduced dimensions.
template <class T>
struct ExtremeWeights {
  Layout<4> layout;
  T* weights;
  const T *x, *result;
  const double* ties;
  bool magnitudes;
  __device__ void operator()(int64_t i) const {
    using C = Compute<T>;
    int64_t at[4];
    walk_places(layout, i, at);
    const C v = value_of(x[at[1]]), top = value_of(result[at[2]]);
    const bool matches = (magnitudes ? std::fabs(v) : v) == top || (v != v && top != top);
    const C sign = !magnitudes ? C(1) : v > 0 ? C(1) : v < 0 ? C(-1) : C(0);
    weights[at[0]] = convert<T>(matches ? C(1) / static_cast<C>(ties[at[3]]) * sign : C(0));
  }
};
template <class T>
struct Widen {
  const T* from;
  double* to;
  __device__ void operator()(int64_t i) const { to[i] = static_cast<double>(value_of(from[i])); }
};

halfstep_status extreme_weights(Call& call) {
  const auto& a = call.attributes<halfstep_norm_attributes>();
  const Tensor &x = call.in[0], &result = call.in[1];
  if (x.numel == 0) return HALFSTEP_OK;
  const uint32_t mask = reduced_dims(a, x);
  // One number for every output, as a tensor that is repeated along the reduced dimensions.
  int64_t strides[HALFSTEP_MAX_DIMS] = {}, outputs = 1;
  for (int d = x.ndim - 1; d >= 0; --d) {
    if (mask >> d & 1) continue;
    strides[d] = outputs;
    outputs *= x.sizes[d];
  }
  const int kind = a.p != 0 ? kFoldEqualAbs : kFoldEqual;
  auto* tops = call.workspace<double>(2 * outputs + partial_results(call, x, mask, kind, {}, kNote));
  if (!tops) return call.no_memory();
  double* ties = tops + outputs;
  with_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each(call, outputs, Widen<T>{static_cast<const T*>(result.data), tops});
    reduce(call, x, mask, kind, {}, {ties, HALFSTEP_F64, true}, ties + outputs, tops);
    Tensor each = x;
    each.strides = strides;
    const auto layout = layout_of<4>({&call.out[0], &x, &each, &each});
    for_each(call, x.numel,
             ExtremeWeights<T>{layout, static_cast<T*>(call.out[0].data), static_cast<const T*>(x.data),
                               static_cast<const T*>(result.data), ties, a.p != 0});
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "sum", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = simple<kFoldSum, kFinishSame>},
    {.op = "mean",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = simple<kFoldSum, kFinishDivide>},
    {.op = "prod",
     .dtypes = kComputed,
     .layouts = kStrided,
     .attributes = true,
     .run = simple<kFoldProduct, kFinishSame>},
    {.op = "amax", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = simple<kFoldMax, kFinishSame>},
    {.op = "amin", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = simple<kFoldMin, kFinishSame>},
    {.op = "any",
     .dtypes = kComputed,
     .layouts = kStrided,
     .attributes = true,
     .run = simple<kFoldNonzero, kFinishAny>},
    {.op = "all",
     .dtypes = kComputed,
     .layouts = kStrided,
     .attributes = true,
     .run = simple<kFoldNonzero, kFinishAll>},
    {.op = "count_nonzero",
     .dtypes = kComputed,
     .layouts = kStrided,
     .attributes = true,
     .run = simple<kFoldNonzero, kFinishSame>},
    {.op = "logsumexp", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = logsumexp},
    {.op = "norm", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = norm},
    {.op = "var", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = variance<kFinishDivide>},
    {.op = "std", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = variance<kFinishRootDivide>},
    {.op = "var_mean", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = variance<kFinishDivide>},
    {.op = "dot", .dtypes = kNumeric, .layouts = kStrided, .attributes = false, .run = dot},
    {.op = "extreme_weights", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = extreme_weights},
};

}  // namespace

std::span<const KernelDef> reduce_kernels() { return kKernels; }

}  // namespace hscuda
