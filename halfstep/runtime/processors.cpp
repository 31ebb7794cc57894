// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/processors_internal.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace halfstep::detail {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// Quota over period; 0 for none ("max", -1, or no such file).
double share(const std::string& quota, const std::string& period) {
  const double q = std::strtod(quota.c_str(), nullptr), p = std::strtod(period.c_str(), nullptr);
  return q > 0 && p > 0 ? q / p : 0;
}

double quota_of_v2(const std::string& folder) {
  std::istringstream line(first_line(folder + "/cpu.max"));
  std::string quota, period;
  line >> quota >> period;
  return share(quota, period);
}

double quota_of_v1(const std::string& folder) {
  return share(first_line(folder + "/cpu.cfs_quota_us"), first_line(folder + "/cpu.cfs_period_us"));
}

bool has_controller(std::string_view list, std::string_view name) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == name) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

int count() {
  int processors = 0;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) processors = CPU_COUNT(&set);
  if (processors < 1) processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::ifstream file("/proc/self/cgroup");
  const std::string groups((std::istreambuf_iterator<char>(file)), {});
  const double quota = processor_quota(groups, "/sys/fs/cgroup");
  if (quota > 0 && quota < processors) processors = std::max(1, static_cast<int>(std::ceil(quota)));
  return processors;
}

}  // namespace

double processor_quota(std::string_view groups, const std::string& root) {
  double least = 0;
  const auto note = [&](double quota) {
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
  };
  // "hierarchy:controllers:/path", one a line; version 2 has neither number nor controllers ("0::/path").
  while (!groups.empty()) {
    const std::size_t end = std::min(groups.find('\n'), groups.size());
    const std::string_view line = groups.substr(0, end);
    groups.remove_prefix(std::min(end + 1, groups.size()));
    const std::size_t first = line.find(':');
    const std::size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && !has_controller(controllers, "cpu")) continue;
    std::string path(line.substr(second + 1));
    // From the group up to the mount. In a container the path may be the host's and lead nowhere: the mount is its own.
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      if (v2) {
        note(quota_of_v2(root + path));
        note(quota_of_v2(root + "/unified" + path));
      } else {
        note(quota_of_v1(root + "/cpu" + path));
        note(quota_of_v1(root + "/" + std::string(controllers) + path));
      }
      if (path.empty()) break;
      path.resize(path.rfind('/') == path.npos ? 0 : path.rfind('/'));
    }
  }
  return least;
}

int processors() noexcept {
  static const int n = [] {
    try {
      return count();
    } catch (...) {  // no memory for the text
      return 1;
    }
  }();
  return n;
}

}  // namespace halfstep::detail
