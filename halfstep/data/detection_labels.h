// SPDX-License-Identifier: Apache-2.0
// Labelled pictures for object detection, and the readers of three formats of labels: COCO's JSON, YOLO's text and
// Pascal VOC's XML.
//
// All readers share the rules for single labels. A box is clipped to the picture. One of which less than half lies
// inside, one without a size, one with a number that is not finite and one of an unknown class are skipped, as is a
// line that can't be read; of equal labels of a picture one is kept. Everything that is skipped is named and counted.
// What can't be read as a whole throws IoError.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::data {

/// The most classes that a data set for detection has; more are refused.
inline constexpr std::int64_t kMostDetectionClasses = 65536;

/// One object in a picture.
struct LabeledObject {
  std::int64_t label = 0;  ///< number of its class
  /// Centre and sides as fractions of the picture.
  /// @{
  double x = 0, y = 0, width = 0, height = 0;
  /// @}
  double area = -1;                                ///< of the object in pixels (COCO's field); -1: the box's
  bool crowd = false;                              ///< COCO's iscrowd: a region with many objects of the class
  std::vector<std::vector<double>> segments = {};  ///< polygons, x and y in turn, as fractions of the picture
  friend bool operator==(const LabeledObject&, const LabeledObject&) = default;
};

/// A picture's file and what is in it.
struct LabeledPicture {
  std::filesystem::path file;
  /// In pixels; 0 where neither the labels nor the picture have told yet.
  /// @{
  std::int64_t width = 0, height = 0;
  /// @}
  std::int64_t id = -1;  ///< COCO's; -1: none
  std::vector<LabeledObject> objects = {};
};

/// One part of a data set for detection.
struct DetectionData {
  std::vector<std::string> classes;
  std::vector<LabeledPicture> pictures;
  std::int64_t skipped = 0;                     ///< pictures and labels left out
  std::vector<std::string> problems;            ///< why, for the first few: `FILE:LINE: what`
  std::vector<std::int64_t> category_ids = {};  ///< COCO's own, by class; empty: none
};

/// What a reader left out.
struct LabelProblems {
  std::int64_t skipped = 0;
  std::vector<std::string> first = {};  ///< texts of the first kMost

  static constexpr std::size_t kMost = 20;  ///< texts that are kept
  /// Counts one.
  HS_API void add(std::string text);
  /// Adds those of another reader.
  HS_API void add(const LabelProblems& other);
};

/// A box by its edges, as fractions of the picture.
struct LabelBox {
  double left = 0, top = 0, right = 0, bottom = 0;
};

/// Sets the object's centre and sides to the part of `box` that lies in the picture. Returns what is wrong with the
/// box, an empty text for nothing.
HS_API std::string place_box(const LabelBox& box, LabeledObject& object);

/// YOLO's text labels: a line is `class x y width height` (the centre; all as fractions of the picture) or `class x1 y1
/// x2 y2 x3 y3 ...`, a polygon whose bounding box counts. Empty lines are allowed. `name` is the file in messages,
/// `classes` how many there are. Reads any text.
HS_API std::vector<LabeledObject> parse_yolo_labels(std::string_view text, std::string_view name, std::int64_t classes,
                                                    LabelProblems& problems);

/// A file of Pascal VOC.
struct VocAnnotation {
  std::string file;                    ///< the `filename` field; may be empty
  std::int64_t width = 0, height = 0;  ///< the `size` field; 0: not given
  std::vector<std::string> names;      ///< of the objects' classes, in their order
  std::vector<LabelBox> boxes;         ///< in pixels: `xmin`, `ymin`, `xmax`, `ymax`
  std::vector<std::int64_t> lines;     ///< where each object begins
};

/// Reads Pascal VOC's XML. Numbers are edges, counted from 0, as labelImg and its kind write them. An object without a
/// name or with coordinates that are no numbers is skipped. Throws IoError for what is no such file.
HS_API VocAnnotation parse_voc(std::string_view text, std::string_view name, LabelProblems& problems);
/// The objects of an annotation, whose picture has these sizes (in pixels, over 0). Names that are not in `classes` are
/// skipped.
HS_API std::vector<LabeledObject> voc_objects(const VocAnnotation& annotation, std::string_view name,
                                              std::int64_t width, std::int64_t height,
                                              std::span<const std::string> classes, LabelProblems& problems);

/// Options of parse_coco.
struct CocoOptions {
  /// The box of an object with polygons is theirs, not the `bbox` field, which is rounded and at times wrong.
  bool segment_boxes = true;
  bool keep_segments = true;  ///< otherwise LabeledObject::segments stays empty
};

/// COCO's JSON of instances: `images`, `annotations`, `categories`, whatever their order. Classes are the categories in
/// order of their ids, which may have gaps; pictures are in the file's order, those without objects too, each with its
/// `file_name`. Polygons become segments, run lengths (crowds) keep their box. Throws IoError for text that is no such
/// JSON, and for more than kMostDetectionClasses categories.
HS_API DetectionData parse_coco(std::string_view text, std::string_view name, const CocoOptions& options = {});

}  // namespace halfstep::data
