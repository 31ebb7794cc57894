// SPDX-License-Identifier: Apache-2.0
// Plug-ins and the library round to the same bits: their element types are different structs with one set of
// conversions.
#include "halfstep/runtime/plugin_numbers.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <random>

#include "halfstep/core/float16.h"

namespace halfstep {
namespace {

namespace plugin = halfstep_plugin_numbers;

template <class Plugin, class Library>
struct Pair {
  using InPlugin = Plugin;
  using InLibrary = Library;
};
template <class T>
class PluginNumbers : public ::testing::Test {};
using Formats = ::testing::Types<Pair<plugin::Half, Half>, Pair<plugin::BFloat16, BFloat16>,
                                 Pair<plugin::Float8E4M3, Float8E4M3>, Pair<plugin::Float8E5M2, Float8E5M2>>;
TYPED_TEST_SUITE(PluginNumbers, Formats);

TYPED_TEST(PluginNumbers, WidenEveryPatternAsTheLibraryDoes) {
  using P = typename TypeParam::InPlugin;
  using L = typename TypeParam::InLibrary;
  using Bits = decltype(P::bits);
  for (std::uint32_t i = 0; i <= std::numeric_limits<Bits>::max(); ++i) {
    const auto bits = static_cast<Bits>(i);
    const float in_plugin = plugin::load(P{bits}), in_library = static_cast<float>(L::from_bits(bits));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(in_plugin), std::bit_cast<std::uint32_t>(in_library)) << i;
    // And back, for a plug-in that only moves elements.
    if (in_plugin == in_plugin) {
      ASSERT_EQ(plugin::convert<P>(in_plugin).bits, bits) << i;
    }
  }
}

TYPED_TEST(PluginNumbers, RoundAsTheLibraryDoes) {
  using P = typename TypeParam::InPlugin;
  using L = typename TypeParam::InLibrary;
  // Patterns of float32 a prime apart, so that all of exponent and sign and every last bit come up.
  for (std::uint64_t i = 0; i < std::uint64_t{1} << 32; i += 4099) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(i));
    ASSERT_EQ(plugin::convert<P>(x).bits, L(x).bits) << i;
  }
  std::mt19937_64 engine(1);
  for (int i = 0; i < 200000; ++i) {
    const auto any = std::bit_cast<double>(engine());
    // Between 2^-40 and 2^40, where the formats round.
    const auto near = std::bit_cast<double>((engine() & 0x800fffffffffffffu) | (983 + engine() % 80) << 52);
    const auto integer = static_cast<std::int64_t>(engine()) >> engine() % 64;
    ASSERT_EQ(plugin::convert<P>(any).bits, L(any).bits) << any;
    ASSERT_EQ(plugin::convert<P>(near).bits, L(near).bits) << near;
    ASSERT_EQ(plugin::convert<P>(integer).bits, L(integer).bits) << integer;
  }
}

}  // namespace
}  // namespace halfstep
