// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/detection_pictures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/train/confusion_figure_internal.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {
namespace {

using io::Align;
using io::Box;
using io::Color;
namespace colors = io::colors;

// Numbers of boxes, those of the highest score first.
std::vector<std::size_t> by_score(const std::vector<ShownBox>& boxes) {
  std::vector<std::size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return boxes[a].score > boxes[b].score; });
  return order;
}

double shared_area(const Box& a, const Box& b) {
  const double width = std::min(a.x + a.width, b.x + b.width) - std::max(a.x, b.x);
  const double height = std::min(a.y + a.height, b.y + b.height) - std::max(a.y, b.y);
  return width > 0 && height > 0 ? width * height : 0;
}

// Where and how boxes are drawn: a picture of `scale` pixels of the drawing to one of its own.
struct BoxPlace {
  Box area;
  double scale = 1, line = 1, font = 10;
  bool whole = false;  // lines are put on whole pixels, where they are sharp
};

class BoxDrawing {
 public:
  BoxDrawing(io::Drawing& drawing, const BoxPlace& place, const std::vector<std::string>& names,
             const ShownBoxOptions& options)
      : out_(drawing), place_(place), names_(names), options_(options) {}

  void draw(const std::vector<ShownBox>& boxes) {
    const std::vector<std::size_t> order = by_score(boxes);
    std::vector<std::optional<Box>> frames(boxes.size());
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      frames[i] = frame_of(boxes[i]);
      if (frames[i]) frames_.push_back(*frames[i]);
    }
    std::vector<std::optional<Label>> labels(boxes.size());
    for (const std::size_t i : order) {
      if (frames[i] && options_.labels) labels[i] = label_of(boxes[i], *frames[i]);
    }
    // What the network is surest of is on top, and no frame crosses a label.
    for (auto i = order.rbegin(); i != order.rend(); ++i) {
      if (frames[*i]) out_.frame(*frames[*i], {.color = class_color(boxes[*i].label), .width = place_.line});
    }
    for (auto i = order.rbegin(); i != order.rend(); ++i) {
      if (!labels[*i]) continue;
      const auto& [box, text] = *labels[*i];
      const Color color = class_color(boxes[*i].label);
      // Relative luminance (ITU-R BT.709), without gamma.
      const double light = 0.2126 * color.red + 0.7152 * color.green + 0.0722 * color.blue;
      out_.fill(box, color);
      out_.text({box.x + pad(), box.y + 0.5 * box.height + 0.36 * place_.font}, text,
                {.size = place_.font, .color = light > 140 ? colors::kBlack : colors::kWhite});
    }
  }

 private:
  struct Label {
    Box box;
    std::string text;
  };

  double pad() const { return 0.25 * place_.font; }

  // The part of a box that is in the picture, its line inside of it; none of what lies outside.
  std::optional<Box> frame_of(const ShownBox& box) const {
    const Box& a = place_.area;
    const double half = std::min({0.5 * place_.line, 0.5 * a.width, 0.5 * a.height});
    const auto inside = [&](double from, double to, double begin,
                            double length) -> std::optional<std::array<double, 2>> {
      const double low = begin + from * place_.scale, high = begin + to * place_.scale, end = begin + length;
      if (!(low <= high && high >= begin && low <= end)) return std::nullopt;  // NaN too
      const auto sharp = [&](double v) {
        const bool odd = std::lround(place_.line) % 2 == 1;
        return !place_.whole ? v : odd ? std::floor(v) + 0.5 : std::round(v);
      };
      return std::array{std::clamp(sharp(std::clamp(low, begin, end)), begin + half, end - half),
                        std::clamp(sharp(std::clamp(high, begin, end)), begin + half, end - half)};
    };
    const auto x = inside(box.left, box.right, a.x, a.width), y = inside(box.top, box.bottom, a.y, a.height);
    if (!x || !y) return std::nullopt;
    return Box{(*x)[0], (*y)[0], (*x)[1] - (*x)[0], (*y)[1] - (*y)[0]};
  }

  // How much a label would hide: other labels, and boxes that are little larger than itself. Of large ones it hides
  // nothing that matters.
  double hidden_by(const Box& label) const {
    constexpr double kLarge = 4, kLabelsWeigh = 4;
    double area = 0;
    for (const Box& t : taken_) area += kLabelsWeigh * shared_area(t, label);
    for (const Box& f : frames_) {
      if (f.width * f.height < kLarge * label.width * label.height) area += shared_area(f, label);
    }
    return area;
  }

  std::optional<Label> label_of(const ShownBox& box, const Box& frame) {
    const Box& a = place_.area;
    const double height = 1.35 * place_.font;
    const std::string score = options_.scores && box.score >= 0 ? fmt::format(" {:.2f}", box.score) : std::string();
    const double room = a.width - 2 * pad() - io::text_width(score, place_.font);
    // Less than two characters say nothing.
    if (room < 2 * place_.font || a.height < height) return std::nullopt;
    const std::string text = io::fitted_text(class_name(names_, box.label), place_.font, room) + score;
    const double width = io::text_width(text, place_.font) + 2 * pad(), half = 0.5 * place_.line;
    const double left = frame.x - half, right = frame.x + frame.width + half - width;
    const double above = frame.y - half - height, below = frame.y + frame.height + half;
    const double top = frame.y - half, bottom = frame.y + frame.height + half - height;
    // Outside of the box where there is room, next to its upper left corner where that is free.
    const std::array<io::Point, 6> places = {
        {{left, above}, {right, above}, {left, below}, {right, below}, {left, top}, {left, bottom}}};
    std::optional<Box> chosen;
    double least = 0;
    for (const io::Point& p : places) {
      const Box here{std::clamp(p.x, a.x, a.x + a.width - width), std::clamp(p.y, a.y, a.y + a.height - height), width,
                     height};
      // Above or below, it has to be there: moved into the picture it would be one of the last two.
      if (here.y != p.y && (p.y == above || p.y == below)) continue;
      const double cost = hidden_by(here);
      if (chosen && cost >= least) continue;
      chosen = here, least = cost;
    }
    taken_.push_back(*chosen);
    return Label{*chosen, text};
  }

  io::Drawing& out_;
  BoxPlace place_;
  const std::vector<std::string>& names_;
  ShownBoxOptions options_;
  std::vector<Box> frames_, taken_;
};

