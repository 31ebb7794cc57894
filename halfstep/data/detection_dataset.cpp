// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/detection_dataset.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>
#include <set>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/data/detection_augment_internal.h"
#include "halfstep/data/detection_description_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::data {
namespace {

/// Memory that is reused from sample to sample.
struct SampleScratch {
  PictureScratch picture;
  PicturePart part;
  std::array<CompositionRenderer, 2> renderers;
  std::vector<std::uint32_t> row, other_row;
  std::vector<std::uint8_t> bytes;
};

std::int64_t rows_for(std::size_t objects) {
  constexpr std::size_t kLeastRows = 8;
  return static_cast<std::int64_t>(std::bit_ceil(std::max(objects, kLeastRows)));
}

}  // namespace

struct DetectionDataset::Impl {
  std::shared_ptr<const DetectionData> data;
  DetectionTransform transform;
  DetectionDatasetOptions options;
  RectangularBatches rectangular;
  std::unique_ptr<const DetectionPictures> pictures;

  mutable std::mutex mutex;
  mutable std::set<std::int64_t> bad;

  /// Throws when this one is one too many.
  void report(std::int64_t index, const char* what) const {
    std::int64_t count = 0;
    {
      const std::scoped_lock lock(mutex);
      if (!bad.insert(index).second) return;
      count = std::ssize(bad);
    }
    if (count > options.max_damaged) {
      fail<IoError>("DetectionDataset: expected at most {} damaged pictures, got {}; the last is {} ({})",
                    options.max_damaged, count, shown_path(data->pictures[static_cast<std::size_t>(index)].file), what);
    }
    log(LogLevel::warning, fmt::format("damaged picture {} of at most {}, a plain one in its place: {}", count,
                                       options.max_damaged, what));
  }

  /// Height and width of a batch.
  std::array<std::int64_t, 2> input_size(const BatchRequest& request) const {
    if (transform.train && transform.multi_scale) {
      const std::int64_t size = multi_scale_size(transform, request.seed, request.epoch, request.number);
      return {size, size};
    }
    if (rectangular.shapes.empty() || request.indices.empty()) return {transform.size, transform.size};
    std::array<std::int64_t, 2> size{};
    for (const std::int64_t index : request.indices) {
      const auto& shape = rectangular.shapes[static_cast<std::size_t>(index / options.batch_size)];
      size = {std::max(size[0], shape[0]), std::max(size[1], shape[1])};
    }
    return size;
  }

  /// The letterboxed picture into `out`, its objects into `objects`, its numbers into `more`.
  void evaluate(std::int64_t index, std::int64_t height, std::int64_t width, SampleScratch& scratch, std::byte* out,
                std::vector<LabeledObject>& objects, double* more) const {
    const LabeledPicture& picture = data->pictures[static_cast<std::size_t>(index)];
    const std::int64_t w = pictures->width(index), h = pictures->height(index);
    const std::int64_t left = (width - w) / 2, top = (height - h) / 2;
    const std::size_t pixel = 3 * item_size(options.dtype);
    PicturePart& part = scratch.part;
    bool readable = true;
    try {
      pictures->load(index, {.left = 0, .top = 0, .width = w, .height = h}, scratch.picture, part);
    } catch (const IoError& error) {
      report(index, error.what());
      readable = false;
    }
    const std::vector<std::uint8_t> plain(static_cast<std::size_t>(3 * width),
                                          static_cast<std::uint8_t>(transform.fill));
    for (std::int64_t y = 0; y < height; ++y, out += static_cast<std::size_t>(width) * pixel) {
      if (!readable || y < top || y >= top + h) {
        bytes_to_units(plain.data(), 3 * width, options.dtype, out);
        continue;
      }
      bytes_to_units(plain.data(), 3 * left, options.dtype, out);
      bytes_to_units(part.view.row(y - top - part.top) - 3 * part.left, 3 * w, options.dtype,
                     out + static_cast<std::size_t>(left) * pixel);
      bytes_to_units(plain.data(), 3 * (width - left - w), options.dtype,
                     out + static_cast<std::size_t>(left + w) * pixel);
    }
    more[1] = std::min(static_cast<double>(transform.size) /
                           static_cast<double>(std::max({picture.width, picture.height, std::int64_t{1}})),
                       transform.upscale ? INFINITY : 1.0);
    more[2] = static_cast<double>(left);
    more[3] = static_cast<double>(top);
    if (!readable) {
      more[1] = 0;  // which no picture has that is there
      return;
    }
    const auto in_width = static_cast<double>(width), in_height = static_cast<double>(height);
    for (const LabeledObject& o : picture.objects) {
      if (o.crowd) continue;
      LabeledObject& placed = objects.emplace_back();
      placed.label = o.label;
      placed.x = (o.x * static_cast<double>(w) + static_cast<double>(left)) / in_width;
      placed.y = (o.y * static_cast<double>(h) + static_cast<double>(top)) / in_height;
      placed.width = o.width * static_cast<double>(w) / in_width;
      placed.height = o.height * static_cast<double>(h) / in_height;
    }
  }

