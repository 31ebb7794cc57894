// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/device_allocator.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/device_wait_internal.h"
#include "halfstep/runtime/queue.h"

namespace halfstep {
namespace {

constexpr std::size_t kRound = 512;
constexpr std::size_t kSmall = std::size_t{1} << 20;           // at most this comes out of small segments
constexpr std::size_t kSmallSegment = std::size_t{2} << 20;    // of this size
constexpr std::size_t kMedium = std::size_t{10} << 20;         // at most this
constexpr std::size_t kMediumSegment = std::size_t{20} << 20;  // out of these
constexpr std::size_t kLargeRound = std::size_t{2} << 20;
// Small blocks are taken and freed at every call: this many of each size stay at hand, outside of the ordered sets and
// unjoined, until memory runs short.
constexpr std::size_t kStashed = std::size_t{16} << 10;
constexpr std::size_t kStashDepth = 32;

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

struct Segment {
  void* data = nullptr;
  std::size_t bytes = 0;
  std::uint64_t number = 0;
};

struct Block {
  char* data = nullptr;
  std::size_t bytes = 0;
  std::size_t requested = 0;
  Segment* segment = nullptr;
  Block* before = nullptr;  // neighbours in the segment
  Block* behind = nullptr;
  void* home = nullptr;  // the queue it was made for
  bool in_use = false;
  bool small = false;
  bool stashed = false;                  // free, at hand for the next call of its size
  std::vector<void*> used_on;            // other queues
  std::vector<halfstep_event*> pending;  // marks in them that have not been passed
  const char* made_by = nullptr;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->home, a->bytes, a->data) < std::tie(b->home, b->bytes, b->data);
  }
};

std::string megabytes(std::uint64_t bytes) {
  const auto n = static_cast<double>(bytes);
  return bytes != 0 && bytes < 100'000 ? fmt::format("{:.1f} kB", n / 1e3) : fmt::format("{:.1f} MB", n / 1e6);
}

}  // namespace

struct DeviceAllocator::State {
  State(DeviceBackend& b, int i) : backend(b), index(i) { caching = std::getenv("HALFSTEP_NO_CACHE") == nullptr; }

  DeviceBackend& backend;
  const int index;
  std::mutex mutex;
  bool caching = true;
  bool emptying = false;
  std::uint64_t limit = 0;
  std::uint64_t next_segment = 1;
  MemoryStats stats;
  std::set<Block*, BySize> free_small, free_large;
  std::unordered_map<void*, Block*> known;  // handed out or stashed, by address
  std::array<std::vector<Block*>, kStashed / kRound + 1> stash;
  std::uint64_t blocks_in_use = 0;
  std::vector<Block*> held_back;
  std::map<void*, std::unique_ptr<Segment>> segments;

  std::set<Block*, BySize>& pool(bool small) { return small ? free_small : free_large; }

  static std::size_t segment_bytes(std::size_t bytes) {
    return bytes <= kSmall ? kSmallSegment : bytes <= kMedium ? kMediumSegment : round_up(bytes, kLargeRound);
  }

  Block* find(std::size_t bytes, void* queue, bool small) {
    Block key;
    key.home = queue;
    key.bytes = bytes;
    auto& blocks = pool(small);
    const auto it = blocks.lower_bound(&key);
    if (it == blocks.end() || (*it)->home != queue) return nullptr;
    Block* block = *it;
    blocks.erase(it);
    return block;
  }

  // A segment from the device as one free block; null when there is no memory.
  // `exact`: no more than is asked for, where a whole segment doesn't fit any more.
  Block* reserve(std::size_t bytes, void* queue, bool small, bool exact = false) {
    const std::size_t size = caching && !exact ? segment_bytes(bytes) : bytes;
    if (limit != 0 && stats.reserved + size > limit) return nullptr;
    void* data = nullptr;
    const halfstep_status status = backend.table.allocate(index, size, &data);
    if (status == HALFSTEP_OUT_OF_MEMORY || (status == HALFSTEP_OK && !data)) {
      clear_error();
      return nullptr;
    }
    backend.check(status, "allocate", index);
    auto segment = std::make_unique<Segment>(Segment{data, size, next_segment++});
    auto* block = new Block;
    block->data = static_cast<char*>(data);
    block->bytes = size;
    block->segment = segment.get();
    block->home = queue;
    block->small = small;
    segments.emplace(data, std::move(segment));
    stats.reserved += size;
    stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
    stats.segments = segments.size();
    return block;
  }

