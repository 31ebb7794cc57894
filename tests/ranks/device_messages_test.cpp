// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks whose tensors are on devices: by the devices where both have them, and what goes on beside
// them doesn't matter.
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/ops/create.h"
#include "tests/ranks/ranks.h"

namespace halfstep::dist::test {
namespace {

class DeviceMessages : public testing::Test {
 protected:
  void SetUp() override {
    try {
      device_ = Device("sim");
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
    if (world().size() == 1) GTEST_SKIP() << "one rank";
    const char* text = std::getenv("HALFSTEP_SIM_COLLECTIVES");
    there_ = !text || std::string_view(text) != "0";
    world().all_reduce(ones({100}, {.device = device_})).wait();  // makes the devices' group
  }
  template <class T = float>
  Tensor from(int rank, std::int64_t n, int salt = 0) const {
    return values<T>(rank, n, salt).to(device_);
  }
  Tensor blank(std::int64_t n, DType dtype = f32) const { return zeros({n}, {.dtype = dtype, .device = device_}); }
  static std::uint64_t on_devices() { return world().stats().on_devices; }
  static void expect_from(const Tensor& got, int rank, int salt, const std::string& what) {
    expect_bits(got.to(Device()), values<float>(rank, got.numel(), salt).to_vector<float>(), what);
  }

  Device device_;
  bool there_ = true;  // the device has collectives
};

TEST_F(DeviceMessages, GoByTheDevices) {
  const int size = world().size(), rank = world().rank(), to = (rank + 1) % size, by = (rank + size - 1) % size;
  for (const DType dtype : kEverything) {
    for (const std::int64_t n : {std::int64_t{1}, std::int64_t{999}, std::int64_t{300'001}}) {
      visit_dtype(dtype, [&](auto tag) {
        using T = storage_t<tag.value>;
        const std::string what = fmt::format("{} {}", halfstep::name(dtype), n);
        const std::uint64_t before = on_devices();
        const Tensor given = from<T>(rank, n), got = blank(n, dtype);
        const Work sent = world().send(given, to), received = world().receive(got, by);
        received.wait();
        sent.wait();
        std::vector<Stored<T>> expected;
        for (std::int64_t i = 0; i < n; ++i) expected.push_back(value<T>(by, i));
        expect_same<T>(got.to(Device()), expected, what);
        const bool large = n * static_cast<std::int64_t>(item_size(dtype)) > 24;
        EXPECT_EQ(on_devices() - before, there_ && large ? 2U : 0U) << what;
      });
    }
  }
}

// Sizes are learnt on arrival, and the next messages go as before.
TEST_F(DeviceMessages, OfAnotherSizeAreRefused) {
  const int rank = world().rank();
  for (const std::int64_t n : {99, 101, 5}) {
    if (rank == 0) world().send(from(0, n), 1, 3).wait();
    if (rank == 1) {
      const std::string error = error_of([&] { world().receive(blank(100), 0, 3).wait(); });
      EXPECT_NE(error.find(fmt::format("expected 100 elements of f32, rank 0 sent {} of f32", n)), std::string::npos)
          << error;
    }
    const std::uint64_t before = on_devices();
    if (rank == 0) world().send(from(0, 100), 1, 3).wait();
    if (rank == 1) {
      const Tensor got = blank(100);
      world().receive(got, 0, 3).wait();
      expect_from(got, 0, 0, "after it");
    }
    EXPECT_EQ(on_devices() - before, there_ && rank < 2 ? 1U : 0U);
  }
}

TEST_F(DeviceMessages, GoThroughTheHostWhereOneOfTheTwoIsThere) {
  const int rank = world().rank();
  const std::uint64_t before = on_devices();
  for (const int host : {0, 1}) {
    for (const int sender : {0, 1}) {
      for (int round = 0; round < 3; ++round) {
        const Device own = rank == host ? Device() : device_;
        if (rank == sender) world().send(from(rank, 5000, round).to(own), 1 - rank, 1).wait();
        if (rank == 1 - sender) {
          const Tensor got = zeros({5000}, {.device = own});
          world().receive(got, sender, 1).wait();
          expect_from(got, sender, round, "mixed");
        }
      }
    }
  }
  // A group whose devices have done nothing together yet.
  ProcessGroup fresh = world().split(0);
  if (rank == 0) fresh.send(from(0, 5000), 1).wait();
  if (rank == 1) {
    const Tensor got = blank(5000);
    fresh.receive(got, 0).wait();
    expect_from(got, 0, 0, "fresh");
  }
  EXPECT_EQ(on_devices(), before);
}

// Several at a time, received in another order than sent, and those with one tag in theirs.
TEST_F(DeviceMessages, AreToldApartByTheirTags) {
  const int size = world().size(), rank = world().rank();
  constexpr int kTags = 3, kEach = 2;
  const auto salt = [](int tag, int k) { return 10 * tag + k; };
  std::vector<Work> sent;
  for (int tag = 0; tag < kTags; ++tag) {
    for (int k = 0; k < kEach; ++k) {
      for (int r = 0; r < size; ++r) {
        if (r != rank) sent.push_back(world().send(from(rank, 3000 + r, salt(tag, k)), r, tag));
      }
    }
  }
  const std::uint64_t before = on_devices();
  for (int tag = kTags; tag-- > 0;) {
    for (int r = size; r-- > 0;) {
      for (int k = 0; k < kEach; ++k) {
        if (r == rank) continue;
        const Tensor got = blank(3000 + rank);
        world().receive(got, r, tag).wait();
        expect_from(got, r, salt(tag, k), fmt::format("from {}, tag {}, {}", r, tag, k));
      }
    }
  }
  for (const Work& w : sent) w.wait();
  if (there_) {
    EXPECT_GE(on_devices() - before, static_cast<std::uint64_t>(kTags * kEach * (size - 1)));
  }
}

// One rank begins with the message, the other with the collective: by the devices, through the host, one that makes a
// group of devices, and one in which MPI's own call waits.
TEST_F(DeviceMessages, GoOnBesideCollectives) {
  const int size = world().size(), rank = world().rank();
  for (int round = 0; round < 40; ++round) {
    const int a = round % size, b = (a + 1 + round / size % (size - 1)) % size;
    const Tensor given = from(a, 20'000, round), got = blank(20'000), reduced_there = from(rank, 10'000),
                 reduced_here = values<float>(rank, 100), small = from(rank, 30);
    std::vector<Work> works;
    const auto message = [&] {
      if (rank == a) works.push_back(world().send(given, b, round));
      if (rank == b) works.push_back(world().receive(got, a, round));
    };
    std::optional<ProcessGroup> half;
    const bool first = rank == (round % 2 == 0 ? a : b);
    if (first) message();
    works.push_back(world().all_reduce(reduced_there));
    works.push_back(world().broadcast(small, a));
    works.push_back(world().all_reduce(reduced_here));
    if (round % 5 == 0) {
      half = world().split(rank % 2);
      works.push_back(half->all_reduce(from(rank, 500)));
      if (round % 10 == 0) half->free();
    }
    if (!first) message();
    for (const Work& w : works) w.wait();
    if (rank == b) expect_from(got, a, round, fmt::format("round {}", round));
    ASSERT_EQ(reduced_there.to(Device()).data<const float>()[9999], reduced<float>(ReduceOp::sum, size, 9999)) << round;
    ASSERT_EQ(reduced_here.data<const float>()[99], reduced<float>(ReduceOp::sum, size, 99)) << round;
    ASSERT_EQ(small.to(Device()).data<const float>()[29], value<float>(a, 29)) << round;
  }
}

}  // namespace
}  // namespace halfstep::dist::test
