// SPDX-License-Identifier: Apache-2.0
// A group of devices is made when all ranks first have a collective for one: rank 0's id travels by MPI, and all create
// the group on a thread of its own.
#include "halfstep/dist/native_group_internal.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/log.h"

namespace halfstep::dist::detail {
namespace {

struct IdBlock {
  std::int32_t status = HALFSTEP_FAILED;
  std::uint32_t bytes = 0;
  char data[HALFSTEP_GROUP_ID_BYTES] = {};  // or the reason
};
struct Outcome {
  std::int32_t status = HALFSTEP_FAILED;
  std::int32_t follows = 0;  ///< given up because another rank failed
  char reason[248] = {};
};

template <std::size_t N>
void put_reason(char (&to)[N], const DeviceBackend& backend) {
  halfstep_error error{};
  error.size = sizeof(error);
  backend.table.error(&error);
  error.text[sizeof(error.text) - 1] = '\0';
  const std::string_view text = error.text[0] ? error.text : "no reason was given";
  to[text.copy(to, N - 1)] = '\0';
}

// What a thread of its own does: it waits for the other ranks, one of which may be gone, or have failed.
struct Creation {
  std::mutex mutex;
  std::condition_variable ended;
  bool over = false, unwanted = false;
  Outcome outcome;
  halfstep_group* group = nullptr;

  void run(const DeviceBackend& backend, int device, int ranks, int rank, const IdBlock& id) {
    halfstep_group* made = nullptr;
    Outcome came;
    came.status = backend.table.group_create(device, ranks, rank, id.data, id.bytes, &made);
    if (came.status != HALFSTEP_OK) put_reason(came.reason, backend);
    const std::lock_guard lock(mutex);
    over = true;
    outcome = came;
    group = made;
    if (unwanted) destroy(backend);
    ended.notify_all();
  }
  bool is_over() {
    const std::lock_guard lock(mutex);
    return over;
  }
  /// The outcome, or that nobody waits for it any more. A creation that doesn't wait for other ranks comes to its end:
  /// a process that ended first would take the device away from under it.
  Outcome take() {
    std::unique_lock lock(mutex);
    ended.wait_for(lock, std::chrono::seconds(1), [this] { return over; });
    unwanted = !over;
    return over ? outcome : Outcome{.status = HALFSTEP_FAILED, .follows = 1};
  }
  void discard(const DeviceBackend& backend) {
    const std::lock_guard lock(mutex);
    destroy(backend);
  }

 private:
  void destroy(const DeviceBackend& backend) {
    if (!group) return;
    backend.table.group_abort(group);
    backend.table.group_destroy(std::exchange(group, nullptr));
  }
};

// The ranks' outcomes, which come one by one: who fails is known to the others while they still wait for it. Never
// destroyed, as MPI may use its memory.
class Outcomes {
 public:
  Outcomes(CommunicationThread& thread, const Call& call)
      : thread_(thread), call_(call), all_(static_cast<std::size_t>(call.group->size)), open_(all_.size()) {
    each_other([&](int r, std::size_t k) {
      const int code = thread_.mpi().start_receive(call_.group->comm, &all_[k], sizeof(Outcome), r, kTag, &open_[k]);
      if (code != 0) thread_.finish(code, nullptr, call_);
    });
  }
  /// Whether another rank is known to have failed.
  bool any_failed() {
    bool failed = false;
    each_other([&](int, std::size_t k) {
      std::int32_t done = 0;
      if (open_[k]) {
        const int code = thread_.mpi().test(open_[k], &done);
        if (done || code != 0) open_[k] = nullptr;
        if (code != 0) thread_.finish(code, nullptr, call_);
      }
      failed = failed || (!open_[k] && all_[k].status != HALFSTEP_OK);
    });
    return failed;
  }
  /// Gives this rank's to all, and waits for those of all.
  const std::vector<Outcome>& exchange(const Outcome& own) {
    Outcome& mine = all_[static_cast<std::size_t>(call_.group->rank)] = own;
    std::vector<halfstep_mpi_request*> sends;
    each_other([&](int r, std::size_t) {
      halfstep_mpi_request* request = nullptr;
      const int code = thread_.mpi().start_send(call_.group->comm, &mine, sizeof(Outcome), r, kTag, &request);
      if (code != 0) thread_.finish(code, nullptr, call_);
      sends.push_back(request);
    });
    each_other([&](int, std::size_t k) {
      if (open_[k]) thread_.finish(0, std::exchange(open_[k], nullptr), call_);
    });
    for (halfstep_mpi_request* request : sends) thread_.finish(0, request, call_);
    return all_;
  }

