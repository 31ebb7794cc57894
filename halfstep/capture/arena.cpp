// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "halfstep/capture/arena_internal.h"
#include "halfstep/core/error.h"

namespace halfstep::detail {
namespace {

// What the allocators of the CPU and of devices give.
std::size_t alignment_of(Device device) { return device.is_host() ? 64 : 512; }
std::size_t rounded(std::size_t bytes, std::size_t alignment) {
  return (std::max<std::size_t>(bytes, 1) + alignment - 1) & ~(alignment - 1);
}

}  // namespace

CaptureArena::CaptureArena(Device device, bool reuse)
    : source_(allocator_for(device)), alignment_(alignment_of(device)), reuse_(reuse) {}

void* CaptureArena::allocate(std::size_t bytes) {
  const std::size_t size = rounded(bytes, alignment_);
  const std::lock_guard lock(mutex_);
  // The smallest free block that it fits in, unless most of that would lie idle.
  const auto found = reuse_ && !closed_ ? free_.lower_bound(size) : free_.end();
  if (found != free_.end() && found->first <= 2 * size) {
    void* data = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) free_.erase(found);
    ++users_;
    return data;
  }
  void* data = nullptr;
  try {
    data = source_.allocate(size);
  } catch (const OutOfMemoryError&) {
    // A step that runs by itself would use this memory for something else.
    if (free_.empty()) throw;
    ran_short_ = true;
    return_free();
    data = source_.allocate(size);
  }
  blocks_.emplace(static_cast<const char*>(data), size);
  ++users_;
  return data;
}

void CaptureArena::deallocate(void* data, std::size_t) noexcept {
  std::unique_lock lock(mutex_);
  const auto block = blocks_.find(static_cast<const char*>(data));
  if (closed_ || ran_short_) {
    source_.deallocate(data, block->second);
    blocks_.erase(block);
  } else {
    free_[block->second].push_back(data);
  }
  release(std::move(lock));
}

bool CaptureArena::owns(const void* data) const {
  const std::lock_guard lock(mutex_);
  auto after = blocks_.upper_bound(static_cast<const char*>(data));
  if (after == blocks_.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

std::size_t CaptureArena::in_use() const {
  const std::lock_guard lock(mutex_);
  return users_ - 1;
}

std::size_t CaptureArena::bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [data, size] : blocks_) sum += size;
  return sum;
}

bool CaptureArena::ran_short() const {
  const std::lock_guard lock(mutex_);
  return ran_short_;
}

void CaptureArena::return_free() noexcept {
  for (const auto& [size, list] : free_) {
    for (void* data : list) {
      source_.deallocate(data, size);
      blocks_.erase(static_cast<const char*>(data));
    }
  }
  free_.clear();
}

void CaptureArena::close() noexcept {
  std::unique_lock lock(mutex_);
  closed_ = true;
  return_free();
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
