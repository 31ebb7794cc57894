// SPDX-License-Identifier: Apache-2.0
// Work on many tensors in few launches: which block works on which stretch of which tensor. Plain host code, but for
// the look-up that a kernel's block does.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "device/geometry.h"
#include "halfstep/runtime/plugin.h"

namespace hscuda {

/// Bytes of all arguments of a kernel. Newer drivers take 32 KiB; this much is taken by all.
inline constexpr std::size_t kParameterBytes = 4096;

/// A stretch of a tensor, the work of one block.
struct Chunk {
  int64_t begin = 0, end = 0;  ///< elements in memory order
  int tensor = 0;              ///< the number that it was added with
  uint32_t present = 0;        ///< a bit for each column that it has
  uint32_t dtypes = 0;         ///< two bits for each column: f32, f64, f16, bf16
  int pool = 0;                ///< where its columns begin among the table's words
  bool aligned = false;        ///< all of its addresses are multiples of 16, and so `begin` is of packs

  HSCUDA_BOTH bool has(int column) const { return (present >> column & 1u) != 0; }
  HSCUDA_BOTH int dtype(int column) const { return static_cast<int>(dtypes >> (2 * column) & 3u); }
};

/// Tensors for one launch. Passed to the kernel by value: unlike a table in memory it lasts exactly as long as it has
/// to, also in a captured graph. A tensor has columns: addresses of what belongs to it (gradient, parameter, ...), or
/// numbers. Absent ones take no room.
class ChunkTable {
 public:
  static constexpr int kColumns = 15;
  static constexpr int kWords = 470;
  static constexpr uint32_t kMostBlocks = 0x7fffffffu;

  HSCUDA_BOTH uint32_t blocks() const { return blocks_; }

  /// The work of a block, from 0 to blocks() - 1.
  HSCUDA_BOTH Chunk at(uint32_t block) const {
    // The last tensor that begins at this block or before it.
    int low = 0, high = tensors_ - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (static_cast<uint32_t>(words_[kEntry * middle + 1]) <= block) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const auto numel = static_cast<int64_t>(words_[kEntry * low]);
    const uint64_t first = words_[kEntry * low + 1], rest = words_[kEntry * low + 2];
    Chunk chunk;
    chunk.begin = static_cast<int64_t>(block - static_cast<uint32_t>(first)) * each_;
    chunk.end = chunk.begin + each_ < numel ? chunk.begin + each_ : numel;
    chunk.tensor = static_cast<int>(static_cast<uint32_t>(rest));
    chunk.dtypes = static_cast<uint32_t>(first >> 32);
    chunk.pool = static_cast<int>(rest >> 32 & 0xffffu);
    chunk.present = static_cast<uint32_t>(rest >> 48 & 0x7fffu);
    chunk.aligned = (rest >> 63) != 0;
    return chunk;
  }

  /// What a column holds that the tensor has.
  HSCUDA_BOTH uint64_t word(const Chunk& chunk, int column) const {
    const uint32_t before = chunk.present & ((1u << column) - 1);
#if defined(__CUDA_ARCH__)
    const int place = __popc(before);
#else
    const int place = std::popcount(before);
#endif
    return words_[chunk.pool + place];
  }
  /// The address in a column; null where the tensor has none.
  template <class T = void>
  HSCUDA_BOTH T* address(const Chunk& chunk, int column) const {
    return chunk.has(column) ? reinterpret_cast<T*>(word(chunk, column)) : nullptr;
  }

 private:
  friend class ChunkTables;
  // A tensor's entry: elements; first block and dtypes; number, pool, columns and whether it is aligned. Entries grow
  // from the front of the words, columns from their end.
  static constexpr int kEntry = 3;

  int32_t tensors_ = 0;
  int32_t each_ = 0;
  uint32_t blocks_ = 0;
  int32_t pool_ = kWords;
  uint64_t words_[kWords] = {};
};
// Room is left for the kernel's other arguments.
static_assert(sizeof(ChunkTable) + 296 <= kParameterBytes);

/// What belongs to one tensor of a list.
class ChunkColumns {
 public:
  /// A tensor of f32, f64, f16 or bf16; nothing if it is absent.
  void add(int column, const halfstep_tensor& tensor) {
    if (!tensor.defined) return;
    set(column, reinterpret_cast<uint64_t>(tensor.data));
    dtypes |= static_cast<uint32_t>(tensor.dtype & 3) << (2 * column);
    aligned = aligned && reinterpret_cast<uint64_t>(tensor.data) % 16 == 0;
  }
  /// Any number.
  void set(int column, uint64_t word) {
    words[column] = word;
    present |= 1u << column;
  }

  uint64_t words[ChunkTable::kColumns] = {};
  uint32_t present = 0, dtypes = 0;
  bool aligned = true;
};

/// Fills tables, one after the other.
class ChunkTables {
 public:
  /// `each`: elements of a block; a multiple of every pack's width.
  explicit ChunkTables(int64_t each) { table_.each_ = static_cast<int32_t>(each); }

  /// Whether the table takes a tensor; if not it has to be launched first, and restart() called. Empty tensors take
  /// no room.
  bool add(int number, int64_t numel, const ChunkColumns& columns) {
    if (numel == 0) return true;
    const int count = std::popcount(columns.present);
    const int64_t blocks = divide_up(numel, table_.each_);
    if (ChunkTable::kEntry * (table_.tensors_ + 1) + count > table_.pool_ ||
        blocks + table_.blocks_ > ChunkTable::kMostBlocks) {
      return false;
    }
    table_.pool_ -= count;
    int at = table_.pool_;
    for (int c = 0; c < ChunkTable::kColumns; ++c) {
      if (columns.present >> c & 1u) table_.words_[at++] = columns.words[c];
    }
    uint64_t* entry = table_.words_ + ChunkTable::kEntry * table_.tensors_++;
    entry[0] = static_cast<uint64_t>(numel);
    entry[1] = uint64_t{table_.blocks_} | uint64_t{columns.dtypes} << 32;
    entry[2] = static_cast<uint32_t>(number) | static_cast<uint64_t>(table_.pool_) << 32 |
               uint64_t{columns.present} << 48 | uint64_t{columns.aligned} << 63;
    table_.blocks_ += static_cast<uint32_t>(blocks);
    return true;
  }
  void restart() {
    table_.tensors_ = 0;
    table_.blocks_ = 0;
    table_.pool_ = ChunkTable::kWords;
  }
  const ChunkTable& table() const { return table_; }

 private:
  ChunkTable table_;
};

/// Calls run(table) for tables that hold n tensors together. `describe(i, columns)` says how many elements tensor i has
/// and adds its columns; 0 elements leave it out.
template <class Describe, class Run>
void for_each_table(int n, int64_t each, Describe&& describe, Run&& run) {
  ChunkTables tables(each);
  for (int i = 0; i < n; ++i) {
    ChunkColumns columns;
    const int64_t numel = describe(i, columns);
    if (tables.add(i, numel, columns)) continue;
    run(tables.table());
    tables.restart();
    tables.add(i, numel, columns);
  }
  if (tables.table().blocks() > 0) run(tables.table());
}

}  // namespace hscuda
