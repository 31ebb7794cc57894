// SPDX-License-Identifier: Apache-2.0
// Losses over classes: cross_entropy and nll_loss on class indices. A row of logits is read once on the way forward:
// its largest element and the sum of exponentials above it are all that the backward pass needs.
#include "device/fault.cuh"
#include "device/softmax.cuh"
#include "halfstep/runtime/plugin_attributes.h"

namespace hscuda {
namespace {

/// What a sample's class makes of it. C: what x computes in.
template <class C>
struct Classes {
  const void* target;
  const C* weight;  ///< null: all ones
  int64_t weight_step, count, ignored;
  double smoothing;
  int target_dtype;

  __device__ __forceinline__ int64_t label(int64_t at) const {
    switch (target_dtype) {
      case HALFSTEP_I64:
        return static_cast<const int64_t*>(target)[at];
      case HALFSTEP_I32:
        return static_cast<const int32_t*>(target)[at];
      default:
        return static_cast<const uint8_t*>(target)[at];
    }
  }
  __device__ __forceinline__ bool known(int64_t label) const { return label >= 0 && label < count; }
  __device__ __forceinline__ C weight_of(int64_t c) const { return weight ? weight[c * weight_step] : C(1); }
  /// What q gives the sample's own class, beside the share that all get.
  __device__ __forceinline__ C own(int64_t label) const { return static_cast<C>(1 - smoothing) * weight_of(label); }
  __device__ __forceinline__ C share(int64_t c) const {
    return static_cast<C>(smoothing / static_cast<double>(count)) * weight_of(c);
  }
};

template <class C>
Classes<C> classes_of(const Call& call, int target, int64_t count) {
  const auto& a = call.attributes<halfstep_class_loss_attributes>();
  const bool weighted = call.has(target + 1);
  const Tensor& t = call.in[target];
  return {t.data,
          weighted ? static_cast<const C*>(call.in[target + 1].data) : nullptr,
          weighted ? call.in[target + 1].strides[0] : 0,
          count,
          a.ignore_index,
          a.label_smoothing,
          static_cast<int>(t.dtype)};
}

/// Sums over samples: of losses, and of the weights of their classes; and the first sample whose class there isn't.
struct LossSums {
  double loss = 0, weight = 0;
  int64_t wrong = INT64_MAX, label = 0;
};
struct JoinLosses {
  __device__ __forceinline__ LossSums operator()(const LossSums& a, const LossSums& b) const {
    const LossSums& first = a.wrong <= b.wrong ? a : b;
    return {a.loss + b.loss, a.weight + b.weight, first.wrong, first.label};
  }
};

// Tensors of `rows`: x, target. `parts` is null for nll_loss. Each block leaves its sums in `sums`, and without a
// reduction the losses go to `loss`.
template <class T>
__global__ void __launch_bounds__(kThreads)
    loss_forward(Rows<2> rows, int lanes, Classes<Compute<T>> classes, const T* x, Compute<T>* parts, LossSums* sums,
                 void* loss, int loss_dtype) {
  using C = Compute<T>;
  const int lane = lane_of_thread(lanes), rows_a_block = kThreads / lanes;
  const int64_t count = rows.rows.numel;
  LossSums mine;
  for (int64_t first = int64_t{blockIdx.x} * rows_a_block; first < count; first += int64_t{gridDim.x} * rows_a_block) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / lanes;
    int64_t at[2] = {0, 0}, label = -1;
    bool counts = row < count;
    if (counts) {
      walk_places(rows.rows, row, at);
      label = classes.label(at[1]);
      const bool ignored = label == classes.ignored;
      if (!ignored && !classes.known(label) && row < mine.wrong) {
        mine.wrong = row;
        mine.label = label;
      }
      counts = !ignored && classes.known(label);
    }
    const T* logits = x + at[0];
    double value = 0;
    if (parts) {
      Exponentials<C> all;
      if (counts) all = exponentials_of<C>(logits, rows.strides[0], rows.length, lane, lanes);
      all = row_reduce(all, JoinExponentials{}, Exponentials<C>{}, lanes);
      const double logarithm = counts ? std::log(all.total()) : 0, top = static_cast<double>(all.top);
      const auto distance = [&](int64_t c) {
        return logarithm - (static_cast<double>(value_of(logits[c * rows.strides[0]])) - top);
      };
      if (counts && lane == 0) value = static_cast<double>(classes.own(label)) * distance(label);
      if (classes.smoothing != 0) {
        double smoothed = 0;
        if (counts) {
          for (int64_t c = lane; c < rows.length; c += lanes) {
            smoothed += static_cast<double>(classes.share(c)) * distance(c);
          }
        }
        value += row_reduce(smoothed, Sum{}, 0.0, lanes);
      }
      if (row < count && lane == 0) {
        parts[row] = counts ? all.top : C(0);
        parts[count + row] = counts ? static_cast<C>(all.total()) : C(0);
      }
    } else if (counts && lane == 0) {
      value = -static_cast<double>(classes.own(label)) * static_cast<double>(value_of(logits[label * rows.strides[0]]));
    }
    if (row >= count || lane != 0) continue;
    if (loss) {
      store_floating(loss, loss_dtype, row, value);
    } else if (counts) {
      mine.loss += value;
      mine.weight += static_cast<double>(classes.weight_of(label));
    }
  }
  mine = block_reduce(mine, JoinLosses{}, LossSums{});
  if (threadIdx.x == 0) sums[blockIdx.x] = mine;
}

// One block: the blocks' sums become the loss (unless each sample has its own) and the divisor.
template <class C>
__global__ void __launch_bounds__(kThreads)
    loss_finish(const LossSums* sums, int64_t blocks, int reduction, void* loss, int loss_dtype, C* divisor,
                Fault* fault, unsigned long long call, int64_t classes, int64_t samples) {
  LossSums all;
  for (int64_t b = threadIdx.x; b < blocks; b += kThreads) all = JoinLosses{}(all, sums[b]);
  all = block_reduce(all, JoinLosses{}, LossSums{});
  if (threadIdx.x != 0) return;
  if (all.wrong != INT64_MAX) report(fault, call, kTarget, all.label, 0, classes - 1, all.wrong, samples);
  const double by = reduction == 1 ? all.weight : 1;
  *divisor = static_cast<C>(by);
  // NaN when no sample counts, as in PyTorch.
  if (reduction != 0) store_floating(loss, loss_dtype, 0, all.loss / by);
}

template <bool kNll>
halfstep_status forward(Call& call) {
  const auto& a = call.attributes<halfstep_class_loss_attributes>();
  const Tensor &x = call.in[0], &target = call.in[1], &loss = call.out[0];
  const Tensor& divisor = call.out[kNll ? 1 : 2];
  const Rows<2> rows = rows_of<2>({&x, &target}, 1, 1u << 1);
  const int processors = call.device().processors();
  const int lanes = kNll ? 1 : lanes_of(rows, 16 / static_cast<int64_t>(item_size(x.dtype)), processors);
  const unsigned blocks = rows.count() == 0 ? 0 : grid_size(rows.count(), kThreads / lanes, int64_t{processors} * 16);
  LossSums* sums = nullptr;
  if (blocks > 0) {
    sums = call.workspace<LossSums>(blocks);
    if (!sums) return call.no_memory();
  }
  with_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    if (blocks > 0) {
      launch(call, {.grid = blocks}, loss_forward<T>, rows, lanes, classes_of<C>(call, 1, rows.length),
             static_cast<const T*>(x.data), kNll ? nullptr : static_cast<C*>(call.out[1].data), sums,
             a.reduction == 0 ? loss.data : nullptr, static_cast<int>(loss.dtype));
    }
    launch(call, {.grid = 1}, loss_finish<C>, sums, blocks, a.reduction, loss.data, loss.dtype,
           static_cast<C*>(divisor.data), call.fault(), call.number(), rows.length, rows.count());
  });
  return call.launched();
}

