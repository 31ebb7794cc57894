// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/data/resize_internal.h"

namespace halfstep::data {

/// The weights along one direction, for the positions of the window.
struct ResizeAxis {
  std::int64_t outputs = 0;
  std::vector<std::int32_t> first;  // of each output: the first source position
  std::int64_t taps = 0;            // weights an output, a multiple of 4; those that aren't used are 0
  std::vector<std::int32_t> weights;
  std::int64_t begin = 0, end = 0;   // the source positions with weights
  bool copies = false;               // every output is the source position `first`
  std::vector<std::int16_t> packed;  // as the kernels want them
};

namespace {

constexpr std::int64_t kLargestSize = std::int64_t{1} << 20;
constexpr std::int64_t kOverread = 64;

double weight_at(ResizeFilter filter, double x) {
  x = std::abs(x);
  if (filter == ResizeFilter::bilinear) return std::max(1 - x, 0.0);
  constexpr double a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

/// Weights for outputs window_begin to window_begin + n of `outputs`, which the interval low to high of a source of
/// `size` positions becomes.
ResizeAxis make_axis(std::int64_t size, double low, double high, std::int64_t outputs, std::int64_t window_begin,
                     std::int64_t n, ResizeFilter filter) {
  const double scale = (high - low) / static_cast<double>(outputs);
  const double widening = std::max(scale, 1.0);
  const double support = (filter == ResizeFilter::bilinear ? 1.0 : 2.0) * widening;
  ResizeAxis axis;
  axis.outputs = n;
  std::vector<double> all;  // weights of all outputs, one behind the other
  std::vector<std::int64_t> counts;
  axis.begin = size;
  for (std::int64_t i = window_begin; i < window_begin + n; ++i) {
    const double center = low + (static_cast<double>(i) + 0.5) * scale;
    const std::int64_t begin = std::clamp<std::int64_t>(static_cast<std::int64_t>(center - support + 0.5), 0, size - 1);
    const std::int64_t end =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(center + support + 0.5), begin + 1, size);
    double sum = 0;
    for (std::int64_t x = begin; x < end; ++x) {
      const double w = weight_at(filter, (static_cast<double>(x) - center + 0.5) / widening);
      sum += w;
      all.push_back(w);
    }
    for (std::size_t k = all.size() - static_cast<std::size_t>(end - begin); k < all.size() && sum != 0; ++k)
      all[k] /= sum;
    axis.first.push_back(static_cast<std::int32_t>(begin));
    counts.push_back(end - begin);
    axis.taps = std::max(axis.taps, end - begin);
    axis.begin = std::min(axis.begin, begin);
    axis.end = std::max(axis.end, end);
  }
  axis.taps = (axis.taps + 3) / 4 * 4;
  axis.weights.assign(static_cast<std::size_t>(n * axis.taps), 0);
  constexpr double kOne = std::int32_t{1} << kWeightBits;
  const double* w = all.data();
  axis.copies = true;
  for (std::int64_t i = 0; i < n; ++i) {
    std::int32_t* to = axis.weights.data() + i * axis.taps;
    for (std::int64_t k = 0; k < counts[static_cast<std::size_t>(i)]; ++k) {
      to[k] = static_cast<std::int32_t>(std::lround(*w++ * kOne));
      // With equal sizes all the weight is on one pixel, which need not be the first.
      if (to[k] != 0 && to[k] != static_cast<std::int32_t>(kOne)) axis.copies = false;
    }
  }
  if (axis.copies) {
    // `first` becomes the pixel with the weight.
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t* from = axis.weights.data() + i * axis.taps;
      axis.first[static_cast<std::size_t>(i)] +=
          static_cast<std::int32_t>(std::max_element(from, from + axis.taps) - from);
    }
    for (std::size_t i = 1; i < axis.first.size(); ++i) {
      if (axis.first[i] != axis.first[i - 1] + 1) axis.copies = false;  // only runs are copied
    }
    if (!axis.copies) {
      for (std::int64_t i = 0; i < n; ++i) {
        std::int32_t* to = axis.weights.data() + i * axis.taps;
        std::fill(to, to + axis.taps, 0);
        to[0] = static_cast<std::int32_t>(kOne);
      }
    }
    axis.begin = axis.first.front();
    axis.end = axis.first.back() + 1;
  }
  return axis;
}

std::int16_t upper(std::int32_t weight) { return static_cast<std::int16_t>(weight >> 8); }
std::int16_t lower(std::int32_t weight) { return static_cast<std::int16_t>(weight & 255); }

/// For resize_row: each weight of four, once for each colour.
void pack_rows(ResizeAxis& axis) {
  axis.packed.assign(static_cast<std::size_t>(axis.outputs * axis.taps * 8), 0);
  std::int16_t* to = axis.packed.data();
  for (std::size_t i = 0; i < axis.weights.size(); i += 4, to += 32) {
    for (std::size_t lane = 0; lane < 16; ++lane) {
      const std::int32_t w = lane % 8 < 6 ? axis.weights[i + lane / 8 * 2 + lane % 2] : 0;
      to[lane] = upper(w);
      to[lane + 16] = lower(w);
    }
  }
}

/// For resize_columns: pairs.
void pack_columns(ResizeAxis& axis) {
  axis.packed.resize(axis.weights.size() * 2);
  for (std::size_t i = 0; i < axis.weights.size(); i += 2) {
    std::int16_t* to = axis.packed.data() + i * 2;
    for (std::size_t k = 0; k < 2; ++k) {
      to[k] = upper(axis.weights[i + k]);
      to[k + 2] = lower(axis.weights[i + k]);
    }
  }
}

}  // namespace