  // Takes what the plug-in has to say, so that it isn't said about a later call.
  void clear_error() {
    halfstep_error error{};
    error.size = sizeof(error);
    backend.table.error(&error);
  }

  void split(Block* block, std::size_t bytes) {
    const std::size_t rest = block->bytes - bytes;
    if (!caching || rest < (block->small ? kRound : kSmall)) return;
    auto* other = new Block;
    other->data = block->data + bytes;
    other->bytes = rest;
    other->segment = block->segment;
    other->home = block->home;
    other->small = block->small;
    other->before = block;
    other->behind = block->behind;
    if (other->behind) other->behind->before = other;
    block->behind = other;
    block->bytes = bytes;
    pool(other->small).insert(other);
  }

  void join(Block* block, Block* other) {  // `other` lies behind `block`; both are free and in no list
    block->bytes += other->bytes;
    block->behind = other->behind;
    if (block->behind) block->behind->before = block;
    delete other;
  }

  bool is_free(const Block* block) { return block && !block->in_use && !block->stashed && block->pending.empty(); }

  Block* from_stash(std::size_t bytes, void* queue) {
    auto& list = stash[bytes / kRound];
    for (std::size_t i = list.size(); i-- > 0;) {
      if (list[i]->home != queue) continue;
      Block* block = list[i];
      list[i] = list.back();
      list.pop_back();
      block->stashed = false;
      return block;
    }
    return nullptr;
  }

  bool to_stash(Block* block) {
    if (!caching || block->bytes > kStashed) return false;
    auto& list = stash[block->bytes / kRound];
    if (list.size() >= kStashDepth) return false;
    list.push_back(block);
    block->stashed = true;
    block->requested = 0;
    block->made_by = nullptr;
    return true;
  }

  void empty_stash() {
    for (auto& list : stash) {
      for (Block* block : std::exchange(list, {})) {
        block->stashed = false;
        known.erase(block->data);
        make_free(block);
      }
    }
  }

  void make_free(Block* block) {
    block->requested = 0;
    block->made_by = nullptr;
    block->used_on.clear();
    if (is_free(block->behind)) {
      pool(block->small).erase(block->behind);
      join(block, block->behind);
    }
    if (is_free(block->before)) {
      pool(block->small).erase(block->before);
      Block* before = block->before;
      join(before, block);
      block = before;
    }
    pool(block->small).insert(block);
    if (!caching) give_back();
  }

  // Blocks that other queues have done with become free.
  void look_at_held_back(bool wait) {
    for (std::size_t i = 0; i < held_back.size();) {
      Block* block = held_back[i];
      while (!block->pending.empty()) {
        halfstep_event* event = block->pending.back();
        const DeviceWait waiting;
        const halfstep_status status = wait ? backend.table.event_synchronize(event) : backend.table.event_query(event);
        if (status == HALFSTEP_NOT_READY) break;
        backend.defer(status, index);  // the memory is free all the same
        backend.table.event_destroy(event);
        block->pending.pop_back();
      }
      if (block->pending.empty()) {
        held_back.erase(held_back.begin() + static_cast<std::ptrdiff_t>(i));
        stats.held_back -= block->bytes;
        make_free(block);
      } else {
        ++i;
      }
    }
  }

  // Gives segments that nobody uses back to the device.
  void give_back() {
    if (!std::exchange(emptying, true)) {  // make_free() comes back here where nothing is kept
      empty_stash();
      emptying = false;
    }
    bool waited = false;
    for (auto* blocks : {&free_small, &free_large}) {
      for (auto it = blocks->begin(); it != blocks->end();) {
        Block* block = *it;
        if (block->before || block->behind) {
          ++it;
          continue;
        }
        if (!waited) {
          // Work that was enqueued before a block was freed may still run.
          const DeviceWait waiting;
          backend.defer(backend.table.synchronize(index), index);
          waited = true;
        }
        it = blocks->erase(it);
        backend.table.deallocate(index, block->segment->data, block->segment->bytes);
        stats.reserved -= block->segment->bytes;
        segments.erase(block->segment->data);
        delete block;
      }
    }
    stats.segments = segments.size();
  }

