// SPDX-License-Identifier: Apache-2.0
// Mixing pairs of samples: Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", 2017.
#pragma once

#include <cstdint>
#include <memory>

#include "halfstep/core/export.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/data/dataset.h"

namespace halfstep::data {

/// Options of mixup.
struct MixupOptions {
  double alpha = 0.2;        ///< lambda is drawn from Beta(alpha, alpha); above 0
  std::int64_t classes = 0;  ///< number of classes, for soft targets
};

/// A batch mixed with itself in another order.
struct Mixed {
  Tensor input;       ///< lambda * input + (1 - lambda) * partner; dtype and layout of the input
  Tensor target_a;    ///< the samples' own labels [N]
  Tensor target_b;    ///< their partners' labels [N]
  double lambda = 1;  ///< the same for the whole batch
};

/// Mixes `batch` (floating input [N, ...], labels [N]) on the CPU. Computed in float32, rounded once. Throws Error,
/// ShapeError, DTypeError.
HS_API Mixed mixup(const Batch& batch, const MixupOptions& options, RandomStream& random);

/// [N, classes] of float32: lambda in the column of target_a plus 1 - lambda in that of target_b, which cross_entropy
/// takes as probabilities (together with `label_smoothing`). Throws Error for a label that is not a class.
HS_API Tensor soft_targets(const Tensor& target_a, const Tensor& target_b, double lambda, std::int64_t classes);

/// A number from Beta(a, a), by two of Marsaglia and Tsang's gamma numbers.
HS_API double beta(double a, RandomStream& random);

/// A data set whose batches are mixed, with soft targets [N, classes]. Lambda and the order are keyed by the request's
/// seed and epoch and the batch's first index, so they don't depend on the number of workers.
class HS_API MixupDataset final : public Dataset {
 public:
  /// Throws Error for invalid options.
  MixupDataset(std::shared_ptr<const Dataset> dataset, const MixupOptions& options);

  std::int64_t size() const override { return dataset_->size(); }
  Batch batch(const BatchRequest& request) const override;

 private:
  std::shared_ptr<const Dataset> dataset_;
  MixupOptions options_;
};

}  // namespace halfstep::data
