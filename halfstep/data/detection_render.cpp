// SPDX-License-Identifier: Apache-2.0
// The pixels of a training sample, row by row.
#include <algorithm>
#include <cmath>

#include "halfstep/data/detection_augment_internal.h"

namespace halfstep::data {
namespace {

/// Pixels of a row whose places are kept at a time: a place's error grows with each step.
constexpr std::int64_t kRun = 256;
constexpr double kPlaceUnit = 1 << kPlaceBits;

std::int32_t to_place(double at) {
  constexpr double kMost = 1 << 30;
  return static_cast<std::int32_t>(std::lrint(std::clamp(at * kPlaceUnit, -kMost, kMost)));
}

/// The pixels i from 0 to n with low <= a * i + b < high, which are neighbours.
std::pair<std::int64_t, std::int64_t> indices_between(double a, double b, double low, double high, std::int64_t n) {
  const auto in = [&](std::int64_t i) {
    const double at = a * static_cast<double>(i) + b;
    return at >= low && at < high;
  };
  if (a == 0) return in(0) ? std::pair<std::int64_t, std::int64_t>{0, n} : std::pair<std::int64_t, std::int64_t>{0, 0};
  const auto index = [&](double at) {
    return static_cast<std::int64_t>(std::clamp(std::floor((at - b) / a), -1.0, static_cast<double>(n)));
  };
  const std::int64_t one = index(low), other = index(high);
  // The quotients are rounded: what counts is the sum, as it is computed below and for the other tiles.
  std::int64_t begin = std::clamp<std::int64_t>(std::min(one, other) - 1, 0, n);
  std::int64_t end = std::clamp<std::int64_t>(std::max(one, other) + 2, 0, n);
  while (begin < end && !in(begin)) ++begin;
  while (end > begin && !in(end - 1)) --end;
  return {begin, end};
}

}  // namespace

void CompositionRenderer::begin(const Composition& composition, std::int64_t input, int fill) {
  composition_ = &composition;
  input_ = input;
  fill_ = static_cast<std::uint32_t>(fill) * 0x010101U;
  to_canvas_ = composition.to_input.inverse();
  loaded_ = {};
  bad_ = {};
  xs_.resize(static_cast<std::size_t>(input));
  ys_.resize(static_cast<std::size_t>(input));
  places_.resize(static_cast<std::size_t>(input));
  pasted_.clear();
  for (const CanvasObject& object : composition.pasted) {
    auto& polygons = pasted_.emplace_back();
    for (const std::vector<double>& polygon : object.segments) {
      std::vector<double>& moved = polygons.emplace_back(polygon.size());
      for (std::size_t i = 0; i + 1 < polygon.size(); i += 2) {
        const Projection::Point p = composition.to_input.at(polygon[i], polygon[i + 1]);
        if (!(p.w > 0)) {
          moved.clear();
          break;
        }
        moved[i] = p.x;
        moved[i + 1] = p.y;
      }
    }
  }
}

PixelRegion CompositionRenderer::needed(std::size_t number, const DetectionPictures& pictures) const {
  const Tile& tile = composition_->tiles[number];
  const auto side = static_cast<double>(input_);
  LabelBox box{INFINITY, INFINITY, -INFINITY, -INFINITY};
  const auto add = [&](double x, double y) {
    box = {std::min(box.left, x), std::min(box.top, y), std::max(box.right, x), std::max(box.bottom, y)};
  };
  for (const double y : {0.0, side}) {
    for (const double x : {0.0, side}) {
      const Projection::Point p = to_canvas_.at(x, y);
      if (p.w > 0) {
        add(p.x, p.y);
      } else {  // the horizon is in the input: any part may be
        add(0, 0);
        add(static_cast<double>(composition_->canvas), static_cast<double>(composition_->canvas));
      }
    }
  }
  // What is pasted comes from the other side.
  const auto canvas = static_cast<double>(composition_->canvas);
  for (const CanvasObject& object : composition_->pasted) {
    if (object.tile != number) continue;
    add(canvas - object.box.left, object.box.top);
    add(canvas - object.box.right, object.box.bottom);
  }
  constexpr double kMargin = 2;  // for the neighbours of the outermost places
  const auto low = [&](double at, std::int64_t least) {
    return std::max(static_cast<std::int64_t>(std::clamp(std::floor(at - kMargin), -1e9, 1e9)), least);
  };
  const auto high = [&](double at, std::int64_t most) {
    return std::min(static_cast<std::int64_t>(std::clamp(std::ceil(at + kMargin), -1e9, 1e9)), most);
  };
  const std::int64_t left = low(box.left, tile.left), top = low(box.top, tile.top);
  const std::int64_t right = high(box.right, tile.right), bottom = high(box.bottom, tile.bottom);
  if (right <= left || bottom <= top) return {};
  // At the edge of the canvas the neighbours are pixels that the canvas doesn't show.
  const std::int64_t w = pictures.width(tile.picture), h = pictures.height(tile.picture);
  const PixelRegion region{.left = std::max<std::int64_t>(left - tile.x - 1, 0),
                           .top = std::max<std::int64_t>(top - tile.y - 1, 0)};
  return {.left = region.left,
          .top = region.top,
          .width = std::min(right - tile.x + 1, w) - region.left,
          .height = std::min(bottom - tile.y + 1, h) - region.top};
}

void CompositionRenderer::row(std::int64_t y, std::uint32_t* out) {
  std::fill(out, out + input_, fill_);
  const double middle = static_cast<double>(y) + 0.5;
  if (to_canvas_.affine()) {
    affine_row(middle, out);
  } else {
    for (std::int64_t x = 0; x < input_; ++x) {
      places_[static_cast<std::size_t>(x)] = to_canvas_.at(static_cast<double>(x) + 0.5, middle);
    }
    scattered(0, input_, out);
  }
  if (!pasted_.empty()) paste_row(middle, out);
}

void CompositionRenderer::affine_row(double y, std::uint32_t* out) {
  const std::array<double, 9>& m = to_canvas_.m;
  // The last row of an affine map is 0 0 1, up to rounding.
  const double u0 = (m[0] * 0.5 + m[1] * y + m[2]) / m[8], v0 = (m[3] * 0.5 + m[4] * y + m[5]) / m[8];
  const double du = m[0] / m[8], dv = m[3] / m[8];
  for (std::size_t i = 0; i < composition_->tiles.size(); ++i) {
    const Tile& tile = composition_->tiles[i];
    if (!loaded_[i]) continue;
    const auto across =
        indices_between(du, u0, static_cast<double>(tile.left), static_cast<double>(tile.right), input_);
    const auto down = indices_between(dv, v0, static_cast<double>(tile.top), static_cast<double>(tile.bottom), input_);
    const std::int64_t first = std::max(across.first, down.first), end = std::min(across.second, down.second);
    const PicturePart& part = parts_[i];
    const double x0 = static_cast<double>(tile.x + part.left) + 0.5, y0 = static_cast<double>(tile.y + part.top) + 0.5;
    const std::int32_t step_x = to_place(du), step_y = to_place(dv);
    for (std::int64_t at = first; at < end; at += kRun) {
      const std::int64_t n = std::min(kRun, end - at);
      const std::int32_t x = to_place(u0 + du * static_cast<double>(at) - x0);
      const std::int32_t v = to_place(v0 + dv * static_cast<double>(at) - y0);
      for (std::int32_t k = 0; k < static_cast<std::int32_t>(n); ++k) {
        xs_[static_cast<std::size_t>(k)] = x + k * step_x;
        ys_[static_cast<std::size_t>(k)] = v + k * step_y;
      }
      sample(i, n, out + at);
    }
  }
}

void CompositionRenderer::sample(std::size_t tile, std::int64_t n, std::uint32_t* out) {
  const ImageView& view = parts_[tile].view;
  sample_pixels(view.pixels, view.stride, view.width, view.height, xs_.data(), ys_.data(), n, out);
}

void CompositionRenderer::scattered(std::int64_t begin, std::int64_t end, std::uint32_t* out) {
  const auto tile_at = [&](const Projection::Point& p) {
    const std::vector<Tile>& tiles = composition_->tiles;
    std::size_t i = 0;
    for (; i < tiles.size(); ++i) {
      const Tile& t = tiles[i];
      if (p.w > 0 && p.x >= static_cast<double>(t.left) && p.x < static_cast<double>(t.right) &&
          p.y >= static_cast<double>(t.top) && p.y < static_cast<double>(t.bottom)) {
        break;
      }
    }
    return i;
  };
  while (begin < end) {
    const std::size_t tile = tile_at(places_[static_cast<std::size_t>(begin)]);
    std::int64_t stop = begin + 1;
    while (stop < end && tile_at(places_[static_cast<std::size_t>(stop)]) == tile) ++stop;
    if (tile < composition_->tiles.size() && loaded_[tile]) {
      const Tile& t = composition_->tiles[tile];
      const PicturePart& part = parts_[tile];
      const double x0 = static_cast<double>(t.x + part.left) + 0.5, y0 = static_cast<double>(t.y + part.top) + 0.5;
      for (std::int64_t i = begin; i < stop; ++i) {
        const Projection::Point& p = places_[static_cast<std::size_t>(i)];
        xs_[static_cast<std::size_t>(i - begin)] = to_place(p.x - x0);
        ys_[static_cast<std::size_t>(i - begin)] = to_place(p.y - y0);
      }
      sample(tile, stop - begin, out + begin);
    }
    begin = stop;
  }
}

void CompositionRenderer::paste_row(double y, std::uint32_t* out) {
  const auto canvas = static_cast<double>(composition_->canvas);
  for (const auto& polygons : pasted_) {
    for (const std::vector<double>& polygon : polygons) {
      crossings_.clear();
      for (std::size_t i = 0; i + 1 < polygon.size(); i += 2) {
        const std::size_t before = i == 0 ? polygon.size() - 2 : i - 2;
        const double y0 = polygon[before + 1], y1 = polygon[i + 1];
        if ((y0 <= y) == (y1 <= y)) continue;
        crossings_.push_back(polygon[before] + (y - y0) / (y1 - y0) * (polygon[i] - polygon[before]));
      }
      std::sort(crossings_.begin(), crossings_.end());
      for (std::size_t i = 0; i + 1 < crossings_.size(); i += 2) {
        // The pixels whose middles are between the two.
        const auto first =
            static_cast<std::int64_t>(std::clamp(std::ceil(crossings_[i] - 0.5), 0.0, static_cast<double>(input_)));
        const auto end =
            static_cast<std::int64_t>(std::clamp(std::ceil(crossings_[i + 1] - 0.5), 0.0, static_cast<double>(input_)));
        for (std::int64_t x = first; x < end; ++x) {
          Projection::Point p = to_canvas_.at(static_cast<double>(x) + 0.5, y);
          p.x = canvas - p.x;
          places_[static_cast<std::size_t>(x)] = p;
        }
        scattered(first, end, out);
      }
    }
  }
}

}  // namespace halfstep::data
