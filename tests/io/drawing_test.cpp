// SPDX-License-Identifier: Apache-2.0
// Figures as SVG and PNG: pixels of what was drawn, text of any bytes, charts of few, many and no numbers.
#include "halfstep/io/drawing.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "halfstep/core/error.h"
#include "halfstep/data/image.h"
#include "halfstep/io/atomic_file.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using io::Chart;
using io::Drawing;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// Red, green and blue of a pixel of a PNG.
std::array<int, 3> pixel(const std::string& png, std::int64_t x, std::int64_t y) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(png.data());
  const data::Image image = data::decode_image({bytes, png.size()}, "drawing.png");
  const std::uint8_t* at = image.pixels.data() + 3 * (y * image.width + x);
  return {at[0], at[1], at[2]};
}

TEST(Drawings, PixelsAreWhatWasDrawn) {
  Drawing drawing(40, 20, "two boxes");
  drawing.fill({0, 0, 10, 20}, {255, 0, 0});
  drawing.picture({20, 0, 20, 20}, {.width = 2, .height = 1, .pixels = {0, 0, 255, 0, 255, 0}});
  const std::string png = drawing.png(2);
  EXPECT_EQ(pixel(png, 10, 20), (std::array{255, 0, 0}));
  EXPECT_EQ(pixel(png, 30, 20), (std::array{255, 255, 255}));
  // Each pixel of the picture is a square of 20 by 40 in the file.
  EXPECT_EQ(pixel(png, 58, 5), (std::array{0, 0, 255}));
  EXPECT_EQ(pixel(png, 62, 35), (std::array{0, 255, 0}));
  const std::string svg = drawing.svg();
  EXPECT_TRUE(
      svg.starts_with("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" "
                      "width=\"40\" height=\"20\""));
  EXPECT_NE(svg.find("<rect x=\"0\" y=\"0\" width=\"10\" height=\"20\" fill=\"#ff0000\"/>"), std::string::npos);
  EXPECT_NE(svg.find("href=\"data:image/png;base64,iVBORw0KGgo"), std::string::npos);
}

TEST(Drawings, TextOfAnyBytesIsTextOnly) {
  Drawing drawing(100, 20, "</title><script>");
  drawing.text({0, 10}, "a<b>&\"c\"\x01\xff \xef\xbf\xbf\n]]>");
  const std::string svg = drawing.svg();
  EXPECT_NE(svg.find("<title>&lt;/title&gt;&lt;script&gt;</title>"), std::string::npos) << svg;
  EXPECT_NE(svg.find(">a&lt;b&gt;&amp;&quot;c&quot;\\x01\\xff \xef\xbf\xbd\\n]]&gt;</text>"), std::string::npos) << svg;
  EXPECT_FALSE(drawing.png().empty());
}

TEST(Drawings, LongTextsAreCut) {
  EXPECT_EQ(io::fitted_text("short", 10, 100), "short");
  const std::string cut = io::fitted_text(std::string(500, 'x'), 10, 100);
  EXPECT_LE(io::text_width(cut, 10), 100);
  EXPECT_TRUE(cut.ends_with("\xe2\x80\xa6"));
  // Not within a character.
  EXPECT_EQ(io::fitted_text("\xe4\xb8\xad\xe4\xb8\xad\xe4\xb8\xad\xe4\xb8\xad", 10, 25), "\xe4\xb8\xad\xe2\x80\xa6");
}

TEST(Drawings, SaveByTheFilesEnding) {
  test::TemporaryDir dir;
  const Drawing drawing(10, 10);
  drawing.save(dir.path() / "a.svg");
  drawing.save(dir.path() / "a.png");
  EXPECT_EQ(io::read_file(dir.path() / "a.svg", 1 << 20), drawing.svg());
  EXPECT_EQ(io::read_file(dir.path() / "a.png", 1 << 20).substr(0, 8), "\x89PNG\r\n\x1a\n");
  const std::string error = test::error_of<Error>([&] { drawing.save(dir.path() / "a.gif"); });
  EXPECT_NE(error.find("to end in .svg or .png"), std::string::npos) << error;
  EXPECT_THROW(drawing.save(dir.path() / "nowhere/a.svg"), IoError);
  EXPECT_THROW(Drawing(10, 10).picture({}, {.width = 2, .height = 2, .pixels = {1, 2, 3}}), Error);
}

