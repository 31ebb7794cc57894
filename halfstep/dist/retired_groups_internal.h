// SPDX-License-Identifier: Apache-2.0
// Internal: the end of groups that ProcessGroup::split() has made. MPI frees a communicator where all its ranks ask for
// it together, as do the libraries of devices, but handles go at any time on each rank. What a group holds is kept here
// from then on, and freed at the next split of a group that has all its ranks, if it is here on all of them.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "halfstep/dist/mpi_table_internal.h"

namespace halfstep::dist::detail {

class CommunicationThread;
class DeviceGroup;
struct Call;
struct GroupState;

/// Of a group made by split(): the same on all its ranks, and of no other one.
struct GroupIdentity {
  std::int64_t rank = 0;    ///< in the job, of the group's rank 0
  std::int64_t number = 0;  ///< that this rank has given; 0: not made by split()
  friend auto operator<=>(const GroupIdentity&, const GroupIdentity&) = default;
};

/// What a group holds that is freed by all its ranks together.
struct RetiredGroup {
  GroupIdentity identity;
  std::vector<int> members;  ///< ranks of the job
  halfstep_mpi_comm* comm = nullptr;
  std::shared_ptr<DeviceGroup> devices;
};

/// Takes what a group holds, the last handle of which has gone on this rank. From any thread.
void retire(RetiredGroup group);
/// Those whose ranks are all in `group`, in an order that is the same on all ranks.
std::vector<GroupIdentity> retired_within(const GroupState& group);
/// Frees those of `own` that all their ranks have retired. All ranks of the call's group call it, with what
/// retired_within() has given each; `counts` are their numbers of them.
void free_retired(CommunicationThread& thread, const Call& call, const std::vector<GroupIdentity>& own,
                  std::span<const std::int64_t> counts);
/// Frees what a group holds. All its ranks call it.
void release(CommunicationThread& thread, const Call& call, halfstep_mpi_comm* comm,
             std::shared_ptr<DeviceGroup> devices);

}  // namespace halfstep::dist::detail
