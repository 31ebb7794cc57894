// SPDX-License-Identifier: Apache-2.0
// Figures: a drawing of lines, boxes, text and pictures that is saved as SVG or PNG, and charts with axes on it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::io {

/// A color, each part from 0 to 255.
struct Color {
  std::uint8_t red = 0, green = 0, blue = 0;
};

/// Colours that stay apart on white for colour-blind readers too (Okabe and Ito), and greys.
namespace colors {
inline constexpr Color kBlue{0, 114, 178}, kOrange{213, 94, 0}, kGreen{0, 138, 100}, kPink{190, 100, 150},
    kYellow{200, 140, 0}, kSky{70, 160, 215}, kRed{204, 32, 38};
inline constexpr Color kBlack{20, 20, 20}, kGrey{105, 105, 105}, kPale{222, 222, 222}, kWhite{255, 255, 255};
}  // namespace colors

/// A place in a drawing: to the right and down from its upper left corner, in pixels.
struct Point {
  double x = 0, y = 0;
};
struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};
struct Pen {
  Color color = colors::kBlack;
  double width = 1;
};
enum class Align : std::uint8_t { left, center, right };
struct TextStyle {
  double size = 12;
  Color color = colors::kBlack;
  Align align = Align::left;  ///< what lies at the given place
  bool bold = false;
  bool upwards = false;  ///< turned by a quarter to the left
};
/// Rows of pixels of three bytes: red, green, blue.
struct Bitmap {
  std::int64_t width = 0, height = 0;
  std::vector<std::uint8_t> pixels = {};
};

/// A white sheet that things are drawn on, later ones over earlier ones.
class HS_API Drawing {
 public:
  /// Size in pixels. `title` is what programs that read SVG aloud say.
  Drawing(double width, double height, std::string title = "");
  double width() const { return width_; }
  double height() const { return height_; }

  /// A filled box, its outline, a line, a line through several points, and a filled circle.
  void fill(const Box& box, Color color);
  void frame(const Box& box, const Pen& pen);
  void line(Point from, Point to, const Pen& pen) { lines({from, to}, pen); }
  void lines(std::vector<Point> points, const Pen& pen);
  void dot(Point center, double radius, Color color);
  /// One line of text whose baseline is at `place`. Any bytes: what can't be shown is escaped as printable() does.
  void text(Point place, std::string_view text, const TextStyle& style = {});
  /// Scaled to the box; single pixels stay sharp squares. Throws Error if the bitmap has too few bytes.
  void picture(const Box& box, Bitmap bitmap);

  /// The drawing as a file's contents.
  std::string svg() const;
  /// `scale`: pixels of the file for one of the drawing.
  std::string png(double scale = 2) const;
  /// Writes SVG or PNG (of that scale), as the file's name ends, atomically. Throws Error for other endings, IoError.
  void save(const std::filesystem::path& path, double scale = 2) const;

 private:
  struct Fill {
    Box box;
    Color color;
  };
  struct Lines {
    std::vector<Point> points;
    Pen pen;
    bool closed = false;
  };
  struct Dot {
    Point center;
    double radius;
    Color color;
  };
  struct Text {
    Point place;
    std::string text;
    TextStyle style;
  };
  struct Picture {
    Box box;
    Bitmap bitmap;
  };
  double width_, height_;
  std::string title_;
  std::vector<std::variant<Fill, Lines, Dot, Text, Picture>> shapes_;
};

/// The width of a text of that size, estimated: fonts differ.
HS_API double text_width(std::string_view text, double size);
/// A printable text cut with an ellipsis where it would be wider than `width`.
HS_API std::string fitted_text(std::string_view text, double size, double width);

/// A curve of a chart. Points whose y isn't finite interrupt it; each is marked by a cross at the upper edge.
struct ChartSeries {
  std::string name = {};  ///< in the legend; empty: not there
  std::vector<Point> points = {};
  Color color = colors::kBlue;
  double width = 1.5;     ///< of the line; 0: none
  bool dots = false;      ///< at the points
  bool interval = false;  ///< y holds from the point before on: a staircase
};
enum class ChartScale : std::uint8_t { linear, log10, log2 };
struct Chart {
  std::string title = {};
  std::string x_label = {}, y_label = {};
  std::vector<ChartSeries> series = {};
  ChartScale scale = ChartScale::linear;  ///< of y; values that a logarithm can't show count as not finite
  std::optional<double> y_min = {};       ///< the axis goes down to this at least
  std::optional<double> y_max = {};       ///< and up to this
  double x_min = 0, x_max = 1;
  ChartScale x_scale = ChartScale::linear;  ///< of x; by a logarithm `x_min` and all points' x are above 0
};
/// Draws a chart with both axes and a legend.
HS_API void draw_chart(Drawing& drawing, const Box& box, const Chart& chart);

}  // namespace halfstep::io