  MemoryStats current() {
    MemoryStats s = stats;
    s.blocks = blocks_in_use;
    s.limit = limit;
    s.split = 0;
    for (auto* blocks : {&free_small, &free_large}) {
      for (const Block* b : *blocks) {
        if (b->before || b->behind) s.split += b->bytes;
      }
    }
    return s;
  }

  // What is held, largest first, blocks of one op and size together.
  std::string held() {
    std::map<std::pair<std::size_t, std::string>, int, std::greater<>> groups;
    for (const auto& [data, b] : known) {
      if (b->in_use) ++groups[{b->bytes, b->made_by ? b->made_by : "unnamed"}];
    }
    std::string text;
    int shown = 0;
    for (const auto& [key, n] : groups) {
      if (++shown > 8) {
        text += ", ...";
        break;
      }
      text += fmt::format("{}{}{} by {}", text.empty() ? "" : ", ", n > 1 ? fmt::format("{} x ", n) : "",
                          megabytes(key.first), key.second);
    }
    return text.empty() ? "nothing" : text;
  }

  [[noreturn]] void out_of_memory(std::size_t bytes) {
    ++stats.out_of_memory;
    std::uint64_t free_bytes = 0, total = 0;
    if (backend.table.memory_info(index, &free_bytes, &total) != HALFSTEP_OK) clear_error();
    const MemoryStats s = current();
    const char* label = allocation_label();
    fail<OutOfMemoryError>(
        "allocate: {} has no {} left{}: {} are in use in {} blocks, {} are kept ({} of it in pieces){}; the device "
        "says "
        "{} of {} are free; in use: {}",
        backend.device(index).str(), megabytes(bytes), label ? fmt::format(" for {}", label) : "",
        megabytes(s.allocated), s.blocks, megabytes(s.reserved - s.allocated), megabytes(s.split),
        limit ? fmt::format(", the limit is {}", megabytes(limit)) : "", megabytes(free_bytes), megabytes(total),
        held());
  }
};

DeviceAllocator::DeviceAllocator(DeviceBackend& backend, int index) : state_(std::make_unique<State>(backend, index)) {}
DeviceAllocator::~DeviceAllocator() = default;

void* DeviceAllocator::home_queue() {
  void* const queue = current_native_queue(state_->backend.device(state_->index));
  return queue == state_->backend.known_default_queue(state_->index) ? queue : nullptr;
}

void* DeviceAllocator::allocate(std::size_t asked) {
  State& s = *state_;
  s.backend.check_alive("allocate", s.index);
  void* const queue = current_native_queue(s.backend.device(s.index));
  std::lock_guard lock(s.mutex);
  if (asked > (std::size_t{1} << 46)) s.out_of_memory(asked);
  const std::size_t bytes = round_up(std::max<std::size_t>(asked, 1), kRound);
  const bool small = bytes <= kSmall;
  ++s.stats.allocations;
  if (!s.held_back.empty()) s.look_at_held_back(false);
  Block* block = bytes <= kStashed ? s.from_stash(bytes, queue) : nullptr;
  const bool at_hand = block != nullptr;
  if (!block && s.caching) block = s.find(bytes, queue, small);
  if (block) {
    ++s.stats.cache_hits;
  } else {
    block = s.reserve(bytes, queue, small);
  }
  if (!block) {
    // What is kept may be what is missing: first what is free already, then what waits for other queues.
    ++s.stats.retries;
    s.give_back();
    block = s.caching ? s.find(bytes, queue, small) : nullptr;
    if (!block) block = s.reserve(bytes, queue, small);
    if (!block && !s.held_back.empty()) {
      s.look_at_held_back(true);
      s.give_back();
      block = s.caching ? s.find(bytes, queue, small) : nullptr;
      if (!block) block = s.reserve(bytes, queue, small);
    }
    if (!block && s.caching) block = s.reserve(bytes, queue, small, true);
    if (!block) s.out_of_memory(asked);
  }
  if (!at_hand) {
    s.split(block, bytes);
    s.known.emplace(block->data, block);
  }
  ++s.blocks_in_use;
  block->in_use = true;
  block->requested = asked;
  block->made_by = allocation_label();
  s.stats.allocated += block->bytes;
  s.stats.allocated_peak = std::max(s.stats.allocated_peak, s.stats.allocated);
  return block->data;
}

