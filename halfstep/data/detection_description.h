// SPDX-License-Identifier: Apache-2.0
// Where a data set for detection lies, and what its classes are called.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "halfstep/core/export.h"
#include "halfstep/data/detection_labels.h"
#include "halfstep/data/image.h"

namespace halfstep::data {

/// Options of load_detection.
struct DetectionLoadOptions {
  /// Polygons of a COCO JSON give the boxes (CocoOptions::segment_boxes); unset: in the part `train` only, as the
  /// official evaluation counts with the `bbox` fields.
  std::optional<bool> segment_boxes = std::nullopt;
  bool keep_segments = true;  ///< otherwise polygons are forgotten, which saves memory
  /// Each picture's header is read: what is missing or no picture is skipped, and sizes are the file's. Otherwise
  /// sizes are 0 where labels don't tell them, and a bad picture is noticed when it is used.
  bool check_pictures = true;
  ImageLimits limits = {};
};

/// One part (`train`, `val`, `test`) of a data set for detection. `description` is one of
///
/// - a YAML file with the keys `train`, `val`, `test` (each a folder that is searched with its subfolders, a text file
///   that lists pictures, a COCO JSON, or a list of folders and text files), `path` (what these are relative to; itself
///   relative to the file's folder), `names` (a list, or a map from 0 on), `nc`, and `annotations` (a map from a part
///   to a COCO JSON, whose pictures are then in the folder that the part names). Other keys, such as `download`, are
///   ignored;
/// - a folder with such a file, `data.yaml` or the only one that ends in `.yaml` or `.yml`;
/// - a folder with `classes.txt` (one name a line), pictures in `images/PART` and labels in `labels/PART`;
/// - a folder in the form of Pascal VOC: `JPEGImages`, `Annotations` and `PART.txt` (or `ImageSets/Main/PART.txt`). Its
///   classes are the lines of `classes.txt` or, without one, all names in Annotations, sorted;
/// - a COCO JSON.
///
/// The labels of a picture are YOLO's, in a file of its name with the ending .txt, in the folder where the last
/// `images` of its path is replaced by `labels`. A picture without such a file is background.
///
/// Pictures and labels that can't be used are skipped, counted and named in the result, which is the same whatever
/// order the file system lists files in. Throws IoError, which names the file and what was expected of it, for what is
/// missing or can't be read as a whole, and for a part without any picture, or (but for `test`) without any labels.
HS_API DetectionData load_detection(const std::filesystem::path& description, const std::string& split,
                                    const DetectionLoadOptions& options = {});

}  // namespace halfstep::data
