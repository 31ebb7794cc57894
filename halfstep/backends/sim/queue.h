// SPDX-License-Identifier: Apache-2.0
// Queues, the work in them, events and graphs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device.h"

namespace sim {

/// A place in a queue that was marked: passed once, for good.
class Ticket {
 public:
  void pass(uint64_t time_ns);
  void wait();
  bool passed(uint64_t* time_ns = nullptr) const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  uint64_t time_ns_ = 0;
};

/// A record of an event takes a fresh ticket, and whoever waits keeps the one that was current then: so a second
/// record moves the event for later waits only, and an event may be destroyed while a queue has still to pass it.
class Event {
 public:
  Event(int32_t device, bool timing) : device(device), timing(timing) {}
  const int32_t device;
  const bool timing;
  /// The last record's ticket; null when there was none.
  std::shared_ptr<Ticket> ticket() const;
  void set_ticket(std::shared_ptr<Ticket> ticket);

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Ticket> ticket_;
};

/// A stretch of device memory, as queues see it.
struct Span {
  const char* begin;
  const char* end;
};

/// Something for a queue to do. It does not change when it is done, so that a graph can do it again.
class Work {
 public:
  enum class Kind { kernel, copy, mark, wait };
  Work(Kind kind, uint64_t call) : kind(kind), call(call) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// Returns what went wrong, or an empty text.
  virtual std::string run() const = 0;
  /// Spoils a value of the result.
  virtual void corrupt() const {}
  virtual const char* op() const { return ""; }

  const Kind kind;
  const uint64_t call;
  std::vector<Span> touches;  ///< device memory that is read or written
};

/// Work of a queue, recorded to be replayed.
struct Graph {
  int32_t device = 0;
  std::vector<std::shared_ptr<const Work>> work;
};

/// Work in order, on a thread of its own.
class Queue {
 public:
  Queue(Device& device, uint32_t number, int32_t priority);
  ~Queue();

  Device& device() const { return device_; }
  /// Kept for whoever asks; threads of all priorities are equal to the system.
  int32_t priority() const { return priority_; }

  /// Adds work, or records it while a graph is being made. Returns its number, for wait().
  uint64_t push(std::shared_ptr<const Work> work, const FaultPlan& faults = {});
  void mark(std::shared_ptr<Ticket> ticket);
  void wait_for(std::shared_ptr<Ticket> ticket);
  /// Waits until work of that number is done.
  void wait(uint64_t number);
  /// Waits for all work.
  void drain();
  bool idle() const;
  /// Whether work that isn't done reads or writes there.
  bool uses(const Span& span) const;
  /// Does what is left and ends the thread.
  void stop();

  /// Null unless the queue records instead of doing.
  std::unique_ptr<Graph> capture;

 private:
  struct Item {
    std::shared_ptr<const Work> work;
    FaultPlan faults;
  };
  void loop();
  void execute(const Item& item);
  void sleep(std::chrono::nanoseconds time) const;

  Device& device_;
  const uint32_t number_;
  const int32_t priority_;
  mutable std::mutex mutex_;
  std::condition_variable added_, done_;
  std::deque<Item> items_;
  std::shared_ptr<const Work> running_;
  uint64_t pushed_ = 0, finished_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses the others
};

inline Queue* queue_of(halfstep_queue* queue) { return reinterpret_cast<Queue*>(queue); }

/// An error while the queue's work is being recorded, `what` being none of it.
inline halfstep_status refuse_while_recording(const Queue& queue, const char* what) {
  if (!queue.capture) return HALFSTEP_OK;
  return fail(HALFSTEP_FAILED, 0, "%s: the queue's work is being recorded into a graph, which can't hold this", what);
}

}  // namespace sim
