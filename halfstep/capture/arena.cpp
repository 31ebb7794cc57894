// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "halfstep/capture/arena_internal.h"
#include "halfstep/core/error.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::detail {
namespace {

// What the allocators of the CPU and of devices give.
std::size_t alignment_of(Device device) { return device.is_host() ? 64 : 512; }
std::size_t rounded(std::size_t bytes, std::size_t alignment) {
  return (std::max<std::size_t>(bytes, 1) + alignment - 1) & ~(alignment - 1);
}

double mb(std::size_t bytes) { return static_cast<double>(bytes) / 1e6; }

}  // namespace

CaptureArena::CaptureArena(Device device)
    : device_(device), source_(allocator_for(device)), alignment_(alignment_of(device)) {}

void* CaptureArena::allocate(std::size_t bytes) {
  const std::size_t size = rounded(bytes, alignment_);
  const std::lock_guard lock(mutex_);
  auto* const data = static_cast<char*>(source_.allocate(size));
  living_.emplace(data, blocks_.size());
  blocks_.push_back({.bytes = size, .data = data, .alone = alone_});
  now_ += size;
  most_ = std::max(most_, now_);
  ++users_;
  return data;
}

void CaptureArena::deallocate(void* data, std::size_t) noexcept {
  std::unique_lock lock(mutex_);
  if (const auto found = living_.find(static_cast<const char*>(data)); found != living_.end()) {
    Block& block = blocks_[found->second];
    block.data = nullptr;
    now_ -= block.bytes;
    source_.deallocate(data, block.bytes);
    living_.erase(found);
  } else {
    --kept_.tensors;
    if (closed_ && kept_.tensors == 0) give(kept_);
  }
  release(std::move(lock));
}

void CaptureArena::used_on(void* data, void* queue) noexcept {
  const std::lock_guard lock(mutex_);
  source_.used_on(kept_.has(data) ? kept_.data : data, queue);
}

std::optional<CaptureArena::Place> CaptureArena::find(const void* data) const {
  const std::lock_guard lock(mutex_);
  const auto* const at = static_cast<const char*>(data);
  auto after = living_.upper_bound(at);
  if (after == living_.begin()) return std::nullopt;
  --after;
  if (at >= after->first + blocks_[after->second].bytes) return std::nullopt;
  return Place{after->second, at - after->first};
}

void CaptureArena::use(const Place& place, std::size_t call) {
  const std::lock_guard lock(mutex_);
  Block& block = blocks_[place.block];
  if (!block.used) block.first = call;
  block.used = true;
  block.last = call;
}

CaptureArena::Place CaptureArena::add_work(std::size_t bytes, std::size_t call) {
  const std::lock_guard lock(mutex_);
  blocks_.push_back({.bytes = rounded(bytes, alignment_), .data = nullptr, .used = true, .first = call, .last = call});
  return {blocks_.size() - 1, 0};
}

std::size_t CaptureArena::in_use() const {
  const std::lock_guard lock(mutex_);
  return users_ - 1;
}

std::vector<Placement> CaptureArena::lifetimes(std::vector<std::size_t>& placed) const {
  std::size_t calls = 0;
  for (const Block& b : blocks_) calls = std::max(calls, b.last);
  std::vector<Placement> all;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Block& b = blocks_[i];
    if (!b.used || b.data) continue;
    placed.push_back(i);
    all.push_back({.bytes = b.bytes, .first = b.alone ? 0 : b.first, .last = b.alone ? calls : b.last});
  }
  return all;
}

void CaptureArena::take(Piece& piece, std::size_t bytes) {
  // What the step has freed is of no more use to the allocator.
  constexpr std::size_t kMuch = std::size_t{32} << 20;
  if (bytes >= kMuch && !device_.is_meta()) empty_memory_cache(device_);
  piece.data = static_cast<char*>(source_.allocate(bytes));
  piece.bytes = bytes;
}

void CaptureArena::give(Piece& piece) noexcept {
  if (piece.data) source_.deallocate(piece.data, piece.bytes);
  piece = {};
}

