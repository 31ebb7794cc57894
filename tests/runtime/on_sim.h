// SPDX-License-Identifier: Apache-2.0
// The simulated accelerator behind Halfstep's runtime: the device, its faults and counters.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "halfstep/backends/sim/sim.h"
#include "halfstep/core/tensor.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/plugin_loader.h"
#include "halfstep/runtime/queue.h"
#include "tests/support/errors.h"

namespace halfstep::test {

/// The first simulated device.
inline Device sim_device(int index = 0) {
  static const bool loaded = [] {
    try {
      return Device("sim").type != 0;  // found beside the library
    } catch (const DeviceError&) {
      return load_plugin(HALFSTEP_SIM_PLUGIN).devices > 0;
    }
  }();
  EXPECT_TRUE(loaded);
  return Device("sim:" + std::to_string(index));
}

inline void order_fault(const std::string& orders) {
  const auto order = reinterpret_cast<halfstep_sim_order_fault_fn>(device_extension(sim_device(), "sim_order_fault"));
  ASSERT_NE(order, nullptr);
  ASSERT_EQ(order(orders.c_str()), 0) << orders;
}

inline halfstep_sim_stats sim_stats() {
  halfstep_sim_stats stats{};
  stats.size = sizeof(stats);
  reinterpret_cast<halfstep_sim_stats_fn>(device_extension(sim_device(), "sim_stats"))(&stats);
  return stats;
}

/// Leaves the device as it was found.
class OnSim : public ::testing::Test {
 protected:
  OnSim() {
    order_fault("clear;restore");
    set_fallback_options({});
    reset_fallback_counts();
    set_log_sink([this](LogLevel level, std::string_view text) {
      if (level >= LogLevel::warning) said.emplace_back(text);
    });
  }
  ~OnSim() override {
    set_log_sink({});
    order_fault("clear;restore");
    set_synchronous(false);
    set_fallback_options({});
    error_of([&] { synchronize(sim); });
  }
  Device sim = sim_device();
  std::vector<std::string> said;
};

}  // namespace halfstep::test
