// SPDX-License-Identifier: Apache-2.0
// Indexing with several tensors, and the places of elements that are not zero.
#include <algorithm>

#include "halfstep/backends/cpu/index_check.h"
#include "halfstep/backends/cpu/move.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

// Where each place of the (broadcast) indices points to in a tensor whose first dimensions they index.
struct Places {
  std::int64_t count = 0;
  std::int64_t* offsets = nullptr;  // in elements of the tensor, `count` of them
  Status status = Status::ok;

  // `strides` are the tensor's; sizes those of all of its dimensions.
  Places(KernelContext* context, const TensorView* index, int k, const TensorView& x, const std::int64_t* strides,
         const std::int64_t* broadcast, int ndim) {
    count = 1;
    for (int d = 0; d < ndim; ++d) count *= broadcast[d];
    offsets = static_cast<std::int64_t*>(
        context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(std::int64_t)));
    if (!offsets) {
      status = Status::failed;
      return;
    }
    std::fill(offsets, offsets + count, std::int64_t{0});
    for (int i = 0; i < k; ++i) {
      if (count != 0 && !check_indices(context, index[i], x.sizes[i], i, x.ndim, true)) {
        status = Status::failed;
        return;
      }
      TensorView to{offsets, broadcast, nullptr, count, ndim, DType::i64, true, true};
      std::int64_t row_major[kMaxDims];
      std::int64_t step = 1;
      for (int d = ndim - 1; d >= 0; --d) {
        row_major[d] = step;
        step *= broadcast[d];
      }
      to.strides = row_major;
      const StridedLoop<2> loop({&to, &index[i]});
      const std::int64_t size = x.sizes[i], stride = strides[i];
      loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* s) {
        const auto* values = static_cast<const std::int64_t*>(index[i].data) + at[1];
        for (std::int64_t j = 0; j < n; ++j) {
          const std::int64_t v = values[j * s[1]];
          offsets[at[0] + j * s[0]] += (v < 0 ? v + size : v) * stride;
        }
      });
    }
  }
};

// The dimensions that are not indexed, row-major: offsets of element j in two tensors.
struct Rest {
  int ndim = 0;
  std::int64_t sizes[kMaxDims];
  std::int64_t strides[2][kMaxDims];
  std::int64_t count = 1;
  bool straight = true;  // both run through memory without gaps

  Rest(const std::int64_t* all_sizes, int from, int to, const std::int64_t* a, const std::int64_t* b) {
    for (int d = from; d < to; ++d) {
      sizes[ndim] = all_sizes[d];
      strides[0][ndim] = a[d];
      strides[1][ndim] = b[d - from];
      count *= all_sizes[d];
      ++ndim;
    }
    std::int64_t step = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      if (sizes[d] != 1) straight &= strides[0][d] == step && strides[1][d] == step;
      step *= sizes[d];
    }
  }
  void offsets(std::int64_t j, std::int64_t& a, std::int64_t& b) const {
    a = b = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      const std::int64_t i = j % sizes[d];
      j /= sizes[d];
      a += i * strides[0][d];
      b += i * strides[1][d];
    }
  }
};

Status index(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  const TensorView& x = in[0];
  const int k = n - 1, broadcast = out[0].ndim - (x.ndim - k);
  const Places places(context, in + 1, k, x, x.strides, out[0].sizes, broadcast);
  if (places.status != Status::ok) return places.status;
  if (out[0].numel == 0) return Status::ok;
  const Rest rest(x.sizes, k, x.ndim, x.strides, out[0].strides + broadcast);
  visit_bits(x.dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    const auto grain = std::max<std::int64_t>(1, kGrain / 2 / rest.count);
    parallel_for(places.count, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const U* from = static_cast<const U*>(x.data) + places.offsets[i];
        U* to = static_cast<U*>(out[0].data) + i * rest.count;
        if (rest.straight) {
          std::memcpy(to, from, static_cast<std::size_t>(rest.count) * sizeof(U));
          continue;
        }
        for (std::int64_t j = 0; j < rest.count; ++j) {
          std::int64_t a = 0, b = 0;
          rest.offsets(j, a, b);
          to[b] = from[a];
        }
      }
    });
  });
  return Status::ok;
}

// Writes or adds `values` in the order of the places. Columns of the dimensions that are not indexed are shared out
// among the threads, so that the order at one element is always the same.
template <class Total, class T, bool kAdd>
void put(Total* to, const Places& places, const Rest& rest, const TensorView& values, int broadcast) {
  parallel_for(rest.count, std::max<std::int64_t>(1, kGrain / 4 / std::max<std::int64_t>(places.count, 1)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = 0; i < places.count; ++i) {
                   std::int64_t at = 0, left = i;
                   for (int d = broadcast - 1; d >= 0; --d) {
                     at += left % values.sizes[d] * values.strides[d];
                     left /= values.sizes[d];
                   }
                   Total* row = to + places.offsets[i];
                   const T* from = static_cast<const T*>(values.data) + at;
                   for (std::int64_t j = begin; j < end; ++j) {
                     std::int64_t a = j, b = j;
                     if (!rest.straight) rest.offsets(j, a, b);
                     if constexpr (kAdd) {
                       row[a] = static_cast<Total>(row[a] + convert<Total>(from[b]));
                     } else {
                       row[a] = from[b];
                     }
                   }
                 }
               });
}

