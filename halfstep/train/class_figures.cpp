// SPDX-License-Identifier: Apache-2.0
// The confusion matrix and the pictures with their verdicts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "halfstep/core/fail.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {
namespace {

using io::Align;
using io::Color;
namespace colors = io::colors;

std::size_t place(std::int64_t i) { return static_cast<std::size_t>(i); }

std::string class_name(const std::vector<std::string>& names, std::int64_t c) {
  const bool known = c >= 0 && place(c) < names.size() && !names[place(c)].empty();
  return c < 0 ? "nothing" : known ? names[place(c)] : std::to_string(c);
}

Color blend(Color from, Color to, double share) {
  const auto mix = [&](std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(std::lround(a + (b - a) * std::clamp(share, 0.0, 1.0)));
  };
  return {mix(from.red, to.red), mix(from.green, to.green), mix(from.blue, to.blue)};
}

std::string right_text(const Verdicts& v) {
  if (v.size() == 0) return "no samples";
  return fmt::format("{} of {} right ({:.2f}%)", v.right(), v.size(),
                     100 * static_cast<double>(v.right()) / static_cast<double>(v.size()));
}

// The classes in groups of equally many, one a row and a column.
struct Blocks {
  std::int64_t classes, of, count;
  explicit Blocks(std::int64_t all, std::int64_t most)
      : classes(all), of(std::max<std::int64_t>(1, (all + most - 1) / most)), count((all + of - 1) / of) {}
  std::vector<std::int64_t> sums(const std::vector<std::int64_t>& counts) const {
    std::vector<std::int64_t> result(place(count * count));
    for (std::int64_t i = 0; i < classes; ++i) {
      for (std::int64_t j = 0; j < classes; ++j)
        result[place(i / of * count + j / of)] += counts[place(i * classes + j)];
    }
    return result;
  }
};

void draw_mistakes(io::Drawing& drawing, io::Point at, const std::vector<std::int64_t>& counts, std::int64_t classes,
                   const std::vector<std::string>& names, double width, bool all_right) {
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < classes * classes; ++i) {
    if (i / classes != i % classes && counts[place(i)] > 0) order.push_back(i);
  }
  constexpr std::size_t kMost = 12;
  const std::size_t shown = std::min(kMost, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(shown), order.end(),
                    [&](std::int64_t a, std::int64_t b) {
                      return counts[place(a)] > counts[place(b)] || (counts[place(a)] == counts[place(b)] && a < b);
                    });
  // Samples without a label, or without a score that is a number, are right as little.
  const char* none = all_right ? "No mistakes" : "None taken for another class";
  drawing.text(at, order.empty() ? none : "Most frequent mistakes", {.size = 12, .bold = true});
  for (std::size_t i = 0; i < shown; ++i) {
    at.y += 19;
    const std::string count = fmt::format("{} x", counts[place(order[i])]);
    drawing.text({at.x + 40, at.y}, count, {.size = 11, .color = colors::kGrey, .align = Align::right});
    const std::string label = class_name(names, order[i] / classes), said = class_name(names, order[i] % classes);
    const double half = (width - 130) / 2;
    drawing.text({at.x + 50, at.y}, io::fitted_text(label, 11, half) + " taken for " + io::fitted_text(said, 11, half),
                 {.size = 11});
  }
}

}  // namespace

