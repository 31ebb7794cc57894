// SPDX-License-Identifier: Apache-2.0
// Charts on a drawing: ticks at round numbers, curves, legend.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "halfstep/io/drawing.h"

namespace halfstep::io {
namespace {

constexpr double kTitle = 13, kSmall = 10.5;

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void take(double v) { low = std::min(low, v), high = std::max(high, v); }
  bool empty() const { return !(low <= high); }
};

struct Tick {
  double at;
  std::string text;
};

// 1, 2 or 5 times a power of ten: the smallest that needs at most `most` steps for `length`.
double round_step(double length, double most) {
  const double power = std::pow(10, std::floor(std::log10(length / most)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power * most >= length * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

std::string tick_text(double value, double step) {
  const double largest = std::max(std::fabs(value), step);
  if (largest >= 1e6 || step < 1e-5) return fmt::format("{:.6g}", value);
  const int digits = std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-9)));
  return fmt::format("{:.{}f}", value, digits);
}

std::vector<Tick> linear_ticks(const Range& range, double most) {
  const double step = round_step(range.high - range.low, most);
  std::vector<Tick> ticks;
  // Counted in steps, so that no error adds up and 0 is 0.
  const double first = std::ceil(range.low / step - 1e-6), last = std::floor(range.high / step + 1e-6);
  for (double i = first; i <= last && ticks.size() < 50; ++i) {
    const double at = i * step + 0.0;  // not -0
    ticks.push_back({at, tick_text(at, step)});
  }
  return ticks;
}

std::string raised(int number) {
  static constexpr std::array<const char*, 10> kDigits = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string text = number < 0 ? "⁻" : "";
  for (const char c : std::to_string(std::abs(number))) text += kDigits[static_cast<std::size_t>(c - '0')];
  return text;
}

// Numbers as they are, or as powers where one of them would be long.
std::vector<Tick> power_texts(std::vector<Tick> ticks, int base) {
  const auto value = [base](const Tick& t) { return std::pow(base, t.at); };
  const bool plain =
      std::all_of(ticks.begin(), ticks.end(), [&](const Tick& t) { return value(t) >= 0.001 && value(t) < 1e5; });
  for (Tick& t : ticks) {
    const auto exponent = static_cast<int>(std::lround(t.at));
    t.text = plain ? fmt::format("{:g}", value(t)) : std::to_string(base) + raised(exponent);
  }
  return ticks;
}

std::vector<Tick> power_ticks(const Range& range, int base, double most) {
  // The range is in exponents.
  const double step = std::max(1.0, round_step(range.high - range.low, most));
  std::vector<Tick> ticks;
  for (double i = std::ceil(range.low / step - 1e-6); i * step <= range.high + 1e-6 && ticks.size() < 50; ++i) {
    ticks.push_back({i * step + 0.0, {}});
  }
  return power_texts(std::move(ticks), base);
}

class ChartDrawing {
 public:
  ChartDrawing(Drawing& drawing, const Box& box, const Chart& chart)
      : out_(drawing),
        box_(box),
        chart_(chart),
        plot_{box.x + 62, box.y + 26, std::max(box.width - 74, 1.0), std::max(box.height - 66, 1.0)} {
    x_ = {place(chart.x_min), place(chart.x_max)};
    if (!(x_.high > x_.low)) x_.high = x_.low + 1;
    for (const ChartSeries& s : chart_.series) {
      for (const Point& p : s.points) {
        if (const double v = position(p.y); std::isfinite(v))
          y_.take(v);
        else
          bad_ = true;
      }
    }
    empty_ = y_.empty();
    if (empty_) y_ = {0, 1};
    if (chart.y_min) y_.take(position(*chart.y_min));
    if (chart.y_max) y_.take(position(*chart.y_max));
    // A flat curve lies in the middle; others leave some room at both ends.
    const double length = y_.high - y_.low;
    const bool linear = chart_.scale == ChartScale::linear;
    constexpr double kLeast = 1e-300;
    if (length <= (linear ? std::max(std::fabs(y_.high) * 1e-6, kLeast) : 1e-6)) {
      const double half = linear && std::fabs(y_.high) > kLeast ? std::fabs(y_.high) * 0.5 : 1;
      y_ = {y_.low - half, y_.high + half};
      if (chart.y_min) y_.low = std::max(y_.low, std::min(position(*chart.y_min), y_.high - half));
    } else {
      const bool grounded = chart.y_min && y_.low == position(*chart.y_min);
      y_ = {grounded ? y_.low : y_.low - 0.05 * length, y_.high + 0.05 * length};
    }
  }

  void draw() {
    axes();
    if (empty_ && !bad_) {
      out_.text({plot_.x + plot_.width / 2, plot_.y + plot_.height / 2}, "no values yet",
                {.size = kSmall, .color = colors::kGrey, .align = Align::center});
    }
    for (const ChartSeries& s : chart_.series) curve(s);
    title();
  }

 private:
  // Where y stands on its axis, in the axis's own numbers.
  double position(double y) const {
    constexpr double kMost = 1e300, kNone = std::numeric_limits<double>::quiet_NaN();
    if (!(std::fabs(y) <= kMost)) return kNone;
    if (chart_.scale == ChartScale::linear) return y;
    if (!(y > 0)) return kNone;
    return chart_.scale == ChartScale::log2 ? std::log2(y) : std::log10(y);
  }
  // The same for x, which is known to be fit for its axis.
  double place(double x) const {
    return chart_.x_scale == ChartScale::linear ? x : chart_.x_scale == ChartScale::log2 ? std::log2(x) : std::log10(x);
  }
  double across(double x) const { return plot_.x + (x - x_.low) / (x_.high - x_.low) * plot_.width; }
  double up(double position) const {
    return plot_.y + plot_.height - (position - y_.low) / (y_.high - y_.low) * plot_.height;
  }

