// SPDX-License-Identifier: Apache-2.0
// Internal: a send or receive under way. A header with dtype and size goes ahead of the data, so that the receiver can
// say what came in place of what it expected.
#pragma once

#include <cstring>
#include <memory>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/dist/communication_thread_internal.h"

namespace halfstep::dist::detail {

struct CommunicationThread::Message {
  explicit Message(std::shared_ptr<Call> c) : call(std::move(c)), since(Clock::now()), checked(since) {}

  std::shared_ptr<Call> call;
  Clock::time_point since, checked;

  bool begun() const { return stage_ != Stage::waiting; }
  /// Between the same ranks with the same tag: data are told apart from headers by their order only.
  bool same_way(const Message& o) const {
    return call->kind == o.call->kind && call->group == o.call->group && call->peer == o.call->peer &&
           call->tag == o.call->tag;
  }

  /// Goes on as far as it can without waiting; true when it is done. `error`: MPI's. Throws DistError when what came
  /// isn't what was expected, after all of it has come.
  bool progress(const halfstep_mpi_table& mpi, int& error) {
    while (true) {
      std::int32_t done = 1;
      if (request_) {
        error = mpi.test(request_, &done);
        if (error != 0 || !done) return false;
        request_ = std::exchange(behind_, nullptr);
        if (request_) continue;
      }
      if (stage_ == Stage::data) {
        finish();
        return true;
      }
      error = next(mpi);
      if (error != 0) return false;
    }
  }

 private:
  enum class Stage { waiting, header, data };
  struct Header {
    std::int64_t count;
    std::int32_t dtype;
    std::int32_t reserved;
  };

  int next(const halfstep_mpi_table& mpi) {
    Call& c = *call;
    const bool sends = c.kind == CallKind::send;
    if (stage_ == Stage::waiting) {
      stage_ = Stage::header;
      c.buffers.emplace_back(sizeof(Header));
      header_ = c.buffers.back().data();
      const Header own{c.count, static_cast<std::int32_t>(c.dtype), 0};
      std::memcpy(header_, &own, sizeof(own));
      if (!sends) return mpi.start_receive(c.group->comm, header_, sizeof(Header), c.peer, c.tag, &request_);
      // Both at once: the header of the next message may not come between them.
      stage_ = Stage::data;
      const int error = mpi.start_send(c.group->comm, header_, sizeof(Header), c.peer, c.tag, &request_);
      if (error != 0 || c.bytes() == 0) return error;
      return mpi.start_send(c.group->comm, c.input, c.bytes(), c.peer, c.tag, &behind_);
    }
    stage_ = Stage::data;
    Header came;
    std::memcpy(&came, header_, sizeof(came));
    void* into = c.output;
    const auto dtype = static_cast<DType>(came.dtype);
    const auto bytes = came.count * static_cast<std::int64_t>(item_size(dtype));
    if (came.count != c.count || dtype != c.dtype) {
      wrong_ = fmt::format("{}: expected {} elements of {}, rank {} sent {} of {}", c.title(), c.count, name(c.dtype),
                           c.peer, came.count, name(dtype));
      c.buffers.emplace_back(static_cast<std::size_t>(bytes));
      into = c.buffers.back().data();
    }
    if (bytes == 0) return 0;
    return mpi.start_receive(c.group->comm, into, bytes, c.peer, c.tag, &request_);
  }

  void finish() {
    if (call->kind == CallKind::send) {
      StatsCounter::get().add({.bytes_sent = static_cast<std::uint64_t>(call->bytes())});
    }
    if (!wrong_.empty()) throw DistError(wrong_);
  }

  Stage stage_ = Stage::waiting;
  halfstep_mpi_request* request_ = nullptr;
  halfstep_mpi_request* behind_ = nullptr;  // of the data that follow the header
  char* header_ = nullptr;
  std::string wrong_;
};

}  // namespace halfstep::dist::detail
