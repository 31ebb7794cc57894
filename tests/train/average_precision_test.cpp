// SPDX-License-Identifier: Apache-2.0
// Average precision against pycocotools, and by hand where the trainers' protocol differs.
#include "halfstep/train/average_precision.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "halfstep/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep::training {
namespace {

using nlohmann::json;

DetectionEvaluation evaluation_of(const json& entry) {
  DetectionEvaluation result(entry["classes"].get<std::int64_t>());
  for (const json& p : entry["pictures"]) {
    const auto box = [](const json& row) {
      return BoxSides{row[1].get<double>(), row[2].get<double>(), row[3].get<double>(), row[4].get<double>()};
    };
    std::vector<DetectedBox> detected;
    std::vector<TrueBox> truth;
    for (const json& row : p["detected"])
      detected.push_back({row[0].get<std::int64_t>(), row[5].get<double>(), box(row)});
    for (const json& row : p["truth"]) {
      truth.push_back({row[0].get<std::int64_t>(), box(row), row[5].get<double>(), row[6].get<int>() != 0});
    }
    result.add(detected, truth);
  }
  return result;
}

json goldens() {
  std::ifstream file(test::goldens_dir() / "coco_metric.json");
  return json::parse(file)["entries"];
}

// Means of at most some thousand quotients in float64, added up in another order.
TEST(AveragePrecision, IsThatOfPycocotools) {
  for (const json& e : goldens()) {
    SCOPED_TRACE(e["name"].get<std::string>());
    const CocoSummary s = evaluation_of(e).coco();
    const double ours[] = {s.ap,  s.ap50, s.ap75,  s.ap_small, s.ap_medium, s.ap_large,
                           s.ar1, s.ar10, s.ar100, s.ar_small, s.ar_medium, s.ar_large};
    for (std::size_t i = 0; i < 12; ++i) EXPECT_NEAR(ours[i], e["stats"][i].get<double>(), 1e-12) << i;
    for (std::size_t c = 0; c < s.ap_of_class.size(); ++c) {
      EXPECT_NEAR(s.ap_of_class[c], e["ap"][c].get<double>(), 1e-12) << c;
      EXPECT_NEAR(s.ap50_of_class[c], e["ap50"][c].get<double>(), 1e-12) << c;
    }
  }
}

// Written with numpy. The score is of a largest mean: equal ones may be told apart by their last bits, and then what is
// reached there is not the same.
TEST(DetectionSummary, IsThatOfTheSameFormulasInNumpy) {
  for (const json& e : goldens()) {
    SCOPED_TRACE(e["name"].get<std::string>());
    const DetectionSummary s = evaluation_of(e).summary();
    EXPECT_NEAR(s.score, e["score"].get<double>(), 1e-12);
    ASSERT_EQ(s.classes.size(), e["trainers"].size());
    double ap50 = 0, ap = 0;
    for (std::size_t i = 0; i < s.classes.size(); ++i) {
      const json& row = e["trainers"][i];
      const ClassDetection& c = s.classes[i];
      EXPECT_EQ(c.label, row[0].get<std::int64_t>());
      EXPECT_EQ(c.objects, row[1].get<std::int64_t>());
      EXPECT_NEAR(c.precision, row[2].get<double>(), 1e-12);
      EXPECT_NEAR(c.recall, row[3].get<double>(), 1e-12);
      EXPECT_NEAR(c.ap50, row[4].get<double>(), 1e-12);
      EXPECT_NEAR(c.ap, row[5].get<double>(), 1e-12);
      ap50 += row[4].get<double>() / static_cast<double>(s.classes.size());
      ap += row[5].get<double>() / static_cast<double>(s.classes.size());
    }
    EXPECT_NEAR(s.ap50, ap50, 1e-12);
    EXPECT_NEAR(s.ap, ap, 1e-12);
  }
}

const BoxSides kLeft = {0, 0, 10, 10}, kRight = {100, 0, 10, 10};

TEST(DetectionSummary, IsWhatTheFormulasGive) {
  DetectionEvaluation e(3);
  // Class 0: two objects, of which one is found at 0.9, and a wrong box at 0.6. Class 2: its object is found.
  e.add({{0, 0.9, kLeft}, {0, 0.6, {300, 0, 10, 10}}}, {{0, kLeft}, {0, kRight}});
  e.add({{2, 0.8, kRight}, {2, 0.3, kRight}}, {{2, kRight}});
  const DetectionSummary s = e.summary();
  ASSERT_EQ(s.classes.size(), 2U);
  EXPECT_EQ(s.classes[0].label, 0);
  EXPECT_EQ(s.classes[0].objects, 2);
  // Recall 0.5 at precision 1, and then the line from (0.5, 0.5) to (1, 0), as the trapezoids of 101 points see it: the
  // step from 1 to 0.5 at recall 0.5 is one of them.
  EXPECT_NEAR(s.classes[0].ap50, 0.5 + 0.5 * 0.25, 0.005);
  EXPECT_NEAR(s.classes[0].ap, s.classes[0].ap50, 1e-12);
  EXPECT_EQ(s.classes[1].label, 2);
  EXPECT_NEAR(s.classes[1].ap50, 1, 0.005);
  EXPECT_NEAR(s.ap50, (s.classes[0].ap50 + s.classes[1].ap50) / 2, 1e-12);
  EXPECT_NEAR(s.fitness(), 0.1 * s.ap50 + 0.9 * s.ap, 1e-12);
  // Between 0.6 and 0.8 both classes have no wrong box; recall is 1/2 and 1.
  EXPECT_GT(s.score, 0.5);
  EXPECT_LT(s.score, 0.81);
  EXPECT_NEAR(s.classes[1].recall, 1, 0.01);
}

// Of two boxes on one object the one of the better score is right, though the other overlaps it more.
TEST(DetectionSummary, TheBestScoreHasTheObject) {
  DetectionEvaluation e(1);
  e.add({{0, 0.9, {0, 0, 10, 6}}, {0, 0.5, {0, 0, 10, 9}}}, {{0, kLeft}});  // overlaps of 0.6 and 0.9
  const DetectionSummary s = e.summary();
  EXPECT_NEAR(s.ap50, 1, 0.005);
  // Right are the first from 0.5 to 0.6 (three overlaps), then, behind a wrong one, the second up to 0.9 (six): the
  // precision is 1/2 from a recall of 0 to 1, but for a trapezoid of 1/200 at each end.
  EXPECT_NEAR(s.ap, (3 * 1.0 + 6 * 0.5) / 10, 0.01);
}

// A box that overlaps two objects claims the one that it overlaps more, also where another box has that.
TEST(DetectionSummary, ABoxClaimsOneObject) {
  DetectionEvaluation e(1);
  const BoxSides shifted = {3, 0, 10, 10};  // an overlap of 7 / 13 with kLeft, 6 / 14 with the next
  e.add({{0, 0.9, kLeft}, {0, 0.8, shifted}}, {{0, kLeft}, {0, {7, 0, 10, 10}}});
  // One object of two is found, by the first box.
  EXPECT_NEAR(e.summary().classes.at(0).ap50, 0.5 + 0.5 * 0.25, 0.005);
}

TEST(DetectionSummary, OfNothingIsZero) {
  DetectionEvaluation e(2);
  EXPECT_EQ(e.summary().ap, 0);
  EXPECT_EQ(e.coco().ap, -1);
  e.add({{0, 0.5, kLeft}}, {});
  EXPECT_EQ(e.summary().ap50, 0);
  e.add({}, {{1, kLeft}});
  EXPECT_EQ(e.summary().ap50, 0);
  EXPECT_EQ(e.summary().recall, 0);
  EXPECT_EQ(e.coco().ap50, 0);
  EXPECT_EQ(e.curves(11).size(), 1U);
}

TEST(DetectionConfusion, CountsPairsAndWhatIsLeft) {
  DetectionEvaluation e(2);
  e.add({{1, 0.9, kLeft}, {0, 0.8, kRight}, {0, 0.1, {50, 0, 5, 5}}, {1, 0.7, {200, 0, 5, 5}}},
        {{0, kLeft}, {0, kRight}, {1, {400, 0, 9, 9}}});
  // Rows: found as 0, as 1, nothing found; columns: is 0, is 1, nothing there.
  EXPECT_EQ(e.confusion(), (std::vector<std::int64_t>{1, 0, 0, 1, 0, 1, 0, 1, 0}));
}

TEST(DetectionEvaluation, GoesThroughBytes) {
  const json all = goldens();
  DetectionEvaluation whole = evaluation_of(all[1]);
  const std::string bytes = whole.serialized();
  EXPECT_EQ(DetectionEvaluation::deserialized(bytes).serialized(), bytes);
  EXPECT_EQ(DetectionEvaluation::deserialized(bytes).coco().ap, whole.coco().ap);
  for (std::size_t n = 0; n < bytes.size(); n += 13) {
    EXPECT_NE(test::error_of<Error>([&] { DetectionEvaluation::deserialized(bytes.substr(0, n)); }), "") << n;
  }
  EXPECT_NE(test::error_of<Error>([&] { DetectionEvaluation::deserialized(bytes + "x"); }), "");
  // Parts that ranks evaluated, joined.
  DetectionEvaluation joined(3);
  const DetectionEvaluation more = evaluation_of(all[2]);
  joined.add(whole);
  joined.add(more);
  EXPECT_EQ(joined.pictures(), whole.pictures() + more.pictures());
  EXPECT_EQ(joined.objects(), whole.objects() + more.objects());
}

TEST(DetectionEvaluation, NamesWhatItRefuses) {
  DetectionEvaluation e(2);
  EXPECT_EQ(test::error_of<Error>([&] {
              e.add({{2, 0.5, kLeft}}, {});
            }),
            "DetectionEvaluation: expected labels from 0 to 1, got 2");
  EXPECT_EQ(test::error_of<Error>([&] {
              e.add({}, {{0, {0, 0, -1, 3}}});
            }),
            "DetectionEvaluation: expected a true box with finite sides of at least 0, got 0, 0, -1, 3");
  EXPECT_EQ(test::error_of<Error>([&] {
              e.add({{0, std::numeric_limits<double>::quiet_NaN(), kLeft}}, {});
            }),
            "DetectionEvaluation: expected scores that are numbers, got NaN");
  EXPECT_EQ(test::error_of<Error>([&] { e.add(DetectionEvaluation(3)); }),
            "DetectionEvaluation: expected an evaluation of 2 classes, got one of 3");
  EXPECT_EQ(e.pictures(), 0);
}

}  // namespace
}  // namespace halfstep::training
