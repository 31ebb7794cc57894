// SPDX-License-Identifier: Apache-2.0
// Internal: the process's Control, where its ranks watch each other.
#pragma once

#include <atomic>
#include <memory>

#include "halfstep/dist/control.h"
#include "halfstep/dist/process_group_internal.h"

namespace halfstep::dist::detail {

/// Starts it for the ranks of `world`: a failure ends their collectives, and the process's end says goodbye, or, with a
/// status other than 0, that this rank failed. A rank hangs after `hang`, 0: never. `stop`, unless it is null, becomes
/// true when this rank is asked to stop. All ranks call it.
void start_watch(const std::shared_ptr<GroupState>& world, const Control::Exchange& exchange,
                 std::chrono::milliseconds hang, const std::atomic<bool>* stop);
/// The time after which a rank hangs: what HALFSTEP_HANG_TIMEOUT says, or `given`. Throws Error where it is too short
/// or no number.
std::chrono::milliseconds hang_timeout(std::chrono::milliseconds given);
/// Null until then, and when the process ends.
std::shared_ptr<Control> watch();
/// Whether expect_end() was called.
bool end_is_expected();

/// Counts, for its lifetime, a thread that waits for what other ranks do: it doesn't hang.
class WaitsForRanks {
 public:
  WaitsForRanks();
  ~WaitsForRanks();
  WaitsForRanks(const WaitsForRanks&) = delete;
  WaitsForRanks& operator=(const WaitsForRanks&) = delete;
};

/// Tells the others, for its lifetime, that this rank is in a collective.
class Watched {
 public:
  explicit Watched(const Call& call);
  ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

 private:
  std::shared_ptr<Control> by_;
};

}  // namespace halfstep::dist::detail