io::Drawing draw_confusion(const Verdicts& verdicts, const std::vector<std::string>& names, const std::string& title) {
  constexpr std::int64_t kMostNamed = 40, kMostNumbered = 16, kMostBlocks = 100;
  const std::int64_t classes = verdicts.classes;
  const std::vector<std::int64_t> counts = confusion_counts(verdicts);
  const bool named = classes <= kMostNamed;
  const Blocks blocks(classes, named ? kMostNamed : kMostBlocks);
  const std::vector<std::int64_t> cells = blocks.sums(counts);
  const double cell = std::clamp(520.0 / static_cast<double>(std::max<std::int64_t>(blocks.count, 1)), 4.0, 46.0);
  const double size = cell * static_cast<double>(blocks.count);
  double label_width = 20;
  if (named) {
    for (std::int64_t c = 0; c < classes; ++c) {
      label_width = std::max(label_width, io::text_width(io::fitted_text(class_name(names, c), 11, 120), 11));
    }
  }
  const double left = 40 + label_width, top = 66;
  const bool upwards = named && label_width > cell - 2;
  const double below = top + size + (upwards ? label_width + 14 : 20);
  constexpr double kSide = 300;
  io::Drawing drawing(left + size + 30 + kSide, std::max(below + 34, top + 270), title);
  drawing.text({20, 26}, io::fitted_text(title, 16, left + size + kSide - 20), {.size = 16, .bold = true});
  std::string what = right_text(verdicts) + "; colour: share of the row's class";
  if (blocks.of > 1) what += fmt::format("; a cell is {0} x {0} classes", blocks.of);
  drawing.text({20, 46}, what, {.size = 12, .color = colors::kGrey});
  for (std::int64_t i = 0; i < blocks.count; ++i) {
    const auto row = cells.begin() + i * blocks.count;
    const double sum = static_cast<double>(std::accumulate(row, row + blocks.count, std::int64_t{0}));
    for (std::int64_t j = 0; j < blocks.count; ++j) {
      const auto n = static_cast<double>(row[j]);
      if (n == 0) continue;
      const double share = n / sum;
      const io::Box box{left + static_cast<double>(j) * cell, top + static_cast<double>(i) * cell, cell, cell};
      // Mistakes are few: a root shows them too.
      drawing.fill(box,
                   blend(colors::kWhite, i == j ? colors::kBlue : colors::kOrange, 0.06 + 0.94 * std::sqrt(share)));
      if (classes > kMostNumbered) continue;
      const std::string text = fmt::format("{}", row[j]);
      const double font = std::min(12.0, 0.9 * (cell - 4) / std::max(io::text_width(text, 1), 0.1));
      drawing.text({box.x + cell / 2, box.y + cell / 2 + font * 0.36}, text,
                   {.size = font, .color = share > 0.3 ? colors::kWhite : colors::kBlack, .align = Align::center});
    }
    if (!named) continue;
    const std::string name = io::fitted_text(class_name(names, i), 11, 120);
    const double middle = (static_cast<double>(i) + 0.5) * cell;
    const double font = std::min(11.0, cell);
    drawing.text({left - 7, top + middle + font * 0.36}, name, {.size = font, .align = Align::right});
    if (upwards) {
      drawing.text({left + middle + font * 0.36, top + size + 7}, name,
                   {.size = font, .align = Align::right, .upwards = true});
    } else {
      drawing.text({left + middle, top + size + 16}, name, {.size = font, .align = Align::center});
    }
  }
  drawing.frame({left, top, size, size}, {.color = colors::kGrey});
  const io::TextStyle axis{.size = 12, .color = colors::kGrey, .align = Align::center};
  drawing.text({left + size / 2, below + 18}, "what the network says", axis);
  io::TextStyle turned = axis;
  turned.upwards = true;
  drawing.text({18, top + size / 2}, "what it is", turned);
  draw_mistakes(drawing, {left + size + 30, top + 10}, counts, classes, names, kSide,
                verdicts.right() == verdicts.size());
  return drawing;
}

namespace {

struct Size {
  std::int64_t height, width;
};
Size size_of(const Tensor& input, const PictureForm& form) {
  const bool image = input.dim() == 4;
  return {.height = form.height > 0 ? form.height
                    : image         ? input.size(2)
                                    : 0,
          .width = form.width > 0 ? form.width
                   : image        ? input.size(3)
                                  : 0};
}

}  // namespace

bool are_pictures(const Tensor& input, const PictureForm& form) {
  const auto [height, width] = size_of(input, form);
  const bool channels = form.channels == 1 || form.channels == 3;
  return channels && height > 0 && width > 0 && input.dim() >= 2 && input.size(0) > 0 &&
         input.numel() / input.size(0) == form.channels * height * width;
}

io::Bitmap bitmap_of(const Tensor& input, std::int64_t sample, const PictureForm& form) {
  const auto [height, width] = size_of(input, form);
  if (!are_pictures(input, form) || sample < 0 || sample >= input.size(0)) {
    fail<ShapeError>("bitmap_of: expected samples of {} x {} x {} values, got {}", form.channels, height, width,
                     input.sizes().str());
  }
  // Row-major, whatever the layout of the input is.
  const std::vector<float> values = input.detach().narrow(0, sample, 1).to_vector<float>();
  io::Bitmap bitmap{.width = width, .height = height, .pixels = {}};
  bitmap.pixels.resize(place(3 * height * width));
  for (std::int64_t i = 0; i < height * width; ++i) {
    for (std::int64_t c = 0; c < 3; ++c) {
      const std::int64_t from = form.channels == 1 ? 0 : c;
      const double p = double{values[place(from * height * width + i)]} * form.normalization.std[place(from)] +
                       form.normalization.mean[place(from)];
      // NaN is black.
      bitmap.pixels[place(3 * i + c)] =
          static_cast<std::uint8_t>(p > 0 ? std::lround(std::min(p, 1.0) * 255) : std::int64_t{0});
    }
  }
  return bitmap;
}

