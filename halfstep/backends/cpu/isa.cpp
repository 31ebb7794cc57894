// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/isa.h"

#include <cpuid.h>
#include <hwy/targets.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/core/fail.h"
#include "halfstep/runtime/log.h"

namespace halfstep::cpu {
namespace {

constexpr std::array<const char*, 6> kNames = {"avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx"};

std::uint64_t enabled_registers() {
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

bool has_bits(std::uint32_t value, std::initializer_list<int> bits) {
  return std::all_of(bits.begin(), bits.end(), [&](int bit) { return (value >> bit) & 1u; });
}

bool made_by_intel() {
  std::uint32_t a = 0, name[3] = {};
  return __get_cpuid(0, &a, &name[0], &name[2], &name[1]) && std::memcmp(name, "GenuineIntel", sizeof name) == 0;
}

Isa detect() {
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, {27})) return Isa::avx2;  // 27: xgetbv may be used
  const std::uint64_t registers = enabled_registers();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::avx2;
  const bool avx512 = (registers & 0xE6) == 0xE6 && has_bits(b, {16, 17, 28, 30, 31});  // F, DQ, CD, BW, VL
  if (!avx512) return Isa::avx2;
  const bool vnni = has_bits(c, {11});
  const bool fp16 = has_bits(d, {23});
  const bool amx = has_bits(d, {22, 24}) && (registers & 0x60000) == 0x60000;  // BF16, TILE and their state
  std::uint32_t a1 = 0, b1 = 0, c1 = 0, d1 = 0;
  const bool bf16 = a >= 1 && __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) && has_bits(a1, {5});
  if (!vnni) return Isa::avx512;
  if (!bf16) return Isa::avx512_vnni;
  if (!fp16) return Isa::avx512_bf16;
  return amx ? Isa::amx : Isa::avx512_fp16;
}

bool detect_f16_tiles() {
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
         has_bits(a, {21});
}

/// What HALFSTEP_ISA asks for, or all that the processor has.
Isa isa_at_start(bool warn) noexcept {
  const char* text = std::getenv("HALFSTEP_ISA");
  if (text == nullptr || *text == '\0') return detected_isa();
  try {
    try {
      return std::min(isa_from_string(text), detected_isa());
    } catch (const Error& error) {
      if (warn) log(LogLevel::warning, std::string("HALFSTEP_ISA is ignored: ") + error.what());
    }
  } catch (...) {  // no memory for the message
  }
  return detected_isa();
}

std::atomic<Isa>& current() {
  // A wrong value is warned of here, at the first product: a program may want to refuse it before.
  static std::atomic<Isa> isa{isa_at_start(true)};
  return isa;
}

void apply(Isa isa) {
  current().store(isa, std::memory_order_relaxed);
  // Highway's own detection, without the targets above the cap.
  hwy::SetSupportedTargetsForTest(0);
  if (isa == Isa::avx2) {
    const std::int64_t up_to_avx2 = ~(HWY_AVX2 - 1);  // A better target has a lower bit.
    hwy::SetSupportedTargetsForTest(hwy::SupportedTargets() & up_to_avx2);
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

/// Caps the instruction set when the library is loaded, before any kernel runs.
struct ApplyEnvironment {
  ApplyEnvironment() {
    if (const Isa isa = isa_at_start(false); isa < detected_isa()) apply(isa);
  }
};
const ApplyEnvironment kApplyEnvironment;

}  // namespace

std::span<const char* const> isa_names() noexcept { return kNames; }

const char* name(Isa isa) noexcept { return kNames[static_cast<std::size_t>(isa)]; }

Isa isa_from_string(std::string_view text) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (text == kNames[i]) return static_cast<Isa>(i);
  }
  fail<Error>("instruction set: expected one of {}, got '{}'", fmt::join(kNames, ", "), text);
}

Isa detected_isa() noexcept {
  static const Isa isa = detect();
  return isa;
}

Isa compute_isa() noexcept { return current().load(std::memory_order_relaxed); }

bool has_bf16_units(Isa isa) noexcept {
  static const bool intel = made_by_intel();
  // Of the processor at hand it is known whether its tiles may be used.
  if (isa == Isa::amx) return isa != compute_isa() || amx_usable() || !intel;
  return isa == Isa::avx512_bf16 || (isa == Isa::avx512_fp16 && !intel);
}

bool has_f16_units(Isa isa) noexcept {
  static const bool tiles = detect_f16_tiles();
  return isa == Isa::amx && tiles && amx_usable();
}

Isa compute_isa(DType dtype) noexcept {
  const Isa isa = compute_isa();
  const Isa wide = std::min(isa, Isa::avx512);
  switch (dtype) {
    case DType::bf16:
      return has_bf16_units(isa) ? (isa == Isa::amx ? Isa::amx : Isa::avx512_bf16) : wide;
    case DType::f16:
      return has_f16_units(isa) ? Isa::amx : wide;
    case DType::i8:
    case DType::u8:
      return isa == Isa::amx ? Isa::amx : std::min(isa, Isa::avx512_vnni);
    default:
      return wide;
  }
}

void set_isa_for_test(Isa isa) { apply(std::min(isa, detected_isa())); }

}  // namespace halfstep::cpu
