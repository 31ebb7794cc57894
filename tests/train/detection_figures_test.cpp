// SPDX-License-Identifier: Apache-2.0
// What is drawn and written of a detector's evaluation, against tables worked out by hand.
#include "halfstep/train/detection_figures.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>

#include "halfstep/core/error.h"
#include "halfstep/core/random.h"
#include "halfstep/data/image.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/run_folder.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using training::DetectionEvaluation;

const std::vector<std::string> kNames = {"cat", "<dog>", "bird"};

// Two cats, of which one is found as a dog; a dog that is missed; a cat where nothing is.
DetectionEvaluation small_evaluation() {
  DetectionEvaluation e(3);
  e.add({{0, 0.9, {10, 10, 20, 20}}}, {{0, {10, 10, 20, 20}}, {1, {50, 50, 20, 20}}});
  e.add({{1, 0.8, {0, 0, 10, 10}}, {0, 0.7, {70, 70, 5, 5}}, {2, 0.1, {0, 50, 5, 5}}}, {{0, {0, 0, 10, 10}}});
  e.add({}, {});
  return e;
}

// 80 classes, some hundred objects each found with some chance.
DetectionEvaluation large_evaluation(std::int64_t classes) {
  DetectionEvaluation e(classes);
  RandomStream random(1);
  for (std::int64_t p = 0; p < 8 * classes; ++p) {
    std::vector<training::DetectedBox> found;
    std::vector<training::TrueBox> truth;
    const std::int64_t label = p % classes;
    for (int i = 0; i < 3; ++i) {
      const training::BoxSides box = {100.0 * i, 10, 60, 60};
      truth.push_back({label, box});
      const double chance = random.uniform64();
      if (chance < 0.8) found.push_back({chance < 0.1 ? (label + 7) % classes : label, random.uniform64(), box});
      if (chance > 0.9) found.push_back({label, 0.5 * random.uniform64(), {100.0 * i, 200, 30, 30}});
    }
    e.add(std::move(found), std::move(truth));
  }
  return e;
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

bool says(const std::string& svg, const std::string& text) { return count(svg, ">" + text + "</text>") > 0; }

std::vector<std::vector<std::string>> lines_of(const std::string& csv) {
  std::vector<std::vector<std::string>> lines;
  for (std::size_t begin = 0; begin < csv.size();) {
    const std::size_t end = csv.find('\n', begin);
    std::vector<std::string> fields(1);
    for (std::size_t i = begin; i < end; ++i) {
      if (csv[i] == ',') {
        fields.emplace_back();
      } else {
        fields.back() += csv[i];
      }
    }
    lines.push_back(fields);
    begin = end + 1;
  }
  return lines;
}

// Of two objects the first is found and nothing else: precision 1 up to recall 0.5 and from there a line to 0 at
// recall 1, as the trainers' protocol closes its curve. The area is 0.5 + 0.25, at each overlap, and that of a class of
// which all is found 1 less half of a hundredth, where the curve falls to 0 at its end.
TEST(DetectionTables, AreThoseWorkedOutByHand) {
  DetectionEvaluation e(3);
  e.add({{0, 0.9, {0, 0, 10, 10}}}, {{0, {0, 0, 10, 10}}, {0, {50, 50, 10, 10}}});
  e.add({{2, 0.9, {0, 0, 10, 10}}}, {{2, {0, 0, 10, 10}}});
  e.add({}, {{0, {1, 1, 5, 5}, -1, true}});  // a crowd counts nowhere
  const auto lines = lines_of(detection_csv(e, kNames));
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0],
            (std::vector<std::string>{"class", "pictures", "objects", "precision", "recall", "map50", "map50_95"}));
  struct Row {
    const char *name, *pictures, *objects;
    double precision, recall, ap;
  };
  const Row expected[] = {
      {"all", "3", "3", 1, 0.75, (0.75 + 0.995) / 2}, {"cat", "1", "2", 1, 0.5, 0.75}, {"bird", "1", "1", 1, 1, 0.995}};
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& fields = lines[i + 1];
    ASSERT_EQ(fields.size(), 7u);
    EXPECT_EQ(fields[0], expected[i].name);
    EXPECT_EQ(fields[1], expected[i].pictures);
    EXPECT_EQ(fields[2], expected[i].objects);
    // Sums of some hundred numbers in float64.
    EXPECT_NEAR(std::stod(fields[3]), expected[i].precision, 1e-12);
    EXPECT_NEAR(std::stod(fields[4]), expected[i].recall, 1e-12);
    EXPECT_NEAR(std::stod(fields[5]), expected[i].ap, 1e-12);
    EXPECT_NEAR(std::stod(fields[6]), expected[i].ap, 1e-12);
  }
  const training::ResultTable table = detection_table(e, {});
  EXPECT_EQ(table.header, (std::vector<std::string>{"Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"}));
  ASSERT_EQ(table.rows.size(), 3u);
  EXPECT_EQ(table.rows[0], (std::vector<std::string>{"all", "3", "3", "1.000", "0.750", "0.873", "0.873"}));
  EXPECT_EQ(table.rows[1], (std::vector<std::string>{"0", "1", "2", "1.000", "0.500", "0.750", "0.750"}));
  EXPECT_EQ(table.rows[2][0], "2");
}

