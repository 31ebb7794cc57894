// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "halfstep/core/export.h"

namespace halfstep {

/// The CPU, and what kernels use of it.
struct MachineInfo {
  std::string cpu = "unknown";  ///< model name
  std::string isa = "unknown";  ///< highest instruction set that kernels use: avx2, avx512, avx512_vnni, avx512_bf16,
                                ///< avx512_fp16, amx
  int threads = 1;              ///< that a parallel loop uses
  double memory_bytes = 0;      ///< of the machine
  bool bf16_units = false;      ///< matrix products of bf16 run natively
  bool f16_units = false;       ///< matrix products of f16 run natively
  bool capped = false;          ///< HALFSTEP_ISA limits the instruction set below what the processor has
};

/// The machine as it is now; the instruction set comes from the CPU backend, which knows what its kernels choose.
HS_API MachineInfo machine();
/// The values that HALFSTEP_ISA accepts, lowest first.
HS_API std::span<const char* const> isa_names();
/// For the CPU backend: fills in isa, bf16_units, f16_units and capped, and supplies the result of isa_names().
HS_API void set_machine_provider(void (*fill)(MachineInfo& info), std::span<const char* const> isa_names);

}  // namespace halfstep
