// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/machine.h"

#include "halfstep/backends/cpu/isa.h"

namespace halfstep::cpu {
namespace {

[[maybe_unused]] const bool machine_kernels = [] {
  const auto fill = [](MachineInfo& info) {
    info.isa = name(compute_isa());
    info.bf16_units = compute_isa(DType::bf16) >= Isa::avx512_bf16;
    info.f16_units = has_f16_units(compute_isa());
    info.capped = compute_isa() < detected_isa();
  };
  set_machine_provider(fill, isa_names());
  return true;
}();

}  // namespace
}  // namespace halfstep::cpu
