// SPDX-License-Identifier: Apache-2.0
// sort and topk. Each value becomes an unsigned key in the order wanted, with its index behind it: no two are equal, so
// that any sorting network is stable. Lines of up to a chunk are sorted in shared memory at once. Of longer ones the
// chunks are; then topk goes on with the first of each, and sort merges them.
#include "device/order.cuh"
#include "device/rows.cuh"
#include "halfstep/runtime/plugin_attributes.h"

namespace hscuda {
namespace {

/// Key and index in one number, for elements of up to 32 bits in lines of less than 2^32.
struct ShortItem {
  uint64_t both;
  __device__ static ShortItem make(uint64_t key, int64_t index) { return {key << 32 | static_cast<uint64_t>(index)}; }
  /// Behind all others.
  __device__ static ShortItem last() { return {~uint64_t{0}}; }
  __device__ int64_t index() const { return static_cast<int64_t>(both & 0xffffffffu); }
  __device__ bool operator<(const ShortItem& b) const { return both < b.both; }
};
struct LongItem {
  uint64_t key;
  int64_t at;
  __device__ static LongItem make(uint64_t key, int64_t index) { return {key, index}; }
  __device__ static LongItem last() { return {~uint64_t{0}, INT64_MAX}; }
  __device__ int64_t index() const { return at; }
  __device__ bool operator<(const LongItem& b) const { return key != b.key ? key < b.key : at < b.at; }
};

constexpr int64_t kSharedBytes = 32768;
template <class Item>
inline constexpr int64_t kChunk = kSharedBytes / static_cast<int64_t>(sizeof(Item));
constexpr int kSortThreads = 512;

/// The lines of the call. Tensors of `rows`: x, values, indices.
struct Lines {
  Rows<3> rows;
  const void* x;
  void* values;
  int64_t* indices;
  int64_t k;  ///< how many are wanted
  int dtype;
  bool descending;

  template <class Item>
  __device__ __forceinline__ Item item(int64_t line, int64_t i) const {
    int64_t at[3];
    walk_places(rows.rows, line, at);
    const int64_t place = at[0] + i * rows.strides[0];
    uint64_t key = 0;
    with_type(dtype, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (!std::is_same_v<T, Float8E4M3> && !std::is_same_v<T, Float8E5M2>) {
        const Key<T> k = order_key(static_cast<const T*>(x)[place]);
        key = descending ? static_cast<Key<T>>(~k) : k;
      }
    });
    return Item::make(key, i);
  }
  /// Puts element `index` of the line at place i of the result.
  __device__ __forceinline__ void put(int64_t line, int64_t i, int64_t index) const {
    int64_t at[3];
    walk_places(rows.rows, line, at);
    const int64_t from = at[0] + index * rows.strides[0], to = at[1] + i * rows.strides[1];
    indices[at[2] + i * rows.strides[2]] = index;
    switch (item_size(dtype)) {
      case 1:
        static_cast<uint8_t*>(values)[to] = static_cast<const uint8_t*>(x)[from];
        break;
      case 2:
        static_cast<uint16_t*>(values)[to] = static_cast<const uint16_t*>(x)[from];
        break;
      case 4:
        static_cast<uint32_t*>(values)[to] = static_cast<const uint32_t*>(x)[from];
        break;
      default:
        static_cast<uint64_t*>(values)[to] = static_cast<const uint64_t*>(x)[from];
    }
  }
};

// Sorts chunks of lines of `length` items, which come from `from` (line by line) or, where that is null, from the
// tensor: `together` chunks of `size` (a power of two) in a block, bitonic. The first `keep` of each chunk go to `to`;
// or the first lines.k to the result, where that is null and a line is one chunk.
template <class Item>
__global__ void __launch_bounds__(kSortThreads) sort_chunks(Lines lines, int64_t length, int64_t chunks, int size,
                                                            int together, const Item* from, Item* to, int64_t keep) {
  Item* shared = dynamic_shared<Item>();
  const int64_t all = lines.rows.rows.numel * chunks, first = int64_t{blockIdx.x} * together;
  const int items = size * together, me = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = me; i < items; i += threads) {
    const int64_t chunk = first + i / size, line = chunk / chunks;
    const int64_t place = (chunk - line * chunks) * size + i % size;
    Item item = Item::last();
    if (chunk < all && place < length) item = from ? from[line * length + place] : lines.item<Item>(line, place);
    shared[i] = item;
  }
  __syncthreads();
  for (int block = 2; block <= size; block *= 2) {
    for (int step = block / 2; step > 0; step /= 2) {
      for (int t = me; t < items / 2; t += threads) {
        const int i = 2 * t - (t & (step - 1));
        const Item a = shared[i], b = shared[i + step];
        const bool up = (i & (size - 1) & block) == 0;
        if ((b < a) == up) {
          shared[i] = b;
          shared[i + step] = a;
        }
      }
      __syncthreads();
    }
  }
  for (int i = me; i < items; i += threads) {
    const int64_t chunk = first + i / size, place = i % size;
    if (chunk >= all) continue;
    if (to) {
      if (place < keep) to[chunk * keep + place] = shared[i];
    } else if (place < lines.k) {
      lines.put(chunk, place, shared[i].index());
    }
  }
}