 private:
  static constexpr int kTag = 32001;  // beyond those of messages
  template <class F>
  void each_other(F&& f) {
    for (int r = 0; r < call_.group->size; ++r) {
      if (r != call_.group->rank) f(r, static_cast<std::size_t>(r));
    }
  }
  CommunicationThread& thread_;
  const Call& call_;
  std::vector<Outcome> all_;
  std::vector<halfstep_mpi_request*> open_;
};

void refuse(const Call& call, Device device, const std::string& why) {
  call.group->no_device_group = true;
  if (call.group->rank != 0) return;
  log(LogLevel::warning,
      fmt::format("the collectives of {} can't be used: {}; tensors on it go through the host", device.str(), why));
}

}  // namespace

std::string reason_of(const DeviceBackend& backend) {
  char text[sizeof(halfstep_error::text)] = {};
  put_reason(text, backend);
  return text;
}

halfstep_group* make_native_group(CommunicationThread& thread, const Call& call) {
  const GroupState& group = *call.group;
  const Device device = call.on_device->device;
  DeviceBackend& backend = backend_for(device, name(call.kind));
  IdBlock& id = *new IdBlock;  // MPI, and the thread below, may use it to the end
  if (group.rank == 0) {
    std::uint64_t bytes = 0;
    id.status = backend.table.group_id(id.data, sizeof(id.data), &bytes);
    id.bytes = static_cast<std::uint32_t>(bytes);
    if (id.status != HALFSTEP_OK) put_reason(id.data, backend);
  }
  halfstep_mpi_request* request = nullptr;
  const int code = thread.mpi().start_broadcast(group.comm, &id, sizeof(IdBlock), 0, &request);
  thread.finish(code, request, call);
  if (id.status != HALFSTEP_OK) {
    id.data[sizeof(id.data) - 1] = '\0';
    refuse(call, device, id.data);
    return nullptr;
  }
  Outcomes& outcomes = *new Outcomes(thread, call);
  const auto creation = std::make_shared<Creation>();
  std::thread([creation, &id, &backend, device, ranks = group.size, rank = group.rank] {
    creation->run(backend, device.index, ranks, rank, id);
  }).detach();
  thread.wait_for(call, [&] { return creation->is_over() || outcomes.any_failed(); });
  const std::vector<Outcome>& all = outcomes.exchange(creation->take());
  const auto failed = std::find_if(all.begin(), all.end(), [](const Outcome& o) { return o.status != HALFSTEP_OK; });
  if (failed != all.end()) {
    const auto first =
        std::find_if(failed, all.end(), [](const Outcome& o) { return o.status != HALFSTEP_OK && o.follows == 0; });
    creation->discard(backend);
    const auto& why = first == all.end() ? *failed : *first;
    refuse(call, device, fmt::format("rank {}: {}", &why - all.data(), why.reason));
    return nullptr;
  }
  return creation->group;
}

void destroy_native_group(CommunicationThread& thread, const Call& call, const DeviceBackend& backend,
                          halfstep_group* group) {
  const auto over = std::make_shared<std::atomic<bool>>(false);
  std::thread([over, &backend, group] {
    backend.table.group_destroy(group);
    *over = true;
  }).detach();
  thread.wait_for(call, [&] { return over->load(); });
}

}  // namespace halfstep::dist::detail
