// SPDX-License-Identifier: Apache-2.0
// Faults that were ordered; the grammar is in sim.h.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace sim {

/// What is to happen to one kernel.
struct FaultPlan {
  bool refuse = false, unsupported = false, lost = false;  ///< at its call
  bool fail = false, corrupt = false;                      ///< on the queue
  std::chrono::nanoseconds delay{0};
};

/// The orders that are open.
class Faults {
 public:
  /// Adds orders; returns what is wrong with them (and adds none), or an empty text. `restore` is set where they ask
  /// for it.
  std::string order(std::string_view orders, bool* restore);
  /// Counts a kernel.
  FaultPlan next_kernel(std::string_view op);
  /// Counts a call of an entry that runs no kernel of its own, which only orders with its name are for.
  FaultPlan next_entry(std::string_view entry);
  /// Counts an allocation; true when it is to fail.
  bool next_allocation();

 private:
  enum class Kind { fail, refuse, unsupported, corrupt, delay, oom, lost };
  struct Order {
    Kind kind;
    std::string op;
    uint64_t left;
    bool always = false;
    std::chrono::nanoseconds delay{0};
  };
  static std::string parse(std::string_view text, Order* order);
  static void add(const Order& order, FaultPlan* plan);
  /// Whether it is this order's turn.
  static bool counts_down(Order& order);
  void drop_done();

  std::mutex mutex_;
  std::vector<Order> orders_;
};

}  // namespace sim