  /// A random sample of `input` x `input` into `out`, its objects into `objects`.
  void augment(const SampleKey& key, std::int64_t input, SampleScratch& scratch, std::byte* out,
               std::vector<LabeledObject>& objects) const {
    const SamplePlan plan = plan_sample(transform, key, *data, *pictures, input);
    const auto bad_picture = [this](std::int64_t index, const char* what) { report(index, what); };
    for (std::size_t i = 0; i < plan.parts.size(); ++i) {
      CompositionRenderer& renderer = scratch.renderers[i];
      renderer.start(plan.parts[i], *pictures, input, transform.fill, scratch.picture, bad_picture);
      place_objects(plan.parts[i], *data, *pictures, renderer.bad(), input, objects);
    }
    scratch.row.resize(static_cast<std::size_t>(input));
    scratch.other_row.resize(static_cast<std::size_t>(input));
    scratch.bytes.resize(static_cast<std::size_t>(3 * input) + kPixelOverread);
    const auto share = static_cast<std::uint32_t>(std::lrint(65536 * plan.share));
    const std::size_t row_bytes = static_cast<std::size_t>(3 * input) * item_size(options.dtype);
    for (std::int64_t y = 0; y < input; ++y, out += row_bytes) {
      scratch.renderers[0].row(y, scratch.row.data());
      if (plan.parts.size() > 1) {
        scratch.renderers[1].row(y, scratch.other_row.data());
        mix_pixels(scratch.row.data(), scratch.other_row.data(), input, share);
      }
      if (plan.colours) change_hsv(scratch.row.data(), input, plan.hsv);
      pack_pixels(scratch.row.data(), input, scratch.bytes.data());
      bytes_to_units(scratch.bytes.data(), 3 * input, options.dtype, out);
    }
  }
};

DetectionDataset::DetectionDataset(DetectionData data, const DetectionTransform& transform,
                                   const DetectionDatasetOptions& options) {
  auto impl = std::make_shared<Impl>();
  check_options(transform);
  if (options.dtype != f32 && options.dtype != f16 && options.dtype != bf16) {
    fail<DTypeError>("DetectionDataset: expected f32, f16 or bf16, got {}", halfstep::name(options.dtype));
  }
  if (options.batch_size < 1) {
    fail<Error>("DetectionDataset: batch_size: expected at least 1, got {}", options.batch_size);
  }
  if (options.max_damaged < 0) {
    fail<Error>("DetectionDataset: max_damaged: expected at least 0, got {}", options.max_damaged);
  }
  if (data.pictures.empty()) fail<Error>("DetectionDataset: expected pictures, got none");
  for (const LabeledPicture& picture : data.pictures) {
    for (const LabeledObject& o : picture.objects) {
      if (o.label < 0 || o.label >= std::ssize(data.classes)) {
        fail<Error>("DetectionDataset: {}: expected classes from 0 to {}, got {}", shown_path(picture.file),
                    std::ssize(data.classes) - 1, o.label);
      }
    }
  }
  for_each_file(data.pictures.size(), [&](std::size_t i) {
    LabeledPicture& picture = data.pictures[i];
    // One that can't be read keeps no sizes, and is noticed when it is used.
    if (picture.width > 0 && picture.height > 0) return;
    if (!picture_sizes(picture.file, options.limits, picture.width, picture.height).empty()) {
      picture.width = picture.height = 0;
    }
  });
  impl->data = std::make_shared<const DetectionData>(std::move(data));
  impl->transform = transform;
  impl->options = options;
  if (!transform.train && transform.rectangular) {
    std::vector<std::array<std::int64_t, 2>> sizes;
    for (const LabeledPicture& picture : impl->data->pictures) sizes.push_back({picture.height, picture.width});
    impl->rectangular = rectangular_batches(sizes, options.batch_size, transform);
  }
  impl->pictures = std::make_unique<const DetectionPictures>(impl->data, transform.size,
                                                             transform.train || transform.upscale, options);
  impl_ = std::move(impl);
}

