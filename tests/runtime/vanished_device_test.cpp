// SPDX-License-Identifier: Apache-2.0
// A device that is lost. It stays so to the end of the program: this file's name puts its test behind all others.
#include "halfstep/core/error.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "tests/runtime/on_sim.h"

namespace halfstep {
namespace {

using test::error_of;
using Values = std::vector<double>;
using VanishedDevice = test::OnSim;

TEST_F(VanishedDevice, IsSaidToBeLostAndNeverUsedAgain) {
  const Device second = test::sim_device(1);
  const Tensor x = ones({4}, {.device = second});
  synchronize(second);
  test::order_fault("lost:2");
  const Tensor y = x + x;
  EXPECT_THROW(y * y, DeviceLostError);
  for (int i = 0; i < 2; ++i) {
    const std::string text = error_of([&] { y.to_vector<double>(); });
    EXPECT_NE(text.find("sim:1 is lost"), std::string::npos) << text;
  }
  EXPECT_THROW(synchronize(second), DeviceLostError);
  EXPECT_THROW(ones({4}, {.device = second}), DeviceLostError);
  EXPECT_THROW(Queue(second, {}), DeviceLostError);
  // Lists go on without it.
  int known = 0;
  for (const DeviceInfo& d : devices()) {
    known += d.device == second || d.device == sim;
    EXPECT_EQ(d.lost, d.device == second) << d.device.str();
  }
  EXPECT_EQ(known, 2);
  EXPECT_EQ((ones({2}, {.device = sim}) * 2).to_vector<double>(), Values(2, 2)) << "the other device works";
}

}  // namespace
}  // namespace halfstep
