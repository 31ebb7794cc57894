// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "halfstep/core/export.h"

namespace halfstep::detail {

/// Processors that this process may use, at least 1: those of its affinity when it was first asked, or fewer where a
/// control group's quota gives less time (rounded up).
HS_API int processors() noexcept;

/// The least quota in processors that control groups of Linux set, 0 where there is none: cpu.max of version 2, or
/// cpu.cfs_quota_us of version 1, of the group and of those above it. `groups`: the text of /proc/self/cgroup;
/// `root`: where the groups are mounted.
HS_API double processor_quota(std::string_view groups, const std::string& root);

}  // namespace halfstep::detail
