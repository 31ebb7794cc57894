// SPDX-License-Identifier: Apache-2.0
// Pictures with boxes: what a detector found, what is there, what it is trained on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/core/tensor.h"
#include "halfstep/io/drawing.h"

namespace halfstep::training {

/// A box that is drawn on a picture, in its pixels.
struct ShownBox {
  std::int64_t label = 0;  ///< number of its class, which decides the colour
  double left = 0, top = 0, right = 0, bottom = 0;
  double score = -1;  ///< 0 to 1, behind the name; below 0: there is none, as of a box that is true
};

/// The colour of a class. Neighbouring numbers are far apart, and the first 80 all differ.
HS_API io::Color class_color(std::int64_t label);

/// Options of draw_detections().
struct ShownBoxOptions {
  bool labels = true;     ///< names of classes
  bool scores = true;     ///< behind the names, of boxes that have one
  double line_width = 0;  ///< in pixels; 0: by the size of the picture
};
/// A picture with boxes in the colours of their classes, in its own size: `png(1)` has its pixels. Labels stand above
/// their boxes, at the picture's edges inside, and are cut where the picture is too narrow. Boxes of low scores are
/// drawn first; what lies outside of the picture is cut off. `names` of classes may be empty or too few: numbers.
/// Throws Error for a bitmap with too few bytes.
HS_API io::Drawing draw_detections(io::Bitmap picture, const std::vector<ShownBox>& boxes,
                                   const std::vector<std::string>& names, const ShownBoxOptions& options = {});

/// A picture of an evaluation: what is there, and what was found.
struct ComparedPicture {
  io::Bitmap picture = {};
  std::vector<ShownBox> truth = {}, found = {};
  std::string name = {};  ///< below it, such as the file's
};
/// Pictures of an evaluation, the truth on the left and what was found on the right of each, at most 12 of them.
HS_API io::Drawing draw_compared(const std::vector<ComparedPicture>& pictures, const std::vector<std::string>& names,
                                 const std::string& title);
/// The first pictures, at most 16, of a batch as networks get it, with its boxes: `input` [N, 3, H, W] of any floating
/// dtype from 0 to 1, `target` [N, M, 5] of class, centre x, centre y, width and height as fractions of the input; rows
/// of negative classes are none. Throws ShapeError for others.
HS_API io::Drawing draw_train_batch(const Tensor& input, const Tensor& target, const std::vector<std::string>& names,
                                    const std::string& title);

/// A picture of such a batch, and its boxes. Throws ShapeError.
HS_API io::Bitmap batch_picture(const Tensor& input, std::int64_t sample);
HS_API std::vector<ShownBox> batch_boxes(const Tensor& input, const Tensor& target, std::int64_t sample);

}  // namespace halfstep::training
