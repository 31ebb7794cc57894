// SPDX-License-Identifier: Apache-2.0
// Quotients and multiples that are at least as large as a number, of numbers that aren't negative.
#pragma once

#include <cstddef>
#include <cstdint>

namespace halfstep::cpu {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }
/// Bytes in whole cache lines.
constexpr std::size_t whole_lines(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace halfstep::cpu
