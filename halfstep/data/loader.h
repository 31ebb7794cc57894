// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "halfstep/core/device.h"
#include "halfstep/core/export.h"
#include "halfstep/data/dataset.h"

namespace halfstep::data {

/// Options of DataLoader.
struct LoaderOptions {
  /// Samples per batch, at least 1; the last batch of an epoch may hold fewer.
  std::int64_t batch_size = 1;
  /// A new order every epoch; otherwise the samples come as they are stored.
  bool shuffle = false;
  /// Drops the last batch of an epoch if it is smaller than the others.
  bool drop_last = false;
  /// Threads that prefetch batches; 0: the loop creates them itself, which it also does, with a warning, if no thread
  /// can be started. If only some can, those prefetch.
  int workers = 1;
  /// Maximum number of prefetched batches per worker.
  int prefetch = 4;
  /// Seed of the order (and of a data set's random transformations).
  std::uint64_t seed = 0;
  /// The device of the batches. For devices other than the CPU the workers put them into pinned memory, and the next
  /// batch is copied on a separate queue while the loop computes with the current one; this needs the memory of one
  /// additional batch there.
  Device device = {};
  /// Passes over the data that make an epoch, at least 1. Each has the order and the batches of a separate epoch: pass
  /// p of epoch e those of epoch e * repeat + p.
  std::int64_t repeat = 1;
  /// Of `ranks` loaders that share each batch, this one returns part `rank`. The parts lie one behind the other, so
  /// that together they are what one loader alone would return, and each sample comes once. They differ by at most one
  /// sample; but of a pass's last, smaller batch some ranks have none where others would have a single one and whole
  /// batches give each several, since batch norm finds no variance in one. Part 0 always has samples. A part without
  /// is one of the first sample's (Batch::stand_in). Batch sizes and positions are those of the whole.
  int rank = 0;
  int ranks = 1;
  /// Batches are divided into this number of parts, as above, of which each rank has the same number, one behind the
  /// other (Batch::shards): the parts don't depend on the number of ranks. A multiple of ranks; 0: a part per rank.
  int shards = 0;
};

/// A loader's position, for checkpoints.
struct LoaderState {
  std::int64_t epoch = 0;
  /// Batches of this epoch returned so far, including the one that the loop is working on.
  std::int64_t batch = 0;
  friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

/// The order of an epoch: a permutation of 0 to n - 1 that depends on the three numbers only (Fisher and Yates's
/// shuffle with Philox numbers).
HS_API std::vector<std::int64_t> shuffled_order(std::int64_t n, std::uint64_t seed, std::int64_t epoch);

/// Returns a data set in batches, one epoch per loop:
///
///     data::DataLoader loader{dataset, {.batch_size = 64, .shuffle = true}};
///     for (int epoch = 0; epoch < 10; ++epoch) {
///       for (auto [images, labels] : loader) { ... }
///     }
///
/// Which samples a batch holds depends on the seed, the epoch and its number only, never on the number of workers. A
/// loop that is left early ends its epoch: the next loop begins the next one. An exception in a worker is thrown by the
/// loop when it reaches the failed batch. One loop at a time; a loader belongs to one thread.
class HS_API DataLoader {
 public:
  class Iterator;

  /// Throws Error for a batch size, prefetch or number of workers out of range, and for a data set whose size is
  /// negative (so does every later use that reads the size).
  explicit DataLoader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options = {});
  /// Takes a data set by value.
  template <std::derived_from<Dataset> D>
  explicit DataLoader(D dataset, const LoaderOptions& options = {})
      : DataLoader(std::shared_ptr<const Dataset>(std::make_shared<const D>(std::move(dataset))), options) {}
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;
  ~DataLoader();

  /// Batches in an epoch.
  std::int64_t size() const;
  const Dataset& dataset() const;
  const LoaderOptions& options() const;

  /// Starts the next epoch, or the rest of the one that seek() named.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  /// The epoch (from 0) and batch to continue with: `seek(saved)` in a new program returns the same batches that this
  /// one will. After a loop has ended it is the start of the next epoch.
  LoaderState state() const;
  /// The next loop continues there; with `batch == size()` it has no batches left. Throws Error if there is no such
  /// position, or inside a loop.
  void seek(const LoaderState& state);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // shared with an iterator, which may outlive the loader
};

/// Iterates once over the rest of an epoch. Stops the workers when destroyed.
class HS_API DataLoader::Iterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;

  Iterator(const Iterator&) = delete;
  Iterator& operator=(const Iterator&) = delete;
  Iterator(Iterator&& other) noexcept;
  Iterator& operator=(Iterator&& other) noexcept;
  ~Iterator();

  const Batch& operator*() const { return batch_; }
  const Batch* operator->() const { return &batch_; }
  Iterator& operator++();
  void operator++(int) { ++*this; }
  friend bool operator==(const Iterator& iterator, std::default_sentinel_t) { return iterator.impl_ == nullptr; }

 private:
  friend class DataLoader;
  explicit Iterator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  void advance();

  std::shared_ptr<Impl> impl_;  // null at the end
  Batch batch_;
};

}  // namespace halfstep::data