  void axes() {
    const double below = plot_.y + plot_.height;
    const double rows = std::max(2.0, plot_.height / 32), columns = std::max(2.0, plot_.width / 60);
    std::vector<Tick> ticks = chart_.scale == ChartScale::linear ? linear_ticks(y_, rows)
                              : chart_.scale == ChartScale::log2 ? power_ticks(y_, 2, rows)
                                                                 : power_ticks(y_, 10, rows);
    // Less than a decade: some numbers between its ends.
    if (ticks.size() < 2 && chart_.scale != ChartScale::linear) {
      const double base = chart_.scale == ChartScale::log2 ? 2 : 10;
      ticks.clear();
      for (const Tick& t : linear_ticks({std::pow(base, y_.low), std::pow(base, y_.high)}, rows)) {
        if (t.at > 0) ticks.push_back({position(t.at), t.text});
      }
    }
    for (const Tick& t : ticks) {
      out_.line({plot_.x, up(t.at)}, {plot_.x + plot_.width, up(t.at)}, {.color = colors::kPale, .width = 0.7});
      out_.text({plot_.x - 6, up(t.at) + 3.5}, t.text, {.size = kSmall, .color = colors::kGrey, .align = Align::right});
    }
    // Powers are short.
    const double powers = std::max(2.0, plot_.width / 45);
    const std::vector<Tick> along = chart_.x_scale == ChartScale::linear ? linear_ticks(x_, columns)
                                    : chart_.x_scale == ChartScale::log2 ? power_ticks(x_, 2, powers)
                                                                         : power_ticks(x_, 10, powers);
    for (const Tick& t : along) {
      out_.line({across(t.at), below}, {across(t.at), below + 4}, {.color = colors::kGrey});
      out_.text({across(t.at), below + 16}, t.text, {.size = kSmall, .color = colors::kGrey, .align = Align::center});
    }
    out_.lines({{plot_.x, plot_.y}, {plot_.x, below}, {plot_.x + plot_.width, below}}, {.color = colors::kGrey});
    out_.text({plot_.x + plot_.width / 2, below + 32}, chart_.x_label,
              {.size = kSmall, .color = colors::kGrey, .align = Align::center});
    out_.text({box_.x + 12, plot_.y + plot_.height / 2}, chart_.y_label,
              {.size = kSmall, .color = colors::kGrey, .align = Align::center, .upwards = true});
  }

  void curve(const ChartSeries& s) {
    std::vector<Point> run;
    const auto flush = [&] {
      if (run.size() > 1 && s.width > 0) out_.lines(run, {.color = s.color, .width = s.width});
      // A line of one point would not be seen.
      const bool alone = run.size() == 1 && s.width > 0;
      for (const Point& p : run) {
        if (s.dots || alone) out_.dot(p, s.dots ? 2.8 : 1.5, s.color);
      }
      run.clear();
    };
    for (const Point& p : s.points) {
      const double v = position(p.y);
      if (!std::isfinite(v)) {
        flush();
        cross({across(place(p.x)), plot_.y + 5});
        continue;
      }
      const Point at{across(place(p.x)), up(v)};
      if (s.interval && !run.empty()) run.push_back({run.back().x, at.y});
      run.push_back(at);
    }
    flush();
  }

  void cross(Point at) {
    constexpr double kArm = 3;
    const Pen pen{.color = colors::kRed, .width = 1.4};
    out_.line({at.x - kArm, at.y - kArm}, {at.x + kArm, at.y + kArm}, pen);
    out_.line({at.x - kArm, at.y + kArm}, {at.x + kArm, at.y - kArm}, pen);
  }

  void title() {
    const double line = box_.y + 14;
    const std::string title = fitted_text(chart_.title, kTitle, plot_.width);
    out_.text({plot_.x, line}, title, {.size = kTitle, .bold = true});
    double room = plot_.width - text_width(title, kTitle * 1.1) - 8;
    double right = plot_.x + plot_.width;
    const auto entry = [&](const std::string& name, Color color, bool is_cross) {
      const std::string text = fitted_text(name, kSmall, std::min(room - 22, 150.0));
      const double width = text_width(text, kSmall);
      if (room < width + 22) return;
      out_.text({right, line - 1}, text, {.size = kSmall, .color = colors::kGrey, .align = Align::right});
      const double mark = right - width - 12;
      if (is_cross)
        cross({mark, line - 4});
      else
        out_.line({mark - 8, line - 4.5}, {mark + 6, line - 4.5}, {.color = color, .width = 2.5});
      right -= width + 32;
      room -= width + 32;
    };
    if (bad_) entry("not finite", colors::kRed, true);
    for (auto s = chart_.series.rbegin(); s != chart_.series.rend(); ++s) {
      if (!s->name.empty()) entry(s->name, s->color, false);
    }
  }

  Drawing& out_;
  Box box_;
  const Chart& chart_;
  Box plot_;
  Range x_, y_;
  bool empty_ = false, bad_ = false;
};

}  // namespace

void draw_chart(Drawing& drawing, const Box& box, const Chart& chart) { ChartDrawing(drawing, box, chart).draw(); }

}  // namespace halfstep::io
