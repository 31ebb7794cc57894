// SPDX-License-Identifier: Apache-2.0
// Internal: the order in which a network asks for its parameters, so that the next ones can be on their way while it
// computes with those that are here.
#pragma once

#include <cstddef>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::dist::detail {

/// What comes next, going by the passes before: a pass is expected to ask as the last one of its kind did. Where it
/// does otherwise, nothing is known of its rest, and the next pass is expected to do as it did. All ranks ask alike,
/// and so expect the same.
class HS_API GatherOrder {
 public:
  using Unit = std::vector<std::size_t>;  ///< numbers of parameters that are asked for together

  /// A forward pass begins: one that a backward pass may follow, or one without gradients, which has an order of its
  /// own.
  void begin(bool with_gradients);
  /// Notes what is asked for now. What is expected behind it, until the next call; null: not known.
  const Unit* next(const Unit& unit);

 private:
  static constexpr std::size_t kLongest = std::size_t{1} << 16;  // of a pass; nobody may call begin()
  std::vector<Unit> with_gradients_, without_;
  std::vector<Unit>* order_ = &with_gradients_;
  std::size_t at_ = 0;
};

}  // namespace halfstep::dist::detail
