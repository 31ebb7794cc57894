// SPDX-License-Identifier: Apache-2.0
// Internal: gradients that are added up as a fixed tree (StepOptions::shards).
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "halfstep/core/tensor.h"

namespace halfstep::training {

using Gradients = std::vector<Tensor>;

// Undefined ones count as zeros.
inline Gradients sum_of(Gradients a, const Gradients& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined()) {
      a[i] = b[i];
    } else if (b[i].defined()) {
      a[i].add_(b[i]);
    }
  }
  return a;
}

// Sums leaves as a binary tree, as they come: (0 + 1) + (2 + 3). Of the leaves that are there it keeps one sum a level.
class Tree {
 public:
  void add(Gradients leaf) {
    std::size_t level = 0;
    for (; level < sums_.size() && sums_[level]; ++level)
      leaf = sum_of(std::move(*std::exchange(sums_[level], {})), leaf);
    if (level == sums_.size()) sums_.emplace_back();
    sums_[level] = std::move(leaf);
  }
  /// Of a power of 2 of them.
  Gradients sum() { return std::move(*sums_.back()); }

 private:
  std::vector<std::optional<Gradients>> sums_;
};

}  // namespace halfstep::training
