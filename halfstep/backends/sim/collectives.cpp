// SPDX-License-Identifier: Apache-2.0
// A reduction: rank r gets part r of everybody's values, combines them in the order of ranks, and, in an all-reduce,
// gives the result to all. All else only moves bytes.
#include "collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "exchange.h"
#include "halfstep/runtime/plugin_numbers.h"
#include "queue.h"

namespace sim::collectives {
namespace {

using namespace halfstep_plugin_numbers;

constexpr uint64_t kMessages = ~uint64_t{0};  // in the place of a call's number

Promise the_promise = Promise::in_order;

struct Group {
  Group(Device& device, const Exchange::Id& id, int ranks, int rank)
      : device(device), ranks(ranks), rank(rank), exchange(id, ranks, rank) {}

  Device& device;
  const int ranks, rank;
  Exchange exchange;
  std::atomic<bool> aborted{false};

  std::mutex mutex;
  uint64_t calls = 0;
  std::string failure;  ///< of the first call that went wrong
};
// A handle keeps the group; so does the work in queues.
using Handle = std::shared_ptr<Group>;
Handle& handle_of(halfstep_group* group) { return *reinterpret_cast<Handle*>(group); }

// --- reductions

template <class C>
C combine(int32_t reduce, C a, C b) {
  using Wrapping = std::conditional_t<std::is_integral_v<C>,
                                      std::make_unsigned_t<std::conditional_t<std::is_integral_v<C>, C, int>>, C>;
  const bool keeps_nan = b != b && a == a;
  switch (reduce) {
    case HALFSTEP_REDUCE_PROD:
      return static_cast<C>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
    case HALFSTEP_REDUCE_MIN:
      return keeps_nan || b < a ? b : a;
    case HALFSTEP_REDUCE_MAX:
      return keeps_nan || b > a ? b : a;
    default:
      return static_cast<C>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
  }
}

// The part of each rank lies `stride` bytes behind that of the one before.
template <class T>
void reduce_values(int32_t reduce, const char* parts, uint64_t stride, int ranks, int first, bool rounds, char* out,
                   uint64_t n) {
  using C = Compute<T>;
  for (uint64_t i = 0; i < n; ++i) {
    C sum{};
    for (int k = 0; k < ranks; ++k) {
      T value;
      const auto rank = static_cast<uint64_t>((first + k) % ranks);
      std::memcpy(&value, parts + rank * stride + i * sizeof value, sizeof value);
      const C next = load(value);
      sum = k == 0 ? next : combine<C>(reduce, sum, next);
      if (rounds) sum = load(convert<T>(sum));
    }
    if (reduce == HALFSTEP_REDUCE_MEAN) sum = sum / static_cast<C>(ranks);
    const T result = convert<T>(sum);
    std::memcpy(out + i * sizeof result, &result, sizeof result);
  }
}

void reduce_parts(int32_t dtype, int32_t reduce, const char* parts, uint64_t stride, const Group& group, char* out,
                  uint64_t n) {
  const bool ring = the_promise == Promise::ring;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, Bool>) {
      reduce_values<T>(reduce, parts, stride, group.ranks, ring ? (group.rank + 1) % group.ranks : 0, ring, out, n);
    }
  });
}

halfstep_status check_reduction(int32_t dtype, int32_t reduce) {
  if (reduce < HALFSTEP_REDUCE_SUM || reduce > HALFSTEP_REDUCE_MEAN) {
    return fail(HALFSTEP_FAILED, 0, "unknown reduction %d", reduce);
  }
  const bool mean = reduce == HALFSTEP_REDUCE_MEAN;
  if (dtype == HALFSTEP_BOOL || (mean && !is_floating(dtype))) {
    return fail(HALFSTEP_UNSUPPORTED, 0, "no reduction %d of %s", reduce, dtype_name(dtype));
  }
  if (the_promise == Promise::ring && (mean || dtype == HALFSTEP_F8E4M3 || dtype == HALFSTEP_F8E5M2)) {
    return fail(HALFSTEP_UNSUPPORTED, 0, "a ring has no reduction %d of %s", reduce, dtype_name(dtype));
  }
  return HALFSTEP_OK;
}

