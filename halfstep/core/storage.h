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
  /// Takes over one count that the caller holds.
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

/// Where the memory of a device comes from. Implementations are thread-safe and live to the end of the program.
class HS_API Allocator {
 public:
  virtual ~Allocator() = default;
  /// At least `bytes` bytes, aligned to 64; throws DeviceError when there are none left. `bytes` may be 0.
  virtual void* allocate(std::size_t bytes) = 0;
  /// Gives back what allocate(bytes) returned.
  virtual void deallocate(void* data, std::size_t bytes) noexcept = 0;
  /// The device's queue whose work may use fresh memory at once, where use by it has not to be told to used_on(); null
  /// on the CPU, and where only the allocator knows whose memory it is.
  virtual void* home_queue() { return nullptr; }
  /// Work of another queue than the home queue uses the memory: it is not handed out again before that is done.
  virtual void used_on(void* data, void* queue) noexcept {
    (void)data;
    (void)queue;
  }
};

/// The allocator of a device; the runtime registers one for each. Throws DeviceError when the device has none.
HS_API Allocator& allocator_for(Device device);
/// Makes `allocator` the device's.
HS_API void set_allocator(Device device, Allocator* allocator);

/// A block of memory of one device that tensors share, with the version that every write through a tensor raises.
class HS_API Storage {
 public:
  /// Fresh memory, not cleared.
  static Ref<Storage> allocate(std::size_t bytes, Device device);
  /// Memory of someone else's; `deleter` (may be empty) runs when the last tensor lets go.
  static Ref<Storage> wrap(void* data, std::size_t bytes, Device device, std::function<void()> deleter);

  /// The block's start, its size and where it lies. For the library and for extensions: who writes through this address
  /// raises the version afterwards, or calls give_address().
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// The queue whose use of the memory goes without saying (Allocator::home_queue()); null for none.
  void* home_queue() const { return home_queue_; }
  /// Work of `queue` uses the memory: called for every tensor of a call on a device.
  void use_on(void* queue) {
    if (queue != home_queue_ && allocator_) [[unlikely]]
      allocator_->used_on(data_, queue);
  }
  /// How many writes there were; a saved tensor whose storage has another version than when it was saved was changed.
  std::uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() { version_.fetch_add(1, std::memory_order_relaxed); }
  /// No floating value in the block is larger in magnitude, nor NaN; infinity where nothing is known. Said by kernels
  /// that know from their inputs, so that a gradient scaler needn't read what was just written.
  float magnitude_bound() const {
    const std::uint64_t b = bound_.load(std::memory_order_relaxed);
    return b >> 32 == version() ? std::bit_cast<float>(static_cast<std::uint32_t>(b)) : kNoBound;
  }
  /// Holds until the next write, or until someone gets the address (forget_magnitude_bound()).
  void set_magnitude_bound(float bound) {
    bound_.store(std::uint64_t{version()} << 32 | std::bit_cast<std::uint32_t>(bound), std::memory_order_relaxed);
  }
  void forget_magnitude_bound() { set_magnitude_bound(kNoBound); }

  /// Someone has the block's address and may write through it without a word, for as long as the block lives: nothing
  /// is known of the contents, and nothing derived from them is kept any more.
  void give_address() {
    forget_magnitude_bound();
    if (!address_given_.load(std::memory_order_relaxed)) address_given_.store(true, std::memory_order_relaxed);
  }
  /// The same until return_address(): for holders that say when they are done, such as DLPack's.
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
  /// Whether someone may write through an address now, so that what was read before may be out of date at any time.
  bool address_held() const {
    return address_given_.load(std::memory_order_relaxed) || holders_.load(std::memory_order_relaxed) != 0;
  }
  /// A number that two reads share only if no write came between them, through a tensor or through a lent address,
  /// while address_held() is false at both.
  std::uint64_t contents() const { return std::uint64_t{lendings_.load(std::memory_order_relaxed)} << 32 | version(); }
  /// What a kernel made of the contents, such as weights in an order of its own: a number for the order, and which part
  /// of the block it was made of.
  using DerivedKey = std::array<std::int64_t, 12>;
  /// What keep_derived() kept under `key`, if nothing was written since; else null. Any number of threads may ask.
  Ref<Storage> derived(const DerivedKey& key);
  /// Whether it pays to keep something under `key`: it was asked before, with the same contents, whose changes are seen
  /// (address_held()), and there is room: at most four a block.
  bool keeps_derived(const DerivedKey& key);
  /// Keeps `data`, made of the contents as they are, until the next write or the block's end.
  void keep_derived(const DerivedKey& key, Ref<Storage> data);
  /// The contents were written without raising the version.
  void forget_derived() {
    if (derived_.load(std::memory_order_relaxed)) [[unlikely]]
      drop_derived();
  }

  /// A number that no other storage of this run has had: addresses come back, these don't.
  std::uint64_t id() const { return id_; }

  void retain() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy();
  }
  std::uint32_t use_count() const { return refs_.load(std::memory_order_relaxed); }

 private:
  struct Derived;
  void drop_derived();
  Storage(void* data, std::size_t bytes, Device device, Allocator* allocator, std::function<void()>* deleter);
  void destroy();

  std::atomic<std::uint32_t> refs_{1};
  std::atomic<std::uint32_t> version_{0};
  static constexpr float kNoBound = std::numeric_limits<float>::infinity();
  std::atomic<std::uint64_t> bound_{std::bit_cast<std::uint32_t>(kNoBound)};  // the version it is of, and the bound
  void* data_;
  std::size_t bytes_;
  Allocator* allocator_;
  std::function<void()>* deleter_;
  std::uint64_t id_;
  void* home_queue_ = nullptr;
  std::atomic<Derived*> derived_{nullptr};
  Device device_;
  std::atomic<bool> address_given_;
  std::atomic<std::uint32_t> holders_{0};   // of lent addresses, now
  std::atomic<std::uint32_t> lendings_{0};  // so far
};

}  // namespace halfstep
