// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "halfstep/core/philox.h"

/// Standard normal numbers from random words (Box and Muller, 1958), to be included by the code that computes them.
///
/// The angle is split into quadrant and remainder in integers, so that sine and cosine keep their relative precision
/// next to their zeros, and everything is done in double: rounded to a float or less the result is within 1 unit of the
/// last place of the exact value wherever `log`, `sin` and `cos` are within a few units in double, that is on every
/// device. Double results are within 2 units with the C library's functions, which err by little more than half a unit.
/// The words are used to their last bit: |x| reaches 6.66 in the 32-bit form and 8.57 in the 64-bit form.
namespace halfstep {

/// Two independent normal numbers.
struct NormalPair {
  double first;
  double second;
};

namespace detail {
/// (x, y) turned by `quadrant` right angles.
inline NormalPair turn(unsigned quadrant, double x, double y) noexcept {
  const double first = quadrant % 2 == 0 ? x : y;
  const double second = quadrant % 2 == 0 ? y : x;
  return {quadrant == 1 || quadrant == 2 ? -first : first, quadrant >= 2 ? -second : second};
}
}  // namespace detail

/// Two independent normals from two 32-bit words: for f32 and narrower. Elements 2k and 2k + 1 of a tensor are the pair
/// from words 2k and 2k + 1.
inline NormalPair normal_pair(std::uint32_t word0, std::uint32_t word1) noexcept {
  const double radius = std::sqrt(-2.0 * std::log((word0 + 1.0) * 0x1p-32));
  const std::uint32_t quadrant = (word1 + (1u << 29)) >> 30;
  const auto remainder = static_cast<std::int32_t>(word1 - (quadrant << 30));
  const double theta = remainder * (3.14159265358979323846 * 0x1p-31);
  return detail::turn(quadrant, radius * std::cos(theta), radius * std::sin(theta));
}

/// Two independent normals from two 64-bit words: for f64.
inline NormalPair normal_pair64(std::uint64_t word0, std::uint64_t word1) noexcept {
  constexpr double kPiHigh = 3.14159265358979311600, kPiLow = 1.2246467991473532e-16;
  const double square = -2.0 * std::log(uniform_open_f64(word0));
  const double radius = std::sqrt(square);
  // What the square root dropped, from the square that it should have had.
  const double radius_rest = radius > 0 ? std::fma(-radius, radius, square) / (2 * radius) : 0.0;
  const std::uint64_t turn53 = word1 >> 11;
  const std::uint64_t quarters = (turn53 + (std::uint64_t{1} << 50)) >> 51;
  const auto remainder = static_cast<std::int64_t>(turn53) - static_cast<std::int64_t>(quarters << 51);
  // theta + rest is the angle to about twice double's precision.
  const double scaled = static_cast<double>(remainder) * 0x1p-52;
  const double theta = scaled * kPiHigh;
  const double rest = std::fma(scaled, kPiLow, std::fma(scaled, kPiHigh, -theta));
  const double cosine = std::cos(theta), sine = std::sin(theta);
  const double x = std::fma(radius, cosine, std::fma(radius_rest, cosine, -radius * rest * sine));
  const double y = std::fma(radius, sine, std::fma(radius_rest, sine, radius * rest * cosine));
  return detail::turn(static_cast<unsigned>(quarters & 3), x, y);
}

/// Element `i` of a stream of normals: one word each, and 64 bits each for f64.
inline double normal_at(PhiloxState state, std::uint64_t i) noexcept {
  const PhiloxBlock block = philox_block(state, i / 4);
  const NormalPair pair = i % 4 < 2 ? normal_pair(block[0], block[1]) : normal_pair(block[2], block[3]);
  return i % 2 == 0 ? pair.first : pair.second;
}
inline double normal_at64(PhiloxState state, std::uint64_t i) noexcept {
  const PhiloxBlock block = philox_block(state, i / 2);
  const NormalPair pair =
      normal_pair64(std::uint64_t{block[1]} << 32 | block[0], std::uint64_t{block[3]} << 32 | block[2]);
  return i % 2 == 0 ? pair.first : pair.second;
}

}  // namespace halfstep
