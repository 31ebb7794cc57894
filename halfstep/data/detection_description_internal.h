// SPDX-License-Identifier: Apache-2.0
// Internal: the layouts of data sets for detection.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "halfstep/data/detection_description.h"

namespace halfstep::data {

/// What a description file says.
struct DescriptionFile {
  std::vector<std::string> classes;           // empty: not given
  std::vector<std::filesystem::path> places;  // of the part's pictures
  std::filesystem::path annotations;          // a COCO JSON; empty: none
  std::filesystem::path root;                 // what paths are relative to
};

/// Reads the YAML file for one part.
DescriptionFile read_description(const std::filesystem::path& file, const std::string& split);

/// The lines of a small text file without blanks around them, empty ones left out. Throws IoError.
std::vector<std::string> read_lines(const std::filesystem::path& file);

/// The names in a classes.txt; throws IoError for none or too many.
std::vector<std::string> read_classes(const std::filesystem::path& file);

/// Runs run(0) to run(n - 1) on a few threads; none may throw.
void for_each_file(std::size_t n, const std::function<void(std::size_t)>& run);

/// Finds the sizes in a picture's header. Returns what is wrong with it, an empty text for nothing.
std::string picture_sizes(const std::filesystem::path& file, const ImageLimits& limits, std::int64_t& width,
                          std::int64_t& height);

}  // namespace halfstep::data
