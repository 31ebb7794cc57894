// SPDX-License-Identifier: Apache-2.0
// Descriptions of detectors in YAML: the published one is the network that is known by name; what is refused, and how.
#include "halfstep/models/yolov5_description.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "halfstep/ops/create.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using models::Yolov5;
using models::Yolov5Options;

// YOLOv5n, from the published table of its layers.
std::string nano() {
  const auto file = test::goldens_dir().parent_path().parent_path() / "fuzz/corpus/yolov5_description/nano.yaml";
  std::ifstream in(file);
  std::ostringstream text;
  text << in.rdbuf();
  EXPECT_FALSE(text.str().empty()) << file;
  return text.str();
}
std::string with(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}
std::vector<std::pair<std::string, Shape>> shapes(const Yolov5& net) {
  std::vector<std::pair<std::string, Shape>> result;
  for (const NamedTensor& t : net.state_dict()) result.emplace_back(t.name, t.tensor.sizes());
  return result;
}

TEST(Yolov5Description, IsTheNetworkThatItDescribes) {
  const test::TemporaryDir dir;
  const auto file = dir.path() / "yolov5n.yaml";
  std::ofstream(file) << nano();
  const Yolov5 net{models::read_yolov5_description(file)}, expected = models::yolov5n();
  EXPECT_EQ(shapes(net), shapes(expected));
  EXPECT_EQ(net.str(), expected.str());
  EXPECT_EQ(net.options.anchors, expected.options.anchors);
  for (std::size_t i = 0; i < expected.options.layers.size(); ++i) {
    EXPECT_EQ(net.options.layers[i].from, expected.options.layers[i].from) << i;
    EXPECT_EQ(net.options.layers[i].repeats, expected.options.layers[i].repeats) << i;
  }
  // Other factors and classes: the large one, for 3.
  std::string large = with(with(nano(), "0.33", "1.0"), "0.25", "1.0");
  large = with(with(large, "nc: 80", "nc: 3"), "[nc, anchors]", "[3, anchors]");
  EXPECT_EQ(shapes(Yolov5{models::parse_yolov5_description(large, "large")}), shapes(models::yolov5l({.classes = 3})));
}

// What may be left out has the defaults; None as a padding is half of the kernel.
TEST(Yolov5Description, FillsInArguments) {
  const Yolov5Options o = models::parse_yolov5_description(
      "nc: 2\ndepth_multiple: 1\nwidth_multiple: 0.5\nanchors: [[4, 5.5]]\n"
      "backbone: [[-1, 1, Conv, [16, 3, 2, None]], [-1, 2, C3, [16, True]], [0, 1, Conv, [16]],\n"
      "           [[-1, 1], 1, Concat, [1]], [-1, 1, SPPF, [32]]]\n"
      "head: [[[-1], 1, Detect, [2, anchors]]]\n",
      "small");
  EXPECT_EQ(o.classes, 2);
  EXPECT_EQ(o.anchors, (std::vector<std::vector<double>>{{4, 5.5}}));
  EXPECT_EQ(o.layers[0].arguments, (std::vector<double>{16, 3, 2}));
  EXPECT_EQ(o.layers[1].arguments, (std::vector<double>{16, 1}));
  EXPECT_EQ(o.layers[1].repeats, 2);
  EXPECT_EQ(o.layers[2].from, std::vector<int>{0});
  EXPECT_EQ(o.layers[3].from, (std::vector<int>{-1, 1}));
  EXPECT_TRUE(o.layers[3].arguments.empty());
  const Yolov5 net{o};
  EXPECT_EQ(net.strides(), std::vector<std::int64_t>{2});
  EXPECT_EQ(net(zeros({1, 3, 8, 8}))[0].sizes(), Shape({1, 1, 4, 4, 7}));
}

