// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/confusion_figure_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "halfstep/core/text.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/verdicts.h"

namespace halfstep::training {
namespace {

using io::Align;
using io::Color;
namespace colors = io::colors;

std::size_t cell_index(std::int64_t i) { return static_cast<std::size_t>(i); }

Color blend(Color from, Color to, double share) {
  const auto mix = [&](std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(std::lround(a + (b - a) * std::clamp(share, 0.0, 1.0)));
  };
  return {mix(from.red, to.red), mix(from.green, to.green), mix(from.blue, to.blue)};
}

// The classes in groups of equally many, one a row and a column.
struct Blocks {
  std::int64_t classes, of, count;
  explicit Blocks(std::int64_t all, std::int64_t most)
      : classes(all), of(std::max<std::int64_t>(1, (all + most - 1) / most)), count((all + of - 1) / of) {}
  std::vector<std::int64_t> sums(const std::vector<std::int64_t>& counts) const {
    std::vector<std::int64_t> result(cell_index(count * count));
    for (std::int64_t i = 0; i < classes; ++i) {
      for (std::int64_t j = 0; j < classes; ++j)
        result[cell_index(i / of * count + j / of)] += counts[cell_index(i * classes + j)];
    }
    return result;
  }
};

void draw_mistakes(io::Drawing& drawing, io::Point at, const ConfusionFigure& figure, double width) {
  const auto& counts = figure.counts;
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < figure.classes * figure.classes; ++i) {
    if (i / figure.classes != i % figure.classes && counts[cell_index(i)] > 0) order.push_back(i);
  }
  constexpr std::size_t kMost = 12;
  const std::size_t shown = std::min(kMost, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(shown), order.end(),
                    [&](std::int64_t a, std::int64_t b) {
                      const std::int64_t x = counts[cell_index(a)], y = counts[cell_index(b)];
                      return x > y || (x == y && a < b);
                    });
  drawing.text(at, order.empty() ? figure.no_mistakes : "Most frequent mistakes", {.size = 12, .bold = true});
  for (std::size_t i = 0; i < shown; ++i) {
    at.y += 19;
    const std::string count = fmt::format("{} x", counts[cell_index(order[i])]);
    drawing.text({at.x + 40, at.y}, count, {.size = 11, .color = colors::kGrey, .align = Align::right});
    drawing.text({at.x + 50, at.y}, figure.mistake(order[i] / figure.classes, order[i] % figure.classes, width - 50),
                 {.size = 11});
  }
}

}  // namespace

bool has_confusion(std::int64_t classes, const std::filesystem::path& folder) {
  if (classes <= kMostConfusionClasses) return true;
  const std::string file = shown_path(folder / "confusion.svg");
  log_once(LogLevel::warning, "no " + file,
           fmt::format("{}: not written: a confusion matrix has at most {} classes, got {}", file,
                       kMostConfusionClasses, classes));
  return false;
}

std::string class_name(const std::vector<std::string>& names, std::int64_t label) {
  const auto i = static_cast<std::size_t>(label);
  return label >= 0 && i < names.size() && !names[i].empty() ? names[i] : std::to_string(label);
}

io::Drawing draw_confusion_figure(const ConfusionFigure& figure) {
  constexpr std::int64_t kMostNumbered = 16, kMostBlocks = 100;
  const std::int64_t classes = figure.classes;
  const bool named = classes <= figure.most_named;
  const Blocks blocks(classes, named ? figure.most_named : kMostBlocks);
  const std::vector<std::int64_t> cells = blocks.sums(figure.counts);
  // Names of less than some 10 pixels can't be read.
  const double least = named ? 9.5 : 4;
  const double cell = std::clamp(520.0 / static_cast<double>(std::max<std::int64_t>(blocks.count, 1)), least, 46.0);
  const double size = cell * static_cast<double>(blocks.count);
  double label_width = 20;
  if (named) {
    for (const auto* names : {&figure.rows, &figure.columns}) {
      for (const std::string& name : *names) {
        label_width = std::max(label_width, io::text_width(io::fitted_text(name, 11, 120), 11));
      }
    }
  }
  const double left = 40 + label_width, top = 66;
  const bool upwards = named && label_width > cell - 2;
  const double below = top + size + (upwards ? label_width + 14 : 20);
  constexpr double kSide = 300;
  io::Drawing drawing(left + size + 30 + kSide, std::max(below + 34, top + 270), figure.title);
  drawing.text({20, 26}, io::fitted_text(figure.title, 16, left + size + kSide - 20), {.size = 16, .bold = true});
  std::string what = figure.summary + "; colour: share of the row's class";
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
    const std::string row_name = io::fitted_text(figure.rows[cell_index(i)], 11, 120);
    const std::string column_name = io::fitted_text(figure.columns[cell_index(i)], 11, 120);
    const double middle = (static_cast<double>(i) + 0.5) * cell;
    const double font = std::min(11.0, cell);
    drawing.text({left - 7, top + middle + font * 0.36}, row_name, {.size = font, .align = Align::right});
    if (upwards) {
      drawing.text({left + middle + font * 0.36, top + size + 7}, column_name,
                   {.size = font, .align = Align::right, .upwards = true});
    } else {
      drawing.text({left + middle, top + size + 16}, column_name, {.size = font, .align = Align::center});
    }
  }
  drawing.frame({left, top, size, size}, {.color = colors::kGrey});
  const io::TextStyle axis{.size = 12, .color = colors::kGrey, .align = Align::center};
  drawing.text({left + size / 2, below + 18}, "what the network says", axis);
  io::TextStyle turned = axis;
  turned.upwards = true;
  drawing.text({18, top + size / 2}, "what it is", turned);
  draw_mistakes(drawing, {left + size + 30, top + 10}, figure, kSide);
  return drawing;
}

}  // namespace halfstep::training
