// SPDX-License-Identifier: Apache-2.0
// sort and topk: each value becomes an unsigned key in the order wanted, with its index behind it, so that one
// comparison of integers decides and equal values keep their order.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/backends/cpu/sort_keys.h"
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
std::uint64_t key_of_item(const LongItem& i) { return i.key; }
std::uint32_t key_of_item(const ShortItem& i) { return static_cast<std::uint32_t>(i.both >> 32); }
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

// The lines of a tensor along a dimension, and where their results go.
struct SortLines {
  std::int64_t length, step, out_step, count;
  int dim;
  const TensorView& x;
  const TensorView& values;

  SortLines(const TensorView& from, const TensorView* out, int along)
      : length(from.ndim ? from.sizes[along] : 1),
        step(from.ndim ? from.strides[along] : 0),
        out_step(from.ndim ? out[0].strides[along] : 0),
        count(length ? from.numel / length : 0),
        dim(along),
        x(from),
        values(out[0]) {}

  void offsets(std::int64_t line, std::int64_t& from, std::int64_t& to) const {
    from = to = 0;
    for (int d = x.ndim - 1; d >= 0; --d) {
      if (d == dim) continue;
      from += line % x.sizes[d] * x.strides[d];
      to += line % x.sizes[d] * values.strides[d];
      line /= x.sizes[d];
    }
  }
};

// Sorts the first k of `items`, which those behind them follow, and writes them.
template <class T, class Item>
void write_first(const SortLines& lines, std::int64_t line, TensorView* out, Item* items, std::int64_t k) {
  std::int64_t from = 0, to = 0;
  lines.offsets(line, from, to);
  const T* values = static_cast<const T*>(lines.x.data) + from;
  T* sorted = static_cast<T*>(out[0].data) + to;
  auto* indices = static_cast<std::int64_t*>(out[1].data) + to;
  std::sort(items, items + k);
  for (std::int64_t i = 0; i < k; ++i) {
    const std::int64_t at = index_of(items[i]);
    sorted[i * lines.out_step] = values[at * lines.step];
    indices[i * lines.out_step] = at;
  }
}

// What select_first() works with: room for items, and for the least keys of blocks, in their order and in any.
template <class T, class Item>
struct SelectionRoom {
  std::int64_t items, blocks;
  SelectionRoom(std::int64_t length, std::int64_t k)
      : items(2 * k + 4 * kKeyBlock), blocks((length + kKeyBlock - 1) / kKeyBlock) {}
  std::int64_t size() const {  // in items
    return items + (2 * blocks * static_cast<std::int64_t>(sizeof(SortKey<T>)) + sizeof(Item) - 1) / sizeof(Item);
  }
};

template <class T>
constexpr bool kFloatKeys = std::is_same_v<T, float> || std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

// The keys of n values, n at most kKeyBlock.
template <class T>
void keys_of_block(const T* values, std::int64_t step, std::int64_t n, bool descending, SortKey<T>* keys) {
  if constexpr (kFloatKeys<T>) {
    if (step == 1) return float_keys(dtype_of<T>, values, n, descending, keys);
  }
  const SortKey<T> flip = descending ? ~SortKey<T>{0} : SortKey<T>{0};
  for (std::int64_t i = 0; i < n; ++i) keys[i] = static_cast<SortKey<T>>(key_of(values[i * step]) ^ flip);
}

// The least key of each block of n values.
template <class T>
void least_keys(const T* values, std::int64_t step, std::int64_t n, bool descending, SortKey<T>* least) {
  SortKey<T> keys[kKeyBlock];
  std::int64_t i = 0;
  if constexpr (kFloatKeys<T>) {
    if (step == 1) {
      least_float_keys(dtype_of<T>, values, n / kKeyBlock, descending, least);
      i = n / kKeyBlock * kKeyBlock;
    }
  }
  for (; i < n; i += kKeyBlock) {
    const std::int64_t m = std::min(kKeyBlock, n - i);
    keys_of_block(values + i * step, step, m, descending, keys);
    least[i / kKeyBlock] = *std::min_element(keys, keys + m);
  }
}