// Tensors of `rows`: x_grad, x, target, g. `parts` is null for nll_loss, which doesn't read x.
template <class T, class Out, int kWidth>
__global__ void __launch_bounds__(kThreads)
    loss_backward(Rows<4> rows, int lanes, Classes<Compute<T>> classes, const void* g, int g_dtype, const T* x,
                  const Compute<T>* divisor, const Compute<T>* parts, void* x_grad, int x_dtype) {
  using C = Compute<T>;
  const int lane = lane_of_thread(lanes);
  const int64_t row = row_of_thread(lanes), count = rows.rows.numel;
  const bool exists = row < count;
  int64_t at[4] = {0, 0, 0, 0}, label = 0;
  if (exists) {
    walk_places(rows.rows, row, at);
    label = classes.label(at[2]);
  }
  const bool counts = exists && label != classes.ignored && classes.known(label);
  C gradient = 0, factor = 0, top = 0;
  const bool smooth = classes.smoothing != 0;
  if (counts) {
    gradient = load_floating<C>(g, g_dtype, at[3]) / *divisor;
    if (parts) top = parts[row];
  }
  if (parts) {
    double mass = 0;  // sum of q
    if (smooth) {
      if (counts) {
        for (int64_t c = lane; c < rows.length; c += lanes) mass += static_cast<double>(classes.share(c));
      }
      mass = row_reduce(mass, Sum{}, 0.0, lanes);
    }
    if (counts) {
      mass += static_cast<double>(classes.own(label));
      factor = gradient * static_cast<C>(mass) / parts[count + row];
    }
  }
  if (!exists) return;
  const C own = counts ? gradient * classes.own(label) : C(0);
  const auto slope = [&](int64_t c, auto logit) {
    C v = parts ? exponential(static_cast<C>(logit) - top) * factor : C(0);
    if (smooth) v -= gradient * classes.share(c);
    if (c == label) v -= own;
    return v;
  };
  if constexpr (kWidth > 1) {
    const auto* from = reinterpret_cast<const Pack<T, kWidth>*>(x + at[1]);
    auto* to = reinterpret_cast<Pack<Out, kWidth>*>(static_cast<Out*>(x_grad) + at[0]);
    for (int64_t i = lane; i < rows.length / kWidth; i += lanes) {
      Pack<Out, kWidth> result;
      Pack<T, kWidth> loaded = {};
      if (counts && parts) loaded = from[i];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        result.values[j] = convert<Out>(counts ? slope(i * kWidth + j, value_of(loaded.values[j])) : C(0));
      }
      to[i] = result;
    }
  } else {
    for (int64_t c = lane; c < rows.length; c += lanes) {
      C v = 0;
      if (counts) v = slope(c, parts ? static_cast<C>(value_of(x[at[1] + c * rows.strides[1]])) : C(0));
      store_floating(x_grad, x_dtype, at[0] + c * rows.strides[0], v);
    }
  }
}

