// SPDX-License-Identifier: Apache-2.0
// Ranks as threads, which exchange texts through memory. Intervals are a tenth of the usual ones and shorter.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "halfstep/dist/control.h"

namespace halfstep::dist {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

inline constexpr milliseconds kBeat{100}, kStep{1000}, kHang{1500};
inline constexpr milliseconds kLongEnough{30'000};  // for a loaded machine; nothing waits for it where all is well

// Nobody is silent here: where all are threads of one process, that says only that the machine is busy.
inline const ControlOptions kQuick{.heartbeat = kBeat, .lost = 2 * kLongEnough, .out_of_step = kStep};

// What all_gather_text does, between threads.
class Meeting {
 public:
  explicit Meeting(int size) : texts_(static_cast<std::size_t>(size)) {}
  std::vector<std::string> exchange(int rank, std::string_view text) {
    std::unique_lock lock(mutex_);
    texts_[static_cast<std::size_t>(rank)] = text;
    const int round = round_;
    if (++arrived_ == static_cast<int>(texts_.size())) {
      arrived_ = 0;
      ++round_;
      result_ = texts_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
    return result_;
  }
  Control::Exchange of(int rank) {
    return [this, rank](std::string_view text) { return exchange(rank, text); };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_, result_;
  int arrived_ = 0, round_ = 0;
};

inline std::vector<std::string> hosts(int size) {
  std::vector<std::string> names;
  for (int r = 0; r < size; ++r) names.push_back(r < 2 ? "a" : "b");
  return names;
}

// Runs `body(rank, control)` on a thread a rank.
template <class Body>
void run_ranks(int size, const ControlOptions& options, Body body) {
  Meeting meeting(size);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Control control(r, size, hosts(size), meeting.of(r), options);
      body(r, control);
    });
  }
  for (std::thread& t : threads) t.join();
}

inline std::optional<Failure> wait_for_failure(const Control& control) {
  const auto end = Clock::now() + kLongEnough;
  while (!control.failed() && Clock::now() < end) std::this_thread::sleep_for(milliseconds(5));
  return control.failure();
}

// Ranks at a certain point, and afterwards: how long the machine kept any of them from running.
class Pace {
 public:
  // Of one rank, from here on.
  class Runner {
   public:
    explicit Runner(Pace& pace) : pace_(pace), last_(Clock::now()) {
      const std::lock_guard lock(pace_.mutex_);
      pace_.first_ = std::min(pace_.first_, last_);
      pace_.longest_ = std::max(pace_.longest_, last_ - pace_.first_);
    }
    void runs() {
      const auto now = Clock::now();
      const std::lock_guard lock(pace_.mutex_);
      pace_.longest_ = std::max(pace_.longest_, now - last_);
      last_ = now;
    }

   private:
    Pace& pace_;
    Clock::time_point last_;
  };
  bool kept() const { return longest_ < kStep / 2; }

 private:
  std::mutex mutex_;
  Clock::time_point first_ = Clock::time_point::max();
  Clock::duration longest_{0};
};

// A rank that the machine doesn't let run is late indeed, and what is said of it says nothing of the Control: such an
// attempt, which returns false before it expects anything, is made again.
inline void attempt(const std::function<bool()>& body) {
  for (int i = 0; i < 10; ++i) {
    if (body()) return;
  }
  GTEST_SKIP() << "the machine is too busy";
}

}  // namespace halfstep::dist
