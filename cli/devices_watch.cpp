// SPDX-License-Identifier: Apache-2.0
#include "cli/devices_watch.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <map>
#include <thread>
#include <vector>

#include "cli/chosen_device.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/core/text.h"
#include "halfstep/runtime/devices.h"

namespace halfstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

// How much a device's queues worked since it was asked before.
class Shares {
 public:
  std::string since_last(Device device) {
    const auto busy = device_busy_seconds(device);
    if (!busy) return "-";
    const Sample now{Clock::now(), *busy};
    const auto [known, first] = last_.try_emplace(device.str(), now);
    const Sample before = std::exchange(known->second, now);
    const double passed = std::chrono::duration<double>(now.time - before.time).count();
    if (first || passed <= 0) return "-";
    return fmt::format("{:.0f} %", 100 * (now.busy - before.busy) / passed);
  }

 private:
  struct Sample {
    Clock::time_point time;
    double busy;
  };
  std::map<std::string, Sample> last_;
};

std::vector<std::string> row(Device device, Shares& shares) {
  // One that can't be asked any more doesn't keep the others from being shown.
  try {
    const DeviceInfo d = device_info(device);
    if (d.lost) return {device.str(), d.name, "-", "-", "lost"};
    const auto used = static_cast<double>(d.memory_total - std::min(d.memory_free, d.memory_total));
    return {device.str(), d.name,
            fmt::format("{:.2f} of {:.2f} GB", used / 1e9, static_cast<double>(d.memory_total) / 1e9),
            shares.since_last(device), "ready"};
  } catch (const Error& e) {
    return {device.str(), "", "-", "-", e.what()};
  }
}

}  // namespace

int watch_devices(const std::string& device, double seconds) {
  constexpr double kLongest = 3600;
  if (!(seconds > 0) || seconds > kLongest) {
    throw UsageError(
        fmt::format("--watch: expected a number of seconds above 0 and up to {}, got {}", kLongest, seconds));
  }
  std::vector<Device> chosen;
  if (!device.empty()) {
    chosen.push_back(chosen_device(device, true, -1));
    if (chosen[0].is_cpu()) throw UsageError("--watch: expected a device other than the CPU");
  } else {
    for (const DeviceInfo& d : devices()) {
      if (!d.device.is_cpu()) chosen.push_back(d.device);
    }
    if (chosen.empty()) throw UsageError("--watch: there is no device here but the CPU");
  }
  catch_signals();
  const bool over = is_terminal(STDOUT_FILENO);
  Shares shares;
  std::ptrdiff_t lines = 0;
  while (!g_stop) {
    std::vector<std::vector<std::string>> rows;
    for (const Device d : chosen) rows.push_back(row(d, shares));
    const std::string text = fmt::format("{:%H:%M:%S}\n{}\n", fmt::localtime(std::time(nullptr)),
                                         table({"device", "name", "memory in use", "queues", "state"}, rows));
    // In a terminal each picture is drawn over the one before.
    if (over && lines > 0) fmt::print("\x1b[{}A\x1b[J", lines);
    fmt::print("{}", printable_lines(text));
    std::fflush(stdout);
    lines = std::count(text.begin(), text.end(), '\n');
    const auto next = Clock::now() + std::chrono::duration<double>(seconds);
    while (!g_stop && Clock::now() < next) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return 128 + g_signal;
}

}  // namespace halfstep::cli
