// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/dataset.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"

namespace halfstep::data {
namespace {

/// Rows of a contiguous tensor, put together in a new one.
Tensor gather_rows(const Tensor& source, std::span<const std::int64_t> indices) {
  Shape sizes = source.sizes();
  sizes[0] = static_cast<std::int64_t>(indices.size());
  Tensor rows = empty(sizes, {.dtype = source.dtype(), .device = Device{}});
  if (rows.numel() == 0) return rows;
  const std::size_t bytes = static_cast<std::size_t>(source.numel() / source.size(0)) * source.item_size();
  const auto* from = static_cast<const std::byte*>(source.const_raw_data());
  auto* to = static_cast<std::byte*>(write_raw_data(rows));
  for (const std::int64_t index : indices) {
    std::memcpy(to, from + static_cast<std::size_t>(index) * bytes, bytes);
    to += bytes;
  }
  return rows;
}

void check_indices(std::span<const std::int64_t> indices, std::int64_t size) {
  for (const std::int64_t index : indices) {
    if (index < 0 || index >= size) {
      fail<ShapeError>("batch: expected positions from 0 to {}, got {}", size - 1, index);
    }
  }
}

/// out = pixels * (high + low) + bias. Blocks of a fixed size are what the compiler turns into vector instructions.
void convert(const std::uint8_t* __restrict pixels, std::int64_t n, float high, float low, float bias,
             float* __restrict out) {
  constexpr std::int64_t kBlock = 16;
  const auto value = [=](std::uint8_t pixel) {
    const float p = static_cast<float>(static_cast<std::int32_t>(pixel));
    return (p * high + bias) + p * low;
  };
  std::int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    for (std::int64_t j = 0; j < kBlock; ++j) out[i + j] = value(pixels[i + j]);
  }
  for (; i < n; ++i) out[i] = value(pixels[i]);
}

void prefetch(std::span<const std::uint8_t> bytes) {
  constexpr std::size_t kCacheLine = 64;
  for (std::size_t i = 0; i < bytes.size(); i += kCacheLine) __builtin_prefetch(bytes.data() + i);
}

}  // namespace

SubsetDataset::SubsetDataset(std::shared_ptr<const Dataset> dataset, std::vector<std::int64_t> indices)
    : dataset_(std::move(dataset)), indices_(std::move(indices)) {
  if (!dataset_) fail<Error>("SubsetDataset: expected a data set, got none");
  const std::int64_t size = dataset_->size();
  for (const std::int64_t index : indices_) {
    if (index < 0 || index >= size)
      fail<ShapeError>("SubsetDataset: expected indices from 0 to {}, got {}", size - 1, index);
  }
}

Batch SubsetDataset::batch(const BatchRequest& request) const {
  check_indices(request.indices, size());
  std::vector<std::int64_t> indices;
  indices.reserve(request.indices.size());
  for (const std::int64_t i : request.indices) indices.push_back(indices_[static_cast<std::size_t>(i)]);
  BatchRequest own = request;
  own.indices = indices;
  return dataset_->batch(own);
}

TensorDataset::TensorDataset(const Tensor& inputs, const Tensor& targets) {
  if (inputs.dim() == 0 || targets.dim() == 0 || inputs.size(0) != targets.size(0)) {
    fail<ShapeError>("TensorDataset: expected inputs [N, ...] and targets [N, ...], got {} and {}",
                     inputs.sizes().str(), targets.sizes().str());
  }
  for (const Tensor* tensor : {&inputs, &targets}) {
    if (!tensor->device().is_cpu()) {
      fail<DeviceError>("TensorDataset: expected tensors on the CPU, got {}; the batches are moved, not the data set",
                        tensor->device().str());
    }
  }
  inputs_ = inputs.detach().contiguous();
  targets_ = targets.detach().contiguous();
}

Batch TensorDataset::batch(const BatchRequest& request) const {
  check_indices(request.indices, size());
  return {gather_rows(inputs_, request.indices), gather_rows(targets_, request.indices)};
}

MnistDataset::MnistDataset(MnistData data, const ImageOptions& options) : options_(options) {
  // Products of negative sizes, or of some that are too large, can look right.
  std::int64_t product;
  if (data.count < 0 || data.rows < 0 || data.columns < 0 || __builtin_mul_overflow(data.count, data.rows, &product) ||
      __builtin_mul_overflow(product, data.columns, &product)) {
    fail<Error>("MnistDataset: expected a count and sizes of at least 0, got {} images of {}x{}", data.count, data.rows,
                data.columns);
  }
  const auto pixels = static_cast<std::size_t>(product);
  if (data.images.size() != pixels || data.labels.size() != static_cast<std::size_t>(data.count)) {
    fail<Error>("MnistDataset: expected {} pixels and {} labels for {} images of {}x{}, got {} and {}", pixels,
                data.count, data.count, data.rows, data.columns, data.images.size(), data.labels.size());
  }
  if (!(options.std > 0) || !std::isfinite(options.std) || !std::isfinite(options.mean)) {
    fail<Error>("MnistDataset: expected a finite mean and a positive std, got {} and {}", options.mean, options.std);
  }
  // 1 / (255 std) in two parts. The first has 16 significant bits, so that its product with a pixel (8 bits) is exact:
  // without a bias the sum is rounded once, and p / 255 comes out as a division would give it.
  const double scale = 1 / (255 * options.std);
  scale_high_ = std::bit_cast<float>(std::bit_cast<std::uint32_t>(static_cast<float>(scale)) & 0xFFFFFF00U);
  scale_low_ = static_cast<float>(scale - static_cast<double>(scale_high_));
  bias_ = static_cast<float>(-options.mean / options.std);
  data_ = std::make_shared<const MnistData>(std::move(data));
}

Batch MnistDataset::batch(const BatchRequest& request) const {
  check_indices(request.indices, size());
  const auto n = static_cast<std::int64_t>(request.indices.size());
  const std::int64_t pixels = data_->rows * data_->columns;
  Batch batch{
      empty(options_.flatten ? Shape{n, pixels} : Shape{n, 1, data_->rows, data_->columns}, {.device = Device{}}),
      empty({n}, {.dtype = i64, .device = Device{}})};
  float* image = write_data<float>(batch.input);
  std::int64_t* label = write_data<std::int64_t>(batch.target);
  for (std::size_t i = 0; i < request.indices.size(); ++i) {
    // Shuffled images lie anywhere in memory: the next ones are asked for while this one is converted.
    constexpr std::size_t kAhead = 4;
    if (i + kAhead < request.indices.size()) prefetch(data_->image(request.indices[i + kAhead]));
    const std::int64_t index = request.indices[i];
    convert(data_->images.data() + index * pixels, pixels, scale_high_, scale_low_, bias_, image);
    image += pixels;
    *label++ = data_->labels[static_cast<std::size_t>(index)];
  }
  return batch;
}

}  // namespace halfstep::data
