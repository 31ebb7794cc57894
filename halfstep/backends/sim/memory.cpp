// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sim {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kGivenBack = 1 << 20;  // blocks from this size on return their pages to the system

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

DeviceMemory::DeviceMemory(uint64_t bytes) : bytes_(round_up(bytes, kPage)) {
  file_ = memfd_create("halfstep_sim", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(bytes_)) != 0) {
    if (file_ >= 0) close(file_);
    throw std::runtime_error("no file in memory of " + std::to_string(bytes_) + " bytes: " + std::strerror(errno));
  }
  void* handles = mmap(nullptr, bytes_, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  void* work = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (handles == MAP_FAILED || work == MAP_FAILED) {
    if (handles != MAP_FAILED) munmap(handles, bytes_);
    if (work != MAP_FAILED) munmap(work, bytes_);
    close(file_);
    throw std::runtime_error("no address space for " + std::to_string(bytes_) + " bytes of device memory");
  }
  handles_ = static_cast<char*>(handles);
  work_ = static_cast<char*>(work);
  holes_[0] = bytes_;
}

DeviceMemory::~DeviceMemory() {
  munmap(handles_, bytes_);
  munmap(work_, bytes_);
  close(file_);
}

bool DeviceMemory::allocate(uint64_t bytes, void** data) {
  if (bytes > bytes_) return false;
  const uint64_t size = round_up(bytes == 0 ? 1 : bytes, kAlignment);
  uint64_t at = 0;
  {
    std::lock_guard lock(mutex_);
    auto hole = holes_.begin();
    while (hole != holes_.end() && hole->second < size) ++hole;
    if (hole == holes_.end()) return false;
    at = hole->first;
    const uint64_t rest = hole->second - size;
    holes_.erase(hole);
    if (rest > 0) holes_[at + size] = rest;
    used_[at] = size;
    used_bytes_ += size;
  }
  std::memset(work_ + at, 0xff, size);
  *data = handles_ + at;
  return true;
}

uint64_t DeviceMemory::size_of(const void* data) const {
  if (!contains(data)) return 0;
  std::lock_guard lock(mutex_);
  const auto block = used_.find(static_cast<uint64_t>(static_cast<const char*>(data) - handles_));
  return block == used_.end() ? 0 : block->second;
}

bool DeviceMemory::deallocate(void* data) {
  if (!contains(data)) return false;
  std::lock_guard lock(mutex_);
  const auto block = used_.find(static_cast<uint64_t>(static_cast<char*>(data) - handles_));
  if (block == used_.end()) return false;
  uint64_t at = block->first, size = block->second;
  used_.erase(block);
  used_bytes_ -= size;
  if (size >= kGivenBack) {
    const uint64_t begin = round_up(at, kPage), end = (at + size) / kPage * kPage;
    // Where this fails the pages just stay.
    (void)!fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                     static_cast<off_t>(end - begin));
  }
  auto next = holes_.lower_bound(at);
  if (next != holes_.end() && next->first == at + size) {
    size += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == at) {
      before->second += size;
      return true;
    }
  }
  holes_[at] = size;
  return true;
}

uint64_t DeviceMemory::free_bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_ - used_bytes_;
}

char* DeviceMemory::translate(const void* address, uint64_t bytes) const {
  if (!contains(address)) return nullptr;
  const auto at = static_cast<uint64_t>(static_cast<const char*>(address) - handles_);
  std::lock_guard lock(mutex_);
  auto block = used_.upper_bound(at);
  if (block == used_.begin()) return nullptr;
  --block;
  if (at - block->first > block->second || bytes > block->second - (at - block->first)) return nullptr;
  return work_ + at;
}

PinnedMemory::~PinnedMemory() {
  for (const auto& [data, bytes] : blocks_) std::free(const_cast<char*>(data));
}

void* PinnedMemory::allocate(uint64_t bytes) {
  if (bytes > UINT64_MAX - kPage) return nullptr;
  const uint64_t size = round_up(bytes == 0 ? 1 : bytes, kAlignment);
  void* data = std::aligned_alloc(kAlignment, size);
  if (data == nullptr) return nullptr;
  std::lock_guard lock(mutex_);
  blocks_[static_cast<char*>(data)] = size;
  return data;
}

bool PinnedMemory::deallocate(void* data) {
  {
    std::lock_guard lock(mutex_);
    if (blocks_.erase(static_cast<char*>(data)) == 0) return false;
  }
  std::free(data);
  return true;
}

bool PinnedMemory::contains(const void* address, uint64_t bytes) const {
  const char* at = static_cast<const char*>(address);
  std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(at);
  if (block == blocks_.begin()) return false;
  --block;
  const auto offset = static_cast<uint64_t>(at - block->first);
  return offset <= block->second && bytes <= block->second - offset;
}

}  // namespace sim