// Merges pairs of sorted runs of `run` items: an item's place is its own in its run and how many of the other are
// before.
template <class Item>
struct MergeRuns {
  int64_t length, run;
  const Item* from;
  Item* to;
  __device__ void operator()(int64_t i) const {
    const int64_t line = i / length, place = i - line * length, mine = place / run, pair = mine / 2 * 2 * run;
    const Item* items = from + line * length;
    const bool second = mine % 2 == 1;
    const Item item = items[place];
    const int64_t other = second ? pair : pair + run;
    int64_t low = other < length ? other : length, high = other + run < length ? other + run : length;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      // Items behind all others are equal: those of the first run come first.
      if (second ? !(item < items[middle]) : items[middle] < item) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int64_t before = low - (other < length ? other : length);
    to[line * length + pair + (place - mine * run) + before] = item;
  }
};

template <class Item>
struct WriteSorted {
  Lines lines;
  int64_t length;
  const Item* items;
  __device__ void operator()(int64_t i) const {
    const int64_t line = i / lines.k, place = i - line * lines.k;
    lines.put(line, place, items[line * length + place].index());
  }
};

template <class Item>
void sort_chunks_of(const Call& call, const Lines& lines, int64_t length, const Item* from, Item* to, int64_t keep) {
  const int64_t size = std::min(kChunk<Item>, std::max<int64_t>(2, power_of_two(length)));
  const int64_t chunks = divide_up(length, size), all = lines.rows.count() * chunks;
  const int64_t together = std::clamp<int64_t>(1024 / size, 1, all);
  const int64_t threads = std::clamp<int64_t>(divide_up(size * together / 2, kWarp) * kWarp, kWarp, kSortThreads);
  launch(call,
         {.grid = static_cast<unsigned>(divide_up(all, together)),
          .block = static_cast<unsigned>(threads),
          .shared = static_cast<std::size_t>(size * together) * sizeof(Item)},
         sort_chunks<Item>, lines, length, chunks, static_cast<int>(size), static_cast<int>(together), from, to, keep);
}

template <class Item>
halfstep_status first_in_order(Call& call, const Lines& lines) {
  const int64_t count = lines.rows.count();
  int64_t length = lines.rows.length;
  const Item* from = nullptr;
  Item *buffer = nullptr, *other = nullptr;
  if (length > kChunk<Item>) {
    const int64_t chunks = divide_up(length, kChunk<Item>);
    const int64_t kept = 2 * lines.k <= kChunk<Item> ? lines.k : kChunk<Item>;
    buffer = call.workspace<Item>(2 * count * chunks * kept);
    if (!buffer) return call.no_memory();
    other = buffer + count * chunks * kept;
  }
  // Few are wanted: the first of every chunk, until they are one chunk themselves.
  while (length > kChunk<Item> && 2 * lines.k <= kChunk<Item>) {
    sort_chunks_of<Item>(call, lines, length, from, buffer, lines.k);
    length = divide_up(length, kChunk<Item>) * lines.k;
    from = buffer;
    std::swap(buffer, other);
  }
  if (length <= kChunk<Item>) {
    sort_chunks_of<Item>(call, lines, length, from, nullptr, 0);
    return call.launched();
  }
  sort_chunks_of<Item>(call, lines, length, from, buffer, kChunk<Item>);
  length = divide_up(length, kChunk<Item>) * kChunk<Item>;
  for (int64_t run = kChunk<Item>; run < length; run *= 2) {
    for_each(call, count * length, MergeRuns<Item>{length, run, buffer, other});
    std::swap(buffer, other);
  }
  for_each(call, count * lines.k, WriteSorted<Item>{lines, length, buffer});
  return call.launched();
}

halfstep_status first_of_lines(Call& call, int64_t dim, int64_t k, bool descending) {
  const Tensor &x = call.in[0], &values = call.out[0], &indices = call.out[1];
  if (values.numel == 0) return HALFSTEP_OK;
  const Rows<3> rows = rows_of<3>({&x, &values, &indices}, dim);
  const Lines lines{rows,      x.data, values.data, static_cast<int64_t*>(indices.data), k, static_cast<int>(x.dtype),
                    descending};
  const bool small = item_size(x.dtype) <= 4 && rows.length < (int64_t{1} << 32) - 1;
  return small ? first_in_order<ShortItem>(call, lines) : first_in_order<LongItem>(call, lines);
}

halfstep_status sort(Call& call) {
  const auto& a = call.attributes<halfstep_sort_attributes>();
  const Tensor& x = call.in[0];
  const int64_t dim = a.dim < 0 ? a.dim + x.ndim : a.dim;
  return first_of_lines(call, dim, x.ndim == 0 ? 1 : x.sizes[dim], a.descending != 0);
}
halfstep_status topk(Call& call) {
  const auto& a = call.attributes<halfstep_top_k_attributes>();
  const Tensor& x = call.in[0];
  return first_of_lines(call, a.dim < 0 ? a.dim + x.ndim : a.dim, x.ndim == 0 ? 1 : a.k, a.largest != 0);
}

constexpr KernelDef kKernels[] = {
    {.op = "sort", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = sort},
    {.op = "topk", .dtypes = kComputed, .layouts = kStrided, .attributes = true, .run = topk},
};

}  // namespace

std::span<const KernelDef> sort_kernels() { return kKernels; }

}  // namespace hscuda
