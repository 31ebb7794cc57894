// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/machine.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>

#include "halfstep/runtime/parallel.h"

namespace halfstep {
namespace {

std::atomic<void (*)(MachineInfo&)> g_provider{nullptr};

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const auto colon = line.find(':');
    if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace

void set_machine_provider(void (*fill)(MachineInfo& info)) { g_provider.store(fill); }

MachineInfo machine() {
  MachineInfo info;
  info.cpu = cpu_model();
  info.threads = num_threads();
  info.memory_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  const char* cap = std::getenv("HALFSTEP_ISA");
  info.capped = cap != nullptr && *cap != '\0';
  if (auto* fill = g_provider.load()) fill(info);
  return info;
}

}  // namespace halfstep
