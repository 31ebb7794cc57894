// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/loader/pictures.h"

#include <algorithm>

#include "halfstep/core/error.h"
#include "halfstep/data/image_folder.h"

namespace halfstep::bench {

Flat::Flat(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (data::is_image_name(entry.path().filename().string())) paths_.push_back(entry.path().string());
  }
  std::sort(paths_.begin(), paths_.end());
  classes_ = {"all"};
}

std::span<const std::uint8_t> Flat::read(std::int64_t index, std::vector<std::uint8_t>& buffer) const {
  data::read_file(name(index), std::uint64_t{1} << 30, buffer);
  return buffer;
}

std::shared_ptr<const data::ImageSource> open_pictures(const std::filesystem::path& folder) {
  std::shared_ptr<const data::ImageSource> source;
  if (data::class_folders(folder).empty()) {
    source = std::make_shared<const Flat>(folder);
  } else {
    source = std::make_shared<const data::ImageFolder>(folder);
  }
  if (source->size() == 0) throw Error("there are no pictures in " + folder.string());
  return source;
}

}  // namespace halfstep::bench
