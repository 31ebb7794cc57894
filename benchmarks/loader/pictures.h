// SPDX-License-Identifier: Apache-2.0
// The pictures that the loader's benchmarks read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "halfstep/data/image_dataset.h"

namespace halfstep::bench {

/// The pictures right in a folder, all of one class.
class Flat final : public data::ImageSource {
 public:
  explicit Flat(const std::filesystem::path& folder);
  std::int64_t size() const override { return static_cast<std::int64_t>(paths_.size()); }
  std::int64_t label(std::int64_t) const override { return 0; }
  std::string name(std::int64_t index) const override { return paths_[static_cast<std::size_t>(index)]; }
  std::span<const std::uint8_t> read(std::int64_t index, std::vector<std::uint8_t>& buffer) const override;

 private:
  std::vector<std::string> paths_;
};

/// A source's pictures over and over, so that a small folder makes an epoch that is not all beginning and end.
class Repeated final : public data::ImageSource {
 public:
  Repeated(std::shared_ptr<const data::ImageSource> source, std::int64_t times) : source_(source), times_(times) {
    classes_ = source->classes();
  }
  std::int64_t size() const override { return source_->size() * times_; }
  std::int64_t label(std::int64_t index) const override { return source_->label(index % source_->size()); }
  std::string name(std::int64_t index) const override { return source_->name(index % source_->size()); }
  std::span<const std::uint8_t> read(std::int64_t index, std::vector<std::uint8_t>& buffer) const override {
    return source_->read(index % source_->size(), buffer);
  }

 private:
  std::shared_ptr<const data::ImageSource> source_;
  std::int64_t times_;
};

/// The class folders in `folder`, or the pictures right in it. Throws Error where there are none.
std::shared_ptr<const data::ImageSource> open_pictures(const std::filesystem::path& folder);

}  // namespace halfstep::bench