// As a checkpoint keeps it, with what was left out.
TEST(Yolov5Description, IsWrittenAsOneLine) {
  const Yolov5Options o = models::parse_yolov5_description(
      "# small\nnc: 2\ndepth_multiple: 1.0\nwidth_multiple: 0.25\nanchors: [[4,5.5, 6,7]]\n"
      "backbone: [[-1, 1, Conv, [16]], [-1, 2, C3, [16]], [-1, 1, Conv, [16, 3, 2, 0]], [-1, 1, SPPF, [32]]]\n"
      "head: [[-1, 1, nn.Upsample, [None, 2, 'nearest']], [[-1, 1], 1, Concat, [1]], [-1, 1, C3, [8, False]],\n"
      "       [[6], 1, Detect, [2, anchors]]]\n",
      "small");
  const std::string text = models::yolov5_description(o);
  EXPECT_EQ(text,
            "{nc: 2, depth_multiple: 1, width_multiple: 0.25, anchors: [[4, 5.5, 6, 7]], backbone: [], "
            "head: [[-1, 1, Conv, [16, 1, 1, None]], [-1, 2, C3, [16, True]], [-1, 1, Conv, [16, 3, 2, 0]], "
            "[-1, 1, SPPF, [32, 5]], [-1, 1, nn.Upsample, [None, 2, 'nearest']], [[-1, 1], 1, Concat, [1]], "
            "[-1, 1, C3, [8, False]], [6, 1, Detect, [nc, anchors]]]}");
  for (const Yolov5Options& written : {o, models::yolov5n().options, models::yolov5x({.classes = 3}).options}) {
    const Yolov5Options again = models::parse_yolov5_description(models::yolov5_description(written), "again");
    EXPECT_EQ(models::yolov5_difference(written, again), "");
    EXPECT_EQ(models::yolov5_description(again), models::yolov5_description(written));
    EXPECT_EQ(shapes(Yolov5{again}), shapes(Yolov5{written}));
  }
}

TEST(Yolov5Description, NamesTheFirstDifference) {
  const auto differs = [](const std::string& other) {
    return models::yolov5_difference(models::parse_yolov5_description(nano(), "a"),
                                     models::parse_yolov5_description(other, "b"));
  };
  EXPECT_EQ(differs(nano()), "");
  EXPECT_EQ(differs("# another comment\n" + with(nano(), "nc: 80", "nc:   3  # of cells")), "");
  // The same layer by its number, and an argument that is the default.
  EXPECT_EQ(differs(with(with(nano(), "[[-1, 6], 1, Concat", "[[11, 6], 1, Concat"), "C3, [128]", "C3, [128, True]")),
            "");
  EXPECT_EQ(differs(with(nano(), "0.33", "0.67")), "depth_multiple is 0.33 and 0.67");
  EXPECT_EQ(differs(with(nano(), "0.25", "0.5")), "width_multiple is 0.25 and 0.5");
  EXPECT_EQ(differs(with(nano(), "C3, [128]", "C3, [128, False]")),
            "layer 2 is [-1, 3, C3, [128, True]] and [-1, 3, C3, [128, False]]");
  EXPECT_EQ(differs(with(nano(), "[-1, 6], 1, Concat", "[-1, 5], 1, Concat")),
            "layer 12 is [[-1, 6], 1, Concat, [1]] and [[-1, 5], 1, Concat, [1]]");
  EXPECT_EQ(differs(with(nano(), "10,13", "10,14")).substr(0, 50),
            "anchors is [[10, 13, 16, 30, 33, 23], [30, 61, 62,");
  Yolov5Options shorter = models::parse_yolov5_description(nano(), "a");
  shorter.layers.pop_back();
  EXPECT_EQ(models::yolov5_difference(models::yolov5n().options, shorter), "the number of layers is 25 and 24");
}

