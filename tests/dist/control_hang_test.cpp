// SPDX-License-Identifier: Apache-2.0
// Ranks that answer and in which nothing moves, and what ranks say of themselves to be told from those.
#include <gtest/gtest.h>

#include <atomic>

#include "halfstep/dist/control_messages_internal.h"
#include "halfstep/runtime/log.h"
#include "tests/dist/control_ranks.h"

namespace halfstep::dist {
namespace {

// One rank is blocked while others wait for it in a collective of all, of some of them, or have to wait for rank 0.
TEST(ControlHang, NamesTheRankInWhichNothingMoves) {
  for (const int who : {2, 0}) {
    for (const bool of_all : {true, false}) {
      if (who == 0 && !of_all) continue;
      SCOPED_TRACE(std::to_string(who) + (of_all ? " of all" : " of some"));
      std::mutex mutex;
      std::vector<Failure> told;
      const auto begin = Clock::now();
      Meeting meeting(3);
      std::vector<std::thread> threads;
      for (int r = 0; r < 3; ++r) {
        threads.emplace_back([&, r] {
          ControlOptions options = kQuick;
          options.out_of_step = milliseconds(0);
          options.hang = kHang;
          options.blocked = [=] { return r == who ? std::string("its main thread reads a\npipe") : std::string(); };
          Control control(r, 3, hosts(3), meeting.of(r), options);
          control.doing({.sequence = 40, .name = "broadcast", .bytes = 1000});
          control.done();
          if (r != who) {
            control.doing(
                {.sequence = 41, .name = "all_reduce", .label = "bucket 3", .bytes = 4 << 20, .of_all = of_all});
          }
          const auto failure = wait_for_failure(control);
          const std::lock_guard lock(mutex);
          if (failure) told.push_back(*failure);
        });
      }
      for (std::thread& t : threads) t.join();
      EXPECT_GE(Clock::now() - begin, kHang);
      ASSERT_EQ(told.size(), 3u);
      for (const Failure& f : told) {
        EXPECT_EQ(f.rank, who);
        EXPECT_EQ(f.what, Failure::What::hung);
        EXPECT_EQ(f.text, told[0].text);
        for (const std::string& part :
             {"rank " + std::to_string(who) + " (host " + (who == 2 ? "b" : "a") + ", pid ",
              std::string(" hangs: it is in no collective, after broadcast #40 (1000 bytes) for "),
              std::string(" s (its main thread reads a\\npipe), while ranks "),
              std::string(" s in all_reduce #41 (bucket 3, 4.0 MiB)")}) {
          EXPECT_NE(f.text.find(part), std::string::npos) << part << " in " << f.text;
        }
      }
    }
  }
}

// Rank 1 stays away from a collective for much longer than a rank that hangs: it moves now and then, or has said that
// it is busy, or it isn't the one that is waited for; or nobody wants to know.
TEST(ControlHang, ARankThatMovesOrIsBusyDoesNotHang) {
  enum class Why : std::uint8_t { moves, busy, works, ahead, off };
  for (const Why why : {Why::moves, Why::busy, Why::works, Why::ahead, Why::off}) {
    SCOPED_TRACE(static_cast<int>(why));
    attempt([why] {
      std::atomic<int> failures{0};
      std::atomic<bool> kept{true};
      ControlOptions options = kQuick;
      options.out_of_step = milliseconds(0);
      options.hang = why == Why::off ? milliseconds(0) : 10 * kBeat;
      options.blocked = [&kept, why, look = 0, moved = Clock::now()]() mutable {
        if (why != Why::moves || ++look % 4 != 0) return std::string("its main thread waits");
        kept = kept && Clock::now() - moved < 7 * kBeat;
        moved = Clock::now();
        return std::string();
      };
      run_ranks(3, options, [&](int rank, Control& control) {
        if (rank == 1 && why == Why::busy) {
          const auto first = control.busy("one"), second = control.busy("two");
          control.not_busy(first);  // the other goes on
          EXPECT_NE(first, second);
        }
        if (rank == 1 && why == Why::works) control.working("a checkpoint");
        if (rank == 1 && why == Why::ahead) control.doing({.sequence = 1, .name = "all_reduce"});
        if (rank == 1 && why == Why::ahead) control.done();
        if (rank != 1) control.doing({.sequence = 1, .name = "all_reduce"});
        std::this_thread::sleep_for(16 * kBeat);
        failures += control.failed();
      });
      if (!kept) return false;
      EXPECT_EQ(failures, 0);
      return true;
    });
  }
}

TEST(ControlHang, BusyIsOverAtItsEnd) {
  std::atomic<int> found{0};
  ControlOptions options = kQuick;
  options.out_of_step = milliseconds(0);
  options.hang = 10 * kBeat;
  options.blocked = [] { return std::string("its main thread waits"); };
  run_ranks(2, options, [&](int rank, Control& control) {
    if (rank == 0) control.doing({.sequence = 1, .name = "all_reduce"});
    if (rank == 1) {
      const auto number = control.busy("the scheduler");
      std::this_thread::sleep_for(15 * kBeat);
      EXPECT_FALSE(control.failed());
      control.not_busy(number);
    }
    const auto failure = wait_for_failure(control);
    ASSERT_TRUE(failure);
    found += failure->rank == 1 && failure->what == Failure::What::hung;
  });
  EXPECT_EQ(found, 2);
}

// Rank 0 says so before it ends the job.
TEST(ControlHang, ARankThatMayHangIsWarnedOfOnce) {
  std::mutex mutex;
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::warning) warnings.emplace_back(text);
  });
  ControlOptions options = kQuick;
  options.out_of_step = milliseconds(0);
  options.hang = 2 * kHang;
  options.blocked = [] { return std::string("its main thread waits"); };
  run_ranks(2, options, [&](int rank, Control& control) {
    if (rank == 0) control.doing({.sequence = 1, .name = "all_reduce"});
    EXPECT_TRUE(wait_for_failure(control));
  });
  set_log_sink({});
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_EQ(warnings[0].rfind("rank 1 (host a, pid ", 0), 0u) << warnings[0];
  EXPECT_NE(warnings[0].find("; when it is 3 s, the job ends (HALFSTEP_HANG_TIMEOUT)"), std::string::npos)
      << warnings[0];
}

