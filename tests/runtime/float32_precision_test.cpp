// SPDX-License-Identifier: Apache-2.0
// How exactly float32 products are computed: the word reaches plug-ins that are there and those that come later.
#include "halfstep/runtime/float32_precision.h"

#include <gtest/gtest.h>

#include <string>

#include "halfstep/core/error.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/plugin_loader.h"

namespace halfstep {
namespace {

/// What the plug-in was told last; -1: nothing.
std::int32_t told(const std::string& name) {
  const std::string kind = "tiny_" + name;
  if (device_count(kind) == 0) {
    load_plugin(std::string(HALFSTEP_TINY_PLUGINS) + "/libhalfstep_tiny_" + name + ".so");
  }
  return *static_cast<const std::int32_t*>(device_extension(Device(kind), "precision"));
}

TEST(Float32Precision, ReachesPluginsThatAreThereAndThoseThatComeLater) {
  EXPECT_EQ(float32_precision(), Float32Precision::highest);
  EXPECT_EQ(told("early"), 0);
  set_float32_precision(Float32Precision::high);
  EXPECT_EQ(float32_precision(), Float32Precision::high);
  EXPECT_EQ(told("early"), 1);
  EXPECT_EQ(told("late"), 1);  // loaded here
  set_float32_precision(Float32Precision::highest);
  EXPECT_EQ(told("early"), 0);
  EXPECT_EQ(told("late"), 0);
}

TEST(Float32Precision, RefusesOtherValuesAndChangesNothing) {
  told("early");
  EXPECT_THROW(set_float32_precision(static_cast<Float32Precision>(2)), Error);
  EXPECT_EQ(float32_precision(), Float32Precision::highest);
  EXPECT_EQ(told("early"), 0);
}

TEST(Float32Precision, HasNames) {
  EXPECT_STREQ(name(Float32Precision::highest), "highest");
  EXPECT_STREQ(name(Float32Precision::high), "high");
}

}  // namespace
}  // namespace halfstep
