// SPDX-License-Identifier: Apache-2.0
// What kernels that read and write by index have in common.
#pragma once

#include "device/elementwise.cuh"
#include "device/fault.cuh"
#include "device/view.h"

namespace hscuda {

/// Which indices are right; reports those that are not.
struct IndexRange {
  Fault* fault;
  unsigned long long call;
  int64_t low, size;

  /// From 0, or with `negative` from -size, to size - 1.
  IndexRange(const Call& of, int64_t size, bool negative = false)
      : fault(of.fault()), call(of.number()), low(negative ? -size : 0), size(size) {}
  __device__ __forceinline__ bool accepts(int64_t index) const {
    if (index >= low && index < size) return true;
    report(fault, call, kIndex, index, low, size - 1);
    return false;
  }
};

/// `t` seen over the elements of `index`: in `dim` it doesn't move.
inline View across(const Tensor& index, const Tensor& t, int dim) {
  View view(index);
  view.data = t.data;
  for (int d = 0; d < index.ndim; ++d) view.own_strides[d] = d == dim || d >= t.ndim ? 0 : t.strides[d];
  return view;
}

inline Layout<1> row_major_of(const Tensor& t) {
  const int64_t* strides[] = {t.strides};
  return row_major<1>(t.ndim, t.sizes, strides);
}

struct SameWord {
  template <class T>
  __device__ __forceinline__ T operator()(T value) const {
    return value;
  }
};
/// The output starts as the input, unless it is the same memory.
inline void start_from(const Call& call, const Tensor& out, const Tensor& in) {
  if (out.numel == 0 || out.data == in.data) return;
  with_word(out.dtype, [&](auto word) {
    using Word = decltype(word);
    map<Word, Word>(call, SameWord{}, out, in);
  });
}

inline void clear(const Call& call, void* data, int64_t bytes) {
  cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), call.stream());
}

// ------------------------------------------------------------------------------------------------------------------
// Several indices, one for each of a tensor's first dimensions, that broadcast together.

struct IndexList {
  Layout<HALFSTEP_MAX_DIMS> layout;  ///< of the indices, over their common shape
  const int64_t* data[HALFSTEP_MAX_DIMS];
  int64_t sizes[HALFSTEP_MAX_DIMS];  ///< of the dimensions
  int64_t steps[HALFSTEP_MAX_DIMS];  ///< along them
  int count;
  Fault* fault;
  unsigned long long call;
};

// `bad` where an index is wrong.
template <class I>
__global__ void __launch_bounds__(kThreads) number_places_kernel(IndexList list, I* places, I bad) {
  for (int64_t i = thread_index(); i < list.layout.numel; i += grid_threads()) {
    int64_t at[HALFSTEP_MAX_DIMS], place = 0;
    places_of(list.layout, i, at);
    bool right = true;
    for (int k = 0; k < HALFSTEP_MAX_DIMS; ++k) {
      if (k >= list.count) break;
      int64_t index = list.data[k][at[k]];
      if (index < -list.sizes[k] || index >= list.sizes[k]) {
        report(list.fault, list.call, kIndex, index, -list.sizes[k], list.sizes[k] - 1);
        right = false;
        continue;
      }
      if (index < 0) index += list.sizes[k];
      place += index * list.steps[k];
    }
    places[i] = right ? static_cast<I>(place) : bad;
  }
}

/// places[i] = sum over k of index[k] times steps[k], for the places i of the indices' common shape in row-major order.
template <class I>
void number_places(const Call& call, const Tensor* index, int count, const int64_t* sizes, const int64_t* steps,
                   int ndim, const int64_t* common, I* places, I bad) {
  IndexList list = {};
  int64_t strides[HALFSTEP_MAX_DIMS][HALFSTEP_MAX_DIMS] = {};
  const int64_t* pointers[HALFSTEP_MAX_DIMS];
  for (int k = 0; k < HALFSTEP_MAX_DIMS; ++k) pointers[k] = strides[k];
  for (int k = 0; k < count; ++k) {
    const Tensor& t = index[k];
    for (int d = 0; d < t.ndim; ++d) {
      strides[k][d + ndim - t.ndim] = t.sizes[d] == 1 ? 0 : t.strides[d];
    }
    list.data[k] = static_cast<const int64_t*>(t.data);
    list.sizes[k] = sizes[k];
    list.steps[k] = steps[k];
  }
  list.layout = row_major<HALFSTEP_MAX_DIMS>(ndim, common, reinterpret_cast<const int64_t* const(&)[8]>(pointers));
  list.count = count;
  list.fault = call.fault();
  list.call = call.number();
  launch(call, {.grid = grid_size(list.layout.numel, kThreads), .alone = true}, number_places_kernel<I>, list, places,
         bad);
}

}  // namespace hscuda
