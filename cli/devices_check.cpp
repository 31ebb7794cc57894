// SPDX-License-Identifier: Apache-2.0
// `halfstep devices --check KIND[:INDEX]`: a device beside the CPU.
#include "cli/devices_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "cli/chosen_device.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "halfstep/conformance/device_check.h"
#include "halfstep/conformance/device_record.h"
#include "halfstep/runtime/log.h"

namespace halfstep::cli {
namespace {

constexpr std::size_t kMostNamed = 4;

std::string where(const conformance::DeviceCheckLine& line) {
  if (!line.note.empty()) return line.note;
  if (line.on_cpu.empty()) return "native";
  std::vector<std::string> named(
      line.on_cpu.begin(), line.on_cpu.begin() + static_cast<std::ptrdiff_t>(std::min(kMostNamed, line.on_cpu.size())));
  if (line.on_cpu.size() > named.size()) named.push_back(fmt::format("{} more", line.on_cpu.size() - named.size()));
  return fmt::format("on the CPU: {}", fmt::join(named, ", "));
}

void print_line(const conformance::DeviceCheckLine& line) {
  std::string error = std::isinf(line.worst)          ? "wrong"
                      : line.bound == "the same bits" ? "same"
                                                      : fmt::format("{:.3f}", line.worst);
  if (line.bound.empty()) error = "-";
  fmt::print("{:<6} {:<48} {:<9} {:>3} case{} {:>6} {:>5.1f} s  {}\n", line.passed() ? "ok" : "FAILED", line.name,
             line.dtype, line.cases, line.cases == 1 ? " " : "s", error, line.seconds, where(line));
  if (line.worst > 0 && !line.worst_case.empty()) {
    fmt::print("         worst: {}; bound: {}\n", line.worst_case, line.bound);
  }
  for (const std::string& p : line.problems) fmt::print("         {}\n", p);
  std::fflush(stdout);
}

}  // namespace

int run_check(const std::string& name, bool quick) {
  const Device device = chosen_device(name, true, -1);
  const DeviceInfo info = device_info(device);
  fmt::print("{}: {}{}{}\n", device.str(), info.name, info.version.empty() ? "" : ", version ", info.version);
  fmt::print("{:<6} {:<48} {:<9} {:>9} {:>6} {:>7}  {}\n", "", "compared with the CPU", "dtype", "", "error", "time",
             "ran where (error: in units of the bound)");
  // An op that runs on the CPU is named in its line; planted infinities need no warning.
  set_log_level(LogLevel::error);
  const conformance::DeviceCheckReport report =
      conformance::check_device(device, {.quick = quick, .on_line = print_line});
  std::size_t failed = 0;
  for (const conformance::DeviceCheckLine& l : report.lines) failed += l.passed() ? 0 : 1;
  if (!report.passed()) {
    fmt::print("{}: FAILED: {} of {} lines{}, {:.0f} s\n", device.str(), failed, report.lines.size(),
               report.lost ? ", and the device was lost before the end" : "", report.seconds);
    return kFailed;
  }
  fmt::print("{}: passed: {} lines, {:.0f} s\n", device.str(), report.lines.size(), report.seconds);
  if (quick) {
    fmt::print("No record is kept of a quick check.\n");
  } else if (!device.is_cpu()) {
    const auto folder = conformance::device_records_folder();
    if (folder.empty()) {
      fmt::print("No record is kept: there is neither XDG_STATE_HOME nor HOME.\n");
    } else {
      conformance::save_device_record(conformance::make_device_record(info, report.seconds), folder);
    }
  }
  return kDone;
}

std::string check_state(const DeviceInfo& info) {
  const auto record = conformance::load_device_record(info, conformance::device_records_folder());
  const std::string how = fmt::format("run halfstep devices --check {}", conformance::kind_of(info.device));
  if (record && conformance::is_current(*record, info)) return fmt::format("checked {}", record->date);
  if (record) {
    return fmt::format("checked {} with version {} and Halfstep {}: {}", record->date,
                       record->version.empty() ? "unknown" : record->version, record->halfstep, how);
  }
  return conformance::needs_check(info.device) ? fmt::format("untested on this hardware: {}", how) : std::string();
}

}  // namespace halfstep::cli
