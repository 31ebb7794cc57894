// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "halfstep/core/device.h"
#include "halfstep/core/export.h"

namespace halfstep {

class Event;

/// Options of Queue.
struct QueueOptions {
  /// 0 is the lowest; a device with fewer priorities uses its highest.
  int priority = 0;
};

/// An in-order sequence of work on a device (a CUDA stream). Ops go to the queue that is current on their thread and
/// return before they are done; reading a value waits. Queues of one device run concurrently; use an Event to order
/// work on one queue after work on another. On the CPU all work is done when the call returns, and queues do nothing.
///
/// Handles are cheap; the device's queue is destroyed with the last one, after its work is done.
class HS_API Queue {
 public:
  /// A new queue. Throws DeviceError.
  explicit Queue(Device device, const QueueOptions& options = {});
  /// The default queue.
  static Queue default_queue(Device device);
  /// The current queue of this thread: the innermost QueueGuard's, else the default one.
  static Queue current(Device device);

  /// The options it was created with.
  Device device() const;
  int priority() const;
  /// Waits until its work is done. Throws DeviceError with the op that failed, if one did.
  void synchronize() const;
  /// Whether its work is done.
  bool query() const;
  /// Later work waits for what `event` has recorded.
  void wait(const Event& event) const;
  /// The plug-in's queue; null on the CPU.
  void* native() const;
  friend bool operator==(const Queue& a, const Queue& b) { return a.impl_ == b.impl_; }

  struct Impl;

 private:
  friend class QueueGuard;
  explicit Queue(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

/// Makes a queue current on this thread for the guard's lifetime.
class HS_API QueueGuard {
 public:
  explicit QueueGuard(const Queue& queue);
  ~QueueGuard();
  QueueGuard(const QueueGuard&) = delete;
  QueueGuard& operator=(const QueueGuard&) = delete;

 private:
  Device device_;
  std::shared_ptr<Queue::Impl> outer_;
};

/// Options of Event.
struct EventOptions {
  bool timing = false;  ///< can be asked for elapsed times
};

/// A mark in a queue.
class HS_API Event {
 public:
  /// Throws DeviceError.
  explicit Event(Device device, const EventOptions& options = {});
  Device device() const;
  /// Marks the end of what is in the queue now; a second call moves the mark. Throws DeviceError for a queue of another
  /// device.
  void record(const Queue& queue) const;
  /// Marks this thread's current queue.
  void record() const;
  /// Whether the mark has been reached; true before the first record().
  bool query() const;
  /// Waits until it has been reached. Throws DeviceError with the op that failed, if one did.
  void synchronize() const;
  /// Milliseconds from this mark to `end`'s, on the device's clock (on the CPU: the host's). Both must have timing;
  /// waits for both. Throws DeviceError.
  double elapsed_ms(const Event& end) const;
  /// The plug-in's event; null on the CPU.
  void* native() const;

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

/// Waits until all work on a device is done. Throws DeviceError with the op that failed, if one did. Nothing on the
/// CPU.
HS_API void synchronize(Device device);
/// The plug-in's queue that is current on this thread; null on the CPU. For the library: no handle is created.
HS_API void* current_native_queue(Device device);
/// Whether every op waits until it is done, so that an error comes from the call that caused it (default: off, or
/// HALFSTEP_SYNC=1).
HS_API bool synchronous();
HS_API void set_synchronous(bool on);
/// Whether captured steps are replayed through a device's graphs where its plug-in has them, or kernel by kernel
/// (default: graphs, unless HALFSTEP_GRAPHS=0).
HS_API bool device_graphs();
HS_API void set_device_graphs(bool on);

}  // namespace halfstep
