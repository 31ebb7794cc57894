// SPDX-License-Identifier: Apache-2.0
// The confusion matrix and the pictures with their verdicts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "halfstep/core/fail.h"
#include "halfstep/train/confusion_figure_internal.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {
namespace {

using io::Align;
using io::Color;
namespace colors = io::colors;

std::size_t place(std::int64_t i) { return static_cast<std::size_t>(i); }

std::string said_name(const std::vector<std::string>& names, std::int64_t c) {
  return c < 0 ? "nothing" : class_name(names, c);
}

std::string right_text(const Verdicts& v) {
  if (v.size() == 0) return "no samples";
  return fmt::format("{} of {} right ({:.2f}%)", v.right(), v.size(),
                     100 * static_cast<double>(v.right()) / static_cast<double>(v.size()));
}

}  // namespace

io::Drawing draw_confusion(const Verdicts& verdicts, const std::vector<std::string>& names, const std::string& title) {
  ConfusionFigure figure{.title = title,
                         .summary = right_text(verdicts),
                         .classes = verdicts.classes,
                         .counts = confusion_counts(verdicts)};
  for (std::int64_t c = 0; c < verdicts.classes; ++c) figure.rows.push_back(class_name(names, c));
  figure.columns = figure.rows;
  // Samples without a label, or without a score that is a number, are right as little.
  if (verdicts.right() != verdicts.size()) figure.no_mistakes = "None taken for another class";
  figure.mistake = [&](std::int64_t row, std::int64_t column, double width) {
    const double half = (width - 80) / 2;
    return io::fitted_text(class_name(names, row), 11, half) + " taken for " +
           io::fitted_text(class_name(names, column), 11, half);
  };
  return draw_confusion_figure(figure);
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
      drawing.text({x, y + kPicture + 15}, io::fitted_text(said_name(names_, said), 11, room) + share,
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
