// SPDX-License-Identifier: Apache-2.0
// Data pipelines in MindSpore's style: a source, map, shuffle, batch, repeat.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>

#include "halfstep/core/device.h"
#include "halfstep/core/export.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/loader.h"
#include "halfstep/data/pipeline_ops.h"

namespace halfstep::data {

/// The two columns of a sample, each by two names.
enum class Column { input = 0, target = 1, image = 0, label = 1 };

/// Options of Pipeline::shuffle.
struct ShuffleOptions {
  /// Seed of the order, and of the random numbers of functions passed to map.
  std::uint64_t seed = 0;
};

/// Options of Pipeline::batch.
struct BatchOptions {
  bool drop_last = false;  ///< drops a last batch that is smaller than the others
  int workers = 1;         ///< threads that prefetch batches; 0: the loop creates them itself
  int prefetch = 4;        ///< batches that each of them prefetches
  Device device = {};      ///< the device of the batches
};

/// The result of Pipeline::batch: a DataLoader, for a range-for and wherever a DataLoader is accepted.
class HS_API PipelineLoader : public DataLoader {
 public:
  /// Throws Error for anything that DataLoader rejects.
  explicit PipelineLoader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options = {});

  /// An epoch is `count` passes over the data, each shuffled separately: it has the batches of that many epochs without
  /// repeat. `repeat(2).repeat(3)` gives six passes. The result starts at epoch 0. Throws Error for a count below 1: an
  /// epoch is finite; for endless iteration, loop over epochs.
  PipelineLoader repeat(std::int64_t count) const;

 private:
  std::shared_ptr<const Dataset> shared_;
};

/// Transformations of a data set's samples, step by step:
///
///     auto train = data::Pipeline{data::MnistDataset{data::load_mnist(folder, data::Split::kTrain)}}
///                      .map({data::Rescale{1.0 / 255}, data::Normalize{{0.1307}, {0.3081}}, data::HWC2CHW{}},
///                           data::Column::image)
///                      .map(data::TypeCast{i64}, data::Column::label)
///                      .shuffle()
///                      .batch(64, {.workers = 2})
///                      .repeat(1);
///     for (auto [images, labels] : train) { ... }
///
/// Each call returns a new pipeline and leaves this one unchanged; copies share the data. map() tries its transforms on
/// the first sample, so that one that doesn't fit is rejected there, not later by a worker. All run in the loader's
/// threads. shuffle() may come before or after map(), with the same result: samples are transformed one by one.
class HS_API Pipeline {
 public:
  /// Starts with the samples as the data set returns them. Throws Error without a data set, or without a sample in it.
  explicit Pipeline(std::shared_ptr<const Dataset> source);
  /// Takes a data set by value.
  template <std::derived_from<Dataset> D>
  explicit Pipeline(D source)
      : Pipeline(std::shared_ptr<const Dataset>(std::make_shared<const D>(std::move(source)))) {}
  /// Starts with raw pixels, u8 [rows, columns, 1], and labels i64 [], like MindSpore's MnistDataset.
  explicit Pipeline(MnistData pictures);
  /// The same. Throws Error if the data set has options: scaling and layout belong in map() here.
  explicit Pipeline(const MnistDataset& pictures);

  /// Applies the transforms to one column, one after the other. Throws ShapeError or DTypeError, naming the transform
  /// and its input, if one of them can't be applied; Error if the data set has no such column; and whatever a function
  /// throws for the first sample.
  Pipeline map(std::initializer_list<ColumnTransform> transforms, Column column = Column::input) const;
  Pipeline map(const ColumnTransform& transform, Column column = Column::input) const {
    return map({transform}, column);
  }

  /// Every epoch, and every pass of repeat(), takes all samples in a new order. There is no buffer size to choose.
  Pipeline shuffle(const ShuffleOptions& options = {}) const;

  /// Batches of `size` samples. Throws Error for anything that DataLoader rejects.
  PipelineLoader batch(std::int64_t size, const BatchOptions& options = {}) const;

  /// Number of samples.
  std::int64_t size() const { return source_->size(); }
  /// The type of a sample's column after the steps so far; none if the data set has no such column.
  const std::optional<ColumnType>& type(Column column) const { return types_[static_cast<std::size_t>(column)]; }
  /// The samples after the steps so far, as a data set.
  std::shared_ptr<const Dataset> dataset() const;

 private:
  struct Steps;
  void probe();

  std::shared_ptr<const Dataset> source_;
  std::shared_ptr<const Steps> steps_;
  std::optional<ColumnType> types_[2];
  bool shuffle_ = false;
  ShuffleOptions shuffle_options_;
};

}  // namespace halfstep::data
