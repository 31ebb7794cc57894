// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

#include "halfstep/core/device.h"
#include "halfstep/core/export.h"

namespace halfstep {

/// A counted reference to an object that has `retain()` and `release()`: a shared_ptr of one word and one allocation.
template <class T>
class Ref {
 public:
  Ref() = default;
  /// Takes ownership of one count held by the caller.
  static Ref adopt(T* p) {
    Ref r;
    r.p_ = p;
    return r;
  }
  static Ref share(T* p) {
    if (p) p->retain();
    return adopt(p);
  }
  Ref(const Ref& other) : p_(other.p_) {
    if (p_) p_->retain();
  }
  Ref(Ref&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(p_, other.p_);
    return *this;
  }
  ~Ref() {
    if (p_) p_->release();
  }
  T* get() const { return p_; }
  T* operator->() const { return p_; }
  T& operator*() const { return *p_; }
  explicit operator bool() const { return p_ != nullptr; }
  T* detach() { return std::exchange(p_, nullptr); }
  friend bool operator==(const Ref& a, const Ref& b) { return a.p_ == b.p_; }

 private:
  T* p_ = nullptr;
};

/// Where the memory of a device comes from. Implementations are thread-safe and live until the program ends.
class HS_API Allocator {
 public:
  virtual ~Allocator() = default;
  /// At least `bytes` bytes, aligned to 64; throws DeviceError when there are none left. `bytes` may be 0.
  virtual void* allocate(std::size_t bytes) = 0;
  /// Frees memory returned by allocate(bytes).
  virtual void deallocate(void* data, std::size_t bytes) noexcept = 0;
  /// The device queue that may use fresh memory immediately, without calling used_on(); null on the CPU, and where only
  /// the allocator knows which queue owns the memory.
  virtual void* home_queue() { return nullptr; }
  /// Work on a queue other than the home queue uses the memory: it is not reused before that work is done.
  virtual void used_on(void* data, void* queue) noexcept {
    (void)data;
    (void)queue;
  }
};

/// The allocator of a device; the runtime registers one for each. Throws DeviceError when the device has none.
HS_API Allocator& allocator_for(Device device);
/// Makes `allocator` the device's.
HS_API void set_allocator(Device device, Allocator* allocator);

/// A block of device memory shared by tensors, with a version that every write through a tensor increments.
class HS_API Storage {
 public:
  /// Fresh memory, not cleared.
  static Ref<Storage> allocate(std::size_t bytes, Device device);
  /// External memory; `deleter` (may be empty) runs when the last tensor releases it.
  static Ref<Storage> wrap(void* data, std::size_t bytes, Device device, std::function<void()> deleter);

  /// The block's start, size and device. For the library and for extensions: code that writes through this address must
  /// increment the version afterwards, or call give_address(). Contents that are still on the host (keep_on_host()) are
  /// brought to the device first.
  void* data() const {
    if (host_copy_.load(std::memory_order_acquire)) [[unlikely]]
      bring();
    return data_;
  }
  /// The block's start, to be compared with other addresses only.
  const void* address() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// The block lies at `data` from now on, where its contents have been copied: for its allocator, while nobody else
  /// uses it. Not for blocks whose address is held.
  void move_to(void* data) { data_ = data; }
  Device device() const { return device_; }
  /// The queue whose use of the memory need not be reported (Allocator::home_queue()); null for none.
  void* home_queue() const { return home_queue_; }
  /// Work of `queue` uses the memory: called for every tensor of a call on a device.
  void use_on(void* queue) {
    if (queue != home_queue_ && allocator_) [[unlikely]]
      allocator_->used_on(data_, queue);
  }
  /// The number of writes so far; a saved tensor whose storage has a different version than when it was saved was
  /// modified.
  std::uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }
  /// No floating value in the block is larger in magnitude, nor NaN; infinity if no bound is known. Reported by kernels
  /// that can derive it from their inputs, so that a gradient scaler needn't read what was just written.
  float magnitude_bound() const {
    const std::uint64_t b = bound_.load(std::memory_order_relaxed);
    return b >> 32 == version() ? std::bit_cast<float>(static_cast<std::uint32_t>(b)) : kNoBound;
  }
  /// Valid until the next write, or until the address is handed out (forget_magnitude_bound()).
  void set_magnitude_bound(float bound) {
    bound_.store(std::uint64_t{version()} << 32 | std::bit_cast<std::uint32_t>(bound), std::memory_order_relaxed);
  }
  void forget_magnitude_bound() { set_magnitude_bound(kNoBound); }

