// SPDX-License-Identifier: Apache-2.0
// One program as several processes: what each of them prints, computes on and waits for.
#pragma once

#include <functional>

#include "cli/train_options.h"

namespace halfstep::cli {

/// Joins the processes that a launcher of MPI started with this one, if one did: the configuration's group. Ranks other
/// than 0 print errors only, which begin with their number, and write no files. A rank's device is the one of its
/// number among the ranks of its machine; it has its share of the machine's processors. Throws UsageError where there
/// are fewer devices than ranks, where several ranks are to use another device than the first, or where processes were
/// started by something else.
void join_ranks(TrainOptions& o);

/// Runs `prepare`, which may fail on any rank, and waits for the others. The lowest rank that failed throws what it
/// threw; the others return false, and rank 0 says which one it was.
bool prepared_on_all(dist::ProcessGroup& group, const std::function<void()>& prepare);

/// Whether all ranks were told to do the same run, and read the same data: the flags that a run that resumes has to
/// have the same, and the checksums of the data. Where they differ rank 0 says which rank has what; all ranks call it.
bool same_on_all(TrainOptions& o);

}  // namespace halfstep::cli
