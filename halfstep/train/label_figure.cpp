// SPDX-License-Identifier: Apache-2.0
// How the labels of a detector's data are spread.
#include <algorithm>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/train/confusion_figure_internal.h"
#include "halfstep/train/detection_figures.h"

namespace halfstep::training {
namespace {

using io::Align;
namespace colors = io::colors;

constexpr double kLeft = 70, kBarsTop = 104, kBarsWidth = 860, kBarsHeight = 200, kMapSide = 320;
constexpr double kUpwardNames = 110, kLyingNames = 24;
constexpr std::size_t kMapCells = 64;

// How the bars stand: one a class, with names below them as far as they can be read.
struct Bars {
  bool named, upwards = false;
  double slot, font;
  Bars(std::size_t classes, const std::vector<std::string>& names)
      : named(classes <= 100), slot(kBarsWidth / static_cast<double>(classes)), font(std::min(11.0, slot + 1)) {
    for (std::size_t c = 0; named && c < classes; ++c) {
      upwards = upwards || io::text_width(class_name(names, static_cast<std::int64_t>(c)), 11) > slot - 4;
    }
  }
  double names_height() const { return upwards ? kUpwardNames : kLyingNames; }
};

// Bars with the number of objects of each class, in the colours that its boxes have.
void draw_bars(io::Drawing& drawing, const Bars& bars, const std::vector<std::int64_t>& counts,
               const std::vector<std::string>& names) {
  const auto& [named, upwards, slot, font] = bars;
  const double below = kBarsTop + kBarsHeight;
  const auto most = static_cast<double>(std::max<std::int64_t>(*std::max_element(counts.begin(), counts.end()), 1));
  for (std::size_t c = 0; c < counts.size(); ++c) {
    const double x = kLeft + slot * static_cast<double>(c),
                 height = kBarsHeight * static_cast<double>(counts[c]) / most;
    const auto label = static_cast<std::int64_t>(c);
    const double width = std::min(slot * 0.82, 60.0), middle = x + slot / 2;
    if (counts[c] > 0) drawing.fill({middle - width / 2, below - height, width, height}, class_color(label));
    if (!named) continue;
    const std::string number = fmt::format("{}", counts[c]);
    const bool lying = io::text_width(number, 10) < slot;
    drawing.text({lying ? middle : middle + font * 0.36, below - height - 5}, number,
                 {.size = lying ? 10 : std::min(9.0, font),
                  .color = colors::kGrey,
                  .align = lying ? Align::center : Align::left,
                  .upwards = !lying});
    if (upwards) {
      drawing.text({middle + font * 0.36, below + 7},
                   io::fitted_text(class_name(names, label), font, kUpwardNames - 10),
                   {.size = font, .align = Align::right, .upwards = true});
    } else {
      drawing.text({middle, below + 16}, class_name(names, label), {.size = font, .align = Align::center});
    }
  }
  if (!named) {
    drawing.text({kLeft + kBarsWidth / 2, below + 16},
                 fmt::format("classes 0 to {}, the highest has {} objects", counts.size() - 1, most),
                 {.size = 11, .color = colors::kGrey, .align = Align::center});
  }
  drawing.line({kLeft, below}, {kLeft + kBarsWidth, below}, {.color = colors::kGrey});
}

// How many points fall into each cell of the unit square; those beyond it into the cells at its edges.
class Spread {
 public:
  void add(double x, double y) {
    if (!std::isfinite(x) || !std::isfinite(y)) return;
    ++counts_[cell(y) * kMapCells + cell(x)];
  }
  // `upwards`: y grows upwards, as on a chart, else downwards, as in a picture.
  io::Bitmap bitmap(bool upwards) const {
    const auto most = static_cast<double>(std::max<std::int64_t>(*std::max_element(counts_.begin(), counts_.end()), 1));
    const auto side = static_cast<std::int64_t>(kMapCells);
    io::Bitmap map{.width = side, .height = side, .pixels = {}};
    for (std::size_t row = 0; row < kMapCells; ++row) {
      const std::size_t y = upwards ? kMapCells - 1 - row : row;
      for (std::size_t x = 0; x < kMapCells; ++x) {
        const auto n = static_cast<double>(counts_[y * kMapCells + x]);
        // A root shows the few beside the many.
        const double share = n > 0 ? 0.06 + 0.94 * std::sqrt(n / most) : 0;
        for (const auto& [from, to] :
             {std::pair{colors::kWhite.red, kFull.red}, std::pair{colors::kWhite.green, kFull.green},
              std::pair{colors::kWhite.blue, kFull.blue}}) {
          map.pixels.push_back(static_cast<std::uint8_t>(std::lround(from + (to - from) * share)));
        }
      }
    }
    return map;
  }

