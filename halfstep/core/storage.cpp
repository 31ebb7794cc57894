// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/storage.h"

#include "halfstep/core/fail.h"
#include "halfstep/core/pool.h"

namespace halfstep {
namespace {

std::atomic<Allocator*> g_allocators[kMaxDeviceTypes][kMaxDevices];

std::uint64_t next_storage_id() {
  // Threads take ids by the thousand, so that a new storage costs no shared write.
  static std::atomic<std::uint64_t> next_block{1};
  thread_local std::uint64_t id = 0, end = 0;
  if (id == end) {
    id = next_block.fetch_add(1, std::memory_order_relaxed) << 10;
    end = id + (1 << 10);
  }
  return id++;
}

}  // namespace

Allocator& allocator_for(Device device) {
  Allocator* allocator =
      device.index < kMaxDevices ? g_allocators[device.type][device.index].load(std::memory_order_acquire) : nullptr;
  if (!allocator) [[unlikely]]
    fail<DeviceError>("allocate: device {} has no allocator; is its plug-in loaded?", device.str());
  return *allocator;
}

void set_allocator(Device device, Allocator* allocator) {
  if (device.index >= kMaxDevices) {
    fail<DeviceError>("device: expected at most {} devices of a kind, got {}", kMaxDevices, device.str());
  }
  g_allocators[device.type][device.index].store(allocator, std::memory_order_release);
}

Storage::Storage(void* data, std::size_t bytes, Device device, Allocator* allocator, std::function<void()>* deleter)
    : data_(data), bytes_(bytes), allocator_(allocator), deleter_(deleter), id_(next_storage_id()), device_(device) {}

Ref<Storage> Storage::allocate(std::size_t bytes, Device device) {
  Allocator& allocator = allocator_for(device);
  void* data = bytes ? allocator.allocate(bytes) : nullptr;
  auto storage = Ref<Storage>::adopt(new (pool_allocate<Storage>()) Storage(data, bytes, device, &allocator, nullptr));
  if (!device.is_cpu()) storage->home_queue_ = allocator.home_queue();
  return storage;
}

Ref<Storage> Storage::wrap(void* data, std::size_t bytes, Device device, std::function<void()> deleter) {
  auto* held = deleter ? new std::function<void()>(std::move(deleter)) : nullptr;
  return Ref<Storage>::adopt(new (pool_allocate<Storage>()) Storage(data, bytes, device, nullptr, held));
}

void Storage::destroy() {
  if (allocator_ && data_) allocator_->deallocate(data_, bytes_);
  if (deleter_) {
    (*deleter_)();
    delete deleter_;
  }
  this->~Storage();
  pool_deallocate<Storage>(this);
}

}  // namespace halfstep