void DeviceAllocator::deallocate(void* data, std::size_t) noexcept {
  State& s = *state_;
  if (s.backend.ended()) return;  // a tensor of static storage: the device is gone before it
  std::lock_guard lock(s.mutex);
  const auto it = s.known.find(data);
  if (it == s.known.end() || !it->second->in_use) return;
  Block* block = it->second;
  --s.blocks_in_use;
  s.stats.allocated -= block->bytes;
  block->in_use = false;
  try {
    if (block->used_on.empty() && s.to_stash(block)) return;
    s.known.erase(it);
    for (void* used : block->used_on) {
      auto* queue = static_cast<halfstep_queue*>(used);
      halfstep_event* event = nullptr;
      if (s.backend.table.event_create(s.index, 0, &event) == HALFSTEP_OK) {
        if (s.backend.table.event_record(event, queue) == HALFSTEP_OK) {
          block->pending.push_back(event);
          continue;
        }
        s.backend.table.event_destroy(event);
      }
      // Without a mark in the queue only its end tells that the memory is free.
      s.clear_error();
      const DeviceWait waiting;
      s.backend.defer(s.backend.table.queue_synchronize(queue), s.index);
    }
    block->used_on.clear();
    if (!block->pending.empty()) {
      s.held_back.push_back(block);
      s.stats.held_back += block->bytes;
    } else {
      s.make_free(block);
    }
  } catch (...) {  // no memory for the lists: the block is not used again
  }
}

void DeviceAllocator::used_on(void* data, void* queue) noexcept {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  const auto it = s.known.find(data);
  if (it == s.known.end() || !it->second->in_use) return;
  auto& queues = it->second->used_on;
  if (it->second->home == queue || std::find(queues.begin(), queues.end(), queue) != queues.end()) return;
  queues.push_back(queue);
}

void DeviceAllocator::queue_destroyed(void* queue) {
  State& s = *state_;
  void* heir = nullptr;
  try {
    heir = s.backend.default_queue_unchecked(s.index);
  } catch (const DeviceError&) {  // the device is lost: its memory is not used again
  }
  std::lock_guard lock(s.mutex);
  s.look_at_held_back(false);
  for (auto* blocks : {&s.free_small, &s.free_large}) {
    std::vector<Block*> moved;
    for (Block* b : *blocks) {
      if (b->home == queue) moved.push_back(b);
    }
    for (Block* b : moved) {
      blocks->erase(b);
      b->home = heir;
      blocks->insert(b);
    }
  }
  for (auto& [data, b] : s.known) {
    if (b->home == queue) b->home = heir;
    std::erase(b->used_on, queue);
  }
  for (Block* b : s.held_back) {
    if (b->home == queue) b->home = heir;
  }
}

MemoryStats DeviceAllocator::stats() {
  std::lock_guard lock(state_->mutex);
  return state_->current();
}

void DeviceAllocator::reset_peak() {
  std::lock_guard lock(state_->mutex);
  state_->stats.allocated_peak = state_->stats.allocated;
  state_->stats.reserved_peak = state_->stats.reserved;
}

void DeviceAllocator::empty_cache() {
  std::lock_guard lock(state_->mutex);
  state_->look_at_held_back(true);
  state_->give_back();
}

void DeviceAllocator::set_caching(bool on) {
  std::lock_guard lock(state_->mutex);
  state_->caching = on;
  if (!on) state_->give_back();
}

void DeviceAllocator::set_limit(std::uint64_t bytes) {
  std::lock_guard lock(state_->mutex);
  state_->limit = bytes;
}

std::vector<MemoryBlock> DeviceAllocator::blocks() {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  std::vector<MemoryBlock> list;
  const auto add = [&](const Block* b) {
    list.push_back({.segment = b->segment->number,
                    .offset = static_cast<std::uint64_t>(b->data - static_cast<char*>(b->segment->data)),
                    .bytes = b->bytes,
                    .requested = b->requested,
                    .in_use = b->in_use,
                    .held_back = !b->pending.empty(),
                    .made_by = b->made_by ? b->made_by : ""});
  };
  for (const auto& [data, b] : s.known) add(b);
  for (const Block* b : s.held_back) add(b);
  for (auto* blocks : {&s.free_small, &s.free_large}) {
    for (const Block* b : *blocks) add(b);
  }
  std::sort(list.begin(), list.end(), [](const MemoryBlock& a, const MemoryBlock& b) {
    return std::tie(a.segment, a.offset) < std::tie(b.segment, b.offset);
  });
  return list;
}

}  // namespace halfstep
