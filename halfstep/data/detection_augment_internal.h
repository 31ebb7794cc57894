// SPDX-License-Identifier: Apache-2.0
// Internal: what is drawn for a training sample of a detector, what it does to boxes, and its pixels.
//
// A sample is one or two compositions. A composition is a canvas with pictures on it and a projective map from the
// canvas to the input. Pixels go from the pictures to the input in one step, row by row, and never onto a canvas in
// memory; parts of pictures that the input doesn't show are not even decoded. Positions are continuous: pixel (i, j)
// covers i to i + 1 and j to j + 1, for pictures and boxes alike.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/data/detection_kernels_internal.h"
#include "halfstep/data/detection_pictures_internal.h"
#include "halfstep/data/detection_transforms.h"

namespace halfstep::data {

/// A projective map: rows of a 3x3 matrix.
struct Projection {
  std::array<double, 9> m = {1, 0, 0, 0, 1, 0, 0, 0, 1};

  struct Point {
    double x = 0, y = 0, w = 1;  // the denominator: not over 0 for points behind the horizon
  };
  Point at(double x, double y) const {
    const double w = m[6] * x + m[7] * y + m[8];
    return {(m[0] * x + m[1] * y + m[2]) / w, (m[3] * x + m[4] * y + m[5]) / w, w};
  }
  bool affine() const { return m[6] == 0 && m[7] == 0; }
  Projection inverse() const;
  /// First `other`, then this.
  Projection operator*(const Projection& other) const;
};

/// A picture on a canvas.
struct Tile {
  std::int64_t picture = 0;
  std::int64_t left = 0, top = 0, right = 0, bottom = 0;  // the part of the canvas that shows it
  std::int64_t x = 0, y = 0;                              // where its first pixel would be
};

/// An object on a canvas, in the canvas's pixels.
struct CanvasObject {
  std::int64_t label = 0;
  std::size_t tile = 0;
  LabelBox box;  // of what the canvas shows
  std::vector<std::vector<double>> segments;
};

struct Composition {
  std::int64_t canvas = 0;  // its sides
  std::vector<Tile> tiles;
  Projection to_input;
  double scale = 1;                  // of lengths, from canvas to input
  std::vector<CanvasObject> pasted;  // copies of objects, mirrored at the canvas's middle
};

/// All that is random about a sample.
struct SamplePlan {
  std::vector<Composition> parts;  // one, or two that are mixed
  double share = 1;                // of the first
  bool colours = false;
  HsvTables hsv;
};

/// Draws a sample for an input of `input` x `input`.
SamplePlan plan_sample(const DetectionTransform& transform, const SampleKey& key, const DetectionData& data,
                       const DetectionPictures& pictures, std::int64_t input);

/// The objects of a composition that the input shows, as fractions of it; none of tiles that `bad` says.
void place_objects(const Composition& composition, const DetectionData& data, const DetectionPictures& pictures,
                   const std::array<bool, 4>& bad, std::int64_t input, std::vector<LabeledObject>& objects);

/// Polygons clipped to a rectangle, by Sutherland and Hodgman's method; and the box around all of them, without width
/// where none is left.
/// @{
std::vector<double> clip_polygon(const std::vector<double>& polygon, const LabelBox& to);
LabelBox box_around(const std::vector<std::vector<double>>& polygons);
/// @}

/// Makes the rows of a composition.
class CompositionRenderer {
 public:
  CompositionRenderer() = default;
  /// Loads what the input shows. `report` is called with the number and the error of a picture that can't be read.
  template <class Report>
  void start(const Composition& composition, const DetectionPictures& pictures, std::int64_t input, int fill,
             PictureScratch& scratch, const Report& report) {
    begin(composition, input, fill);
    for (std::size_t i = 0; i < composition.tiles.size(); ++i) {
      const PixelRegion region = needed(i, pictures);
      if (region.width < 1 || region.height < 1) continue;
      try {
        pictures.load(composition.tiles[i].picture, region, scratch, parts_[i]);
        loaded_[i] = true;
      } catch (const IoError& error) {
        bad_[i] = true;
        report(composition.tiles[i].picture, error.what());
      }
    }
  }
  /// Of the tiles that can't be read.
  const std::array<bool, 4>& bad() const { return bad_; }
  /// Row y of the input, `input` pixels.
  void row(std::int64_t y, std::uint32_t* out);

 private:
  void begin(const Composition& composition, std::int64_t input, int fill);
  PixelRegion needed(std::size_t tile, const DetectionPictures& pictures) const;
  void affine_row(double y, std::uint32_t* out);
  /// Pixels `begin` to `end` of a row, whose places on the canvas are in places_.
  void scattered(std::int64_t begin, std::int64_t end, std::uint32_t* out);
  void sample(std::size_t tile, std::int64_t n, std::uint32_t* out);
  void paste_row(double y, std::uint32_t* out);

  const Composition* composition_ = nullptr;
  std::int64_t input_ = 0;
  std::uint32_t fill_ = 0;
  Projection to_canvas_;
  std::array<PicturePart, 4> parts_;
  std::array<bool, 4> loaded_{}, bad_{};
  std::vector<std::int32_t> xs_, ys_;                     // places in a picture
  std::vector<Projection::Point> places_;                 // places on the canvas
  std::vector<std::vector<std::vector<double>>> pasted_;  // polygons in the input's pixels
  std::vector<double> crossings_;
};

}  // namespace halfstep::data