// --- work

class CollectiveWork : public Work {
 public:
  CollectiveWork(const char* name, Handle group, int32_t dtype)
      : Work(Kind::copy, 0), name_(name), group_(std::move(group)), dtype_(dtype) {}

  std::string run() const final {
    std::string wrong = group_->aborted ? "the group was aborted" : exchange();
    if (!wrong.empty()) {
      // For group_error: calls that wait for the queue know nothing of other ranks.
      const std::lock_guard lock(group_->mutex);
      if (group_->failure.empty()) group_->failure = std::move(wrong);
    }
    return {};
  }
  void corrupt() const final {
    if (out_ == nullptr) return;
    with_type(dtype_, [&](auto type) {
      using T = decltype(type);
      T value;
      std::memcpy(&value, out_, sizeof value);
      if constexpr (!std::is_same_v<T, Bool>) {
        const auto wide = load(value);
        value = convert<T>(static_cast<Compute<T>>(wide == 0 ? 1 : wide + wide / 2));
      }
      std::memcpy(out_, &value, sizeof value);
    });
  }
  const char* op() const final { return name_; }

  /// Or only of those that it names.
  virtual bool of_all_ranks() const { return true; }
  uint64_t number = 0;  ///< of the call

 protected:
  virtual std::string exchange() const = 0;
  std::string transfer(std::span<const Transfer> transfers) const {
    return group_->exchange.run(
        transfers, number, [&] { return group_->aborted.load() || group_->device.lost() || machine().ending.load(); });
  }
  uint64_t item() const { return item_size(dtype_); }
  /// Of a rank that isn't this one.
  template <class F>
  void others(F&& f) const {
    for (int r = 0; r < group_->ranks; ++r) {
      if (r != group_->rank) f(r);
    }
  }
  /// Everybody's `bytes` at `from` to everybody's place in `to`.
  std::string gather(const char* from, char* to, uint64_t bytes) const {
    std::vector<Transfer> all;
    others([&](int r) {
      all.push_back({r, const_cast<char*>(from), bytes, false});
      all.push_back({r, to + static_cast<uint64_t>(r) * bytes, bytes, true});
    });
    char* own = to + static_cast<uint64_t>(group_->rank) * bytes;
    if (own != from) std::memmove(own, from, bytes);
    return transfer(all);
  }
  /// Part r at `from` to rank r.
  std::string swap(const char* from, char* to, uint64_t bytes) const {
    std::vector<Transfer> all;
    others([&](int r) {
      const uint64_t at = static_cast<uint64_t>(r) * bytes;
      all.push_back({r, const_cast<char*>(from) + at, bytes, false});
      all.push_back({r, to + at, bytes, true});
    });
    const uint64_t own = static_cast<uint64_t>(group_->rank) * bytes;
    std::memcpy(to + own, from + own, bytes);
    return transfer(all);
  }

  const char* name_;
  Handle group_;
  int32_t dtype_;
  char* out_ = nullptr;  ///< a place of the result, for corrupt()
};

class AllReduce final : public CollectiveWork {
 public:
  AllReduce(Handle group, const char* in, char* out, uint64_t count, int32_t dtype, int32_t reduce)
      : CollectiveWork("all_reduce", std::move(group), dtype), in_(in), count_(count), reduce_(reduce) {
    out_ = out;
  }

 private:
  std::string exchange() const override {
    const auto ranks = static_cast<uint64_t>(group_->ranks), rank = static_cast<uint64_t>(group_->rank);
    const uint64_t share = (count_ + ranks - 1) / ranks, bytes = share * item();
    // Equal parts; what is beyond the end is nobody's.
    std::vector<char> whole(ranks * bytes), parts(ranks * bytes);
    std::memcpy(whole.data(), in_, count_ * item());
    if (std::string wrong = swap(whole.data(), parts.data(), bytes); !wrong.empty()) return wrong;
    reduce_parts(dtype_, reduce_, parts.data(), bytes, *group_, whole.data() + rank * bytes, share);
    if (std::string wrong = gather(whole.data() + rank * bytes, whole.data(), bytes); !wrong.empty()) return wrong;
    std::memcpy(out_, whole.data(), count_ * item());
    return {};
  }
  const char* in_;
  uint64_t count_;
  int32_t reduce_;
};

