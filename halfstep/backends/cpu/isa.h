// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// Instruction sets that kernels are chosen for; each has what those before it have.
enum class Isa : std::uint8_t { avx2, avx512, avx512_vnni, avx512_bf16, avx512_fp16, amx };

/// "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_fp16" or "amx".
HS_API const char* name(Isa isa) noexcept;
/// All names, lowest first.
HS_API std::span<const char* const> isa_names() noexcept;
/// The reverse of name(). Throws Error with the valid choices.
HS_API Isa isa_from_string(std::string_view text);

/// What this processor and its operating system offer.
HS_API Isa detected_isa() noexcept;
/// What kernels use: detected_isa(), capped by the environment variable HALFSTEP_ISA (a value that is not a name is
/// warned of and ignored).
HS_API Isa compute_isa() noexcept;
/// Whether bf16 is multiplied faster by units of a processor with `isa` than as float32: on AMX that this process may
/// use, and by AVX512-BF16, but for Intel's processors with AVX512-FP16. Those (Sapphire Rapids and later) multiply
/// pairs at half of the vector units' rate for float32, 85 instead of 150 GFLOP/s a core. (HALFSTEP_ISA=avx512_bf16
/// computes by the units there too.)
HS_API bool has_bf16_units(Isa isa) noexcept;
/// The same for f16: on AMX that this process may use and that multiplies f16 (Granite Rapids and later). AVX512-FP16
/// doesn't count, because it accumulates in f16: with it, oneDNN's convolutions convert f16 to float32 in their inner
/// loops, and reach about 0.65 of float32's rate.
HS_API bool has_f16_units(Isa isa) noexcept;
/// The part of compute_isa() with units for products of `dtype`: float32 on any machine stays with avx512 or avx2,
/// 16-bit dtypes have units of their own or compute in float32, i8 and u8 have avx512_vnni.
HS_API Isa compute_isa(DType dtype) noexcept;

/// For tests: caps Highway's kernels and the choice of paths from now on, and lifts an earlier cap. oneDNN keeps the
/// cap that it was first used with. Not while other threads compute.
HS_API void set_isa_for_test(Isa isa);

}  // namespace halfstep::cpu