ResizePlan::ResizePlan(std::int64_t source_width, std::int64_t source_height, const ResizeOptions& options) {
  for (const std::int64_t size : {source_width, source_height, options.width, options.height}) {
    if (size < 1 || size > kLargestSize) {
      fail<ShapeError>("resize: expected sizes from 1 to {}, got {}x{} to become {}x{}", kLargestSize, source_width,
                       source_height, options.width, options.height);
    }
  }
  const auto width = static_cast<double>(source_width), height = static_cast<double>(source_height);
  Box box = options.box;
  if (box.left == 0 && box.top == 0 && box.right == 0 && box.bottom == 0) box = {0, 0, width, height};
  if (!(box.left >= 0 && box.top >= 0 && box.right > box.left && box.bottom > box.top && box.right <= width &&
        box.bottom <= height)) {
    fail<ShapeError>("resize: expected a box inside the picture of {}x{}, got ({}, {}) to ({}, {})", source_width,
                     source_height, box.left, box.top, box.right, box.bottom);
  }
  PixelRegion window = options.window;
  if (window == PixelRegion{}) window = {.left = 0, .top = 0, .width = options.width, .height = options.height};
  if (window.left < 0 || window.top < 0 || window.width < 1 || window.height < 1 || window.width > options.width ||
      window.height > options.height || window.left > options.width - window.width ||
      window.top > options.height - window.height) {
    fail<ShapeError>("resize: expected a window inside the result of {}x{}, got {}x{} at ({}, {})", options.width,
                     options.height, window.width, window.height, window.left, window.top);
  }
  horizontal_ = std::make_unique<ResizeAxis>(
      make_axis(source_width, box.left, box.right, options.width, window.left, window.width, options.filter));
  vertical_ = std::make_unique<ResizeAxis>(
      make_axis(source_height, box.top, box.bottom, options.height, window.top, window.height, options.filter));
  if (!horizontal_->copies) pack_rows(*horizontal_);
  if (!vertical_->copies) pack_columns(*vertical_);
}

ResizePlan::ResizePlan(ResizePlan&&) noexcept = default;
ResizePlan& ResizePlan::operator=(ResizePlan&&) noexcept = default;
ResizePlan::~ResizePlan() = default;

PixelRegion ResizePlan::source_region() const {
  return {.left = horizontal_->begin,
          .top = vertical_->begin,
          .width = horizontal_->end - horizontal_->begin,
          .height = vertical_->end - vertical_->begin};
}

void ResizePlan::run(const ImageView& source, std::int64_t left, std::int64_t top, Image& scratch,
                     Image& result) const {
  const ResizeAxis& across = *horizontal_;
  const ResizeAxis& down = *vertical_;
  if (left > across.begin || top > down.begin || left + source.width < across.end || top + source.height < down.end) {
    fail<ShapeError>("resize: expected a source with the columns {} to {} and the rows {} to {}, got {}x{} at ({}, {})",
                     across.begin, across.end, down.begin, down.end, source.width, source.height, left, top);
  }
  const std::int64_t rows = down.end - down.begin;
  const std::int64_t row_bytes = across.outputs * 3;
  result.resize(across.outputs, down.outputs);

  // Rows first. With nothing to do the columns are made from the source itself.
  ImageView between = source;
  between.pixels += (down.begin - top) * source.stride + (across.begin - left) * 3;
  const bool aside = !across.copies || !down.copies;  // the pass over columns reads some bytes beyond the rows
  if (aside) {
    scratch.width = across.outputs;
    scratch.height = rows;
    scratch.pixels.resize(static_cast<std::size_t>(rows * row_bytes + kOverread));
    std::uint8_t* to = scratch.pixels.data();
    const std::uint8_t* last = source.row(source.height - 1) + source.width * 3;
    std::vector<std::uint8_t> padded;
    std::vector<std::int32_t> first = across.first;
    for (std::int32_t& position : first) position -= static_cast<std::int32_t>(across.begin);
    for (std::int64_t y = 0; y < rows; ++y, to += row_bytes) {
      const std::uint8_t* from = between.row(y);
      if (across.copies) {
        std::memcpy(to, from, static_cast<std::size_t>(row_bytes));
        continue;
      }
      const std::int64_t bytes = (across.end - across.begin) * 3;
      // A pixel's weights are filled up to a multiple of four, so up to 3 pixels and 4 bytes beyond are read; with a
      // pixel near the right edge that has fewer taps than others, more.
      const std::int64_t beyond = across.taps * 3 + 4;
      if (last - from < bytes + beyond) {
        padded.assign(static_cast<std::size_t>(bytes + beyond), 0);
        std::memcpy(padded.data(), from, static_cast<std::size_t>(bytes));
        from = padded.data();
      }
      resize_row(from, first.data(), across.packed.data(), across.outputs, across.taps / 4, to);
    }
    between = {.pixels = scratch.pixels.data(), .width = across.outputs, .height = rows, .stride = row_bytes};
  }

  for (std::int64_t y = 0; y < down.outputs; ++y) {
    const std::int64_t first = down.first[static_cast<std::size_t>(y)] - down.begin;
    std::uint8_t* to = result.row(y);
    if (down.copies) {
      std::memcpy(to, between.row(first), static_cast<std::size_t>(row_bytes));
    } else {
      resize_columns(between.row(first), between.stride, rows - first, down.packed.data() + y * down.taps * 2,
                     down.taps / 2, row_bytes, to);
    }
  }
}

Image resize(const ImageView& source, const ResizeOptions& options) {
  const ResizePlan plan(source.width, source.height, options);
  Image scratch, result;
  plan.run(source, 0, 0, scratch, result);
  return result;
}

}  // namespace halfstep::data
