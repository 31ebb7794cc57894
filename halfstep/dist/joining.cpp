// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/dist/joining_internal.h"
#include "halfstep/ops/create.h"

namespace halfstep::dist::detail {

Joining::Turn Joining::announce(Turn own) {
  if (CaptureSink* sink = capture_sink()) [[unlikely]]
    sink->refuse("other ranks may be at the end of their loops (join)");
  const CapturePause pause;
  const TensorOptions here{.dtype = i64, .device = Device{}};
  const Tensor mine = tensor_from_integers({static_cast<std::int64_t>(own)}, {1}, here),
               all = empty({group_.size()}, here);
  group_.all_gather(all, mine, "who goes on").wait();
  const auto turns = all.to_vector<std::int64_t>();
  auto turn = Turn::none;
  int active = 0, first = 0;
  std::string done;
  for (int r = group_.size(); r-- > 0;) {
    const auto theirs = static_cast<Turn>(turns[static_cast<std::size_t>(r)]);
    if (theirs == Turn::none) {
      done = std::to_string(r) + (done.empty() ? "" : ", ") + done;
      continue;
    }
    if (turn != Turn::none && theirs != turn) {
      fail<DistError>(
          "data_parallel: join: expected the same forward and backward passes on all ranks, but rank {} "
          "{} where rank {} {}",
          r, theirs == Turn::reduce ? "reduces gradients" : "takes over buffers", first,
          turn == Turn::reduce ? "reduces gradients" : "takes over buffers");
    }
    turn = theirs;
    first = r;
    ++active;
  }
  if (active == 0) return Turn::none;
  active_ = active;
  first_ = first;
  if (active == group_.size()) return turn;
  shadowed_ = true;
  if (options_.throw_on_early_termination) {
    fail<DistError>("data_parallel: join: expected as many steps on all ranks, but the loop of rank {} is over", done);
  }
  return turn;
}

double Joining::factor() const {
  return options_.divide_by_initial_world_size ? 1 : static_cast<double>(group_.size()) / active_;
}

}  // namespace halfstep::dist::detail
