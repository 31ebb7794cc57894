// SPDX-License-Identifier: Apache-2.0
// Which modules of a network recompute their forward passes, and which have to for a step to fit into a budget of
// memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/nn/module.h"
#include "halfstep/train/config.h"

namespace halfstep::training {

/// A number of bytes as the command line writes it: `800MB` and `1.5GB` (powers of 1000), `1GiB` (powers of 1024), or
/// bytes without a unit. Throws Error for anything else, and for 0.
HS_API std::uint64_t parse_bytes(const std::string& text);
/// In 10^6 bytes: `987.1 MB`.
HS_API std::string megabytes_text(std::uint64_t bytes);

/// Paths of the blocks that a network repeats, in order: modules with parameters that are made of modules, in a list (a
/// Sequential, a ModuleList, or a module whose children are called 0, 1, ...). A list of layers that are made of none,
/// such as Sequential{Conv2d, BatchNorm2d, ReLU}, is a block itself. Blocks inside of blocks are left out.
HS_API std::vector<std::string> recompute_candidates(const nn::ModuleBase& network);

/// Has modules recompute their forward passes (nn::ModuleBase::recompute) and all others not: `which` is `all` (those
/// of recompute_candidates()), `none`, or paths with commas between; empty: nothing is changed. Throws Error for a path
/// that isn't there, naming the blocks, and for `all` of a network without any.
HS_API void set_recomputed(const nn::ModuleBase& network, const std::string& which);

/// What a step needs, and which modules recompute for it.
struct HS_API MemoryPlan {
  std::vector<std::string> recomputed = {};  ///< paths
  std::size_t candidates = 0;                ///< how many could have been chosen
  std::uint64_t budget = 0;                  ///< bytes; 0: none was given, and the numbers below aren't known
  std::uint64_t peak = 0;                    ///< predicted: the most bytes that tensors have in a step
  std::uint64_t peak_without = 0;            ///< the same where nothing is recomputed
  double extra = 0;                          ///< the recomputed part, as a share of a step's work without

  /// The paths as set_recomputed() takes them: `layer1.0,layer1.1`, or `none`.
  std::string modules() const;
  /// One line: `recomputing 9 of 17 modules (bn1, layer1.0, ...), 12% more work; predicted peak ...`.
  std::string text() const;
};

/// A module that may recompute.
struct RecomputeCandidate {
  std::string path;
  double cost = 0;         ///< of its forward pass, in any unit
  std::string alike = {};  ///< modules with the same text save as much
};
/// Chooses among modules, in the order in which they run, the cheapest set whose predicted peak is at most `budget`
/// bytes. `peak` predicts that of a set (one entry a candidate) and is called some dozens of times, and about a hundred
/// times more where nothing fits: the savings of single modules give a first set, which is then corrected by the peaks
/// of whole sets. MemoryPlan::extra is left 0. The result has a peak over the budget if none of the sets tried fits:
/// the least one.
HS_API MemoryPlan choose_recomputed(std::span<const RecomputeCandidate> modules,
                                    const std::function<std::uint64_t(const std::vector<bool>& recomputed)>& peak,
                                    std::uint64_t budget);

/// Chooses the modules to recompute for a step of the configuration's network on `batch_size` samples, by
/// predict_memory() of every set that is tried; nothing is computed. It chooses among recompute_candidates() and layers
/// outside of those that multiply no matrices: a batch norm is recomputed in little time, and where a pooling follows
/// no other op needs its result. The time of a module is its multiply-adds and the bytes that it writes. `image_size`
/// as in random_batch(). Leaves the default generator as it was. Throws Error, with the least possible peak, where no
/// choice fits, and as predict_memory() does.
HS_API MemoryPlan plan_memory(const TrainConfig& config, std::int64_t batch_size, std::int64_t image_size,
                              std::uint64_t budget);
/// The plan of a run, for what each of its ranks has of a batch; none where neither `recompute` nor `memory_budget` is
/// given. With `recompute` it only says which modules those are in `network`. Throws as plan_memory() does.
HS_API std::optional<MemoryPlan> plan_of_run(const TrainConfig& config, const nn::ModuleBase& network);

}  // namespace halfstep::training
