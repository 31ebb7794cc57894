// SPDX-License-Identifier: Apache-2.0
// The end of groups of some ranks. MPI has a limited number of communicators: without their end MPICH fails at about a
// thousand groups.
#include <algorithm>
#include <deque>
#include <filesystem>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/ops/create.h"
#include "tests/ranks/ranks.h"
#include "tests/support/errors.h"

namespace halfstep::dist::test {
namespace {

double sum_of_ranks(ProcessGroup& group) {
  const Tensor t = full({}, world().rank(), {.device = Device{}});
  group.all_reduce(t).wait();
  return t.item<double>();
}

double expected_of_halves() {
  double sum = 0;
  for (int r = world().rank() % 2; r < world().size(); r += 2) sum += r;
  return sum;
}

// MPICH keeps processors busy in its own waiting, which is slow where there are more ranks than processors.
int rounds() { return world().size() <= 2 ? 5000 : world().library().starts_with("MPICH") ? 60 : 1500; }

TEST(SplitGroups, EndWithTheirHandles) {
  for (int i = 0; i < rounds(); ++i) {
    ProcessGroup half = world().split(world().rank() % 2);
    if (i % 100 == 0) {
      ASSERT_EQ(sum_of_ranks(half), expected_of_halves()) << i;
    }
  }
}

// Ranks let go at different times, in different orders, and some groups are parts of others that have gone before.
TEST(SplitGroups, EndWhenTheLastRankLetsGo) {
  std::deque<ProcessGroup> held;
  const int rank = world().rank();
  for (int i = 0; i < rounds() / 3; ++i) {
    ProcessGroup all = world().split(0, -rank);
    held.push_back(all.split(rank % 2));
    held.push_back(all);
    if (i % 50 == 0) {
      ASSERT_EQ(all.rank(), world().size() - 1 - rank);
      ASSERT_EQ(sum_of_ranks(held[held.size() - 2]), expected_of_halves()) << i;
    }
    const std::size_t most = static_cast<std::size_t>(2 * (rank * 5 + i % 7));
    while (held.size() > most) {
      if ((i + rank) % 2 == 0) {
        held.pop_front();
      } else {
        held.pop_back();
      }
    }
  }
}

TEST(SplitGroups, MayBeFreedAtOnce) {
  for (int i = 0; i < rounds(); ++i) {
    ProcessGroup half = world().split(world().rank() % 2), copy = half;
    half.free();
    if (i > 0) continue;
    const Tensor t = ones({4}, {.device = Device{}});
    for (const std::string& error : {halfstep::test::error_of<Error>([&] { half.all_reduce(t); }),
                                     halfstep::test::error_of<Error>([&] { copy.barrier(); }),
                                     halfstep::test::error_of<Error>([&] { copy.free(); }),
                                     halfstep::test::error_of<Error>([&] { half.split(0); })}) {
      EXPECT_NE(error.find(": the group was freed"), std::string::npos) << error;
    }
    EXPECT_EQ(half.size(), (world().size() + 1 - world().rank() % 2) / 2);
  }
  EXPECT_NE(halfstep::test::error_of<Error>([&] { world().free(); }).find("a group that split() has made"),
            std::string::npos);
}

TEST(SplitGroups, AreFreedByAllRanksOrNone) {
  const int size = world().size(), rank = world().rank();
  if (size == 1) return;
  ProcessGroup group = world().split(0);
  const std::string error = error_of([&] {
    if (rank == 0) {
      group.free();
    } else {
      group.barrier();
    }
  });
  EXPECT_NE(error.find("expected all ranks to do the same, got rank 0: free;"), std::string::npos) << error;
  EXPECT_EQ(sum_of_ranks(group), size * (size - 1) / 2);
  // A message on its way is waited for.
  const Tensor t = values<float>(rank, 50'000), came = zeros({50'000}, {.device = Device{}});
  std::optional<Work> work;
  if (rank == 0) work = group.send(t, 1);
  if (rank == 1) work = group.receive(came, 0);
  group.free();
  if (work) work->wait();
  if (rank == 1) expect_bits(came, values<float>(0, 50'000).to_vector<float>(), "message");
}

// The simulated device has a file for each group.
TEST(SplitGroups, LetGoOfTheDevices) {
  std::optional<Device> device;
  try {
    device = Device("sim");
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
  const auto files = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  std::ptrdiff_t before = 0;
  for (int i = 0; i < 20; ++i) {
    ProcessGroup all = world().split(0);
    const Tensor t = full({1000}, world().rank(), {.device = *device});
    all.all_reduce(t).wait();
    ASSERT_EQ(t.to(Device()).data<const float>()[999], static_cast<float>(world().size() * (world().size() - 1) / 2));
    if (i % 2 == 0) all.free();
    if (i == 4) before = files();
  }
  EXPECT_LE(files(), before + 4);
}

}  // namespace
}  // namespace halfstep::dist::test