// Puts the first k of elements [begin, end) of a line at the front of `items`, in any order. At least k elements have
// no greater key than the k-th least of the blocks' least keys, so that the first k are among these, which few blocks
// have. Should they be more than there is room for, all but the first k of them go: from then on, a key must be lower
// than theirs, as equal ones come behind them.
template <class T, class Item>
void select_first(const T* values, std::int64_t step, std::int64_t begin, std::int64_t end, std::int64_t k,
                  bool descending, const SelectionRoom<T, Item>& room, Item* items) {
  using Key = SortKey<T>;
  Key keys[kKeyBlock], limit = ~Key{0};
  auto* least = reinterpret_cast<Key*>(items + room.items);
  const std::int64_t blocks = (end - begin + kKeyBlock - 1) / kKeyBlock;
  if (blocks >= k) {
    least_keys(values + begin * step, step, end - begin, descending, least);
    Key* sorted = least + room.blocks;
    std::copy_n(least, blocks, sorted);
    std::nth_element(sorted, sorted + k - 1, sorted + blocks);
    limit = sorted[k - 1];
  } else {
    std::fill_n(least, blocks, Key{0});
  }
  std::int64_t m = 0;
  for (std::int64_t block = 0; block < blocks; ++block) {
    if (least[block] > limit) continue;
    const std::int64_t first = begin + block * kKeyBlock, n = std::min(kKeyBlock, end - first);
    keys_of_block(values + first * step, step, n, descending, keys);
    for (std::int64_t i = 0; i < n; ++i) {
      make(items[m], keys[i], first + i);
      m += keys[i] <= limit;
    }
    if (m + kKeyBlock <= room.items) continue;
    std::nth_element(items, items + k - 1, items + m);
    m = k;
    const Key last = key_of_item(items[k - 1]);
    if (last == 0) break;
    limit = last - 1;
  }
  if (m > k) std::nth_element(items, items + k - 1, items + m);
}

// topk for k much less than the length. Few long lines are cut into pieces, whose first k are put together.
template <class T, class Item>
Status run_selection(KernelContext* context, const SortLines& lines, TensorView* out, std::int64_t k, bool descending) {
  constexpr std::int64_t kFewLines = 64;
  const std::int64_t n = lines.length, piece = std::max<std::int64_t>(16384, 128 * k);
  const std::int64_t pieces = lines.count < kFewLines ? (n + piece - 1) / piece : 1;
  const std::int64_t length = (n + pieces - 1) / pieces, jobs = lines.count * pieces;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / 4 / length);
  const std::int64_t ranges = std::max<std::int64_t>(1, detail::num_ranges(jobs, grain));
  // One stretch of items a range of lines or pieces.
  const SelectionRoom<T, Item> room(length, k);
  const std::int64_t size = room.size(), chosen = pieces > 1 ? jobs * k : 0;
  auto* items =
      static_cast<Item*>(context->workspace(context, static_cast<std::size_t>(ranges * size + chosen) * sizeof(Item)));
  if (!items) return Status::failed;
  Item* chosen_items = items + ranges * size;
  parallel_for(ranges, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t range = first; range < last; ++range) {
      Item* own = items + range * size;
      for (std::int64_t job = jobs * range / ranges; job < jobs * (range + 1) / ranges; ++job) {
        std::int64_t from = 0, to = 0;
        lines.offsets(job / pieces, from, to);
        // Pieces that differ by one at most: each has more than k.
        const std::int64_t begin = n * (job % pieces) / pieces, end = n * (job % pieces + 1) / pieces;
        select_first(static_cast<const T*>(lines.x.data) + from, lines.step, begin, end, k, descending, room, own);
        if (pieces > 1) {
          std::copy_n(own, k, chosen_items + job * k);
        } else {
          write_first<T>(lines, job, out, own, k);
        }
      }
    }
  });
  if (pieces > 1) {
    parallel_for(lines.count, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t line = begin; line < end; ++line) {
        Item* all = chosen_items + line * pieces * k;
        std::nth_element(all, all + k - 1, all + pieces * k);
        write_first<T>(lines, line, out, all, k);
      }
    });
  }
  return Status::ok;
}

// The first k of each line along `dim`, in order.
template <class T, class Item>
Status run(KernelContext* context, const TensorView& x, TensorView* out, int dim, std::int64_t k, bool descending) {
  const SortLines lines(x, out, dim);
  const std::int64_t n = lines.length;
  if (k <= n / 8) return run_selection<T, Item>(context, lines, out, k, descending);
  // A line costs about n log2 n comparisons.
  const std::int64_t cost = n * (std::bit_width(static_cast<std::uint64_t>(n)) + 1) * 4;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / cost);
  const std::int64_t ranges = std::max<std::int64_t>(1, detail::num_ranges(lines.count, grain));
  auto* items = static_cast<Item*>(context->workspace(context, static_cast<std::size_t>(ranges * n) * sizeof(Item)));
  if (!items) return Status::failed;
  // One stretch of items a range of lines.
  parallel_for(ranges, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t range = first; range < last; ++range) {
      Item* items_of_line = items + range * n;
      for (std::int64_t l = lines.count * range / ranges; l < lines.count * (range + 1) / ranges; ++l) {
        std::int64_t from = 0, to = 0;
        lines.offsets(l, from, to);
        const T* values = static_cast<const T*>(x.data) + from;
        for (std::int64_t i = 0; i < n; ++i) {
          const auto key = key_of(values[i * lines.step]);
          make(items_of_line[i], descending ? static_cast<SortKey<T>>(~key) : key, i);
        }
        if (k < n) std::nth_element(items_of_line, items_of_line + k - 1, items_of_line + n);
        write_first<T>(lines, l, out, items_of_line, k);
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
