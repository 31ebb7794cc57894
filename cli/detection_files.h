// SPDX-License-Identifier: Apache-2.0
// What `halfstep predict` reads and writes with detectors, but the pictures themselves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "halfstep/models/detections.h"

namespace halfstep::cli {

/// The files of INPUT, folders replaced by the pictures in them, by name. Throws IoError for a folder that can't be
/// read or has none; a file need not be there.
std::vector<std::filesystem::path> pictures_in(const std::vector<std::filesystem::path>& inputs);
/// A name of each that is none of the others': that of the file without its ending, and behind it `-2`, `-3`...
std::vector<std::string> names_of(const std::vector<std::filesystem::path>& pictures);

/// A line for each object, as YOLO's labels: class number, centre x and y, width and height as fractions of the picture
/// and, with `scores`, the score.
std::string yolo_labels(const std::vector<models::Detection>& objects, std::int64_t width, std::int64_t height,
                        bool scores);

/// The numbers that COCO's annotations give these classes (1 to 90), where they are its 80 in their order; else none.
std::vector<std::int64_t> coco_categories(const std::vector<std::string>& classes);

/// Objects as COCO's results: a list with image_id, category_id, bbox (left, top, width, height in pixels) and score.
class CocoResults {
 public:
  /// Where the classes aren't COCO's, `category` with the name of the class stands for `category_id`.
  explicit CocoResults(std::vector<std::string> classes);
  /// `name` of a picture: its id where it is a number, as that of COCO's pictures.
  void add(const std::string& name, const std::vector<models::Detection>& objects);
  /// All of them as JSON.
  std::string text() const;

 private:
  std::vector<std::string> classes_;
  std::vector<std::int64_t> categories_;
  std::string rows_;
};

}  // namespace halfstep::cli
