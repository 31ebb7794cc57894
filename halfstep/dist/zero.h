// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "halfstep/dist/data_parallel.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/optimizer.h"

namespace halfstep::dist {

/// Options of ZeroRedundancy.
struct ZeroOptions {
  /// What ranks divide among them (Rajbhandari et al., 2020): 1, the optimizer's state and master weights; 2, gradients
  /// too; 3, parameters too.
  int stage = 1;
  double bucket_cap_mb = 25;  ///< of parameters that are exchanged together after a step, in MiB, above 0
  /// At stage 3 the largest parameter of a module comes while the module before it computes, in the order that the pass
  /// before had: one parameter more is here at a time. Unless said, where parameters are on a device or ranks on
  /// several machines: ranks that compute on the processors that also do the exchange lose by it.
  std::optional<bool> prefetch = {};
};

/// What stage 3 has brought so far, on this rank.
struct ZeroGathers {
  std::uint64_t gathers = 0;    ///< of a module's parameters, or of one that a backward pass needs
  std::uint64_t ahead = 0;      ///< of these: started while what came before was computed
  std::uint64_t arrived = 0;    ///< of those: there when they were asked for, so that the exchange took no time
  std::uint64_t discarded = 0;  ///< started and not used, since the order was another one
  double wait_seconds = 0;      ///< time that the passes have waited for parameters
};

/// Bytes of a network's training state on this rank.
struct ZeroMemory {
  std::int64_t parameters = 0;  ///< those that require grad
  std::int64_t gradients = 0;   ///< of them, without buckets of a reduction that is on its way
  std::int64_t optimizer = 0;   ///< state and master weights
};

/// Data parallel training in which ranks divide the training state, instead of each having all of it: DeepSpeed's ZeRO,
/// PyTorch's ZeroRedundancyOptimizer (stages 1 and 2) and FullyShardedDataParallel (3). Each parameter that requires
/// grad belongs to one rank, its owner, which has its optimizer state and updates it; parameters are assigned whole,
/// the largest first, to the rank with the least so far. Weights, losses and skipped steps have the same bits as
/// without it.
///
///     dist::DataParallel net(models::resnet50(), group);
///     optim::AdamW optimizer(net.module().parameters());
///     dist::ZeroRedundancy zero(net, optimizer, {.stage = 2});
///
/// The loop stays as it is: schedules, parameter groups, a GradScaler and optim::EMA (stages 1 and 2) work. At stage 2
/// and 3 a backward pass leaves gradients with their owners only: clip them by clip_grad_norm_() here, and drop them
/// (zero_grad()) before the next pass that reduces; passes under no_sync() add up whole gradients on each rank.
/// Captured steps replay at stages 1 and 2; at stage 3 steps run uncaptured.
///
/// At stage 3 a parameter's values are on its owner, and on the others while the module runs to which it belongs: they
/// come before its forward() and when its backward pass needs them, and are freed behind it. Outside of that a
/// parameter of another rank reads as NaN; gather_parameters() brings all. A module may not use parameters of a
/// submodule without calling it. Each step sends parameters twice: the largest one of the module that comes next, as
/// far as the pass before tells, while the network computes. The order may change at any time; all ranks have the same
/// one.
///
/// A handle; the optimizer keeps what it needs. On one rank it does nothing.
class HS_API ZeroRedundancy {
 public:
  /// All ranks call it, with the network and an optimizer of its parameters, which may have made steps already. Throws
  /// Error for a stage other than 1 to 3, and what optim::Optimizer::shard() throws.
  template <class M>
  ZeroRedundancy(DataParallel<M>& net, optim::Optimizer& optimizer, const ZeroOptions& options = {})
      : ZeroRedundancy(net, net.module(), optimizer, options) {}
  /// The same for a network whose type isn't known: `module` is the one that `net` was made of.
  ZeroRedundancy(DataParallelBase& net, const nn::ModuleBase& module, optim::Optimizer& optimizer,
                 const ZeroOptions& options = {});

  /// The rank that a parameter belongs to; -1 for one that doesn't require grad, which all have.
  int owner(const Tensor& parameter) const;
  int stage() const;  ///< ZeroOptions::stage
  /// What this rank holds now.
  ZeroMemory memory() const;
  ZeroGathers gathers() const;

  /// optim::clip_grad_norm_ of all of the optimizer's gradients, wherever they are. All ranks call it.
  Tensor clip_grad_norm_(double max_norm, const optim::ClipOptions& options = {});
  /// Brings the optimizer's whole state to rank `to`, whose optimizer.state_dict() gives it until the next step or
  /// drop_state_dict(). All ranks call it. load_state_dict() takes such a state, on all ranks, of any number of ranks.
  /// (io::save_checkpoint(), called by all ranks, needs no rank with room for it: each writes its own part.)
  void consolidate_state_dict(int to = 0);
  /// Frees that copy. All ranks call it.
  void drop_state_dict();
  /// At stage 3, all parameters are whole on all ranks for as long as the result lives. What is written to them
  /// meanwhile stays on their owners only. All ranks call it.
  [[nodiscard]] std::shared_ptr<void> gather_parameters();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace halfstep::dist
