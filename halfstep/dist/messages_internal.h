// SPDX-License-Identifier: Apache-2.0
// Internal: a send or receive under way. A header with dtype and size goes ahead of the data, so that the receiver can
// say what came in place of what it expected.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/dist/device_messages_internal.h"

namespace halfstep::dist::detail {

struct CommunicationThread::Message {
  explicit Message(std::shared_ptr<Call> c) : call(std::move(c)), since(Clock::now()), checked(since) {}

  std::shared_ptr<Call> call;
  Clock::time_point since, checked;

  bool begun() const { return stage_ != Stage::waiting; }
  /// It waits for its device, and in doing so for other messages.
  bool running() const { return running_; }
  /// Whether `later` has to wait until this is done, or its data are on their way: between the same ranks with the same
  /// tag data are told apart from headers by their order only.
  bool holds_up(const Message& later) const {
    const bool same_way = call->kind == later.call->kind && call->group == later.call->group &&
                          call->peer == later.call->peer && call->tag == later.call->tag;
    return same_way && begun() && (call->kind == CallKind::receive || stage_ != Stage::data);
  }

  /// Goes on as far as it can without waiting for another rank; true when it is done. `error`: MPI's. Throws DistError
  /// when what came isn't what was expected, after all of it has come.
  bool progress(CommunicationThread& thread, int& error) {
    try {
      return go_on(thread, error);
    } catch (const DeviceError& e) {
      thread.give_up(fmt::format("{}: {}", call->title(), e.what()));
    }
  }

 private:
  using Signal = DeviceMessages::Signal;
  enum class Stage { waiting, header, signals, data };
  struct Header {
    std::int64_t count;
    std::int32_t dtype;
    std::uint32_t offer;  ///< message_offer() of the sender; 0: data follow
  };

  bool sends() const { return call->kind == CallKind::send; }
  bool leads() const { return call->group->rank < call->peer; }

  bool go_on(CommunicationThread& thread, int& error) {
    while (true) {
      std::int32_t done = 1;
      if (request_) {
        error = thread.mpi().test(request_, &done);
        if (error != 0 || !done) return false;
        request_ = std::exchange(behind_, nullptr);
        if (request_) continue;
      }
      if (stage_ == Stage::signals && !follow_signals(thread)) return false;
      if (stage_ == Stage::data) {
        finish();
        return true;
      }
      error = next(thread);
      if (error != 0) return false;
    }
  }

  int next(CommunicationThread& thread) {
    if (stage_ == Stage::waiting) return start(thread);
    if (stage_ == Stage::header && sends()) {
      stage_ = Stage::signals;
      return 0;
    }
    if (stage_ == Stage::header) {
      std::memcpy(&came_, header_, sizeof(came_));
      if (came_.offer != 0) {
        stage_ = Stage::signals;
        const bool fits = came_.count == call->count && came_.dtype == static_cast<std::int32_t>(call->dtype);
        if (!fits || message_offer(*call) != came_.offer) {
          thread.device_messages().send(*call, Signal::host);
        } else if (leads()) {
          wants_device_ = true;
          return 0;
        } else {
          thread.device_messages().send(*call, Signal::willing);
          return 0;
        }
      }
    }
    stage_ = Stage::data;
    return sends() ? send_data(thread.mpi()) : receive_data(thread.mpi());
  }

  int start(CommunicationThread& thread) {
    Call& c = *call;
    const halfstep_mpi_table& mpi = thread.mpi();
    stage_ = Stage::header;
    c.buffers.emplace_back(sizeof(Header));
    header_ = c.buffers.back().data();
    const Header own{c.count, static_cast<std::int32_t>(c.dtype), sends() ? message_offer(c) : 0};
    std::memcpy(header_, &own, sizeof(own));
    if (!sends()) return mpi.start_receive(c.group->comm, header_, sizeof(Header), c.peer, c.tag, &request_);
    int error = mpi.start_send(c.group->comm, header_, sizeof(Header), c.peer, c.tag, &request_);
    if (error != 0 || own.offer != 0) return error;
    // Both at once: the header of the next message may not come between them.
    stage_ = Stage::data;
    halfstep_mpi_request* const header = std::exchange(request_, nullptr);
    error = send_data(mpi);
    behind_ = std::exchange(request_, header);
    return error;
  }

  int send_data(const halfstep_mpi_table& mpi) {
    Call& c = *call;
    if (c.on_device) stage_to_host(c);
    return c.bytes() == 0 ? 0 : mpi.start_send(c.group->comm, c.input, c.bytes(), c.peer, c.tag, &request_);
  }

  int receive_data(const halfstep_mpi_table& mpi) {
    Call& c = *call;
    const auto dtype = static_cast<DType>(came_.dtype);
    const auto bytes = came_.count * static_cast<std::int64_t>(item_size(dtype));
    void* into = nullptr;
    if (came_.count != c.count || dtype != c.dtype) {
      wrong_ = fmt::format("{}: expected {} elements of {}, rank {} sent {} of {}", c.title(), c.count, name(c.dtype),
                           c.peer, came_.count, name(dtype));
      c.buffers.emplace_back(static_cast<std::size_t>(bytes));
      into = c.buffers.back().data();
    } else {
      if (c.on_device) stage_to_host(c);
      into = c.output;
    }
    return bytes == 0 ? 0 : mpi.start_receive(c.group->comm, into, bytes, c.peer, c.tag, &request_);
  }

  // What device_messages_internal.h says. False while the other rank has to say something; otherwise the message is
  // done, or its data are to go by MPI.
  bool follow_signals(CommunicationThread& thread) {
    DeviceMessages& devices = thread.device_messages();
    while (true) {
      if (wants_device_) {
        if (Clock::now() < again_ || !devices.reserve()) return false;
        wants_device_ = false;
        devices.send(*call, Signal::go);
      }
      const std::optional<Signal> signal = devices.receive(*call);
      if (!signal) return false;
      switch (*signal) {
        case Signal::host:
          return true;  // next() begins with them
        case Signal::willing:
          wants_device_ = true;
          continue;
        case Signal::later:
          if (!leads()) {  // than what the other rank wanted
            devices.send(*call, Signal::later);
            continue;
          }
          devices.end_reservation();
          wants_device_ = true;
          again_ = Clock::now() + std::chrono::microseconds(200);
          continue;
        case Signal::go:
          devices.send(*call, Signal::ready);
          break;
        case Signal::ready:
          devices.end_reservation();
          break;
      }
      running_ = true;
      devices.transfer(*call);
      running_ = false;
      stage_ = Stage::data;
      return true;
    }
  }

  void finish() {
    if (sends()) StatsCounter::get().add({.bytes_sent = static_cast<std::uint64_t>(call->bytes())});
    if (!wrong_.empty()) throw DistError(wrong_);
    if (call->on_device) return_to_device(*call);
  }

  Stage stage_ = Stage::waiting;
  halfstep_mpi_request* request_ = nullptr;
  halfstep_mpi_request* behind_ = nullptr;  // of the data that follow the header
  char* header_ = nullptr;
  Header came_{};  // to a receiver
  std::string wrong_;
  bool wants_device_ = false, running_ = false;
  Clock::time_point again_;  // may be asked for the device
};

}  // namespace halfstep::dist::detail
