// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::dist {

/// Why a job with several ranks can't go on.
struct Failure {
  /// What happened to the rank.
  enum class What : std::uint8_t {
    ended,        ///< its process ended without a goodbye
    silent,       ///< it doesn't answer: stopped, or its network is cut
    out_of_step,  ///< it answers, but others wait for it in a collective
    hung,         ///< the same, and nothing in its process moves
    error,        ///< it reported an error
  };
  What what = What::error;
  int rank = 0;
  std::string host = {};  ///< of the rank
  std::int64_t pid = 0;
  std::string text = {};  ///< one line for users, which names the rank
};

/// The collective that a rank is about to start, as it is shown to others.
struct CollectiveNote {
  std::uint64_t sequence = 0;  ///< number of the collective in its group, from 1
  std::string_view name = {};  ///< `all_reduce`
  std::string_view label = {};
  std::uint64_t bytes = 0;
  bool of_all = true;  ///< of the group of all ranks; only these are compared by sequence number
};

/// Intervals and limits of Control.
struct ControlOptions {
  std::chrono::milliseconds heartbeat{1000};      ///< between two heartbeats
  std::chrono::milliseconds lost{10'000};         ///< silence after which a rank is lost
  std::chrono::milliseconds out_of_step{10'000};  ///< wait of others after which a rank is out of step; 0: never
  std::chrono::milliseconds connect{30'000};      ///< until all ranks have connected
  /// Time for which nothing has moved in a rank that others wait for, after which it hangs; 0: never. Rank 0 warns
  /// after three quarters of it.
  std::chrono::milliseconds hang{10'000};
  /// Tells what all threads of this process are blocked in, `its main thread waits for a lock`, if none has moved
  /// since the call before, and else nothing. Called on the thread of the Control at each heartbeat while this rank is
  /// in no collective. Empty function: this rank never hangs.
  std::function<std::string()> blocked = {};
  /// From the moment at which a rank is asked to stop until all must have answered.
  std::chrono::milliseconds answer{2000};
  /// Whether this rank is asked to stop, by a signal, say; called on the thread of the Control, often. Ranks stop
  /// together: when one of them is asked, each must answer within `answer`, or it is lost. May be empty.
  std::function<bool()> stop = {};
  /// Called once, on the thread of the Control, when a failure becomes known; it must not destroy the Control.
  std::function<void(const Failure&)> on_failure = {};
};

/// The ranks of a job watch each other over TCP connections of their own, beside what carries the data. Each rank sends
/// rank 0 a heartbeat that says what it does, and rank 0 sends one to each. When a rank ends without a goodbye, is
/// silent, hangs, falls out of step, or reports an error, rank 0 tells all ranks, which then know the same first
/// failure; when it is rank 0 that is lost, each of the others notices.
///
/// A thread does all this, so that a rank that computes or waits in MPI still answers. The destructor says goodbye and
/// returns within about a second: a rank that finishes before the others is no failure. Once rank 0 has said goodbye
/// the others are no longer watched.
class HS_API Control {
 public:
  /// Gives a text to all ranks: the texts of all, in the order of ranks. All ranks call it alike.
  using Exchange = std::function<std::vector<std::string>(std::string_view)>;

  /// All ranks construct one; `hosts` are the names of their machines. Returns when all have connected. The exchange is
  /// called on this thread, and not after the constructor. Throws DistError if that fails.
  Control(int rank, int size, std::vector<std::string> hosts, const Exchange& exchange, ControlOptions options = {});
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  /// This rank enters a collective. Takes a lock for a moment, and sends nothing.
  void doing(const CollectiveNote& collective);
  /// It has left it.
  void done();
  /// It begins something for which others may have to wait longer than `out_of_step`, such as an evaluation by rank 0
  /// alone; the next doing() or done() ends that.
  void working(std::string_view what);
  /// It waits for something outside of this process, until not_busy() is called with the number that is returned: then
  /// it neither hangs nor is out of step.
  std::uint64_t busy(std::string_view with);
  void not_busy(std::uint64_t number);

  /// This rank ends because of an error: all ranks learn the text, if it is the first failure. Returns when the first
  /// failure is known here, after two seconds at the latest.
  void report_failure(std::string_view text);
  /// The first failure, if there is one.
  std::optional<Failure> failure() const;
  /// Whether there is one. Takes no lock.
  bool failed() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The ranks of this job have agreed to end, with a status other than 0, say: from here on that is no failure, of which
/// ranks that are a moment behind would be told in place of what they agreed on.
HS_API void expect_end();

}  // namespace halfstep::dist