class ReduceScatter final : public CollectiveWork {
 public:
  ReduceScatter(Handle group, const char* in, char* out, uint64_t count, int32_t dtype, int32_t reduce)
      : CollectiveWork("reduce_scatter", std::move(group), dtype), in_(in), count_(count), reduce_(reduce) {
    out_ = out;
  }

 private:
  std::string exchange() const override {
    const uint64_t bytes = count_ * item();
    std::vector<char> parts(static_cast<uint64_t>(group_->ranks) * bytes);
    if (std::string wrong = swap(in_, parts.data(), bytes); !wrong.empty()) return wrong;
    reduce_parts(dtype_, reduce_, parts.data(), bytes, *group_, out_, count_);
    return {};
  }
  const char* in_;
  uint64_t count_;
  int32_t reduce_;
};

class AllGather final : public CollectiveWork {
 public:
  AllGather(Handle group, const char* in, char* out, uint64_t count, int32_t dtype)
      : CollectiveWork("all_gather", std::move(group), dtype), in_(in), count_(count) {
    out_ = out;
  }

 private:
  std::string exchange() const override { return gather(in_, out_, count_ * item()); }
  const char* in_;
  uint64_t count_;
};

class AllToAll final : public CollectiveWork {
 public:
  AllToAll(Handle group, const char* in, char* out, uint64_t count, int32_t dtype)
      : CollectiveWork("all_to_all", std::move(group), dtype), in_(in), count_(count) {
    out_ = out;
  }

 private:
  std::string exchange() const override { return swap(in_, out_, count_ * item()); }
  const char* in_;
  uint64_t count_;
};

class SendReceive final : public CollectiveWork {
 public:
  SendReceive(const char* name, Handle group, std::vector<Transfer> transfers, int32_t dtype)
      : CollectiveWork(name, std::move(group), dtype), transfers_(std::move(transfers)) {
    for (const Transfer& t : transfers_) {
      if (t.receive && t.bytes > 0) out_ = t.data;
    }
  }

 private:
  std::string exchange() const override { return transfer(transfers_); }
  bool of_all_ranks() const override { return false; }
  std::vector<Transfer> transfers_;
};

// --- calls

/// Memory of a call, which begins at a host's address.
struct Place {
  const void* host;
  uint64_t bytes;
  char* data = nullptr;  ///< where queues find it
};

/// Checks what all calls have in common, and enqueues `make(group)` with the places' memory.
template <class Make>
halfstep_status enqueue(const char* what, halfstep_group* handle, halfstep_queue* queue_handle, int32_t dtype,
                        std::span<Place> places, Make&& make) {
  return guarded([&]() -> halfstep_status {
    const Handle& group = handle_of(handle);
    Queue& queue = *reinterpret_cast<Queue*>(queue_handle);
    Device& device = group->device;
    if (device.lost()) return device.present();
    if (dtype < 0 || dtype > HALFSTEP_BOOL) return fail(HALFSTEP_FAILED, 0, "unknown dtype %d", dtype);
    if (&queue.device() != &device) return fail(HALFSTEP_FAILED, 0, "a queue of another device");
    if (queue.capture) return fail(HALFSTEP_UNSUPPORTED, 0, "graphs hold no collectives here");
    if (group->aborted) return fail(HALFSTEP_FAILED, 0, "the group was aborted");
    for (Place& place : places) {
      if (place.bytes == 0) continue;
      place.data = device.memory.translate(place.host, place.bytes);
      if (place.data == nullptr) {
        return fail(HALFSTEP_FAILED, 0, "%llu bytes at %p are not in the memory of this device",
                    static_cast<unsigned long long>(place.bytes), place.host);
      }
    }
    const FaultPlan faults = machine().faults.next_kernel(what);
    if (faults.lost) {
      device.lose();
      return fail(HALFSTEP_LOST, 0, "the device was lost, as ordered");
    }
    if (faults.unsupported) return fail(HALFSTEP_UNSUPPORTED, 0, "not supported, as ordered");
    if (faults.refuse) return fail(HALFSTEP_FAILED, 0, "refused, as ordered");
    std::shared_ptr<CollectiveWork> work = make(group);
    for (const Place& place : places) {
      if (place.bytes != 0) work->touches.push_back({place.data, place.data + place.bytes});
    }
    const std::lock_guard lock(group->mutex);
    work->number = work->of_all_ranks() ? ++group->calls : kMessages;
    queue.push(std::move(work), faults);
    return HALFSTEP_OK;
  });
}

