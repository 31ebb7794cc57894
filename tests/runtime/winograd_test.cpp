// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/winograd.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/error.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/random.h"

namespace halfstep {
namespace {

// On a processor with AMX as on one without: there its tiles are the faster way for most shapes.
struct Winograds : testing::Test {
  Winograd before = winograd();
  cpu::Isa isa = cpu::compute_isa();
  Winograds() { cpu::set_isa_for_test(std::min(isa, cpu::Isa::avx512_fp16)); }
  ~Winograds() override {
    set_winograd(before);
    cpu::set_isa_for_test(isa);
  }
};

TEST_F(Winograds, AreTakenOnlyWhenAskedFor) {
  manual_seed(1);
  const Tensor x = randn({8, 64, 16, 16}).contiguous(MemoryFormat::channels_last), w = randn({64, 64, 3, 3});
  const auto results = [&](Winograd allowed) {
    set_winograd(allowed);
    return conv2d(x, w, {}, {.padding = {1}}).to_vector<float>();
  };
  const auto off = results(Winograd::off), small = results(Winograd::tiles_2x2), large = results(Winograd::tiles_4x4);
  EXPECT_NE(off, small);
  EXPECT_NE(off, large);
  EXPECT_NE(small, large);
  EXPECT_EQ(off, results(Winograd::off));
}

TEST_F(Winograds, RefuseOtherValuesAndChangeNothing) {
  set_winograd(Winograd::tiles_2x2);
  EXPECT_THROW(set_winograd(static_cast<Winograd>(3)), Error);
  EXPECT_EQ(winograd(), Winograd::tiles_2x2);
  EXPECT_THROW(winograd_from_string("3x3"), Error);
}

TEST_F(Winograds, HaveNames) {
  for (const Winograd each : {Winograd::off, Winograd::tiles_2x2, Winograd::tiles_4x4}) {
    EXPECT_EQ(winograd_from_string(name(each)), each);
  }
  EXPECT_STREQ(name(Winograd::tiles_4x4), "4x4");
}

}  // namespace
}  // namespace halfstep
