// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/core/tensor.h"
#include "halfstep/data/mnist.h"

namespace halfstep::data {

/// What one step trains on: `auto [images, labels] = batch;`.
struct Batch {
  Tensor input;                   ///< the samples along dimension 0
  Tensor target;                  ///< what belongs to them, along dimension 0
  std::vector<Tensor> more = {};  ///< what else the task needs, such as masks, lengths or indices
  /// Of a loader that returns a part of each batch (LoaderOptions::ranks): the samples of all parts; 0 otherwise.
  std::int64_t all_samples = 0;
  /// This part has no samples; one of another part stands in its place, to count nothing.
  bool stand_in = false;
  /// Samples of each shard that this part consists of (LoaderOptions::shards); may be 0.
  std::vector<std::int64_t> shards = {};

  /// For structured bindings, which see input and target.
  template <std::size_t I>
  Tensor& get() & {
    return I == 0 ? input : target;
  }
  template <std::size_t I>
  const Tensor& get() const& {
    return I == 0 ? input : target;
  }
  template <std::size_t I>
  Tensor&& get() && {
    return std::move(I == 0 ? input : target);
  }
};
/// Calls `visit` for each tensor of a batch: input, target, more.
template <class V>
void visit_tensors(Batch& batch, V&& visit) {
  visit(batch.input);
  visit(batch.target);
  for (Tensor& t : batch.more) visit(t);
}

/// Which samples a batch is made of.
struct BatchRequest {
  /// Positions in [0, size()).
  std::span<const std::int64_t> indices;
  /// For data sets with random transformations: keyed by these two and the sample's index, the transformation is the
  /// same whichever thread produces the batch.
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  /// Of the batch in its pass over the data, from 0; the same for all parts of a batch. For what is drawn once a batch.
  std::int64_t number = 0;
};

/// Samples read by index, a whole batch at a time, so that a batch is written only once, directly to its destination.
class HS_API Dataset {
 public:
  virtual ~Dataset() = default;

  /// Number of samples, at least 0: code that reads a data set throws Error if it is negative.
  virtual std::int64_t size() const = 0;

  /// Creates a batch in fresh memory. Called by several threads at once; an exception reaches the loop over the loader.
  virtual Batch batch(const BatchRequest& request) const = 0;
};

/// Tensors whose dimension 0 counts samples; a batch gathers their rows and keeps their dtypes.
class HS_API TensorDataset final : public Dataset {
 public:
  /// `inputs` [N, ...] and `targets` [N, ...] of any dtype, on the CPU. They are kept without a copy when contiguous.
  /// Throws ShapeError if they have no dimensions or different N, DeviceError when they are not on the CPU.
  TensorDataset(const Tensor& inputs, const Tensor& targets);

  std::int64_t size() const override { return inputs_.size(0); }
  Batch batch(const BatchRequest& request) const override;

 private:
  Tensor inputs_;
  Tensor targets_;
};

/// Some samples of another data set, in the order given: PyTorch's Subset. A data set with random transformations keys
/// them by the other one's indices.
class HS_API SubsetDataset final : public Dataset {
 public:
  /// Throws ShapeError for an index that is not in [0, dataset->size()), Error for no data set.
  SubsetDataset(std::shared_ptr<const Dataset> dataset, std::vector<std::int64_t> indices);

  std::int64_t size() const override { return static_cast<std::int64_t>(indices_.size()); }
  Batch batch(const BatchRequest& request) const override;

 private:
  std::shared_ptr<const Dataset> dataset_;
  std::vector<std::int64_t> indices_;
};

/// How MnistDataset converts pixels and images.
struct ImageOptions {
  /// [N, rows * columns] instead of [N, 1, rows, columns].
  bool flatten = false;
  /// A pixel p from 0 to 255 becomes (p / 255 - mean) / std. For MNIST 0.1307 and 0.3081 are customary.
  double mean = 0;
  double std = 1;
};

/// MNIST, data sets in its format, or the built-in digits: `MnistDataset{load_mnist(folder, Split::kTrain)}`,
/// `MnistDataset{make_digits(Split::kTrain)}`.
///
/// A batch has the images as float32 and the labels as int64 [N]. p / 255 is exact to float32's last place; with mean
/// and std the value is within one unit of the last place of the largest term.
class HS_API MnistDataset final : public Dataset {
 public:
  /// Throws Error when `data` is not consistent or std is not positive.
  explicit MnistDataset(MnistData data, const ImageOptions& options = {});

  std::int64_t size() const override { return data_->count; }
  Batch batch(const BatchRequest& request) const override;

  const MnistData& data() const { return *data_; }
  /// The same, to keep.
  const std::shared_ptr<const MnistData>& shared_data() const { return data_; }
  const ImageOptions& options() const { return options_; }

 private:
  std::shared_ptr<const MnistData> data_;  // copies of the data set share the pixels
  ImageOptions options_;
  float scale_high_;
  float scale_low_;
  float bias_;
};

}  // namespace halfstep::data

template <>
struct std::tuple_size<halfstep::data::Batch> : std::integral_constant<std::size_t, 2> {};
template <std::size_t I>
struct std::tuple_element<I, halfstep::data::Batch> {
  /// Input and target.
  using type = halfstep::Tensor;
};