  /// The block's address has been handed out and may be written through unnoticed for as long as the block lives:
  /// nothing is known about the contents, and nothing derived from them is cached any more.
  void give_address() {
    forget_magnitude_bound();
    if (!address_given_.load(std::memory_order_relaxed)) address_given_.store(true, std::memory_order_relaxed);
  }
  /// The same until return_address(): for holders that report when they are done, such as DLPack's.
  void lend_address() {
    forget_magnitude_bound();
    lendings_.fetch_add(1, std::memory_order_relaxed);
    holders_.fetch_add(1, std::memory_order_relaxed);
    forget_derived();
  }
  void return_address() {
    forget_magnitude_bound();
    forget_derived();
    holders_.fetch_sub(1, std::memory_order_relaxed);
  }
  /// Whether someone may currently write through an address, so that values read before may be stale at any time.
  bool address_held() const {
    return address_given_.load(std::memory_order_relaxed) || holders_.load(std::memory_order_relaxed) != 0;
  }
  /// Two reads return the same number only if no write happened between them, through a tensor or a lent address,
  /// provided that address_held() is false at both.
  std::uint64_t contents() const { return std::uint64_t{lendings_.load(std::memory_order_relaxed)} << 32 | version(); }
  /// Identifies data that a kernel derived from the contents, such as weights in its own layout: a number for the
  /// layout, and the part of the block it was derived from.
  using DerivedKey = std::array<std::int64_t, 12>;
  /// The data stored by keep_derived() under `key` if nothing was written since, else null. Any number of threads may
  /// call it.
  Ref<Storage> derived(const DerivedKey& key);
  /// Whether it is worth storing something under `key`: it was requested before with the same contents, changes are
  /// noticed (address_held()), and there is room (at most four per block).
  bool keeps_derived(const DerivedKey& key);
  /// Stores `data`, derived from the current contents, until the next write or the end of the block's life.
  void keep_derived(const DerivedKey& key, Ref<Storage> data);
  /// The contents were written without incrementing the version.
  void forget_derived() {
    if (derived_.load(std::memory_order_relaxed)) [[unlikely]]
      drop_derived();
  }

  /// How contents of the host get into a device's memory, for keep_on_host().
  struct Bring {
    const char* made_by;  ///< the op that they are the result of; lives as long as the program
    /// Copies them; the device's later work on any queue sees them.
    void (*copy)(const Bring& how, const Storage& block, void* to, const Storage& from);
    /// Called afterwards, when data() gives the address again.
    void (*copied)(const Bring& how, Storage& block, Storage& from);
  };
  /// The contents of the whole block are in `copy`, a block of the CPU of the same size, and come to the device when
  /// data() is called; who writes them anew writes there, too. Not for blocks whose address is held.
  void keep_on_host(Ref<Storage> copy, const Bring& how);
  /// That copy; null where the contents are on the device.
  Ref<Storage> host_copy() const;

  /// A number that is unique among all storages of this run; unlike addresses, it is never reused.
  std::uint64_t id() const { return id_; }

  void retain() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy();
  }
  std::uint32_t use_count() const { return refs_.load(std::memory_order_relaxed); }

 private:
  struct Derived;
  struct HostCopy;
  void drop_derived();
  void bring() const;
  Storage(void* data, std::size_t bytes, Device device, Allocator* allocator, std::function<void()>* deleter);
  void destroy();

  std::atomic<std::uint32_t> refs_{1};
  std::atomic<std::uint32_t> version_{0};
  static constexpr float kNoBound = std::numeric_limits<float>::infinity();
  std::atomic<std::uint64_t> bound_{std::bit_cast<std::uint32_t>(kNoBound)};  // its version, and the bound
  void* data_;
  std::size_t bytes_;
  Allocator* allocator_;
  std::function<void()>* deleter_;
  std::uint64_t id_;
  void* home_queue_ = nullptr;
  mutable std::atomic<HostCopy*> host_copy_{nullptr};
  std::atomic<Derived*> derived_{nullptr};
  Device device_;
  std::atomic<bool> address_given_;
  std::atomic<std::uint32_t> holders_{0};   // of lent addresses, currently
  std::atomic<std::uint32_t> lendings_{0};  // so far
};

}  // namespace halfstep