Status index_put(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const bool accumulate = static_cast<const IndexPutAttributes*>(attributes)->accumulate;
  const TensorView &x = out[0], &values = in[1];
  const int k = n - 2, broadcast = values.ndim - (x.ndim - k);
  const bool wide = accumulate && (x.dtype == DType::f16 || x.dtype == DType::bf16);
  // Sums of 16-bit values are taken in float32, in a row-major copy.
  std::int64_t row_major[kMaxDims];
  std::int64_t step = 1;
  for (int d = x.ndim - 1; d >= 0; --d) {
    row_major[d] = step;
    step *= x.sizes[d];
  }
  const std::int64_t* strides = wide ? row_major : x.strides;
  const Places places(context, in + 2, k, x, strides, values.sizes, broadcast);
  if (places.status != Status::ok) return places.status;
  if (!wide && out[0].data != in[0].data && x.numel) move_elements(x, in[0]);
  if (x.numel == 0) return Status::ok;
  const Rest rest(x.sizes, k, x.ndim, strides, values.strides + broadcast);
  Status status = Status::ok;
  if (!accumulate) {
    visit_bits(x.dtype, [&](auto tag) {
      using U = typename decltype(tag)::type;
      if (values.numel) put<U, U, false>(static_cast<U*>(x.data), places, rest, values, broadcast);
    });
    return status;
  }
  visit_all(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_float8(dtype_of<T>)) {
      status = Status::failed;
    } else if constexpr (is_low_precision(dtype_of<T>)) {
      auto* sums = static_cast<float*>(context->workspace(context, static_cast<std::size_t>(x.numel) * sizeof(float)));
      if (!sums) {
        status = Status::failed;
        return;
      }
      TensorView total = x;
      total.data = sums;
      total.strides = row_major;
      total.contiguous = true;
      const StridedLoop<2> load({&total, &in[0]}), store({&x, &total});
      load.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t m, const std::int64_t* s) {
        const T* from = static_cast<const T*>(in[0].data) + at[1];
        for (std::int64_t i = 0; i < m; ++i) sums[at[0] + i * s[0]] = static_cast<float>(from[i * s[1]]);
      });
      if (values.numel) put<float, T, true>(sums, places, rest, values, broadcast);
      store.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t m, const std::int64_t* s) {
        T* to = static_cast<T*>(x.data) + at[0];
        for (std::int64_t i = 0; i < m; ++i) to[i * s[0]] = T(sums[at[1] + i * s[1]]);
      });
    } else {
      if (values.numel) put<T, T, true>(static_cast<T*>(x.data), places, rest, values, broadcast);
    }
  });
  return status;
}

// Calls f(i, is_not_zero) for all elements in row-major order.
template <class F>
void for_each_place(const TensorView& x, F&& f) {
  visit_all(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = static_cast<const T*>(x.data);
    std::int64_t position[kMaxDims] = {};
    std::int64_t offset = 0;
    for (std::int64_t i = 0; i < x.numel; ++i) {
      f(position, convert<bool>(data[offset]));
      for (int d = x.ndim - 1; d >= 0; --d) {
        offset += x.strides[d];
        if (++position[d] < x.sizes[d]) break;
        offset -= x.sizes[d] * x.strides[d];
        position[d] = 0;
      }
    }
  });
}

Status nonzero_count(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  std::int64_t count = 0;
  for_each_place(in[0], [&](const std::int64_t*, bool set) { count += set; });
  *static_cast<std::int64_t*>(out[0].data) = count;
  return Status::ok;
}

Status nonzero(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t count = static_cast<const CountAttributes*>(attributes)->count;
  auto* to = static_cast<std::int64_t*>(out[0].data);
  std::int64_t found = 0;
  for_each_place(in[0], [&](const std::int64_t* position, bool set) {
    // Another thread may write the input between counting and this.
    if (!set || found == count) return;
    for (int d = 0; d < in[0].ndim; ++d) *to++ = position[d];
    ++found;
  });
  std::fill(to, static_cast<std::int64_t*>(out[0].data) + out[0].numel, std::int64_t{0});
  return Status::ok;
}

const RegisterCpuKernel registered[] = {
    {"index", kAllDTypes, index},
    {"index_put", kAllDTypes, index_put},
    {"nonzero_count", kAllDTypes, nonzero_count},
    {"nonzero", kAllDTypes, nonzero},
};

}  // namespace
}  // namespace halfstep::cpu
