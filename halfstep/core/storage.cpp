// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/storage.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "halfstep/core/capture.h"
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
    : data_(data),
      bytes_(bytes),
      allocator_(allocator),
      deleter_(deleter),
      id_(next_storage_id()),
      device_(device),
      address_given_(allocator == nullptr) {}  // memory of someone else's has been given out all along

Ref<Storage> Storage::allocate(std::size_t bytes, Device device) {
  Allocator* from = nullptr;
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    from = sink->memory(device);
  Allocator& allocator = from ? *from : allocator_for(device);
  void* data = bytes ? allocator.allocate(bytes) : nullptr;
  auto storage = Ref<Storage>::adopt(new (pool_allocate<Storage>()) Storage(data, bytes, device, &allocator, nullptr));
  if (!device.is_cpu()) storage->home_queue_ = allocator.home_queue();
  return storage;
}

Ref<Storage> Storage::wrap(void* data, std::size_t bytes, Device device, std::function<void()> deleter) {
  auto* held = deleter ? new std::function<void()>(std::move(deleter)) : nullptr;
  return Ref<Storage>::adopt(new (pool_allocate<Storage>()) Storage(data, bytes, device, nullptr, held));
}

struct Storage::Derived {
  struct Entry {
    DerivedKey key;
    Ref<Storage> data;  ///< null: it was only asked for
  };
  static constexpr std::size_t kMost = 4;
  std::mutex mutex;
  std::uint32_t version = 0;  ///< of the contents that the entries were made of
  std::vector<Entry> entries;

  /// The entry under `key`; those of other contents are thrown away first.
  Entry* find(const DerivedKey& key, std::uint32_t now) {
    if (version != now) entries.clear();
    version = now;
    const auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.key == key; });
    return found == entries.end() ? nullptr : &*found;
  }
};

Ref<Storage> Storage::derived(const DerivedKey& key) {
  Derived* const d = derived_.load(std::memory_order_acquire);
  if (d == nullptr || address_held()) return {};
  const std::lock_guard lock(d->mutex);
  const Derived::Entry* const found = d->find(key, version());
  return found ? found->data : Ref<Storage>();
}

bool Storage::keeps_derived(const DerivedKey& key) {
  if (address_held()) return false;
  Derived* d = derived_.load(std::memory_order_acquire);
  if (d == nullptr) {
    auto fresh = std::make_unique<Derived>();
    if (derived_.compare_exchange_strong(d, fresh.get(), std::memory_order_acq_rel)) d = fresh.release();
  }
  const std::lock_guard lock(d->mutex);
  if (d->find(key, version())) return true;
  if (d->entries.size() < Derived::kMost) d->entries.push_back({key, {}});
  return false;
}

void Storage::keep_derived(const DerivedKey& key, Ref<Storage> data) {
  Derived* const d = derived_.load(std::memory_order_acquire);
  if (d == nullptr || address_held()) return;
  const std::lock_guard lock(d->mutex);
  if (Derived::Entry* const found = d->find(key, version())) found->data = std::move(data);
}

void Storage::drop_derived() {
  Derived* const d = derived_.load(std::memory_order_acquire);
  const std::lock_guard lock(d->mutex);
  d->entries.clear();
}

struct Storage::HostCopy {
  Ref<Storage> storage;
  Bring how;
  bool coming = false;  ///< to the device: a thread copies it
};

namespace {
// One for all storages, held for a few instructions: a copy waits for its device, whose work may wait for another
// thread's.
struct HostCopies {
  std::mutex mutex;
  std::condition_variable came;
};
HostCopies& host_copies() {
  static HostCopies& copies = *new HostCopies;
  return copies;
}
}  // namespace

void Storage::keep_on_host(Ref<Storage> copy, const Bring& how) {
  auto fresh = std::make_unique<HostCopy>(HostCopy{std::move(copy), how});
  const std::lock_guard lock(host_copies().mutex);
  delete host_copy_.exchange(fresh.release(), std::memory_order_acq_rel);
}

Ref<Storage> Storage::host_copy() const {
  if (!host_copy_.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(host_copies().mutex);
  const HostCopy* const copy = host_copy_.load(std::memory_order_relaxed);
  return copy && !copy->coming ? copy->storage : Ref<Storage>();
}

void Storage::bring() const {
  std::unique_lock lock(host_copies().mutex);
  HostCopy* found = nullptr;
  host_copies().came.wait(lock, [&] {
    found = host_copy_.load(std::memory_order_relaxed);
    return !found || !found->coming;
  });
  if (!found) return;  // another thread has done it
  found->coming = true;
  lock.unlock();
  try {
    found->how.copy(found->how, *this, data_, *found->storage);
  } catch (...) {
    lock.lock();
    found->coming = false;
    host_copies().came.notify_all();
    throw;
  }
  const std::unique_ptr<HostCopy> copy(found);
  lock.lock();
  host_copy_.store(nullptr, std::memory_order_release);
  lock.unlock();
  host_copies().came.notify_all();
  copy->how.copied(copy->how, const_cast<Storage&>(*this), *copy->storage);
}

void Storage::destroy() {
  delete host_copy_.load(std::memory_order_relaxed);
  delete derived_.load(std::memory_order_relaxed);
  if (allocator_ && data_) allocator_->deallocate(data_, bytes_);
  if (deleter_) {
    (*deleter_)();
    delete deleter_;
  }
  this->~Storage();
  pool_deallocate<Storage>(this);
}

}  // namespace halfstep
