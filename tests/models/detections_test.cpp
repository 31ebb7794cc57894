// SPDX-License-Identifier: Apache-2.0
// What is found in predictions that are written by hand: expected values by the rules of the header.
#include "halfstep/models/detections.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "halfstep/core/error.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

using models::Detection;
using models::detections;

// Rows of centre x, centre y, width, height, objectness and two classes.
Tensor predictions(const std::vector<double>& rows) {
  return tensor(rows, {1, static_cast<std::int64_t>(rows.size()) / 7, 7});
}

std::vector<std::int64_t> labels(const std::vector<Detection>& found) {
  std::vector<std::int64_t> result;
  for (const Detection& d : found) result.push_back(d.label);
  return result;
}

TEST(Detections, HaveCornersAndScoresAndComeBestFirst) {
  const auto found = detections(predictions({50, 40, 20, 10, 0.5, 0.75, 0.25,    //
                                             200, 100, 40, 60, 0.75, 0.25, 1}))  // 0.75, of class 1
                         .at(0);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(labels(found), (std::vector<std::int64_t>{1, 0}));
  EXPECT_EQ(found[0].score, 0.75);
  EXPECT_EQ(found[1].score, 0.375);
  EXPECT_EQ(found[0].left, 180);
  EXPECT_EQ(found[0].top, 70);
  EXPECT_EQ(found[0].right, 220);
  EXPECT_EQ(found[0].bottom, 130);
}

TEST(Detections, SuppressWithinAClassOnlyUnlessAgnostic) {
  // The second overlaps the first by 9 of 11; the third lies where the first does, in another class.
  const Tensor all = predictions({50, 50, 10, 10, 1, 0.9, 0,  //
                                  51, 50, 10, 10, 1, 0.8, 0,  //
                                  50, 50, 10, 10, 1, 0,   0.7});
  EXPECT_EQ(labels(detections(all)[0]), (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(labels(detections(all, {.agnostic = true})[0]), (std::vector<std::int64_t>{0}));
  // 9 / 11 is 0.818.
  EXPECT_EQ(detections(all, {.overlap = 0.81})[0].size(), 2U);
  EXPECT_EQ(detections(all, {.overlap = 0.82})[0].size(), 3U);
}

TEST(Detections, OfEqualScoresKeepTheOrderOfThePredictions) {
  const auto found = detections(predictions({10, 10, 4, 4, 1, 0.5, 0,    //
                                             30, 10, 4, 4, 1, 0,   0.5,  //
                                             50, 10, 4, 4, 1, 0.5, 0}))[0];
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[0].left, 8);
  EXPECT_EQ(found[1].left, 28);
  EXPECT_EQ(found[2].left, 48);
}

TEST(Detections, OfManyLabelsAreEachClassAboveTheScore) {
  const Tensor all = predictions({10, 10, 4, 4, 1, 0.5, 0.4, 40, 10, 4, 4, 0.5, 0.8, 0.2});
  EXPECT_EQ(labels(detections(all, {.multi_label = true})[0]), (std::vector<std::int64_t>{0, 1, 0}));
  EXPECT_EQ(labels(detections(all)[0]), (std::vector<std::int64_t>{0, 0}));
}

TEST(Detections, NeedObjectnessAndProbabilityAboveTheScore) {
  // Objectness of 0.25 isn't above it, and 0.5 * 0.5 neither.
  EXPECT_TRUE(detections(predictions({10, 10, 4, 4, 0.25, 1, 0, 40, 10, 4, 4, 0.5, 0.5, 0}))[0].empty());
  EXPECT_EQ(detections(predictions({10, 10, 4, 4, 0.375, 1, 0}))[0].size(), 1U);
}

TEST(Detections, AreAtMostSoMany) {
  std::vector<double> rows;
  for (int i = 0; i < 20; ++i) rows.insert(rows.end(), {20.0 * i, 10, 4, 4, 1, 0.9 - 0.01 * i, 0});
  EXPECT_EQ(detections(predictions(rows), {.limit = 3})[0].size(), 3U);
  const auto few = detections(predictions(rows), {.candidates = 5})[0];
  ASSERT_EQ(few.size(), 5U);
  EXPECT_EQ(few[4].left, 78);  // the fifth best
}

TEST(Detections, LeaveOutWhatIsNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(detections(predictions(
      {nan, 10, 4, 4, 1, 1, 0, 10, 10, infinity, 4, 1, 1, 0, 10, 10, 4, 4, nan, 1, 0, 10, 10, 4, 4, 1, nan, 1}))[0]
                  .empty());
}

TEST(Detections, AreThoseOfEachPicture) {
  const Tensor two = tensor({10, 10, 4, 4, 1, 1, 0, 10, 10, 4, 4, 0, 1, 0}, {2, 1, 7});
  const auto found = detections(two);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].size(), 1U);
  EXPECT_TRUE(found[1].empty());
}

TEST(Detections, RefuseWhatDoesNotFit) {
  EXPECT_THROW(detections(zeros({4, 7})), ShapeError);
  EXPECT_THROW(detections(zeros({1, 4, 5})), ShapeError);
  EXPECT_THROW(detections(zeros({1, 4, 7}, {.dtype = i64})), DTypeError);
  EXPECT_THROW(detections(zeros({1, 4, 7}), {.score = 1.5}), Error);
  EXPECT_THROW(detections(zeros({1, 4, 7}), {.overlap = -0.1}), Error);
  EXPECT_THROW(detections(zeros({1, 4, 7}), {.limit = 0}), Error);
}

}  // namespace
}  // namespace halfstep