std::string drawn(const Chart& chart) {
  Drawing drawing(400, 200);
  draw_chart(drawing, {0, 0, 400, 200}, chart);
  EXPECT_FALSE(drawing.png().empty());
  return drawing.svg();
}

TEST(Charts, TicksAreRoundNumbers) {
  const std::string svg =
      drawn({.title = "t", .x_label = "epoch", .y_label = "%", .series = {{.points = {{0, 0}, {4, 100}}}}, .x_max = 4});
  for (const char* text : {">0</text>", ">50</text>", ">100</text>", ">4</text>", ">epoch</text>", ">%</text>"}) {
    EXPECT_NE(svg.find(text), std::string::npos) << text << svg;
  }
  const std::string scales = drawn({.series = {{.points = {{0, 1024}, {1, 16777216}}}}, .scale = io::ChartScale::log2});
  EXPECT_NE(scales.find(">2²⁰</text>"), std::string::npos) << scales;
}

TEST(Charts, ALogarithmOfXPutsPowersAtEqualDistances) {
  // From 8 to 512 over 62 to 388: 64 is half of the way, where a linear axis has 260.
  const std::string svg = drawn({.series = {{.points = {{8, 1}, {64, 2}, {512, 3}}, .dots = true}},
                                 .x_min = 8,
                                 .x_max = 512,
                                 .x_scale = io::ChartScale::log2});
  for (const char* text :
       {"<circle cx=\"62\"", "<circle cx=\"225\"", "<circle cx=\"388\"", ">8</text>", ">16</text>", ">512</text>"}) {
    EXPECT_NE(svg.find(text), std::string::npos) << text << svg;
  }
}

TEST(Charts, NumbersThatAreNoneAreCrosses) {
  // Two arms each, and two in the legend; the curve is broken in two.
  const std::string svg =
      drawn({.series = {{.name = "loss", .points = {{0, 1}, {1, 2}, {2, kNan}, {3, 1}, {4, 3}}}}, .x_max = 4});
  EXPECT_EQ(count(svg, "stroke=\"#cc2026\""), 4);
  EXPECT_EQ(count(svg, "stroke=\"#0072b2\" stroke-width=\"1.5\""), 2);
  EXPECT_NE(svg.find(">not finite</text>"), std::string::npos);
  const std::string none = drawn({.series = {{.points = {{0, kNan}, {1, HUGE_VAL}}}}});
  EXPECT_EQ(count(none, "stroke=\"#cc2026\""), 6);
  // What a logarithm can't show.
  EXPECT_EQ(count(drawn({.series = {{.points = {{0, 0}, {1, 8}}}}, .scale = io::ChartScale::log10}), "#cc2026"), 4);
}

TEST(Charts, FewNumbersAndExtremeOnes) {
  EXPECT_NE(drawn({}).find("no values yet"), std::string::npos);
  EXPECT_EQ(count(drawn({.series = {{.points = {{1, 0.5}}}}}), "<circle"), 1);
  for (const double v : {0.0, -1.0, 1e-300, 1e300, 5e-324}) {
    for (const auto scale : {io::ChartScale::linear, io::ChartScale::log10, io::ChartScale::log2}) {
      for (const double w : {v, v * 2, 1.0}) {
        const std::string svg = drawn({.series = {{.points = {{0, v}, {1, w}}}}, .scale = scale});
        EXPECT_LT(svg.size(), 30000u) << v << " " << w;
        EXPECT_EQ(count(svg, "nan"), 0) << v << " " << w;
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