std::int64_t DetectionDataset::size() const { return std::ssize(impl_->data->pictures); }
const DetectionData& DetectionDataset::data() const { return *impl_->data; }
const DetectionTransform& DetectionDataset::transform() const { return impl_->transform; }
const DetectionDatasetOptions& DetectionDataset::options() const { return impl_->options; }

std::int64_t DetectionDataset::picture(std::int64_t index) const {
  if (index < 0 || index >= size())
    fail<ShapeError>("batch: expected positions from 0 to {}, got {}", size() - 1, index);
  return impl_->rectangular.order.empty() ? index : impl_->rectangular.order[static_cast<std::size_t>(index)];
}

Batch DetectionDataset::batch(const BatchRequest& request) const {
  const Impl& impl = *impl_;
  const auto n = std::ssize(request.indices);
  std::vector<std::int64_t> chosen;
  for (const std::int64_t index : request.indices) chosen.push_back(picture(index));
  const auto [height, width] = impl.input_size(request);
  const Shape sizes{n, 3, height, width};
  Batch batch;
  batch.input = empty_strided(sizes, channels_last_strides(sizes), {.dtype = impl.options.dtype, .device = Device{}});
  batch.more.push_back(empty({n, 6}, {.dtype = f64, .device = Device{}}));
  std::vector<std::vector<LabeledObject>> objects(static_cast<std::size_t>(n));
  std::size_t most = 0;
  if (n > 0) {
    auto* out = static_cast<std::byte*>(write_raw_data(batch.input));
    double* more = write_data<double>(batch.more[0]);
    SampleScratch scratch;
    for (std::size_t i = 0; i < chosen.size(); ++i, more += 6) {
      const LabeledPicture& picture = impl.data->pictures[static_cast<std::size_t>(chosen[i])];
      std::fill(more, more + 6, 0.0);
      more[0] = static_cast<double>(chosen[i]);
      more[4] = static_cast<double>(picture.width);
      more[5] = static_cast<double>(picture.height);
      if (impl.transform.train) {
        const SampleKey key{.seed = request.seed, .epoch = request.epoch, .sample = chosen[i]};
        impl.augment(key, height, scratch, out, objects[i]);
      } else {
        impl.evaluate(chosen[i], height, width, scratch, out, objects[i], more);
      }
      out += static_cast<std::size_t>(3 * height * width) * item_size(impl.options.dtype);
      most = std::max(most, objects[i].size());
    }
  }
  const std::int64_t rows = rows_for(most);
  batch.target = empty({n, rows, 5}, {.dtype = f32, .device = Device{}});
  float* row = n > 0 ? write_data<float>(batch.target) : nullptr;
  for (const std::vector<LabeledObject>& own : objects) {
    for (std::int64_t i = 0; i < rows; ++i, row += 5) {
      const bool there = i < std::ssize(own);
      const LabeledObject o = there ? own[static_cast<std::size_t>(i)] : LabeledObject{.label = -1};
      row[0] = static_cast<float>(o.label);
      row[1] = static_cast<float>(o.x);
      row[2] = static_cast<float>(o.y);
      row[3] = static_cast<float>(o.width);
      row[4] = static_cast<float>(o.height);
    }
  }
  return batch;
}

std::vector<std::string> DetectionDataset::bad_pictures() const {
  std::vector<std::string> names;
  {
    const std::scoped_lock lock(impl_->mutex);
    for (const std::int64_t index : impl_->bad) {
      names.push_back(shown_path(impl_->data->pictures[static_cast<std::size_t>(index)].file));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace halfstep::data
