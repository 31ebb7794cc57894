// SPDX-License-Identifier: Apache-2.0
#include "cli/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "cli/options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::cli {

void silence_fallback_warnings() {
  if (!std::getenv("HALFSTEP_LOG")) set_log_level(LogLevel::error);
}

int print_placement(const std::string& device, const PlacementOptions& o) {
  CommonOptions common;
  common.model = o.model;
  common.device = device;
  common.device_given = true;
  const Device where = apply_common(common);
  const training::NetworkInput input = checked_input(o.model, o.image_size);
  training::TrainConfig config = training::default_config(o.model, o.batch_size, where);
  config.amp = o.amp;
  as_usage([&] { training::check(config); });
  // The ops don't depend on the size of the pictures, but for their time.
  constexpr std::int64_t kSmall = 64;
  const std::int64_t size = o.image_size > 0 ? o.image_size : std::min(input.image_size, kSmall);
  fmt::print("a training step of {}{} on {}, {}, by {}\n", o.model,
             input.images ? fmt::format(" with images of {0}x{0}", size) : std::string(), where.str(),
             o.amp == "off" ? "float32" : training::amp_text(config), config.optimizer);
  std::fflush(stdout);
  silence_fallback_warnings();
  const auto calls = training::trace_step(config, size);
  std::vector<std::vector<std::string>> rows;
  std::set<std::string> native, moved;
  std::uint64_t native_calls = 0, moved_calls = 0;
  const auto count = [](std::uint64_t n) { return n == 0 ? std::string() : std::to_string(n); };
  for (const debug::Placement& p : debug::placements(calls)) {
    const bool away = p.path == ExecutionPath::fallback, host = p.device != where;
    if (!host) {
      (away ? moved : native).insert(p.op);
      (away ? moved_calls : native_calls) += p.calls();
    }
    rows.push_back({p.op, std::string(name(p.dtype)), count(p.forward), count(p.backward), count(p.other),
                    where.is_cpu() ? "cpu"
                    : host         ? "CPU: its tensors are there"
                                   : p.str()});
  }
  fmt::print("{}\n", table({"op", "dtype", "forward", "backward", "update", "runs"}, rows));
  if (where.is_cpu()) {
    fmt::print("{} ops in {} calls\n", native.size(), native_calls);
  } else if (moved.empty()) {
    fmt::print("all {} ops run on {}, in {} calls\n", native.size(), where.str(), native_calls);
  } else {
    fmt::print("{} of {} calls run on the CPU, with copies there and back: {}\n", moved_calls,
               native_calls + moved_calls, fmt::join(moved, ", "));
  }
  return kDone;
}

}  // namespace halfstep::cli
