// SPDX-License-Identifier: Apache-2.0
// cat and flip.
#include "device/chunks.cuh"
#include "device/view.h"

namespace hscuda {
namespace {

struct Same {
  template <class T>
  __device__ __forceinline__ T operator()(T value) const {
    return value;
  }
};

halfstep_status flip(Call& call) {
  const Tensor& y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  View from(call.in[0]);
  const halfstep_int_list& dims = call.attributes<halfstep_dims_attributes>().dims;
  for (int i = 0; i < dims.size; ++i) {
    const auto d = static_cast<int>(dims.values[i]);
    from.advance((from.own_sizes[d] - 1) * from.own_strides[d], item_size(from.dtype));
    from.own_strides[d] = -from.own_strides[d];
  }
  with_word(y.dtype, [&](auto word) {
    using Word = decltype(word);
    map<Word, Word>(call, Same{}, y, from);
  });
  return call.launched();
}

// ------------------------------------------------------------------------------------------------------------------
// cat of row-major tensors: each is rows of one length, which lie at one distance from each other in the result.

constexpr int kData = 0, kLength = 1, kOffset = 2;  // columns

template <class Word>
__global__ void __launch_bounds__(kThreads)
    cat_kernel(const __grid_constant__ ChunkTable table, Word* to, int64_t pitch) {
  const Chunk chunk = table.at(blockIdx.x);
  const auto* from = table.address<const Word>(chunk, kData);
  const auto length = static_cast<int64_t>(table.word(chunk, kLength));
  to += static_cast<int64_t>(table.word(chunk, kOffset));
  // Rows of a chunk are counted from that of its first element, by 32-bit arithmetic.
  const int64_t first_row = chunk.begin / length;
  const auto begin = chunk.begin - first_row * length;
  to += first_row * pitch;
  from += first_row * length;
  const auto size = chunk.end - chunk.begin;
  if (begin + size <= length) {
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x; i < begin + size; i += kThreads) to[i] = from[i];
    return;
  }
  // length < begin + size, and begin < length: all of it fits 32 bits.
  const auto divisor = static_cast<uint32_t>(length), end = static_cast<uint32_t>(begin + size);
#pragma unroll 4
  for (uint32_t i = static_cast<uint32_t>(begin) + threadIdx.x; i < end; i += kThreads) {
    const uint32_t row = i / divisor;
    to[row * pitch + (i - row * divisor)] = from[i];
  }
}

// Any strides: a copy for each input.
void cat_views(const Call& call, int dim) {
  View part(call.out[0]);
  for (int i = 0; i < call.n; ++i) {
    const Tensor& x = call.in[i];
    if (x.numel == 0) continue;
    part.own_sizes[dim] = x.sizes[dim];
    part.numel = x.numel;
    with_word(x.dtype, [&](auto word) {
      using Word = decltype(word);
      map<Word, Word>(call, Same{}, part, x);
    });
    part.advance(x.sizes[dim] * part.own_strides[dim], item_size(x.dtype));
  }
}

halfstep_status cat(Call& call) {
  const Tensor& y = call.out[0];
  if (y.numel == 0) return HALFSTEP_OK;
  const int dim = wrapped(call.attributes<halfstep_along_attributes>().dim, y.ndim);
  const auto item = static_cast<int64_t>(item_size(y.dtype));
  int64_t inner = 1;
  for (int d = dim + 1; d < y.ndim; ++d) inner *= y.sizes[d];
  bool straight = y.contiguous;
  // Everything in bytes: what divides all of it can be moved at once.
  const int64_t pitch = y.sizes[dim] * inner * item;
  uint64_t all = reinterpret_cast<uint64_t>(y.data) | static_cast<uint64_t>(pitch);
  for (int i = 0; i < call.n; ++i) {
    const Tensor& x = call.in[i];
    if (x.numel == 0) continue;
    straight = straight && x.contiguous;
    all |= reinterpret_cast<uint64_t>(x.data) | static_cast<uint64_t>(x.sizes[dim] * inner * item);
  }
  if (!straight) {
    cat_views(call, dim);
    return call.launched();
  }
  const int64_t bytes = word_bytes(all);
  int64_t offset = 0;
  const auto describe = [&](int i, ChunkColumns& columns) -> int64_t {
    const Tensor& x = call.in[i];
    if (x.numel == 0) return 0;
    const int64_t length = x.sizes[dim] * inner * item / bytes;
    columns.set(kData, reinterpret_cast<uint64_t>(x.data));
    columns.set(kLength, static_cast<uint64_t>(length));
    columns.set(kOffset, static_cast<uint64_t>(offset));
    offset += length;
    return x.numel * item / bytes;
  };
  with_bytes(bytes, [&](auto word) {
    using Word = decltype(word);
    for_each_table(call.n, kChunkElements / 4, describe, [&](const ChunkTable& table) {
      launch_chunks(call, table, true, cat_kernel<Word>, table, static_cast<Word*>(y.data), pitch / bytes);
    });
  });
  return call.launched();
}

constexpr KernelDef kKernels[] = {
    {.op = "cat", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = cat},
    {.op = "flip", .dtypes = kAll, .layouts = kStrided, .attributes = true, .run = flip},
};

}  // namespace

std::span<const KernelDef> join_kernels() { return kKernels; }

}  // namespace hscuda