void CaptureArena::place(std::span<const Ref<Storage>> outlasting) {
  const std::lock_guard lock(mutex_);
  std::vector<std::size_t> placed;
  std::vector<Placement> passing = lifetimes(placed);
  const std::size_t alone = find_places(passing);
  // Those that are written last leave most time to others. While they are copied they are there twice.
  std::vector<Ref<Storage>> moving(outlasting.begin(), outlasting.end());
  const auto block_of = [&](const Ref<Storage>& s) -> const Block& {
    return blocks_[living_.at(static_cast<const char*>(s->address()))];
  };
  std::stable_sort(moving.begin(), moving.end(),
                   [&](const auto& a, const auto& b) { return block_of(a).first > block_of(b).first; });
  std::size_t bytes = 0;
  std::vector<Placement> all;
  std::erase_if(moving, [&](const Ref<Storage>& s) {
    const Block& b = block_of(s);
    // What a device's graphs run after the copies that fill it must not use the memory of a copy before.
    if (!b.used || b.alone || now_ + bytes + b.bytes > most_) return true;
    all.push_back({.bytes = b.bytes,
                   .first = b.first,
                   .last = std::numeric_limits<std::size_t>::max(),
                   .offset = bytes,
                   .fixed = true});
    bytes += b.bytes;
    return false;
  });
  const std::size_t moved = all.size();
  all.insert(all.end(), passing.begin(), passing.end());
  std::size_t end = moved > 0 ? find_places(all, bytes) : alone;
  // Not for next to nothing.
  if (end > bytes + alone - alone / 64) {
    moving.clear();
    bytes = 0;
    end = alone;
    all = passing;
  }
  if (bytes > 0) {
    try {
      take(kept_, bytes);
      all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(moved));
    } catch (const OutOfMemoryError&) {
      // A step without what moves may still fit.
      moving.clear();
      bytes = 0;
      end = alone;
      all = passing;
    }
  }
  const std::size_t least = std::max(bytes, most_in_use(all));
  move(moving);
  if (end > bytes) take(passing_, end - bytes);
  if (placed.empty()) return;
  log(LogLevel::debug,
      fmt::format("capture: {} blocks of {} in {:.3f} MB, {:.3f} MB of them what outlasts the step; at least {:.3f} MB",
                  placed.size(), device_.str(), mb(end), mb(bytes), mb(least)));
  for (std::size_t i = 0; i < placed.size(); ++i) {
    const std::size_t offset = all[i].offset;
    blocks_[placed[i]].data = offset < bytes ? kept_.data + offset : passing_.data + (offset - bytes);
  }
}

void CaptureArena::move(std::span<const Ref<Storage>> moving) {
  char* to = kept_.data;
  for (const Ref<Storage>& s : moving) {
    const auto found = living_.find(static_cast<const char*>(s->address()));
    Block& block = blocks_[found->second];
    if (!device_.is_meta()) copy_memory(to, device_, block.data, device_, s->bytes());
    source_.deallocate(block.data, block.bytes);
    now_ -= block.bytes;
    living_.erase(found);
    s->move_to(to);
    block.data = to;
    to += block.bytes;
    ++kept_.tensors;
  }
}

void* CaptureArena::address(const Place& place) const {
  const std::lock_guard lock(mutex_);
  return blocks_[place.block].data + place.offset;
}

bool CaptureArena::owns(const void* data) const {
  if (find(data)) return true;
  const std::lock_guard lock(mutex_);
  return kept_.has(data) || passing_.has(data);
}

std::size_t CaptureArena::bytes() const {
  const std::lock_guard lock(mutex_);
  return now_ + kept_.bytes + passing_.bytes;
}

void CaptureArena::close() noexcept {
  std::unique_lock lock(mutex_);
  closed_ = true;
  give(passing_);
  if (kept_.tensors == 0) give(kept_);
  release(std::move(lock));
}

void CaptureArena::release(std::unique_lock<std::mutex> lock) noexcept {
  if (--users_ > 0) return;
  lock.unlock();
  delete this;
}

Scratch::~Scratch() {
  for (const auto& [data, bytes] : blocks_) allocator_for(device_).deallocate(data, bytes);
}

void* Scratch::take(std::size_t bytes) {
  const std::size_t size = rounded(bytes, alignment_of(device_));
  while (block_ < blocks_.size() && used_ + size > blocks_[block_].second) ++block_, used_ = 0;
  if (block_ == blocks_.size()) {
    const std::size_t fresh = std::max<std::size_t>(size, std::size_t{1} << 20);
    blocks_.reserve(blocks_.size() + 1);
    blocks_.emplace_back(allocator_for(device_).allocate(fresh), fresh);
  }
  void* data = static_cast<char*>(blocks_[block_].first) + used_;
  used_ += size;
  return data;
}

}  // namespace halfstep::detail
