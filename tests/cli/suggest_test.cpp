// SPDX-License-Identifier: Apache-2.0
#include "cli/suggest.h"

#include <gtest/gtest.h>

namespace halfstep::cli {
namespace {

const std::vector<std::string> kVerbs = {"train", "eval", "predict", "bench", "compare", "ops", "devices"};

TEST(Suggest, SlipsOfTheKeyboard) {
  EXPECT_EQ(nearest("trian", kVerbs), "train");
  EXPECT_EQ(nearest("trai", kVerbs), "train");
  EXPECT_EQ(nearest("traain", kVerbs), "train");
  EXPECT_EQ(nearest("TRAIN", kVerbs), "train");
  EXPECT_EQ(nearest("op", kVerbs), "ops");
  EXPECT_EQ(nearest("prediction", kVerbs), "predict");
}

TEST(Suggest, WhatWasBegunWins) {
  EXPECT_EQ(nearest("dev", kVerbs), "devices");
  EXPECT_EQ(nearest("com", {"cam", "compare"}), "compare");
}

TEST(Suggest, NothingNear) {
  EXPECT_EQ(nearest("quantize", kVerbs), "");
  EXPECT_EQ(nearest("", kVerbs), "");
  EXPECT_EQ(nearest("x", kVerbs), "");
  EXPECT_EQ(nearest(std::string(100000, 't'), kVerbs), "");
  EXPECT_EQ(nearest("train", {}), "");
}

TEST(Suggest, Text) {
  EXPECT_EQ(did_you_mean("evla", kVerbs), "; did you mean eval?");
  EXPECT_EQ(did_you_mean("xyzzy", kVerbs), "");
}

}  // namespace
}  // namespace halfstep::cli
