// SPDX-License-Identifier: Apache-2.0
#include "cli/chosen_device.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "cli/options.h"
#include "cli/verbs.h"
#include "halfstep/runtime/devices.h"

namespace halfstep::cli {
namespace {

// Kinds of accelerators that have a device here.
std::vector<std::string> accelerator_kinds() {
  std::vector<std::string> kinds;
  for (const DeviceInfo& d : devices()) {
    const std::string name = d.device.str(), kind = name.substr(0, name.find(':'));
    if (!d.device.is_cpu() && std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  if (kinds.size() > 1) std::erase(kinds, "sim");
  return kinds;
}

}  // namespace

Device chosen_device(const std::string& device, bool given, int gpu) {
  const auto named_device = [&] {
    const Device named = as_usage([&] { return Device(device); });
    if (named.is_meta()) {
      throw UsageError("--device: expected a device that computes, got meta, whose tensors have no values");
    }
    return named;
  };
  if (gpu < 0) return named_device();
  if (given) {
    // A kind that is named needs not be the only one.
    const Device named = named_device();
    if (!named.is_cpu() && named.index == gpu) return named;
    throw UsageError(fmt::format("--gpu: means device {} of the accelerator, and --device {} is given", gpu, device));
  }
  const std::vector<std::string> kinds = accelerator_kinds();
  if (kinds.empty())
    throw UsageError(fmt::format("--gpu {}: there is no accelerator here; see `halfstep devices`", gpu));
  if (kinds.size() > 1) {
    throw UsageError(
        fmt::format("--gpu {}: there are several kinds of accelerators here, {}; --device NAME:{} says which", gpu,
                    fmt::join(kinds, " and "), gpu));
  }
  return as_usage([&] { return Device(fmt::format("{}:{}", kinds[0], gpu)); });
}

}  // namespace halfstep::cli
