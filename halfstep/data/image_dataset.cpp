// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_dataset.h"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <set>

#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::data {

struct ImageDataset::Bad {
  std::mutex mutex;
  std::set<std::int64_t> indices;

  /// Throws when this one is one too many.
  void report(const ImageSource& source, std::int64_t index, const std::string& what, std::int64_t most) {
    std::int64_t count = 0;
    {
      const std::scoped_lock lock(mutex);
      if (!indices.insert(index).second) return;
      count = static_cast<std::int64_t>(indices.size());
    }
    if (count > most) {
      fail<IoError>("ImageDataset: expected at most {} damaged pictures, got {}; the last is {} ({})", most, count,
                    source.name(index), what);
    }
    log(LogLevel::warning,
        fmt::format("damaged picture {} of at most {}, replaced by the next one: {}", count, most, what));
  }
};

ImageDataset::ImageDataset(std::shared_ptr<const ImageSource> source, const ImageTransform& transform,
                           const ImageDatasetOptions& options)
    : source_(std::move(source)),
      pipeline_(std::make_shared<const ImagePipeline>(transform, options.dtype)),
      options_(options),
      bad_(std::make_shared<Bad>()) {
  if (source_ == nullptr) fail<Error>("ImageDataset: expected a source of pictures, got none");
  if (options.max_damaged < 0) {
    fail<Error>("ImageDataset: expected a limit of damaged pictures of at least 0, got {}", options.max_damaged);
  }
}

Batch ImageDataset::batch(const BatchRequest& request) const {
  const auto n = static_cast<std::int64_t>(request.indices.size());
  const std::int64_t total = size();
  Batch batch{empty_image_batch(n, pipeline_->size(), options_.dtype), empty({n}, {.dtype = i64, .device = Device{}})};
  auto* out = static_cast<std::byte*>(write_raw_data(batch.input));
  std::int64_t* label = write_data<std::int64_t>(batch.target);
  const std::size_t picture_bytes =
      static_cast<std::size_t>(3 * pipeline_->size() * pipeline_->size()) * item_size(options_.dtype);
  TransformScratch scratch;
  std::vector<std::uint8_t> buffer;
  for (const std::int64_t index : request.indices) {
    if (index < 0 || index >= total)
      fail<ShapeError>("batch: expected positions from 0 to {}, got {}", total - 1, index);
    const SampleKey key{.seed = request.seed, .epoch = request.epoch, .sample = index};
    for (std::int64_t away = 0;; ++away) {
      if (away == total)
        fail<IoError>("ImageDataset: expected pictures, got {} files of which none can be read", total);
      const std::int64_t chosen = (index + away) % total;
      try {
        const std::span<const std::uint8_t> bytes = source_->read(chosen, buffer);
        ImageDecoder picture(bytes, source_->name(chosen), options_.limits);
        pipeline_->run(picture, key, scratch, out);
        *label = source_->label(chosen);
        break;
      } catch (const IoError& error) {
        bad_->report(*source_, chosen, error.what(), options_.max_damaged);
      }
    }
    out += picture_bytes;
    ++label;
  }
  return batch;
}

std::vector<std::string> ImageDataset::bad_images() const {
  std::vector<std::string> names;
  {
    const std::scoped_lock lock(bad_->mutex);
    for (const std::int64_t index : bad_->indices) names.push_back(source_->name(index));
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace halfstep::data
