// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/retired_groups_internal.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/dist/communication_thread_internal.h"
#include "halfstep/dist/device_group_internal.h"
#include "halfstep/dist/process_group_internal.h"

namespace halfstep::dist::detail {
namespace {

struct Retired {
  std::mutex mutex;
  std::map<GroupIdentity, RetiredGroup> groups;
};
// Never destroyed: handles may be static.
Retired& retired() {
  static Retired& all = *new Retired;
  return all;
}

bool has_all(std::vector<int> ranks, std::vector<int> some) {
  std::sort(ranks.begin(), ranks.end());
  std::sort(some.begin(), some.end());
  return std::includes(ranks.begin(), ranks.end(), some.begin(), some.end());
}

}  // namespace

GroupState::~GroupState() {
  if (comm && identity.number != 0) retire({identity, std::move(members), comm, std::move(device_group)});
}

void retire(RetiredGroup group) {
  const std::lock_guard lock(retired().mutex);
  const GroupIdentity identity = group.identity;
  retired().groups.emplace(identity, std::move(group));
}

std::vector<GroupIdentity> retired_within(const GroupState& group) {
  const std::lock_guard lock(retired().mutex);
  std::vector<GroupIdentity> found;
  for (const auto& [identity, one] : retired().groups) {
    if (has_all(group.members, one.members)) found.push_back(identity);
  }
  return found;
}

void free_retired(CommunicationThread& thread, const Call& call, const std::vector<GroupIdentity>& own,
                  std::span<const std::int64_t> counts) {
  const GroupState& group = *call.group;
  const auto size = static_cast<std::size_t>(group.size), me = static_cast<std::size_t>(group.rank);
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(GroupIdentity));
  std::vector<std::int64_t> bytes(size), first(size), offsets(size);
  std::int64_t total = 0;
  for (std::size_t r = 0; r < size; ++r) {
    bytes[r] = counts[r] * kBytes;
    first[r] = total;
    offsets[r] = total * kBytes;
    total += counts[r];
  }
  if (total == 0) return;
  static auto& all = *new std::vector<GroupIdentity>;  // of the thread; MPI may use it to the end
  all.assign(static_cast<std::size_t>(total), {});
  std::copy(own.begin(), own.end(), all.begin() + first[me]);
  const halfstep_mpi_parts parts{all.data(), bytes.data(), offsets.data()};
  halfstep_mpi_request* request = nullptr;
  const int code = thread.mpi().start_allgatherv(group.comm, &parts, &request);
  thread.finish(code, request, call);

  std::map<int, std::size_t> place;  // of a rank of the job in this group
  for (std::size_t r = 0; r < size; ++r) place[group.members[r]] = r;
  // Those of one rank are sorted.
  const auto has = [&](std::size_t r, const GroupIdentity& identity) {
    const auto begin = all.begin() + first[r];
    return std::binary_search(begin, begin + counts[r], identity);
  };
  for (const GroupIdentity& identity : own) {
    RetiredGroup one;
    {
      const std::lock_guard lock(retired().mutex);
      const auto found = retired().groups.find(identity);
      const std::vector<int>& members = found->second.members;
      if (!std::all_of(members.begin(), members.end(), [&](int m) { return has(place.at(m), identity); })) continue;
      one = std::move(found->second);
      retired().groups.erase(found);
    }
    release(thread, call, one.comm, std::move(one.devices));
  }
}

void release(CommunicationThread& thread, const Call& call, halfstep_mpi_comm* comm,
             std::shared_ptr<DeviceGroup> devices) {
  if (devices) destroy_device_group(thread, call, std::move(devices));
  if (thread.mpi().comm_free(comm) != 0) {
    thread.give_up(fmt::format("{}: MPI can't free a communicator", call.title()));
  }
}

}  // namespace halfstep::dist::detail