uint64_t bytes_of(int64_t count, int32_t dtype) {
  return dtype < 0 || dtype > HALFSTEP_BOOL ? 0 : static_cast<uint64_t>(count) * item_size(dtype);
}
uint64_t ranks_of(halfstep_group* group) { return static_cast<uint64_t>(handle_of(group)->ranks); }

// --- the entries

halfstep_status group_id(void* id, uint64_t capacity, uint64_t* bytes) {
  return guarded([&]() -> halfstep_status {
    *bytes = 0;
    if (capacity < sizeof(Exchange::Id)) {
      return fail(HALFSTEP_FAILED, 0, "a group's id has %zu bytes, there is room for %llu", sizeof(Exchange::Id),
                  static_cast<unsigned long long>(capacity));
    }
    const Exchange::Id made = Exchange::make_id();
    std::memcpy(id, &made, sizeof made);
    *bytes = sizeof made;
    return HALFSTEP_OK;
  });
}

halfstep_status group_create(int32_t index, int32_t ranks, int32_t rank, const void* id, uint64_t bytes,
                             halfstep_group** group) {
  return guarded([&]() -> halfstep_status {
    *group = nullptr;
    Device* device = machine().device(index);
    if (device == nullptr) return HALFSTEP_FAILED;
    if (device->lost()) return device->present();
    if (ranks < 1 || ranks > Exchange::kMostRanks || rank < 0 || rank >= ranks) {
      return fail(HALFSTEP_FAILED, 0, "expected a rank of 1 to %d, got %d of %d", Exchange::kMostRanks, rank, ranks);
    }
    Exchange::Id given;
    if (bytes != sizeof given) {
      return fail(HALFSTEP_FAILED, 0, "expected a group's id of %zu bytes, got %llu", sizeof given,
                  static_cast<unsigned long long>(bytes));
    }
    std::memcpy(&given, id, sizeof given);
    if (machine().faults.next_kernel("group_create").refuse) return fail(HALFSTEP_FAILED, 0, "refused, as ordered");
    *group = reinterpret_cast<halfstep_group*>(new Handle(std::make_shared<Group>(*device, given, ranks, rank)));
    return HALFSTEP_OK;
  });
}

halfstep_status group_destroy(halfstep_group* group) {
  delete &handle_of(group);
  return HALFSTEP_OK;
}

halfstep_status group_abort(halfstep_group* handle) {
  Group& group = *handle_of(handle);
  group.aborted = true;
  group.exchange.abort();
  return HALFSTEP_OK;
}

halfstep_status group_error(halfstep_group* handle) {
  return guarded([&]() -> halfstep_status {
    Group& group = *handle_of(handle);
    if (group.device.lost()) return group.device.present();
    const std::lock_guard lock(group.mutex);
    return group.failure.empty() ? HALFSTEP_OK : fail(HALFSTEP_FAILED, 0, "%s", group.failure.c_str());
  });
}

halfstep_status all_reduce(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype, int32_t reduce) {
  if (const auto status = check_reduction(dtype, reduce)) return status;
  const uint64_t bytes = bytes_of(count, dtype);
  Place places[] = {{in, bytes}, {out, bytes}};
  return enqueue("all_reduce", group, queue, dtype, places, [&](const Handle& g) {
    return std::make_shared<AllReduce>(g, places[0].data, places[1].data, static_cast<uint64_t>(count), dtype, reduce);
  });
}