constexpr double kPane = 300, kGap = 8, kMargin = 20, kCaption = 20, kHeadings = 64;
constexpr BoxPlace kInPane{.area = {}, .scale = 1, .line = 1.6, .font = 10};

double pane_scale(const io::Bitmap& picture) {
  return kPane / static_cast<double>(std::max<std::int64_t>({picture.width, picture.height, 1}));
}

// A picture with its boxes, as large as fits into a pane whose upper left corner is given, and centred across it.
// Returns where the text below it stands.
double draw_pane(io::Drawing& drawing, io::Point at, const io::Bitmap& picture, const std::vector<ShownBox>& boxes,
                 const std::vector<std::string>& names) {
  BoxPlace place = kInPane;
  place.scale = pane_scale(picture);
  const double width = place.scale * static_cast<double>(picture.width);
  place.area = {at.x + (kPane - width) / 2, at.y, width, place.scale * static_cast<double>(picture.height)};
  drawing.picture(place.area, picture);
  BoxDrawing(drawing, place, names, {}).draw(boxes);
  return at.y + place.area.height + 14;
}

void draw_heading(io::Drawing& drawing, const std::string& title, const std::string& note) {
  const double room = drawing.width() - 2 * kMargin;
  drawing.text({kMargin, 28}, io::fitted_text(title, 16, room), {.size = 16, .bold = true});
  drawing.text({kMargin, 48}, io::fitted_text(note, 12, room), {.size = 12, .color = colors::kGrey});
}

// Upper edges of rows of so many pictures, and the end of the last.
std::vector<double> row_tops(const std::vector<const io::Bitmap*>& pictures, std::size_t columns, double top) {
  std::vector<double> tops = {top};
  for (std::size_t i = 0; i < pictures.size(); i += columns) {
    double highest = 0;
    for (std::size_t k = i; k < std::min(i + columns, pictures.size()); ++k) {
      highest = std::max(highest, pane_scale(*pictures[k]) * static_cast<double>(pictures[k]->height));
    }
    tops.push_back(tops.back() + highest + kCaption + kGap);
  }
  return tops;
}

std::string objects_text(std::size_t n) { return fmt::format("{} object{}", n, n == 1 ? "" : "s"); }

}  // namespace

io::Color class_color(std::int64_t label) {
  // Steps of the golden ratio put neighbouring hues far apart; lightness and strength keep later ones from earlier.
  constexpr double kGolden = 0.6180339887498949;
  constexpr std::array<double, 3> kLight = {0.50, 0.38, 0.64};
  constexpr std::array<double, 2> kStrong = {0.95, 0.70};
  const auto i = static_cast<std::size_t>(std::max<std::int64_t>(label, 0));
  const double hue = std::fmod(0.02 + kGolden * static_cast<double>(i), 1.0) * 6;
  const double light = kLight[i % kLight.size()], strong = kStrong[i / kLight.size() % kStrong.size()];
  // From hue, saturation and lightness (Smith 1978).
  const double chroma = (1 - std::fabs(2 * light - 1)) * strong;
  const auto part = [&](double from) {
    const double k = std::fmod(from + hue, 6.0);
    const double share = std::clamp(std::min(k, 4 - k), 0.0, 1.0);
    return static_cast<std::uint8_t>(std::lround(255 * (light + chroma * (share - 0.5))));
  };
  return {part(2), part(0), part(4)};
}

io::Drawing draw_detections(io::Bitmap picture, const std::vector<ShownBox>& boxes,
                            const std::vector<std::string>& names, const ShownBoxOptions& options) {
  const double width = static_cast<double>(picture.width), height = static_cast<double>(picture.height);
  const double size = (width + height) / 2;
  io::Drawing drawing(width, height);
  drawing.picture({0, 0, width, height}, std::move(picture));
  const double line = options.line_width > 0 ? options.line_width : std::max(1.0, std::round(0.0035 * size));
  BoxDrawing(drawing,
             {.area = {0, 0, width, height},
              .scale = 1,
              .line = line,
              .font = std::max(10.0, 0.021 * size),
              .whole = line == std::round(line)},
             names, options)
      .draw(boxes);
  return drawing;
}