template <bool kNll>
halfstep_status backward(Call& call) {
  const Tensor &g = call.in[0], &x = call.in[1], &target = call.in[2], &x_grad = call.out[0];
  if (x_grad.numel == 0) return HALFSTEP_OK;
  // One gradient for all is a tensor that is repeated.
  const int64_t none[HALFSTEP_MAX_DIMS] = {};
  Tensor each = g;
  if (g.ndim == 0) each.strides = none;
  const Rows<4> rows = rows_of<4>({&x_grad, &x, &target, &each}, 1, 1u << 2 | 1u << 3);
  with_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    constexpr int kWidth = static_cast<int>(16 / sizeof(T));
    const bool packed = x_grad.dtype == x.dtype && rows.packed(0, x_grad.data, kWidth, sizeof(T)) &&
                        rows.packed(1, x.data, kWidth, sizeof(T));
    const int lanes = lanes_of(rows, packed ? kWidth : 1, call.device().processors());
    launch(call, {.grid = row_blocks(rows.count(), kThreads, lanes), .alone = lanes == 1},
           packed ? loss_backward<T, T, kWidth> : loss_backward<T, T, 1>, rows, lanes,
           classes_of<C>(call, 2, rows.length), g.data, static_cast<int>(g.dtype), static_cast<const T*>(x.data),
           static_cast<const C*>(call.in[4].data), kNll ? nullptr : static_cast<const C*>(call.in[5].data), x_grad.data,
           static_cast<int>(x_grad.dtype));
  });
  return call.launched();
}

// q itself. Tensors of `rows`: q, target.
template <class C>
struct FillTargets {
  Rows<2> rows;
  Classes<C> classes;
  C* q;
  __device__ void operator()(int64_t i) const {
    const int64_t row = i / rows.length, c = i - row * rows.length;
    int64_t at[2];
    walk_places(rows.rows, row, at);
    const int64_t label = classes.label(at[1]);
    C v = 0;
    if (label != classes.ignored) v = classes.share(c) + (c == label ? classes.own(label) : C(0));
    q[at[0] + c * rows.strides[0]] = v;
  }
};
template <class C>
halfstep_status targets_as(Call& call) {
  const Tensor& q = call.out[0];
  const Rows<2> rows = rows_of<2>({&q, &call.in[0]}, 1, 1u << 1);
  for_each(call, q.numel, FillTargets<C>{rows, classes_of<C>(call, 0, rows.length), static_cast<C*>(q.data)});
  return call.launched();
}
halfstep_status targets(Call& call) {
  if (call.out[0].numel == 0) return HALFSTEP_OK;
  return call.out[0].dtype == HALFSTEP_F64 ? targets_as<double>(call) : targets_as<float>(call);
}

constexpr uint32_t kWide = dtypes({HALFSTEP_F32, HALFSTEP_F64});
constexpr KernelDef kKernels[] = {
    {.op = "cross_entropy", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = forward<false>},
    {.op = "cross_entropy_backward",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = backward<false>},
    {.op = "nll_loss", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = forward<true>},
    {.op = "nll_loss_backward", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = backward<true>},
    {.op = "cross_entropy_targets", .dtypes = kWide, .layouts = kStrided, .attributes = true, .run = targets},
};

}  // namespace

std::span<const KernelDef> loss_kernels() { return kKernels; }

}  // namespace hscuda
