// SPDX-License-Identifier: Apache-2.0
// Dropout: element i of the row-major order from word i of a Philox stream, whatever the strides. One thread makes what
// comes from one block of four words.
#include "device/random.cuh"

namespace hscuda {
namespace {

template <class T>
struct Dropout {
  uint64_t threshold;
  Compute<T> scale;
  __device__ __forceinline__ T operator()(uint32_t word, T x) const {
    return convert<T>(word < threshold ? Compute<T>{0} : value_of(x) * scale);
  }
};
template <class T>
constexpr int kDropoutWidth = sizeof(T) == 2 ? 8 : 4;

// Runs of packs in row-major order.
template <class T>
__global__ void __launch_bounds__(kThreads) dropout_packs(int64_t n, State state, Dropout<T> f, T* out, const T* in) {
  constexpr int kWidth = kDropoutWidth<T>;
  const int64_t i = thread_index() * kWidth;
  if (i >= n) return;
  const PhiloxState stream = state();
  const bool whole = i + kWidth <= n;
  Pack<T, kWidth> x;
  if (whole) {
    x = load_pack<kWidth>(in + i);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x.values[j] = i + j < n ? in[i + j] : T{};
  }
#pragma unroll
  for (int k = 0; k < kWidth / 4; ++k) {
    const PhiloxBlock words = philox_block(stream, static_cast<uint64_t>(i / 4 + k));
#pragma unroll
    for (int j = 0; j < 4; ++j) x.values[4 * k + j] = f(words[static_cast<std::size_t>(j)], x.values[4 * k + j]);
  }
  if (whole) {
    *reinterpret_cast<Pack<T, kWidth>*>(out + i) = x;
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (i + j < n) out[i + j] = x.values[j];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_strided(Layout<2> layout, State state, Dropout<T> f, T* out, const T* in) {
  const PhiloxState stream = state();
  for (int64_t block = thread_index(); block * 4 < layout.numel; block += grid_threads()) {
    const PhiloxBlock words = philox_block(stream, static_cast<uint64_t>(block));
    for (int j = 0; j < 4 && block * 4 + j < layout.numel; ++j) {
      int64_t at[2];
      layout.places(block * 4 + j, at);
      out[at[0]] = f(words[static_cast<std::size_t>(j)], in[at[1]]);
    }
  }
}

halfstep_status dropout(Call& call) {
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const double p = call.attributes<halfstep_dropout_attributes>().p;
  const Layout<2> layout = layout_of<2>({&y, &x}, true);
  with_floating(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kWidth = kDropoutWidth<T>;
    const Dropout<T> f{halfstep::bernoulli_threshold(p), static_cast<Compute<T>>(1 / (1 - p))};
    auto* to = static_cast<T*>(y.data);
    const auto* from = static_cast<const T*>(x.data);
    if (layout.linear() && aligned(to, kWidth) && aligned(from, kWidth)) {
      launch(call, {.grid = grid_size(y.numel, kThreads * kWidth, INT32_MAX), .alone = true}, dropout_packs<T>, y.numel,
             State(call.in[1]), f, to, from);
    } else {
      launch(call, {.grid = grid_size(y.numel, kThreads * 4), .alone = true}, dropout_strided<T>, layout,
             State(call.in[1]), f, to, from);
    }
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "dropout", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = dropout},
};

}  // namespace

std::span<const KernelDef> dropout_kernels() { return kKernels; }

}  // namespace hscuda