TEST(DetectionTables, WithoutPicturesObjectsOrWithManyClasses) {
  EXPECT_TRUE(detection_table(DetectionEvaluation(2), {}).rows.empty());
  DetectionEvaluation nothing(2);
  nothing.add({{1, 0.5, {0, 0, 1, 1}}}, {});
  EXPECT_EQ(detection_csv(nothing, {}), "class,pictures,objects,precision,recall,map50,map50_95\nall,1,0,0,0,0,0\n");
  const training::ResultTable table = detection_table(large_evaluation(120), {});
  EXPECT_EQ(table.rows.size(), 51u);
  EXPECT_EQ(table.note, "(50 of 120 classes, those with the lowest mAP50-95)");
  for (std::size_t i = 2; i < table.rows.size(); ++i) EXPECT_LE(table.rows[i - 1][6], table.rows[i][6]);
  EXPECT_EQ(detection_table(large_evaluation(80), {}).rows.size(), 81u);
}

TEST(DetectionFigures, TheConfusionMatrixHasWhatItIsInRows) {
  const std::string svg = training::draw_confusion(small_evaluation(), kNames, "a run").svg();
  EXPECT_TRUE(says(svg, "1 of 3 objects found; boxes where nothing is: 1; colour: share of the row's class"));
  for (const char* text : {"cat taken for &lt;dog&gt;", "&lt;dog&gt; missed", "cat where nothing is", "background",
                           "missed", "a run", "Most frequent mistakes"}) {
    EXPECT_TRUE(says(svg, text)) << text;
  }
  // The box of a score under 0.25 is in no cell: 1 cat as cat, 1 as dog, 1 missed dog, 1 cat on the background.
  EXPECT_EQ(count(svg, ">1</text>"), 4);
  const std::string none = training::draw_confusion(DetectionEvaluation(2), {}, "t").svg();
  EXPECT_TRUE(says(none, "No mistakes"));
}

