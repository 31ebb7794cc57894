// SPDX-License-Identifier: Apache-2.0
// Internal: gradients that are added up as a fixed tree (StepOptions::shards).
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/parts_internal.h"

namespace halfstep::training {

// Samples of each of this rank's `own` shards of a batch, of which it has `samples`. Only a loader knows how a batch is
// divided among several ranks.
inline std::vector<std::int64_t> shards_of(const data::Batch& batch, std::int64_t samples, int own, int ranks) {
  if (batch.shards.size() == static_cast<std::size_t>(own)) return batch.shards;
  if (ranks > 1 || !batch.shards.empty()) {
    fail<Error>("train_step: expected a batch of {} shards, as a loader with that many makes it, got one of {}",
                own * ranks, batch.shards.size() * static_cast<std::size_t>(ranks));
  }
  std::vector<std::int64_t> sizes;
  for (int k = 0; k < own; ++k) {
    const auto begin_of = [&](int shard) { return data::detail::part_begin(samples, samples, shard, own); };
    sizes.push_back(begin_of(k + 1) - begin_of(k));
  }
  return sizes;
}

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
