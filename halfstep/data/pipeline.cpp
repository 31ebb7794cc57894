// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/pipeline.h"

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"

namespace halfstep::data {
namespace {

struct Step {
  Column column;
  ColumnTransform transform;
};

/// The samples of a data set after the steps of a pipeline.
class Mapped final : public Dataset {
 public:
  Mapped(std::shared_ptr<const Dataset> source, std::vector<Step> steps)
      : source_(std::move(source)), steps_(std::move(steps)) {}
  std::int64_t size() const override { return source_->size(); }
  Batch batch(const BatchRequest& request) const override {
    Batch batch = source_->batch(request);
    for (const Step& step : steps_) {
      Tensor& column = step.column == Column::input ? batch.input : batch.target;
      column = step.transform.apply(column, request);
    }
    return batch;
  }

 private:
  std::shared_ptr<const Dataset> source_;
  std::vector<Step> steps_;
};

/// Pictures as MindSpore's MnistDataset gives them: u8 [rows, columns, 1], labels as i64.
class RawPictures final : public Dataset {
 public:
  explicit RawPictures(std::shared_ptr<const MnistData> data) : data_(std::move(data)) {}
  std::int64_t size() const override { return data_->count; }
  Batch batch(const BatchRequest& request) const override {
    const auto n = static_cast<std::int64_t>(request.indices.size());
    Batch batch{empty({n, data_->rows, data_->columns, 1}, {.dtype = u8, .device = Device{}}),
                empty({n}, {.dtype = i64, .device = Device{}})};
    auto* pixels = write_data<std::uint8_t>(batch.input);
    auto* label = write_data<std::int64_t>(batch.target);
    for (const std::int64_t index : request.indices) {
      if (index < 0 || index >= data_->count) {
        fail<ShapeError>("batch: expected positions from 0 to {}, got {}", data_->count - 1, index);
      }
      const auto picture = data_->image(index);
      std::memcpy(pixels, picture.data(), picture.size());
      pixels += picture.size();
      *label++ = data_->labels[static_cast<std::size_t>(index)];
    }
    return batch;
  }

 private:
  std::shared_ptr<const MnistData> data_;
};

std::shared_ptr<const Dataset> raw_pictures(const MnistDataset& pictures) {
  const ImageOptions& o = pictures.options();
  if (o.flatten || o.mean != 0 || o.std != 1) {
    fail<Error>(
        "Pipeline: expected an MnistDataset without options, got flatten {}, mean {}, std {}; a pipeline begins "
        "with the pixels, and scales them in map()",
        o.flatten, o.mean, o.std);
  }
  return std::make_shared<const RawPictures>(pictures.shared_data());
}

}  // namespace

PipelineLoader::PipelineLoader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options)
    : DataLoader(dataset, options), shared_(std::move(dataset)) {}

PipelineLoader PipelineLoader::repeat(std::int64_t count) const {
  if (count < 1) {
    fail<Error>("PipelineLoader::repeat: expected at least 1 pass, got {}{}", count,
                count == -1 ? "; an epoch ends, write a loop around it for more" : "");
  }
  LoaderOptions more = options();
  if (count > std::numeric_limits<std::int32_t>::max() / more.repeat) {
    fail<Error>("PipelineLoader::repeat: expected at most {} passes in all, got {} times {}",
                std::numeric_limits<std::int32_t>::max(), more.repeat, count);
  }
  more.repeat *= count;
  return PipelineLoader(shared_, more);
}

struct Pipeline::Steps {
  std::vector<Step> list;
};

Pipeline::Pipeline(std::shared_ptr<const Dataset> source)
    : source_(std::move(source)), steps_(std::make_shared<const Steps>()) {
  if (source_ == nullptr) fail<Error>("Pipeline: expected a data set, got none");
  if (source_->size() < 1) fail<Error>("Pipeline: expected at least one sample, got a data set of {}", source_->size());
  probe();
}

Pipeline::Pipeline(const MnistDataset& pictures) : Pipeline(raw_pictures(pictures)) {}
Pipeline::Pipeline(MnistData pictures) : Pipeline(MnistDataset{std::move(pictures)}) {}

std::shared_ptr<const Dataset> Pipeline::dataset() const {
  if (steps_->list.empty()) return source_;
  return std::make_shared<const Mapped>(source_, steps_->list);
}

// What the columns are now, by making the first sample.
void Pipeline::probe() {
  const std::int64_t first[] = {0};
  const Batch batch = dataset()->batch({.indices = first, .seed = shuffle_options_.seed});
  const Tensor* columns[] = {&batch.input, &batch.target};
  for (std::size_t i = 0; i < 2; ++i) {
    types_[i].reset();
    if (!columns[i]->defined() || columns[i]->dim() == 0) continue;
    Shape sizes = columns[i]->sizes();
    sizes.erase(0);
    types_[i] = ColumnType{.sizes = sizes, .dtype = columns[i]->dtype()};
  }
}

Pipeline Pipeline::map(std::initializer_list<ColumnTransform> transforms, Column column) const {
  if (column != Column::input && column != Column::target) {
    fail<Error>("Pipeline::map: expected the column input (image) or target (label), got number {}",
                static_cast<int>(column));
  }
  if (!type(column)) {
    fail<Error>("Pipeline::map: expected a column {}, and the data set gives none",
                column == Column::input ? "input (image)" : "target (label)");
  }
  std::vector<Step> list = steps_->list;
  for (const ColumnTransform& transform : transforms) list.push_back({column, transform});
  Pipeline longer = *this;
  longer.steps_ = std::make_shared<const Steps>(Steps{std::move(list)});
  longer.probe();
  return longer;
}

Pipeline Pipeline::shuffle(const ShuffleOptions& options) const {
  Pipeline shuffled = *this;
  shuffled.shuffle_ = true;
  shuffled.shuffle_options_ = options;
  return shuffled;
}

PipelineLoader Pipeline::batch(std::int64_t size, const BatchOptions& o) const {
  return PipelineLoader(dataset(), {.batch_size = size,
                                    .shuffle = shuffle_,
                                    .drop_last = o.drop_last,
                                    .workers = o.workers,
                                    .prefetch = o.prefetch,
                                    .seed = shuffle_options_.seed,
                                    .device = o.device});
}

}  // namespace halfstep::data