namespace {

constexpr double kCell = 104, kPicture = 92, kRow = kPicture + 40;
constexpr std::size_t kColumns = 8, kMost = 24;

class Grid {
 public:
  Grid(const Verdicts& verdicts, const std::vector<std::string>& names, const data::Dataset& samples,
       const PictureForm& form)
      : verdicts_(verdicts), names_(names), samples_(samples), form_(form) {}

  static double height(std::size_t count) {
    return count == 0 ? 0 : 34 + static_cast<double>((count + kColumns - 1) / kColumns) * kRow;
  }
  void draw(io::Drawing& drawing, double top, const std::string& heading, const std::vector<std::int64_t>& chosen) {
    if (chosen.empty()) return;
    drawing.text({20, top + 18}, heading, {.size = 13, .bold = true});
    const data::Batch batch = samples_.batch({.indices = chosen});
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const double x = 20 + static_cast<double>(i % kColumns) * kCell;
      const double y = top + 30 + static_cast<double>(i / kColumns) * kRow;
      const std::size_t sample = place(chosen[i]);
      const std::int32_t label = verdicts_.label[sample], said = verdicts_.said[sample];
      const bool right = said >= 0 && said == label;
      const Color color = right ? colors::kGreen : colors::kRed;
      drawing.picture({x, y, kPicture, kPicture}, bitmap_of(batch.input, static_cast<std::int64_t>(i), form_));
      drawing.frame({x, y, kPicture, kPicture}, {.color = color, .width = 3});
      const std::string share = fmt::format(" ({:.0f}%)", 100 * double{verdicts_.share[sample]});
      const double room = kPicture - io::text_width(share, 11);
      drawing.text({x, y + kPicture + 15}, io::fitted_text(class_name(names_, said), 11, room) + share,
                   {.size = 11, .color = color, .bold = true});
      if (right) continue;
      const std::string is = label < 0 ? "has no label" : "is " + class_name(names_, label);
      drawing.text({x, y + kPicture + 29}, io::fitted_text(is, 11, kPicture), {.size = 11, .color = colors::kGrey});
    }
  }

 private:
  const Verdicts& verdicts_;
  const std::vector<std::string>& names_;
  const data::Dataset& samples_;
  const PictureForm& form_;
};

}  // namespace

io::Drawing draw_predictions(const Verdicts& verdicts, const std::vector<std::string>& names,
                             const data::Dataset& samples, const PictureForm& form, const std::string& title) {
  const std::int64_t count = std::min(verdicts.size(), samples.size());
  std::vector<std::int64_t> first(std::min(kMost, place(count))), wrong;
  std::iota(first.begin(), first.end(), std::int64_t{0});
  for (std::int64_t i = 0; i < count; ++i) {
    if (verdicts.label[place(i)] >= 0 && verdicts.said[place(i)] != verdicts.label[place(i)]) wrong.push_back(i);
  }
  const std::size_t shown = std::min(kMost, wrong.size());
  std::partial_sort(wrong.begin(), wrong.begin() + static_cast<std::ptrdiff_t>(shown), wrong.end(),
                    [&](std::int64_t a, std::int64_t b) {
                      const float x = verdicts.share[place(a)], y = verdicts.share[place(b)];
                      return x > y || (x == y && a < b);
                    });
  const std::size_t mistakes = wrong.size();
  wrong.resize(shown);
  constexpr double kTop = 62;
  const double second = kTop + Grid::height(first.size());
  io::Drawing drawing(40 + kCell * static_cast<double>(kColumns) - (kCell - kPicture),
                      second + Grid::height(wrong.size()) + 10, title);
  drawing.text({20, 28}, io::fitted_text(title, 16, drawing.width() - 40), {.size = 16, .bold = true});
  drawing.text({20, 48}, right_text(verdicts) + "; green: right, red: wrong; the network's own probability in percent",
               {.size = 12, .color = colors::kGrey});
  Grid grid(verdicts, names, samples, form);
  grid.draw(drawing, kTop, "The first pictures", first);
  grid.draw(drawing, second,
            shown < mistakes ? fmt::format("The {} of {} mistakes that it was surest of", shown, mistakes)
                             : std::string("All mistakes, those that it was surest of first"),
            wrong);
  return drawing;
}

}  // namespace halfstep::training
