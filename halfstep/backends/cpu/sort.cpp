// SPDX-License-Identifier: Apache-2.0
// sort and topk: each value becomes an unsigned key in the order wanted, with its index behind it, so that one
// comparison of integers decides and equal values keep their order.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

template <class T>
using SortKey = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

// Order of keys = order of values; -0 is 0, NaN the greatest.
template <class T>
SortKey<T> key_of(T value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value;
  } else if constexpr (std::is_integral_v<T>) {
    constexpr SortKey<T> kFlip = std::is_signed_v<T> ? SortKey<T>(1) << (8 * sizeof(SortKey<T>) - 1) : 0;
    return static_cast<SortKey<T>>(static_cast<std::make_signed_t<SortKey<T>>>(value)) ^ kFlip;
  } else if constexpr (std::is_same_v<T, double> || std::is_same_v<T, float>) {
    if (value != value) return ~SortKey<T>{0};
    const auto bits = std::bit_cast<SortKey<T>>(value + T{0});  // -0 + 0 is 0
    constexpr SortKey<T> kSign = SortKey<T>(1) << (8 * sizeof(T) - 1);
    return bits & kSign ? ~bits : bits | kSign;
  } else {
    return key_of(static_cast<float>(value));
  }
}

struct LongItem {
  std::uint64_t key;
  std::int64_t index;
  friend bool operator<(const LongItem& a, const LongItem& b) {
    return a.key != b.key ? a.key < b.key : a.index < b.index;
  }
};

// SortKey and index in one number where they fit: lines of up to 2^32 elements of up to 32 bits.
struct ShortItem {
  std::uint64_t both;
  friend bool operator<(const ShortItem& a, const ShortItem& b) { return a.both < b.both; }
};
std::int64_t index_of(const LongItem& i) { return i.index; }
std::int64_t index_of(const ShortItem& i) { return static_cast<std::int64_t>(i.both & 0xffffffffu); }
template <class K>
void make(LongItem& i, K key, std::int64_t index) {
  i = {key, index};
}
template <class K>
void make(ShortItem& i, K key, std::int64_t index) {
  i.both = static_cast<std::uint64_t>(key) << 32 | static_cast<std::uint64_t>(index);
}

// The first k of each line along `dim`, in order.
template <class T, class Item>
Status run(KernelContext* context, const TensorView& x, TensorView* out, int dim, std::int64_t k, bool descending) {
  const std::int64_t n = x.ndim ? x.sizes[dim] : 1, step = x.ndim ? x.strides[dim] : 0;
  const std::int64_t out_step = x.ndim ? out[0].strides[dim] : 0;
  const std::int64_t lines = n ? x.numel / n : 0;
  // A line costs about n log2 n comparisons.
  const std::int64_t cost = n * (std::bit_width(static_cast<std::uint64_t>(n)) + 1) * 4;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / cost);
  const std::int64_t ranges = detail::num_ranges(lines, grain);
  auto* items = static_cast<Item*>(
      context->workspace(context, static_cast<std::size_t>(std::max<std::int64_t>(ranges, 1) * n) * sizeof(Item)));
  if (!items) return Status::failed;
  // One stretch of items a range of lines.
  parallel_for(std::max<std::int64_t>(ranges, 1), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t range = first; range < last; ++range) {
      Item* line = items + range * n;
      const std::int64_t count = std::max<std::int64_t>(ranges, 1);
      for (std::int64_t l = lines * range / count; l < lines * (range + 1) / count; ++l) {
        std::int64_t from = 0, to = 0, rest = l;
        for (int d = x.ndim - 1; d >= 0; --d) {
          if (d == dim) continue;
          from += rest % x.sizes[d] * x.strides[d];
          to += rest % x.sizes[d] * out[0].strides[d];
          rest /= x.sizes[d];
        }
        const T* values = static_cast<const T*>(x.data) + from;
        for (std::int64_t i = 0; i < n; ++i) {
          const auto key = key_of(values[i * step]);
          make(line[i], descending ? static_cast<SortKey<T>>(~key) : key, i);
        }
        if (k < n) {
          if (k > 0) std::nth_element(line, line + k - 1, line + n);
        }
        std::sort(line, line + k);
        T* sorted = static_cast<T*>(out[0].data) + to;
        auto* indices = static_cast<std::int64_t*>(out[1].data) + to;
        for (std::int64_t i = 0; i < k; ++i) {
          const std::int64_t at = index_of(line[i]);
          sorted[i * out_step] = values[at * step];
          indices[i * out_step] = at;
        }
      }
    }
  });
  return Status::ok;
}

Status first_of_lines(KernelContext* context, const TensorView& x, TensorView* out, std::int64_t wanted, std::int64_t k,
                      bool descending) {
  if (out[0].numel == 0) return Status::ok;
  const auto dim = static_cast<int>(wanted < 0 ? wanted + std::max(x.ndim, 1) : wanted);
  const std::int64_t n = x.ndim ? x.sizes[dim] : 1;
  Status status = Status::ok;
  visit_all(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_float8(dtype_of<T>)) {
      status = Status::failed;
    } else if constexpr (sizeof(T) <= 4) {
      status = n <= std::int64_t{1} << 32 ? run<T, ShortItem>(context, x, out, dim, k, descending)
                                          : run<T, LongItem>(context, x, out, dim, k, descending);
    } else {
      status = run<T, LongItem>(context, x, out, dim, k, descending);
    }
  });
  return status;
}

Status sort(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const SortAttributes*>(attributes);
  const std::int64_t n = in[0].ndim ? in[0].sizes[a.dim < 0 ? a.dim + in[0].ndim : a.dim] : 1;
  return first_of_lines(context, in[0], out, a.dim, n, a.descending);
}

Status topk(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const TopKAttributes*>(attributes);
  return first_of_lines(context, in[0], out, a.dim, in[0].ndim ? a.k : 1, a.largest);
}

const RegisterCpuKernel sort_kernels[] = {
    {"sort", kComputeDTypes, sort},
    {"topk", kComputeDTypes, topk},
};

}  // namespace
}  // namespace halfstep::cpu
