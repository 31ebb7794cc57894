// SPDX-License-Identifier: Apache-2.0
// Internal: DataParallelOptions::static_graph.
#pragma once

#include <vector>

#include "halfstep/autograd/parameter.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist::detail {

/// Which parameters' gradients come in a backward pass, and how often: what the first passes have shown.
class StaticGraph {
 public:
  StaticGraph(bool on, const NamedTensors& parameters) : on_(on), parameters_(parameters) {}
  bool on() const { return on_; }
  /// Whether a backward pass of this rank has shown what comes here.
  bool known() const { return !expected_.empty(); }
  /// Whether it is to be learned: then nothing is sent before the end of the pass.
  bool learns() const { return on_ && !known(); }
  /// Whether the ranks know which parameters none of them uses.
  bool agreed() const { return !nowhere_.empty(); }
  bool nowhere(std::size_t i) const { return agreed() && nowhere_[i]; }
  bool unused_here(std::size_t i) const { return known() && expected_[i] == 0; }

  /// Whether the gradient that came for the so-many-th time in this pass is whole now. Throws DistError, naming the
  /// parameter, where it wasn't to come.
  bool whole(std::size_t i, int arrivals) const;
  /// Of a gradient that came in a pass that reduces nothing: throws DistError where none was to come on any rank, since
  /// no later pass would reduce it.
  void check_unreduced(std::size_t i) const {
    if (nowhere(i)) changed(i, 1);
  }
  /// Throws DistError, naming them, where parameters are missing.
  void check_missing(const std::vector<std::size_t>& missing, int rank) const;
  /// What the first pass of all ranks has shown.
  void agree(std::vector<bool> nowhere) { nowhere_ = std::move(nowhere); }
  /// What the first backward pass of this rank has shown.
  void learn(const std::vector<int>& arrivals);

 private:
  [[noreturn]] void changed(std::size_t i, int arrivals) const;

  bool on_;
  const NamedTensors& parameters_;
  std::vector<int> expected_;
  std::vector<bool> nowhere_;
};

/// `a, b and 3 more`.
std::string names_of(const NamedTensors& parameters, const std::vector<std::size_t>& which);

}  // namespace halfstep::dist::detail