TEST(DetectionFigures, EightyClassesHaveTheirNames) {
  std::vector<std::string> names;
  for (int i = 0; i < 80; ++i) names.push_back("class-" + std::to_string(i));
  const DetectionEvaluation e = large_evaluation(80);
  const std::string confusion = training::draw_confusion(e, names, "t").svg();
  const std::string labels = training::draw_labels({{79, 0.5, 0.5, 0.1, 0.1}}, names, "t").svg();
  for (const std::string& name : names) {
    EXPECT_EQ(count(confusion, ">" + name + "</text>"), 2) << name;
    EXPECT_EQ(count(labels, ">" + name + "</text>"), 1) << name;
  }
  const auto curves = e.curves(201);
  const std::string pr = draw_precision_recall(curves, e.summary(), names, "t").svg();
  EXPECT_TRUE(says(pr, "each of 80 classes"));
  // Thin lines, and the one in the legend.
  EXPECT_EQ(count(pr, "stroke=\"#b2bcc6\""), 80 + 1);
  EXPECT_LT(pr.size(), 500'000u);
  const std::string many = training::draw_confusion(large_evaluation(365), {}, "t").svg();
  EXPECT_NE(many.find("a cell is 4 x 4 classes"), std::string::npos);
}

// A matrix of a million classes would have 10^12 cells.
TEST(DetectionFigures, OfTooManyClassesThereIsNoMatrix) {
  DetectionEvaluation e(1'000'000);
  e.add({{7, 0.9, {0, 0, 8, 8}}}, {{7, {0, 0, 8, 8}}, {999'999, {20, 0, 8, 8}}});
  const std::string error = test::error_of<Error>([&] { training::draw_confusion(e, {}, "t"); });
  EXPECT_NE(error.find("at most 2000 classes, got 1000000"), std::string::npos) << error;
  EXPECT_EQ(DetectionEvaluation(2000).confusion().size(), 2001u * 2001u);
  const test::TemporaryDir dir;
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  for (int i = 0; i < 2; ++i) write_detection_results(e, {}, dir.path(), "t");
  set_log_sink({});
  ASSERT_EQ(said.size(), 1u) << "once for a folder";
  EXPECT_NE(said[0].find("confusion.svg: not written: a confusion matrix has at most 2000 classes, got 1000000"),
            std::string::npos)
      << said[0];
  EXPECT_FALSE(fs::exists(dir.path() / "confusion.svg"));
  for (const char* name : {"classes.csv", "precision-recall.svg", "f1.svg", "precision.svg", "recall.svg"}) {
    EXPECT_TRUE(fs::exists(dir.path() / name)) << name;
  }
}

TEST(DetectionFigures, OfManyClassesThereIsTheMeanOnly) {
  DetectionEvaluation e(1001);
  for (std::int64_t label = 0; label < 1001; ++label) {
    e.add({{label, 0.9, {0, 0, 8, 8}}}, {{label, {0, 0, 8, 8}}});
  }
  const std::string svg = draw_precision_recall(e.curves(201), e.summary(), {}, "t").svg();
  EXPECT_EQ(count(svg, "stroke=\"#b2bcc6\""), 0);
  EXPECT_TRUE(says(svg, "all classes, mean"));
  EXPECT_LT(svg.size(), 50'000u);
}

TEST(DetectionFigures, CurvesNameTheirClassesAndTheirBest) {
  const DetectionEvaluation e = small_evaluation();
  const auto curves = e.curves(201);
  const std::string pr = draw_precision_recall(curves, e.summary(), kNames, "a run").svg();
  // Cats: the first box is right, the second wrong: precision 1 up to a recall of 0.5, there 0.5, and from there a line
  // to 0: 0.49 + 0.01 (1 + 0.5) / 2 + 0.5 * 0.5 / 2 = 0.6225 by the trapezoidal rule.
  EXPECT_EQ(count(pr, ">cat 0.62"), 1);
  EXPECT_TRUE(says(pr, "&lt;dog&gt; 0.000"));
  EXPECT_FALSE(says(pr, "bird 0.000")) << "it has no objects";
  EXPECT_TRUE(says(pr, "all classes, mean"));
  EXPECT_EQ(count(pr, "nan"), 0);
  const std::string f1 = draw_score_curve(training::ScoreCurve::f1, curves, kNames, "a run").svg();
  // Of cats the box of score 0.9 alone has precision 1, recall 0.5 and so F1 2/3; dogs have 0.
  EXPECT_NE(f1.find(">best mean F1 of all classes 0.333, at a score of 0.900</text>"), std::string::npos)
      << f1.substr(0, 900);
  for (const auto which : {training::ScoreCurve::precision, training::ScoreCurve::recall}) {
    EXPECT_TRUE(says(draw_score_curve(which, curves, kNames, "a run").svg(), "score"));
    EXPECT_TRUE(says(draw_score_curve(which, {}, kNames, "a run").svg(), "no objects"));
  }
  EXPECT_TRUE(says(training::draw_precision_recall({}, {}, kNames, "a run").svg(), "no objects"));
}

// Pixels of the maps in the figure of labels: their only pictures.
TEST(DetectionFigures, LabelsAreCountedWhereTheyAre) {
  const std::vector<training::LabelBox> boxes = {
      {0, 0.01, 0.99, 0.5, 0.25}, {0, 0.01, 0.99, 0.5, 0.25}, {2, 0.01, 0.99, 0.5, 0.25}, {2, -3, 7, 2, 0.25}};
  const io::Drawing drawing = training::draw_labels(boxes, kNames, "a run");
  const std::string svg = drawing.svg();
  EXPECT_EQ(count(svg, ">2</text>"), 2) << "cats and birds";
  EXPECT_EQ(count(svg, ">0</text>"), 1 + 4) << "dogs, and the axes";
  for (const char* text : {"cat", "&lt;dog&gt;", "bird", "Centres", "Sizes"}) EXPECT_TRUE(says(svg, text)) << text;
  EXPECT_EQ(count(svg, "href=\"data:image/png"), 2);
  const std::string png = drawing.png(1);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(png.data());
  const data::Image image = data::decode_image({bytes, png.size()}, "labels.png");
  // Where the centre's map is in the drawing, from the SVG.
  double x = 0, y = 0, side = 0;
  ASSERT_EQ(std::sscanf(svg.c_str() + svg.find("<image "), "<image x=\"%lf\" y=\"%lf\" width=\"%lf\"", &x, &y, &side),
            3);
  const auto green = [&](double across, double down) {
    const auto column = static_cast<std::int64_t>(x + across * side), row = static_cast<std::int64_t>(y + down * side);
    return image.row(row)[3 * column + 1];
  };
  // All four are in the lower left corner: that beyond the picture is put at its edge.
  EXPECT_LT(green(0.01, 0.99), 100);
  EXPECT_EQ(green(0.5, 0.5), 255);
  EXPECT_EQ(green(0.01, 0.01), 255);
  EXPECT_NE(test::error_of<Error>([] { training::draw_labels({{-1}}, {}, "t"); }).find("got -1"), std::string::npos);
  EXPECT_FALSE(training::draw_labels({}, {}, "t").png().empty());
}

TEST(DetectionFigures, CrowdsAreNoLabels) {
  data::DetectionData data;
  data.pictures.push_back(
      {.file = "a.jpg",
       .objects = {{.label = 1, .x = 0.5, .y = 0.25, .width = 0.125, .height = 1}, {.label = 2, .crowd = true}}});
  const auto boxes = training::label_boxes(data);
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_EQ(boxes[0].label, 1);
  EXPECT_EQ((std::array{boxes[0].x, boxes[0].y, boxes[0].width, boxes[0].height}), (std::array{0.5, 0.25, 0.125, 1.0}));
}

class DetectionFiles : public ::testing::Test {
 protected:
  void write() {
    write_detection_results(small_evaluation(), kNames, dir_.path(), "a run");
    training::write_labels({{0, 0.5, 0.5, 0.1, 0.1}}, kNames, dir_.path(), "a run");
    training::write_train_batch(zeros({2, 3, 32, 32}), full({2, 8, 5}, -1), kNames, dir_.path(), "a run");
    training::write_compared({{.picture = {.width = 4, .height = 4, .pixels = std::vector<std::uint8_t>(48)}}}, kNames,
                             dir_.path(), "a run");
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : fs::directory_iterator(dir_.path())) result.push_back(entry.path().filename());
    std::sort(result.begin(), result.end());
    return result;
  }
  std::string read(const char* name) const { return io::read_file(dir_.path() / name, 1 << 24); }

  test::TemporaryDir dir_;
};

TEST_F(DetectionFiles, AreAllThatARunMayWrite) {
  write();
  EXPECT_EQ(names(),
            (std::vector<std::string>{"classes.csv", "confusion.svg", "f1.svg", "labels.svg", "precision-recall.svg",
                                      "precision.svg", "predictions.png", "recall.svg", "train-batch.png"}));
  const auto all = training::run_file_names();
  for (const std::string& name : names()) EXPECT_NE(std::find(all.begin(), all.end(), name), all.end()) << name;
  EXPECT_EQ(read("classes.csv"), detection_csv(small_evaluation(), kNames));
  for (const char* name : {"confusion.svg", "f1.svg", "labels.svg", "precision-recall.svg", "precision.svg"}) {
    const std::string svg = read(name);
    EXPECT_TRUE(says(svg, "a run")) << name;
    EXPECT_TRUE(svg.ends_with("</svg>\n")) << name;
  }
  // Pixel by pixel, not enlarged.
  const std::string png = read("train-batch.png");
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(png.data());
  EXPECT_EQ(data::decode_image({bytes, png.size()}, "p").width,
            static_cast<std::int64_t>(
                training::draw_train_batch(zeros({2, 3, 32, 32}), full({2, 8, 5}, -1), {}, "a run").width()));
  // Without pictures nothing is written.
  fs::remove(dir_.path() / "classes.csv");
  fs::remove(dir_.path() / "predictions.png");
  write_detection_results(DetectionEvaluation(2), {}, dir_.path(), "t");
  training::write_compared({}, {}, dir_.path(), "t");
  EXPECT_EQ(names().size(), 7u);
}

TEST_F(DetectionFiles, FaultsOfTheFolderAreNamed) {
  const fs::path nowhere = dir_.path() / "nowhere";
  const auto said = [](auto&& write) { return test::error_of<IoError>(write); };
  EXPECT_NE(
      said([&] { write_detection_results(small_evaluation(), kNames, nowhere, "t"); }).find("nowhere/classes.csv"),
      std::string::npos);
  EXPECT_NE(said([&] { training::write_labels({}, kNames, nowhere, "t"); }).find("nowhere/labels.svg"),
            std::string::npos);
  fs::create_directory(dir_.path() / "f1.svg");
  EXPECT_NE(said([&] { write(); }).find("f1.svg"), std::string::npos) << "a folder where a file was expected";
  fs::remove(dir_.path() / "f1.svg");
  // A link is followed, and stays.
  fs::remove(dir_.path() / "classes.csv");
  fs::create_symlink("elsewhere.csv", dir_.path() / "classes.csv");
  write();
  EXPECT_TRUE(fs::is_symlink(dir_.path() / "classes.csv"));
  EXPECT_EQ(read("elsewhere.csv"), detection_csv(small_evaluation(), kNames));
}

// A limit on the size of files stands for a full disk: write() fails in the middle of the file.
TEST_F(DetectionFiles, AFullDiskLeavesWhatWasThere) {
  write();
  const std::string before = read("confusion.svg");
  const std::vector<std::string> files = names();
  rlimit was{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &was), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit less{.rlim_cur = 512, .rlim_max = was.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
  const std::string error = test::error_of<IoError>([&] {
    write_detection_results(small_evaluation(), {"other", "names"}, dir_.path(), "another run");
  });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &was), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(error.find("confusion.svg: writing failed"), std::string::npos) << error;
  EXPECT_EQ(read("confusion.svg"), before);
  EXPECT_EQ(names(), files) << "nothing half written stays";
}

}  // namespace
}  // namespace halfstep
