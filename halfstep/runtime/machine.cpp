// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/machine.h"

#include <unistd.h>

#include <atomic>
#include <fstream>

#include "halfstep/runtime/parallel.h"

namespace halfstep {
namespace {

std::atomic<void (*)(MachineInfo&)> g_provider{nullptr};
std::span<const char* const> g_isa_names;

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

void set_machine_provider(void (*fill)(MachineInfo& info), std::span<const char* const> isa_names) {
  g_isa_names = isa_names;
  g_provider.store(fill);
}

std::span<const char* const> isa_names() { return g_isa_names; }

MachineInfo machine() {
  MachineInfo info;
  info.cpu = cpu_model();
  info.threads = num_threads();
  info.memory_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  if (auto* fill = g_provider.load()) fill(info);
  return info;
}

}  // namespace halfstep
