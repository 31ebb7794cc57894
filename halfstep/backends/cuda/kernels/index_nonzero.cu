// SPDX-License-Identifier: Apache-2.0
// Places of what is not zero: each block counts its elements, then knows where its results begin.
#include "device/index.cuh"
#include "device/prefix_sum.cuh"

namespace hscuda {
namespace {

constexpr int64_t kCountTile = int64_t{kThreads} * 8;

/// The bits that make a number differ from 0: all but the sign of a float.
template <class Word>
Word mask_of(int dtype) {
  return static_cast<Word>(is_floating(dtype) ? ~(Word{1} << (8 * sizeof(Word) - 1)) : ~Word{0});
}

// Which of eight elements, from number `first` on in row-major order, are not 0.
template <class Word>
__device__ __forceinline__ uint32_t set_bits(const Layout<1>& layout, const Word* x, Word mask, int64_t first) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (first + j >= layout.numel) break;
    int64_t at[1];
    places_of(layout, first + j, at);
    bits |= uint32_t{(x[at[0]] & mask) != 0} << j;
  }
  return bits;
}

template <class Word>
__global__ void __launch_bounds__(kThreads) count_nonzero(Layout<1> layout, const Word* x, Word mask, int64_t* counts) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCountTile + int64_t{threadIdx.x} * 8;
  const int count = block_reduce(__popc(set_bits(layout, x, mask, first)), Sum(), 0);
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

struct Sizes {
  int64_t sizes[HALFSTEP_MAX_DIMS];
  int ndim;
};
template <class Word>
__global__ void __launch_bounds__(kThreads) write_nonzero(Layout<1> layout, Sizes shape, const Word* x, Word mask,
                                                          const int64_t* starts, int64_t most, int64_t* places) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCountTile + int64_t{threadIdx.x} * 8;
  const uint32_t bits = set_bits(layout, x, mask, first);
  int total;
  int64_t place = starts[blockIdx.x] + block_scan(__popc(bits), &total);
  for (int j = 0; j < 8; ++j) {
    if (!(bits >> j & 1u)) continue;
    // Another thread may write the input between counting and this.
    if (place >= most) break;
    int64_t rest = first + j;
#pragma unroll
    for (int d = HALFSTEP_MAX_DIMS - 1; d >= 0; --d) {
      if (d >= shape.ndim) continue;
      places[place * shape.ndim + d] = rest % shape.sizes[d];
      rest /= shape.sizes[d];
    }
    ++place;
  }
}
// Zeros where fewer came than were counted.
__global__ void __launch_bounds__(kThreads) fill_rest(const int64_t* found, int ndim, int64_t numel, int64_t* places) {
  for (int64_t i = *found * ndim + thread_index(); i < numel; i += grid_threads()) places[i] = 0;
}

halfstep_status nonzero_count(Call& call) {
  const Tensor& x = call.in[0];
  auto* count = static_cast<int64_t*>(call.out[0].data);
  const int64_t tiles = divide_up(x.numel, kCountTile);
  auto* counts = call.workspace<int64_t>(std::max<int64_t>(tiles, 1));
  if (!counts) return call.no_memory();
  if (tiles > 0) {
    with_word(x.dtype, [&](auto word) {
      using Word = decltype(word);
      launch(call, {.grid = static_cast<unsigned>(tiles)}, count_nonzero<Word>, row_major_of(x),
             static_cast<const Word*>(x.data), mask_of<Word>(x.dtype), counts);
    });
  }
  launch(call, {.grid = 1}, scan_counts<int64_t>, counts, tiles, count);
  return call.launched();
}

halfstep_status nonzero(Call& call) {
  const Tensor &x = call.in[0], &y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  if (!y.contiguous) return call.refuse("a result that is not row-major");
  const int64_t tiles = divide_up(x.numel, kCountTile);
  auto* counts = call.workspace<int64_t>(tiles + 1);
  if (!counts) return call.no_memory();
  auto* places = static_cast<int64_t*>(y.data);
  const Launch how{.grid = static_cast<unsigned>(std::max<int64_t>(tiles, 1))};
  Sizes shape = {};
  shape.ndim = x.ndim;
  std::copy_n(x.sizes, x.ndim, shape.sizes);
  with_word(x.dtype, [&](auto word) {
    using Word = decltype(word);
    const auto* data = static_cast<const Word*>(x.data);
    const auto mask = mask_of<Word>(x.dtype);
    if (tiles > 0) launch(call, how, count_nonzero<Word>, row_major_of(x), data, mask, counts);
    launch(call, {.grid = 1}, scan_counts<int64_t>, counts, tiles, counts + tiles);
    if (tiles > 0) {
      launch(call, how, write_nonzero<Word>, row_major_of(x), shape, data, mask, counts,
             call.attributes<halfstep_count_attributes>().count, places);
    }
  });
  launch(call, {.grid = 32, .alone = true}, fill_rest, counts + tiles, static_cast<int>(x.ndim), y.numel, places);
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "nonzero_count", .dtypes = kAll, .layouts = kStrided, .attributes = false, .run = nonzero_count},
    {.op = "nonzero", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = nonzero},
};

}  // namespace

std::span<const KernelDef> index_nonzero_kernels() { return kKernels; }

}  // namespace hscuda