TEST(Yolov5Description, NamesFileRowAndWhatWasExpected) {
  const auto error = [](const std::string& text) {
    return test::error_of<IoError>([&] { models::parse_yolov5_description(text, "f.yaml"); });
  };
  const auto changed = [&](const std::string& from, const std::string& to) { return error(with(nano(), from, to)); };
  EXPECT_EQ(error("- 3\n"),
            "f.yaml: expected the keys nc, depth_multiple, width_multiple, anchors, backbone and head, got a list");
  EXPECT_EQ(error(""),
            "f.yaml: expected the keys nc, depth_multiple, width_multiple, anchors, backbone and head, got nothing");
  EXPECT_EQ(changed("nc: 80", "nc: 0"), "f.yaml:2: nc: expected a whole number from 1 to 65536, got '0'");
  EXPECT_EQ(changed("nc: 80", "nc: many"), "f.yaml:2: nc: expected a whole number from 1 to 65536, got 'many'");
  EXPECT_EQ(changed("nc: 80\n", ""), "f.yaml: expected the key nc, got none");
  EXPECT_EQ(changed("nc: 80\n", "nc: 80\nnc: 81\n"), "f.yaml:3: expected nc once, got it again");
  EXPECT_EQ(changed("nc: 80\n", "nc: 80\nactivation: nn.ReLU()\n"),
            "f.yaml:3: expected one of the keys nc, depth_multiple, width_multiple, anchors, backbone and head, got "
            "'activation'");
  EXPECT_EQ(changed("0.33", "-1"), "f.yaml:3: depth_multiple: expected a factor above 0, at most 100, got '-1'");
  EXPECT_EQ(changed("0.25", "nan"), "f.yaml:4: width_multiple: expected a factor above 0, at most 100, got 'nan'");
  EXPECT_EQ(changed("[10,13, 16,30, 33,23]", "[10,13, 16]"),
            "f.yaml:6: anchors: expected pairs of a width and a height, got 3 numbers");
  EXPECT_EQ(changed("[10,13, 16,30, 33,23]", "[10,-13]"), "f.yaml:6: anchors: expected pixels above 0, got '-13'");
  EXPECT_EQ(changed("[-1, 3, C3, [128]]", "[-1, 3, C3]"),
            "f.yaml:12: layer 2: expected a row [from, number, module, arguments], got a list of 3");
  EXPECT_EQ(changed("[-1, 3, C3, [128]]", "[-1, 3, CSP, [128]]"),
            "f.yaml:12: layer 2 (CSP): expected Conv, C3, SPPF, nn.Upsample, Concat or Detect");
  EXPECT_EQ(changed("[-1, 3, C3, [128]]", "[-1, 0, C3, [128]]"),
            "f.yaml:12: layer 2 (C3): number: expected a whole number from 1 to 1000, got '0'");
  EXPECT_EQ(changed("[-1, 3, C3, [128]]", "[2, 3, C3, [128]]"),
            "f.yaml:12: layer 2 (C3): from: expected a whole number from -3 to 1, got '2'");
  EXPECT_EQ(changed("[-1, 3, C3, [128]]", "[-1, 3, C3, [128, 1, 2]]"),
            "f.yaml:12: layer 2 (C3): expected the arguments [channels, shortcut = True], got 3 arguments");
  EXPECT_EQ(changed("[512, False]", "[512, maybe]"),
            "f.yaml:25: layer 13 (C3): shortcut: expected True or False, got 'maybe'");
  EXPECT_EQ(changed("[64, 6, 2, 2]", "[64.5, 6]"),
            "f.yaml:10: layer 0 (Conv): channels: expected a whole number from 0 to 1048576, got '64.5'");
  EXPECT_EQ(changed("'nearest'", "bilinear"),
            "f.yaml:23: layer 11 (nn.Upsample): expected 'nearest' as the mode, got 'bilinear'");
  EXPECT_EQ(changed("[None, 2", "[[4, 4], 2"),
            "f.yaml:23: layer 11 (nn.Upsample): expected None as the size, got a list");
  EXPECT_EQ(changed("Concat, [1]", "Concat, [2]"), "f.yaml:24: layer 12 (Concat): expected the dimension 1, got '2'");
  EXPECT_EQ(changed("[nc, anchors]", "[79, anchors]"),
            "f.yaml:40: layer 24 (Detect): expected nc or 80, its value, got '79'");
  EXPECT_EQ(changed("[nc, anchors]", "[nc, 3]"),
            "f.yaml:40: layer 24 (Detect): expected anchors, the key above, got '3'");
  EXPECT_EQ(changed("   [[17, 20, 23], 1, Detect, [nc, anchors]],\n", ""),
            "f.yaml:22: head: expected Detect in the last row, got C3");
  EXPECT_EQ(error(std::string("nc: 1\0", 6)), "f.yaml: expected text, got a zero byte at offset 5");
  EXPECT_TRUE(error("nc: [1").starts_with("f.yaml:1: expected YAML: ")) << error("nc: [1");
  EXPECT_EQ(test::error_of<IoError>([] { models::read_yolov5_description("/nowhere/net.yaml"); }).find("/nowhere"), 0u);
}

}  // namespace
}  // namespace halfstep
