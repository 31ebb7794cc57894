// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "halfstep/dist/data_parallel.h"

namespace halfstep::dist {

/// Options of PowerSGD; defaults are those of PyTorch's PowerSGDState, whose names are in parentheses.
struct PowerSGDOptions {
  /// Columns of the factors that stand for a gradient (matrix_approximation_rank), at least 1: more of them are more
  /// exact and more bytes.
  int rank = 1;
  /// Backward passes, from the first on, whose gradients are sent whole (start_powerSGD_iter); at least 0.
  std::int64_t start = 1000;
  /// A gradient [n, m] is compressed if (n + m) rank times this is less than n m (min_compression_rate); above 0.
  double min_compression_rate = 2;
  bool error_feedback = true;  ///< what a pass leaves out is added in the next one (use_error_feedback)
  bool warm_start = true;      ///< a pass begins with the factors of the one before it (warm_start)
  std::uint64_t seed = 0;      ///< of the first factors (random_seed), the same on all ranks
};

/// What PowerSGD sent in the last pass that it compressed, in elements.
struct PowerSGDStats {
  std::int64_t elements = 0;  ///< of all gradients
  std::int64_t sent = 0;      ///< by each rank in their place
};

/// Low-rank compression of gradients: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
/// for Distributed Optimization" (NeurIPS 2019), with the semantics of PyTorch's powerSGD_hook.
///
///     dist::PowerSGD compression({.rank = 2, .start = 100});
///     dist::DataParallel net(models::resnet18(), group, {.hook = compression.hook()});
///
/// A gradient, as a matrix M [n, m] of its first dimension and all others, becomes P Q^T with P [n, rank] and
/// Q [m, rank]: P = mean(M Q), made orthonormal, then Q = mean(M^T P). (n + m) rank elements are sent for n m. Vectors,
/// and matrices that don't get small enough, are sent as they are. What P Q^T lacks of a rank's own M is added to its
/// next gradient. A gradient of at most this rank is reproduced but for rounding.
///
/// Arithmetic is float32 (float64 for f64 gradients), and gradients are the same bits on all ranks; on devices, where
/// these are of one kind. Columns are made orthonormal in float64; one that depends on those before it is left out of
/// P and drawn anew for Q, so that no gradient, zero included, divides by 0 (PyTorch's orthogonalization_epsilon).
/// State belongs to parameters and not to buckets, so that results don't depend on the size of buckets, and `start` may
/// be 0.
///
/// A pass in which any gradient is not finite gives gradients that aren't on all ranks, so that a gradient scaler skips
/// the step, and leaves the state as it was. With follow() what was left out is kept without the loss scale, and stays
/// right when that changes.
///
/// Works on the gradients of one DataParallel. A handle: copies are the same one.
class HS_API PowerSGD {
 public:
  /// Throws Error for options out of range.
  explicit PowerSGD(const PowerSGDOptions& options = {});
  /// For DataParallelOptions::hook.
  CommunicationHook hook() const;
  const PowerSGDOptions& options() const;
  PowerSGDStats stats() const;
  /// The loss scale that gradients have, asked for at the start of each pass. Unless called, 1.
  void follow(std::function<double()> loss_scale);

  /// What a run needs to resume with the same bits: `iteration` i64 [], and for each compressed parameter `q.NAME`
  /// [m, rank] and `error.NAME` [ranks, n, m]. All ranks call it; those but rank 0 get an empty one.
  NamedTensors state_dict(ProcessGroup& group) const;
  /// Takes over a state. On another number of ranks each gets the mean of what was left out, which is the same to the
  /// mean of gradients but for rounding; factors of another rank are drawn anew. Throws Error for what is no such
  /// state.
  void load_state_dict(const NamedTensors& state, const ProcessGroup& group);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace halfstep::dist
