// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/dist/communication_hook.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/nn/module.h"

namespace halfstep::dist {

/// Options of DataParallel; defaults and names are PyTorch's DistributedDataParallel's.
struct DataParallelOptions {
  /// Size of a bucket in MiB; 0: a few sizes are tried in the first steps, about 25 of them, and the one whose steps
  /// were shortest on the slowest rank is kept. Sums of gradients don't depend on it (Reduction::rank_order).
  double bucket_cap_mb = 25;
  double first_bucket_cap_mb = 1;  ///< of the first one, which is small so that communication starts early
  bool broadcast_buffers = true;   ///< each forward pass in training begins with the buffers of rank 0
  /// Parameters that a backward pass doesn't reach count as zeros; those that it reaches on no rank keep the gradient
  /// they have. Otherwise such a parameter is an error that names it.
  bool find_unused_parameters = false;
  /// Each rank's backward passes reach the same parameters every time, which may be fewer than all: the first pass
  /// finds out which, and later ones search no more (find_unused_parameters does in each), so that steps can be
  /// captured. Unused ones are as there. A pass in which the set differs throws DistError, which names the parameter.
  bool static_graph = false;
  CommunicationHook hook = {};  ///< how a bucket is reduced; by default an all_reduce in the dtype of the gradients
};

/// Options of DataParallelBase::join; names and defaults are PyTorch's.
struct JoinOptions {
  /// Gradients are divided by the number of all ranks, also when some have no samples left; else by the number of those
  /// that have.
  bool divide_by_initial_world_size = true;
  /// Throws DistError on all ranks, which names those whose loops are over, when the first one is.
  bool throw_on_early_termination = false;
  /// What a rank whose loop is over does after each reduction of the others, such as the optimizer's step, so that its
  /// state stays the same as theirs. (A gradient scaler begins with the first loss: where a rank may have no batch at
  /// all, call `scaler.scale(zeros({}))` ahead of the loop.)
  std::function<void()> step = {};
};

/// What the gradients' reduction has cost so far.
struct DataParallelStats {
  std::uint64_t reductions = 0;  ///< backward passes that ended with one
  int buckets = 0;               ///< of the next one
  double bucket_mb = 0;          ///< largest size of them
  bool tuning = false;           ///< sizes are still being tried
  double wait_seconds = 0;       ///< time after the end of the backward passes in which they were waited for
  double reduction_seconds = 0;  ///< from the start of the first bucket's reduction to the end of the last one's
};

/// The part of DataParallel that doesn't depend on the network's type.
class HS_API DataParallelBase {
 public:
  /// See DataParallel.
  DataParallelBase(const nn::ModuleBase& module, ProcessGroup group, const DataParallelOptions& options = {});
  ~DataParallelBase();
  DataParallelBase(DataParallelBase&&) noexcept;
  DataParallelBase& operator=(DataParallelBase&&) noexcept;

  /// While it lives, backward passes on this rank reduce nothing: gradients add up. The first pass after it reduces the
  /// sum. Guards may be nested.
  class HS_API NoSync {
   public:
    explicit NoSync(const DataParallelBase& of);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<int> depth_;
    const void* step_;  // that is being captured where the guard is made
  };
  /// Begins a NoSync, for as long as the result lives.
  [[nodiscard]] NoSync no_sync() const { return NoSync(*this); }

  /// For a rank without samples in this step, in the place of its backward pass: the gradients that it has, or zeros.
  void reduce_without_backward();
  /// Runs `loop`, a loop over batches of which ranks may have different numbers; all ranks call it. A rank whose loop
  /// is over takes part in the reductions of the others, as one whose gradients are zeros, until all are done. In the
  /// end all ranks have the parameters and buffers of one of those whose loops ran longest; the state of optimizers is
  /// the same where `step` of the options makes their step. PyTorch's Join.
  ///
  ///     net.join([&] {
  ///       for (const data::Batch& batch : batches) train_on(batch);
  ///     }, {.step = [&] { optimizer.step(); }});
  ///
  /// Gradients that a rank has at the end of its loop are dropped. Steps in it aren't captured. Collectives other than
  /// those of forward and backward passes of this network (synchronised batch norms, mean_()) are not taken part in,
  /// and throw DistError. Throws Error inside of another join() of this network.
  void join(const std::function<void()>& loop, const JoinOptions& options = {});
  /// Each element becomes the mean over the ranks, in place, also in every replay of a step that is being captured.
  void mean_(const Tensor& tensor, std::string_view label) const;
  /// Buffers become those of rank 0, on all ranks. All ranks call it.
  void broadcast_buffers();
  const ProcessGroup& group() const;
  const DataParallelOptions& options() const;
  DataParallelStats stats() const;

 private:
  friend class ZeroRedundancy;
  /// From now on a gradient is reduced to the rank that `owner` says; on the others it is undefined after a backward
  /// pass, and no bucket outlives one.
  void shard_gradients(const std::function<int(const Tensor& parameter)>& owner);
  const NamedTensors& parameters() const;  ///< those that require grad, each once

  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// A network that each rank trains on its own part of each batch: PyTorch's DistributedDataParallel.
///
///     dist::ProcessGroup group = dist::ProcessGroup::init();
///     dist::DataParallel net(models::resnet50(), group);
///     optim::SGD optimizer(net.module().parameters(), {.lr = 0.1});
///     ...
///     cross_entropy(net(images), labels).backward();   // gradients are the mean over the ranks now
///
/// At the start all ranks get the parameters and buffers of rank 0. Gradients are put into buckets, in the order in
/// which the first backward pass made them, and a bucket is reduced while the backward pass continues; when backward()
/// returns, each grad() is the mean over the ranks and a view of its bucket. A loss that is the mean over the rank's
/// samples gives the gradient of the mean over all samples where all ranks have as many. Bits are the same on all
/// ranks.
///
/// Steps can be captured, on the CPU and on devices; a replay reduces as the step does.
///
/// Throws DistError where the ranks' networks differ, naming the first parameter that does; from backward() where a
/// parameter got no gradient (see find_unused_parameters) and what collectives throw. Throws Error for options out of
/// range and for a network without parameters that require grad.
template <class M>
class DataParallel : public DataParallelBase {
 public:
  DataParallel(M module, ProcessGroup group, const DataParallelOptions& options = {})
      : DataParallelBase(module, std::move(group), options), module_(std::move(module)) {}
  /// The network itself; it shares its parameters with the one that was given.
  const M& module() const { return module_; }
  /// The network's forward pass, in training behind a broadcast of the buffers.
  template <class... Inputs>
  auto operator()(Inputs&&... inputs) {
    if (options().broadcast_buffers && module_.is_training()) broadcast_buffers();
    return module_(std::forward<Inputs>(inputs)...);
  }

 private:
  M module_;
};

/// The scaler's state becomes that of rank 0, on all ranks: scales that differ at the start would let them drift apart,
/// since they see the same reduced gradients but would divide them by different numbers. All ranks call it.
HS_API void broadcast_state(amp::GradScaler& scaler, const ProcessGroup& group);

/// Name of the first parameter or buffer whose bits are not the same on all ranks; empty if all are. All ranks call it.
HS_API std::string first_difference(const nn::ModuleBase& module, ProcessGroup& group);

}  // namespace halfstep::dist
