// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/loss_scale.h"

#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/dist/captured_internal.h"

namespace halfstep::dist {

bool debug_checks() {
  const char* text = std::getenv("HALFSTEP_DIST_DEBUG");
  return text && *text != '\0' && std::string_view(text) != "0";
}

void check_same_scale(const amp::GradScaler& scaler, const ProcessGroup& group) {
  if (group.size() == 1 || !scaler.is_enabled()) return;
  const auto check = [&scaler, g = group]() mutable {
    const std::vector<std::string> all = g.all_gather_text(
        fmt::format("{} (after {} steps without overflow)", scaler.get_scale(), scaler.growth_tracker()));
    std::map<std::string, std::string> ranks;
    for (std::size_t r = 0; r < all.size(); ++r)
      ranks[all[r]] += fmt::format("{}{}", ranks[all[r]].empty() ? "" : ", ", r);
    if (ranks.size() == 1) return;
    std::string text;
    for (std::size_t r = 0; r < all.size(); ++r) {
      const auto which = ranks.find(all[r]);
      if (which == ranks.end()) continue;
      const bool several = which->second.find(',') != std::string::npos;
      text += fmt::format("{}{} on rank{} {}", text.empty() ? "" : "; ", all[r], several ? "s" : "", which->second);
      ranks.erase(which);
    }
    fail<DistError>("loss scale: expected the same on all ranks, got {}", text);
  };
  if (const Tensor scale = scaler.scale_tensor(); scale.defined()) {
    detail::repeated({scale}, check);
  } else {
    detail::repeated({}, check);
  }
}

void share_found_inf(const amp::GradScaler& scaler, const amp::OptimizerBase& optimizer, const ProcessGroup& group) {
  if (!scaler.is_enabled()) return;
  const Tensor found = scaler.found_inf(optimizer);
  if (!found.defined()) fail<Error>("share_found_inf: expected unscale_() of this optimizer before");
  detail::repeated({found}, [found, g = group]() mutable {
    g.all_reduce(found, ReduceOp::max, "found inf").wait();
    found.storage()->bump_version();
  });
}

}  // namespace halfstep::dist
