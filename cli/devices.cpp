// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "cli/verbs.h"
#include "halfstep/runtime/machine.h"

namespace halfstep::cli {

void add_devices(CLI::App& program, int& status) {
  auto* verb = program.add_subcommand("devices", "List the devices and what they compute with");
  verb->callback([&status] {
    const MachineInfo m = machine();
    fmt::print("cpu: {}, {} thread{}, {:.1f} GB of memory\n", m.cpu, m.threads, m.threads == 1 ? "" : "s",
               m.memory_bytes / 1e9);
    fmt::print("  instruction set: {}{}\n", m.isa, m.capped ? " (capped by HALFSTEP_ISA)" : "");
    fmt::print("  f32, f64: native\n");
    fmt::print("  bf16: {}\n",
               m.bf16_units ? "native matrix products" : "stored in 16 bits, computed in float32, rounded once an op");
    fmt::print("  f16:  {}\n",
               m.f16_units ? "native matrix products" : "stored in 16 bits, computed in float32, rounded once an op");
    fmt::print("  f8e4m3, f8e5m2: storage and conversion\n");
    status = kDone;
  });
}

}  // namespace halfstep::cli
