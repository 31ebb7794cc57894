// SPDX-License-Identifier: Apache-2.0
// Copies and conversions between any layouts and dtypes, and fills.
#include "device/elementwise.cuh"
#include "kernels/copy.h"

namespace hscuda {
namespace {

struct Same {
  template <class T>
  __device__ __forceinline__ T operator()(T value) const {
    return value;
  }
};

/// f(zero) for the dtypes that are converted all the time; false for the rest.
template <class F>
bool with_quick(int dtype, F&& f) {
  switch (dtype) {
    case HALFSTEP_F32:
      return f(float{});
    case HALFSTEP_F16:
      return f(Half{});
    case HALFSTEP_BF16:
      return f(BFloat16{});
    default:
      return false;
  }
}

// ------------------------------------------------------------------------------------------------------------------
// Where the result's fastest dimension (a) is not the source's (b): by way of tiles in shared memory, so that
// neighbours are read and neighbours are written.

struct Transposition {
  Layout<2> others;  ///< the other dimensions
  uint32_t a, b;     ///< sizes
  int64_t from_a, to_b;
  uint32_t tiles_a, tiles_b;
};
template <class Word>
inline constexpr uint32_t kTile = sizeof(Word) <= 2 ? 64 : 32;

template <class Word>
__global__ void __launch_bounds__(kThreads) transpose(Transposition t, Word* to, const Word* from) {
  constexpr uint32_t kSide = kTile<Word>, kStep = kThreads / kSide;
  // Rows end a bank further on, so that columns lie in different banks.
  constexpr uint32_t kGap = sizeof(Word) < 4 ? 4 / sizeof(Word) : 1;
  __shared__ Word tile[kSide][kSide + kGap];
  uint32_t block = blockIdx.x;
  const uint32_t b = block % t.tiles_b * kSide;
  block /= t.tiles_b;
  const uint32_t a = block % t.tiles_a * kSide;
  int64_t at[2];
  t.others.places(block / t.tiles_a, at);
  const uint32_t x = threadIdx.x % kSide;
  for (uint32_t y = threadIdx.x / kSide; y < kSide; y += kStep) {
    if (a + y < t.a && b + x < t.b) tile[y][x] = from[at[1] + (a + y) * t.from_a + (b + x)];
  }
  __syncthreads();
  for (uint32_t y = threadIdx.x / kSide; y < kSide; y += kStep) {
    if (a + x < t.a && b + y < t.b) to[at[0] + (a + x) + (b + y) * t.to_b] = tile[x][y];
  }
}

/// Whether it was such a copy, and is enqueued.
bool copy_transposed(const Call& call, const Tensor& to, const Tensor& from) {
  Layout<2> layout = layout_of<2>({&to, &from});
  if (!layout.narrow() || layout.strides[0][0] != 1 || layout.strides[0][1] <= 1) return false;
  int other = 1;
  while (other < layout.ndim && layout.strides[other][1] != 1) ++other;
  constexpr int64_t kFew = 16;  // fewer neighbours are found in the caches
  if (other >= layout.ndim || layout.sizes[0] < kFew || layout.sizes[other] < kFew) return false;
  Transposition t = {};
  t.a = static_cast<uint32_t>(layout.sizes[0]), t.b = static_cast<uint32_t>(layout.sizes[other]);
  t.from_a = layout.strides[0][1], t.to_b = layout.strides[other][0];
  // What is left is walked as if both were of size 1.
  layout.numel /= layout.sizes[0] * layout.sizes[other];
  layout.sizes[0] = layout.sizes[other] = 1;
  layout.make_divisors();
  t.others = layout;
  with_word(to.dtype, [&](auto word) {
    using Word = decltype(word);
    t.tiles_a = static_cast<uint32_t>(divide_up(t.a, kTile<Word>));
    t.tiles_b = static_cast<uint32_t>(divide_up(t.b, kTile<Word>));
    const auto blocks = static_cast<unsigned>(t.tiles_a * t.tiles_b * layout.numel);
    launch(call, {.grid = blocks}, transpose<Word>, t, static_cast<Word*>(to.data),
           static_cast<const Word*>(from.data));
  });
  return true;
}

// ------------------------------------------------------------------------------------------------------------------

// Every pair of dtypes in one kernel, by way of a type that holds every value of the source, so that the one rounding
// is the one into the result. Slower than a kernel of its own, and a hundred kernels fewer.
template <class Middle>
__global__ void __launch_bounds__(kThreads)
    convert_any(Layout<2> layout, void* to, int to_dtype, const void* from, int from_dtype) {
  for (int64_t i = thread_index(); i < layout.numel; i += grid_threads()) {
    int64_t at[2];
    layout.places(static_cast<uint32_t>(i), at);
    Middle value = 0;
    with_type(from_dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (std::is_floating_point_v<Compute<T>> == std::is_floating_point_v<Middle>) {
        value = static_cast<Middle>(value_of(static_cast<const T*>(from)[at[1]]));
      }
    });
    with_type(to_dtype, [&](auto zero) {
      using T = decltype(zero);
      static_cast<T*>(to)[at[0]] = convert<T>(value);
    });
  }
}

}  // namespace

void copy_view(const Call& call, const Tensor& to, const Tensor& from) {
  if (to.numel == 0) return;
  // Elements of one dtype are moved as words, so that every NaN keeps its bits.
  if (to.dtype == from.dtype) {
    if (copy_transposed(call, to, from)) return;
    with_word(to.dtype, [&](auto word) {
      using Word = decltype(word);
      map<Word, Word>(call, Same{}, to, from);
    });
    return;
  }
  const bool done = with_quick(to.dtype, [&](auto to_zero) {
    return with_quick(from.dtype, [&](auto from_zero) {
      map<decltype(to_zero), decltype(from_zero)>(call, Same{}, to, from);
      return true;
    });
  });
  if (done) return;
  in_pieces(layout_of<2>({&to, &from}), [&](const Layout<2>& layout, const auto& first) {
    const auto place = [](const Tensor& t, int64_t element) {
      return static_cast<char*>(t.data) + element * static_cast<int64_t>(item_size(t.dtype));
    };
    const Launch how{.grid = grid_size(layout.numel, kThreads), .alone = true};
    launch(call, how, is_floating(from.dtype) ? convert_any<double> : convert_any<int64_t>, layout, place(to, first[0]),
           static_cast<int>(to.dtype), place(from, first[1]), static_cast<int>(from.dtype));
  });
}

namespace {

halfstep_status copy(Call& call) {
  copy_view(call, call.out[0], call.in[call.n - 1]);
  return call.launched();
}

template <class Word>
struct Constant {
  Word value;
  __device__ __forceinline__ Word operator()() const { return value; }
};

halfstep_status fill(Call& call) {
  const halfstep_scalar& value = call.attributes<halfstep_fill_attributes>().value;
  with_type(call.out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T v = value.kind == 2 ? convert<T>(value.floating) : convert<T>(value.integer);
    with_word(call.out[0].dtype, [&](auto word) {
      using Word = decltype(word);
      if constexpr (sizeof(Word) == sizeof(T)) {
        map<Word>(call, Constant<Word>{std::bit_cast<Word>(v)}, call.out[0]);
      }
    });
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "copy", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = copy},
    {.op = "to", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = copy},
    {.op = "clone", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = copy},
    {.op = "fill", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = fill},
};

}  // namespace

std::span<const KernelDef> copy_kernels() { return kKernels; }

}  // namespace hscuda
