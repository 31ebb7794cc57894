// SPDX-License-Identifier: Apache-2.0
// Internal: the process's Control, where its ranks watch each other.
#pragma once

#include <atomic>
#include <memory>

#include "halfstep/dist/control.h"
#include "halfstep/dist/process_group_internal.h"

namespace halfstep::dist::detail {

/// Starts it for the ranks of `world`: a failure ends their collectives, and the process's end says goodbye, or, with a
/// status other than 0, that this rank failed. `stop`, unless it is null, becomes true when this rank is asked to stop.
/// All ranks call it.
void start_watch(const std::shared_ptr<GroupState>& world, const Control::Exchange& exchange,
                 const std::atomic<bool>* stop);
/// Null until then, and when the process ends.
std::shared_ptr<Control> watch();
/// Whether expect_end() was called.
bool end_is_expected();

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