halfstep_status reduce_scatter(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                               int32_t dtype, int32_t reduce) {
  if (const auto status = check_reduction(dtype, reduce)) return status;
  const uint64_t bytes = bytes_of(count, dtype);
  Place places[] = {{in, ranks_of(group) * bytes}, {out, bytes}};
  return enqueue("reduce_scatter", group, queue, dtype, places, [&](const Handle& g) {
    return std::make_shared<ReduceScatter>(g, places[0].data, places[1].data, static_cast<uint64_t>(count), dtype,
                                           reduce);
  });
}

halfstep_status all_gather(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype) {
  const uint64_t bytes = bytes_of(count, dtype);
  Place places[] = {{in, bytes}, {out, ranks_of(group) * bytes}};
  return enqueue("all_gather", group, queue, dtype, places, [&](const Handle& g) {
    return std::make_shared<AllGather>(g, places[0].data, places[1].data, static_cast<uint64_t>(count), dtype);
  });
}

halfstep_status all_to_all(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype) {
  const uint64_t bytes = ranks_of(group) * bytes_of(count, dtype);
  Place places[] = {{in, bytes}, {out, bytes}};
  return enqueue("all_to_all", group, queue, dtype, places, [&](const Handle& g) {
    return std::make_shared<AllToAll>(g, places[0].data, places[1].data, static_cast<uint64_t>(count), dtype);
  });
}

halfstep_status broadcast(halfstep_group* group, halfstep_queue* queue, void* data, int64_t count, int32_t dtype,
                          int32_t root) {
  const int ranks = handle_of(group)->ranks, rank = handle_of(group)->rank;
  if (root < 0 || root >= ranks) {
    return fail(HALFSTEP_FAILED, 0, "expected a root from 0 to %d, got %d", ranks - 1, root);
  }
  const uint64_t bytes = bytes_of(count, dtype);
  Place places[] = {{data, bytes}};
  return enqueue("broadcast", group, queue, dtype, places, [&](const Handle& g) {
    std::vector<Transfer> transfers;
    if (rank != root) {
      transfers.push_back({root, places[0].data, bytes, true});
    } else {
      for (int r = 0; r < ranks; ++r) {
        if (r != root) transfers.push_back({r, places[0].data, bytes, false});
      }
    }
    return std::make_shared<SendReceive>("broadcast", g, std::move(transfers), dtype);
  });
}

halfstep_status send_receive(halfstep_group* group, halfstep_queue* queue, const halfstep_transfer* transfers,
                             int32_t count) {
  return guarded([&]() -> halfstep_status {
    const int ranks = handle_of(group)->ranks, rank = handle_of(group)->rank;
    std::vector<Place> places;
    for (int32_t i = 0; i < count; ++i) {
      const halfstep_transfer& t = transfers[i];
      if (t.peer < 0 || t.peer >= ranks || t.peer == rank) {
        return fail(HALFSTEP_FAILED, 0, "expected another rank of the %d, got %d", ranks, t.peer);
      }
      places.push_back({t.data, bytes_of(t.count, t.dtype)});
    }
    const int32_t dtype = count > 0 ? transfers[count - 1].dtype : int32_t{HALFSTEP_U8};
    return enqueue("send_receive", group, queue, dtype, places, [&](const Handle& g) {
      std::vector<Transfer> all;
      for (std::size_t i = 0; i < places.size(); ++i) {
        all.push_back({transfers[i].peer, places[i].data, places[i].bytes, transfers[i].receive != 0});
      }
      return std::make_shared<SendReceive>("send_receive", g, std::move(all), dtype);
    });
  });
}

}  // namespace

void fill(halfstep_plugin_table& table) {
  table.group_id = group_id;
  table.group_create = group_create;
  table.group_destroy = group_destroy;
  table.group_abort = group_abort;
  table.all_reduce = all_reduce;
  table.broadcast = broadcast;
  table.all_gather = all_gather;
  table.reduce_scatter = reduce_scatter;
  table.all_to_all = all_to_all;
  table.send_receive = send_receive;
  table.group_error = group_error;
}

void set_promise(Promise promise) { the_promise = promise; }
Promise promise() { return the_promise; }

}  // namespace sim::collectives