io::Drawing draw_compared(const std::vector<ComparedPicture>& pictures, const std::vector<std::string>& names,
                          const std::string& title) {
  constexpr std::size_t kMost = 12, kColumns = 3;
  constexpr double kPair = 2 * kPane + 2 * kGap + 8;
  const std::size_t count = std::min(kMost, pictures.size()), columns = std::clamp<std::size_t>(count, 1, kColumns);
  std::vector<const io::Bitmap*> shown;
  for (std::size_t i = 0; i < count; ++i) shown.push_back(&pictures[i].picture);
  const std::vector<double> tops = row_tops(shown, columns, kHeadings + 18);
  io::Drawing drawing(2 * kMargin + static_cast<double>(columns) * kPair - kGap - 8, tops.back() + 8, title);
  draw_heading(drawing, title, "of each picture the truth on the left, what was found on the right");
  for (std::size_t c = 0; c < columns; ++c) {
    const double x = kMargin + static_cast<double>(c) * kPair;
    const io::TextStyle style{.size = 11, .color = colors::kGrey, .align = Align::center};
    drawing.text({x + kPane / 2, kHeadings + 11}, "truth", style);
    drawing.text({x + kPane + kGap + kPane / 2, kHeadings + 11}, "found", style);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const ComparedPicture& p = pictures[i];
    const double x = kMargin + static_cast<double>(i % columns) * kPair, top = tops[i / columns];
    const double line = draw_pane(drawing, {x, top}, p.picture, p.truth, names);
    draw_pane(drawing, {x + kPane + kGap, top}, p.picture, p.found, names);
    const std::string counts = fmt::format("{}, {} found", objects_text(p.truth.size()), p.found.size());
    drawing.text({x, line}, io::fitted_text(p.name, 11, kPane), {.size = 11});
    drawing.text({x + kPane + kGap, line}, counts, {.size = 11, .color = colors::kGrey});
  }
  return drawing;
}

io::Bitmap batch_picture(const Tensor& input, std::int64_t sample) { return bitmap_of(input, sample, {.channels = 3}); }

std::vector<ShownBox> batch_boxes(const Tensor& input, const Tensor& target, std::int64_t sample) {
  const bool fits = input.dim() == 4 && target.dim() == 3 && target.size(2) == 5 && target.size(0) == input.size(0);
  if (!fits || sample < 0 || sample >= input.size(0)) {
    fail<ShapeError>("batch_boxes: expected a sample of inputs [N, 3, H, W] and targets [N, M, 5], got {} of {} and {}",
                     sample, input.sizes().str(), target.sizes().str());
  }
  const auto width = static_cast<double>(input.size(3)), height = static_cast<double>(input.size(2));
  const std::vector<float> rows = target.detach().narrow(0, sample, 1).to_vector<float>();
  std::vector<ShownBox> boxes;
  for (std::size_t i = 0; i + 5 <= rows.size(); i += 5) {
    if (!(rows[i] >= 0)) continue;
    const double x = rows[i + 1], y = rows[i + 2], w = rows[i + 3], h = rows[i + 4];
    boxes.push_back({.label = std::llround(double{rows[i]}),
                     .left = (x - w / 2) * width,
                     .top = (y - h / 2) * height,
                     .right = (x + w / 2) * width,
                     .bottom = (y + h / 2) * height});
  }
  return boxes;
}

io::Drawing draw_train_batch(const Tensor& input, const Tensor& target, const std::vector<std::string>& names,
                             const std::string& title) {
  constexpr std::int64_t kMost = 16;
  const std::int64_t count = input.dim() == 4 ? std::min(kMost, input.size(0)) : 1;
  std::vector<io::Bitmap> pictures;
  std::vector<std::vector<ShownBox>> boxes;
  for (std::int64_t i = 0; i < count; ++i) {
    boxes.push_back(batch_boxes(input, target, i));
    pictures.push_back(batch_picture(input, i));
  }
  std::vector<const io::Bitmap*> shown;
  for (const io::Bitmap& p : pictures) shown.push_back(&p);
  // As many rows as columns.
  std::size_t columns = 1;
  while (columns * columns < pictures.size()) ++columns;
  const std::vector<double> tops = row_tops(shown, columns, kHeadings);
  io::Drawing drawing(2 * kMargin + static_cast<double>(columns) * (kPane + kGap) - kGap, tops.back() + 8, title);
  draw_heading(drawing, title,
               count < input.size(0)
                   ? fmt::format("the first {} of {} pictures of a batch in training", count, input.size(0))
                   : "a batch in training");
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    const double x = kMargin + static_cast<double>(i % columns) * (kPane + kGap), top = tops[i / columns];
    const double line = draw_pane(drawing, {x, top}, pictures[i], boxes[i], names);
    drawing.text({x, line}, objects_text(boxes[i].size()), {.size = 11, .color = colors::kGrey});
  }
  return drawing;
}

}  // namespace halfstep::training
