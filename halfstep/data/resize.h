// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "halfstep/core/export.h"
#include "halfstep/data/image.h"

namespace halfstep::data {

/// How the pixels of the source are weighted: triangle, or Keys's cubic with a = -0.5. When the image becomes smaller
/// the filter is widened accordingly (antialiasing).
enum class ResizeFilter { bilinear, bicubic };

/// Part of an image, with fractions of pixels: (0, 0) is the upper left corner of the first pixel.
struct Box {
  double left = 0;
  double top = 0;
  double right = 0;
  double bottom = 0;
};

/// The source and target of a resize.
struct ResizeOptions {
  /// Sizes of the result.
  std::int64_t width = 0;
  std::int64_t height = 0;
  ResizeFilter filter = ResizeFilter::bilinear;
  /// The part of the source that becomes the result; empty: all of it. Pixels outside it still contribute at its edges,
  /// as far as the filter reaches.
  Box box = {};
  /// The part of the result that is computed; empty: all of it.
  PixelRegion window = {};
};

struct ResizeAxis;

/// A precomputed resize: what it reads, and the weights. The result has the same pixels as
/// `Image.resize(size, resample, box)` of Pillow up to 12: rows first, then columns, each in fixed point with 22
/// fractional bits and rounded to 8 bits. (Pillow 13 takes columns first where that is less work, which differs by at
/// most one level.) Any number of threads may run it.
class HS_API ResizePlan {
 public:
  /// For sources of these sizes. Throws ShapeError for sizes under 1 or over 2^20, a box or a window that is empty or
  /// not inside the image.
  ResizePlan(std::int64_t source_width, std::int64_t source_height, const ResizeOptions& options);
  ResizePlan(ResizePlan&&) noexcept;
  ResizePlan& operator=(ResizePlan&&) noexcept;
  ~ResizePlan();

  /// The pixels of the source that run() reads.
  PixelRegion source_region() const;

  /// Computes the window of the result. `source` may be a part of the whole image that contains source_region(): its
  /// first pixel is (left, top) of the whole. `scratch` keeps memory between calls.
  void run(const ImageView& source, std::int64_t left, std::int64_t top, Image& scratch, Image& result) const;

 private:
  std::unique_ptr<ResizeAxis> horizontal_;
  std::unique_ptr<ResizeAxis> vertical_;
};

/// The image at a different size; errors as ResizePlan.
HS_API Image resize(const ImageView& source, const ResizeOptions& options);

}  // namespace halfstep::data