 private:
  static constexpr io::Color kFull{0, 60, 110};
  static std::size_t cell(double v) { return static_cast<std::size_t>(std::clamp(v, 0.0, 1.0) * (kMapCells - 1e-9)); }
  std::vector<std::int64_t> counts_ = std::vector<std::int64_t>(kMapCells * kMapCells);
};

void draw_spread(io::Drawing& drawing, io::Point at, const Spread& spread, bool upwards, const char* title,
                 const char* x_name, const char* y_name) {
  const io::TextStyle small{.size = 10.5, .color = colors::kGrey, .align = Align::center};
  drawing.text({at.x, at.y - 9}, title, {.size = 13, .bold = true});
  drawing.picture({at.x, at.y, kMapSide, kMapSide}, spread.bitmap(upwards));
  drawing.frame({at.x, at.y, kMapSide, kMapSide}, {.color = colors::kGrey});
  for (const double v : {0.0, 0.5, 1.0}) {
    const std::string text = fmt::format("{:g}", v);
    const double up = upwards ? 1 - v : v;
    drawing.text({at.x + v * kMapSide, at.y + kMapSide + 15}, text, small);
    drawing.text({at.x - 6, at.y + up * kMapSide + 3.5}, text,
                 {.size = 10.5, .color = colors::kGrey, .align = Align::right});
  }
  drawing.text({at.x + kMapSide / 2, at.y + kMapSide + 31}, x_name, small);
  io::TextStyle turned = small;
  turned.upwards = true;
  drawing.text({at.x - 34, at.y + kMapSide / 2}, y_name, turned);
}

}  // namespace

std::vector<LabelBox> label_boxes(const data::DetectionData& data) {
  std::vector<LabelBox> boxes;
  for (const data::LabeledPicture& p : data.pictures) {
    for (const data::LabeledObject& o : p.objects) {
      if (!o.crowd) boxes.push_back({o.label, o.x, o.y, o.width, o.height});
    }
  }
  return boxes;
}

io::Drawing draw_labels(const std::vector<LabelBox>& boxes, const std::vector<std::string>& names,
                        const std::string& title) {
  constexpr std::int64_t kMostClasses = 100'000;
  std::vector<std::int64_t> counts(std::max<std::size_t>(names.size(), 1));
  Spread centres, sizes;
  for (const LabelBox& b : boxes) {
    if (b.label < 0 || b.label >= kMostClasses) {
      fail<Error>("draw_labels: expected labels from 0 to {}, got {}", kMostClasses - 1, b.label);
    }
    if (static_cast<std::size_t>(b.label) >= counts.size()) counts.resize(static_cast<std::size_t>(b.label) + 1);
    ++counts[static_cast<std::size_t>(b.label)];
    centres.add(b.x, b.y);
    sizes.add(b.width, b.height);
  }
  const Bars bars(counts.size(), names);
  const double maps = kBarsTop + kBarsHeight + bars.names_height() + 40;
  io::Drawing drawing(kLeft + kBarsWidth + 20, maps + kMapSide + 44, title);
  drawing.text({20, 26}, io::fitted_text(title, 16, kBarsWidth), {.size = 16, .bold = true});
  drawing.text({20, 46}, fmt::format("{} objects; the darker a place, the more of them", boxes.size()),
               {.size = 12, .color = colors::kGrey});
  draw_bars(drawing, bars, counts, names);
  draw_spread(drawing, {kLeft + 20, maps}, centres, false, "Centres", "x, of the picture's width",
              "y, of the picture's height");
  draw_spread(drawing, {kLeft + 20 + kMapSide + 130, maps}, sizes, true, "Sizes", "width, of the picture's",
              "height, of the picture's");
  return drawing;
}

}  // namespace halfstep::training