TEST(ControlMessages, WhatARankDoesComesBackAsItWasSent) {
  using detail::ControlMessage;
  const ControlMessage sent{.kind = ControlMessage::Kind::beat,
                            .activity = {.state = detail::Activity::State::subgroup,
                                         .elapsed_ms = 1,
                                         .sequence = 2,
                                         .of_all = 3,
                                         .bytes = 4,
                                         .still_ms = 5,
                                         .name = "all_reduce",
                                         .label = "bucket 3",
                                         .blocked = "its main thread waits"}};
  std::string bytes = encode(sent);
  // Cut short, or with a length that isn't its own, it is no message.
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    std::string part = bytes.substr(0, size);
    ControlMessage message;
    EXPECT_EQ(take_message(part, message), detail::Taken::more) << size;
    if (size <= 4) continue;
    part[0] = static_cast<char>(size - 4);
    part[1] = part[2] = part[3] = 0;
    EXPECT_EQ(take_message(part, message), detail::Taken::broken) << size;
  }
  ControlMessage came;
  ASSERT_EQ(take_message(bytes, came), detail::Taken::message);
  EXPECT_EQ(bytes, "");
  EXPECT_EQ(came.activity.state, sent.activity.state);
  EXPECT_EQ(came.activity.elapsed_ms, 1u);
  EXPECT_EQ(came.activity.sequence, 2u);
  EXPECT_EQ(came.activity.of_all, 3u);
  EXPECT_EQ(came.activity.bytes, 4u);
  EXPECT_EQ(came.activity.still_ms, 5u);
  EXPECT_EQ(came.activity.name, "all_reduce");
  EXPECT_EQ(came.activity.label, "bucket 3");
  EXPECT_EQ(came.activity.blocked, "its main thread waits");
  // A text that is too long is cut, and one that says so is refused.
  std::string longer =
      detail::encode({.kind = ControlMessage::Kind::goodbye, .activity = {.blocked = std::string(600, 'x')}});
  ASSERT_EQ(take_message(longer, came), detail::Taken::message);
  EXPECT_EQ(came.activity.blocked, std::string(512, 'x'));
  longer = detail::encode({.kind = ControlMessage::Kind::goodbye, .activity = {.blocked = std::string(512, 'x')}});
  longer += 'x';
  for (const std::size_t field : {std::size_t{0}, longer.size() - 1 - 512 - 2}) {
    longer[field] = static_cast<char>(static_cast<unsigned char>(longer[field]) + 1);
  }
  EXPECT_EQ(take_message(longer, came), detail::Taken::broken);
}

}  // namespace
}  // namespace halfstep::dist
