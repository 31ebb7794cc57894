// SPDX-License-Identifier: Apache-2.0
// Large blocks of the CPU's memory, and of meta's addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::detail {

/// Hands out blocks of whole pages from a range of addresses that is as large as the machine's memory. A block is cut
/// from a free one, small ones from the smallest that holds them and large ones from the first, and joins its free
/// neighbours when it is given back, so that the small blocks of a forward pass make room for the large ones of its
/// backward pass. Only where no free block is large enough does the system give more pages, next to free ones where
/// there are such. Which block is handed out follows from the sizes and order of the calls alone. Not thread-safe.
class HS_API BlockHeap {
 public:
  enum class Kind {
    memory,     ///< can be read and written, and is backed by huge pages where the system has them
    addresses,  ///< takes no memory; an access ends the program
  };
  explicit BlockHeap(Kind kind) : kind_(kind) {}
  /// Blocks that are still in use are gone, too.
  ~BlockHeap();
  BlockHeap(const BlockHeap&) = delete;
  BlockHeap& operator=(const BlockHeap&) = delete;

  /// What a block for so many bytes takes.
  static std::size_t block_bytes(std::size_t bytes);

  /// A block of block_bytes(bytes); null when the system has no more.
  void* take(std::size_t bytes);
  /// The block is free from now on. False: it isn't one of this heap's.
  bool give(void* data) noexcept;
  /// Returns free memory to the system, but for parts of huge pages that are in use: what is left of a huge page would
  /// be small pages from then on. Those stay reserved.
  void trim() noexcept;
  /// Returns free blocks to the system until at most so many bytes are reserved, or none is free. Whole blocks, since
  /// free ones with pages and without aren't joined: the smallest that is enough, or else the largest and then others.
  /// Parts of huge pages go, too.
  void shrink(std::uint64_t most) noexcept;

  /// Bytes that the system has given and not got back: blocks in use, and free ones that are kept.
  std::uint64_t reserved() const { return reserved_; }

 private:
  struct Region;
  // Free blocks with pages and free ones without are never joined.
  struct Block {
    char* data = nullptr;
    std::size_t bytes = 0;
    Region* region = nullptr;
    Block* before = nullptr;  // neighbours in the region
    Block* behind = nullptr;
    bool in_use = false;
    bool backed = false;  // it may have pages
  };
  // Addresses from one call to the system, of which the first `writable` may be used.
  struct Region {
    std::uint64_t number = 0;  // in order, from 1
    char* data = nullptr;
    std::size_t bytes = 0;
    std::size_t writable = 0;
    void* mapped = nullptr;  // with what lies before for alignment, and behind
    std::size_t mapped_bytes = 0;
  };
  struct ByPlace {
    static auto place(const Block* b) { return std::tuple(b->region->number, b->data); }
    bool operator()(const Block* a, const Block* b) const { return place(a) < place(b); }
  };
  using Blocks = std::set<Block*, ByPlace>;

  Blocks& free_like(const Block* block) { return block->backed ? backed_ : bare_; }
  static bool is_free(const Block* block, bool backed) { return block && !block->in_use && block->backed == backed; }
  Block* kept(std::size_t bytes);
  Block* grown(std::size_t bytes);
  void release(Block* block) noexcept;
  Block* without_shared_pages(Block* block);
  bool add_region(std::size_t bytes);
  bool make_writable(Region& region, std::size_t end);
  void drop_region(Block* whole) noexcept;
  void cut(Block* block, std::size_t bytes);
  void absorb(Block* block, Block* behind) noexcept;
  void make_free(Block* block);

  const Kind kind_;
  Blocks backed_, bare_;                     // free ones
  std::unordered_map<void*, Block*> taken_;  // in use, by address
  std::vector<std::unique_ptr<Region>> regions_;
  std::uint64_t regions_so_far_ = 0;
  std::uint64_t reserved_ = 0;
};

}  // namespace halfstep::detail
