// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>

#include "halfstep/data/loader.h"

namespace halfstep::training {

/// Anything that is looped over in batches and knows their number, one loop an epoch: data::DataLoader, a vector of
/// data::Batch. It is referred to, not copied; calls of Model take it as it is.
class HS_API Batches {
 public:
  template <class L>
  requires(!std::same_as<std::remove_cvref_t<L>, Batches> &&
           !std::derived_from<std::remove_cvref_t<L>, data::DataLoader> &&
           requires(std::remove_reference_t<L> & loader) {
             { *loader.begin() } -> std::convertible_to<const data::Batch&>;
             { loader.size() } -> std::convertible_to<std::int64_t>;
           }) Batches(L&& loader)
      : size_([&loader] { return static_cast<std::int64_t>(loader.size()); }) {
    each_ = [&loader](const Visitor& visit) {
      for (const data::Batch& batch : loader) {
        if (!visit(batch)) break;
      }
    };
  }
  /// A loader stands at a place: a run that goes on begins there, and it stays at the epoch's end until that is over.
  Batches(data::DataLoader& loader);
  Batches(data::DataLoader&& loader) : Batches(loader) {}

  /// Sees a batch, and says whether it wants the next one.
  using Visitor = std::function<bool(const data::Batch&)>;
  /// Batches in the next epoch, or in the one that a loop is in: a data set may change its size between two.
  std::int64_t size() const { return size_(); }
  /// Shows the batches of an epoch, or the rest of it where a loader stands inside of one.
  void each(const Visitor& visit) const { each_(visit); }
  /// Where a loader stands; nothing for other batches.
  std::optional<data::LoaderState> position() const { return position_ ? std::optional(position_()) : std::nullopt; }
  /// The epoch is over: all its batches were seen, and evaluated if they are to be. The next each() begins the next
  /// one.
  void finish_epoch() const {
    if (finish_) finish_();
  }

 private:
  std::function<std::int64_t()> size_;
  std::function<void(const Visitor&)> each_;
  std::function<void()> finish_;
  std::function<data::LoaderState()> position_;
};

}  // namespace halfstep::training
