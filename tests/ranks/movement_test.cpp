// SPDX-License-Identifier: Apache-2.0
// Collectives that move values, texts, sub-groups, and messages between two ranks.
#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/ranks/ranks.h"

namespace halfstep::dist::test {
namespace {

const std::vector<std::int64_t> kCounts = {0, 1, 3, 7, 999, 20011};

std::string case_name(DType dtype, std::int64_t n, int root = 0) {
  return std::string(halfstep::name(dtype)) + " " + std::to_string(n) + " root " + std::to_string(root);
}

template <class F>
void each_case(F&& f) {
  for (const DType dtype : kEverything) {
    for (const std::int64_t n : kCounts) visit_dtype(dtype, [&](auto tag) { f(tag, n); });
  }
}

template <class T>
Tensor blank(std::int64_t n) {
  const Tensor t = empty({n}, {.dtype = dtype_of<T>, .device = Device()});
  std::fill_n(t.data<T>(), n, convert<T>(1));
  return t;
}

TEST(Movement, Broadcast) {
  for (int root = 0; root < world().size(); ++root) {
    each_case([&](auto tag, std::int64_t n) {
      using T = storage_t<tag.value>;
      const Tensor t = values<T>(world().rank(), n);
      world().broadcast(t, root).wait();
      std::vector<Stored<T>> expected;
      for (std::int64_t i = 0; i < n; ++i) expected.push_back(value<T>(root, i));
      expect_same<T>(t, expected, case_name(tag.value, n, root));
    });
  }
}

template <class T>
std::vector<Stored<T>> all_values(std::int64_t n) {
  std::vector<Stored<T>> all;
  for (int r = 0; r < world().size(); ++r) {
    for (std::int64_t i = 0; i < n; ++i) all.push_back(value<T>(r, i));
  }
  return all;
}

TEST(Movement, AllGather) {
  each_case([&](auto tag, std::int64_t n) {
    using T = storage_t<tag.value>;
    const Tensor output = blank<T>(n * world().size());
    world().all_gather(output, values<T>(world().rank(), n)).wait();
    expect_same<T>(output, all_values<T>(n), case_name(tag.value, n));
    // In place.
    const Tensor again = blank<T>(n * world().size());
    const Tensor own = again.slice(0, n * world().rank(), n * (world().rank() + 1));
    for (std::int64_t i = 0; i < n; ++i) own.data<T>()[i] = value<T>(world().rank(), i);
    world().all_gather(again, own).wait();
    expect_same<T>(again, all_values<T>(n), case_name(tag.value, n) + " in place");
  });
}

TEST(Movement, Gather) {
  for (int root = 0; root < world().size(); ++root) {
    each_case([&](auto tag, std::int64_t n) {
      using T = storage_t<tag.value>;
      const bool here = world().rank() == root;
      const Tensor output = here ? blank<T>(n * world().size()) : Tensor();
      world().gather(output, values<T>(world().rank(), n), root).wait();
      if (here) expect_same<T>(output, all_values<T>(n), case_name(tag.value, n, root));
    });
  }
}

TEST(Movement, Scatter) {
  for (int root = 0; root < world().size(); ++root) {
    each_case([&](auto tag, std::int64_t n) {
      using T = storage_t<tag.value>;
      const Tensor input = world().rank() == root ? values<T>(root, n * world().size()) : Tensor();
      const Tensor output = blank<T>(n);
      world().scatter(output, input, root).wait();
      std::vector<Stored<T>> expected;
      for (std::int64_t i = 0; i < n; ++i) expected.push_back(value<T>(root, n * world().rank() + i));
      expect_same<T>(output, expected, case_name(tag.value, n, root));
    });
  }
}

TEST(Movement, AllToAll) {
  each_case([&](auto tag, std::int64_t n) {
    using T = storage_t<tag.value>;
    const Tensor output = blank<T>(n * world().size());
    world().all_to_all(output, values<T>(world().rank(), n * world().size())).wait();
    std::vector<Stored<T>> expected;
    for (int r = 0; r < world().size(); ++r) {
      for (std::int64_t i = 0; i < n; ++i) expected.push_back(value<T>(r, n * world().rank() + i));
    }
    expect_same<T>(output, expected, case_name(tag.value, n));
  });
}

TEST(Movement, TextsOfAnyLength) {
  const auto text_of = [](int rank) {
    return std::string(static_cast<std::size_t>(rank * 5000), char(rank)) + std::string("\0end", 4);
  };
  const auto texts = world().all_gather_text(text_of(world().rank()));
  ASSERT_EQ(static_cast<int>(texts.size()), world().size());
  for (int r = 0; r < world().size(); ++r) {
    EXPECT_EQ(texts[static_cast<std::size_t>(r)], text_of(r));
    EXPECT_EQ(world().broadcast_text("from " + std::to_string(world().rank()), r), "from " + std::to_string(r));
    EXPECT_EQ(world().broadcast_text("", r), "");
  }
}

TEST(Movement, BarrierWaitsForAll) {
  for (int k = 0; k < 20; ++k) world().barrier("a barrier");
}

TEST(Movement, PlaceOfARank) {
  const auto hosts = world().all_gather_text(world().host(world().rank()));
  for (int r = 0; r < world().size(); ++r) EXPECT_EQ(world().host(r), hosts[static_cast<std::size_t>(r)]);
  // These tests run on one machine.
  EXPECT_EQ(world().local_rank(), world().rank());
  EXPECT_EQ(world().local_size(), world().size());
  EXPECT_TRUE(ProcessGroup::launched());
  EXPECT_TRUE(world().library().starts_with("Open MPI ") || world().library().starts_with("MPICH "))
      << world().library();
  EXPECT_TRUE(ProcessGroup::init() == world());
  EXPECT_THROW(world().host(world().size()), Error);
}

TEST(SubGroups, CommunicateAmongThemselves) {
  const int color = world().rank() % 2;
  ProcessGroup part = world().split(color);
  const int expected_size = (world().size() + 1 - color) / 2;
  EXPECT_EQ(part.size(), expected_size);
  EXPECT_EQ(part.rank(), world().rank() / 2);
  EXPECT_EQ(part.local_size(), expected_size);
  EXPECT_FALSE(part == world());
  const Tensor t = values<float>(world().rank(), 5001);
  part.all_reduce(t).wait();
  std::vector<float> expected;
  for (std::int64_t i = 0; i < 5001; ++i) {
    float sum = value<float>(color, i);
    for (int r = color + 2; r < world().size(); r += 2) sum += value<float>(r, i);
    expected.push_back(sum);
  }
  expect_bits(t, expected, "half of the ranks");
  // Both groups at once.
  const Tensor all = values<float>(world().rank(), 11), half = values<float>(world().rank(), 11);
  const Work a = world().all_reduce(all), b = part.all_reduce(half);
  b.wait();
  a.wait();
  expected.resize(11);
  expect_bits(half, expected, "half");
  for (std::int64_t i = 0; i < 11; ++i) {
    expected[static_cast<std::size_t>(i)] = reduced<float>(ReduceOp::sum, world().size(), i);
  }
  expect_bits(all, expected, "all");
}

TEST(SubGroups, KeysSetTheOrder) {
  ProcessGroup reversed = world().split(0, -world().rank());
  EXPECT_EQ(reversed.rank(), world().size() - 1 - world().rank());
  EXPECT_EQ(reversed.broadcast_text(std::to_string(world().rank()), 0), std::to_string(world().size() - 1));
  ProcessGroup alone = world().split(world().rank());
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.all_gather_text("me"), std::vector<std::string>{"me"});
}

TEST(Messages, GoAroundTheRing) {
  const int size = world().size(), next = (world().rank() + 1) % size, last = (world().rank() + size - 1) % size;
  for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{300001}}) {
    const Tensor got = blank<float>(n);
    // All send first: neither waits for the other.
    const Work sent = world().send(values<float>(world().rank(), n), next, 3);
    const Work received = world().receive(got, last, 3);
    received.wait();
    sent.wait();
    std::vector<float> expected;
    for (std::int64_t i = 0; i < n; ++i) expected.push_back(value<float>(last, i));
    expect_bits(got, expected, std::to_string(n));
  }
}

TEST(Messages, TagsAndOrder) {
  ProcessGroup& all = world();
  const Tensor first = blank<float>(5), second = blank<float>(70000), third = blank<std::int32_t>(3);
  if (all.rank() == 0) {
    for (int r = 1; r < all.size(); ++r) {
      all.send(values<std::int32_t>(r, 3), r, 9).wait();
      const Work a = all.send(values<float>(r, 5), r, 2), b = all.send(values<float>(r, 70000), r, 2);
      b.wait();
      a.wait();
    }
  } else {
    const Work a = all.receive(first, 0, 2), b = all.receive(second, 0, 2), c = all.receive(third, 0, 9);
    c.wait();
    b.wait();
    a.wait();
    EXPECT_EQ(first.data<float>()[4], value<float>(all.rank(), 4));
    EXPECT_EQ(second.data<float>()[69999], value<float>(all.rank(), 69999));
    EXPECT_EQ(third.data<std::int32_t>()[2], value<std::int32_t>(all.rank(), 2));
  }
  all.barrier();
}

// One that is sent while a collective waits for the other rank arrives before that rank joins it.
TEST(Messages, GoOnBesideACollectiveThatWaits) {
  const int rank = world().rank();
  if (world().size() == 1) GTEST_SKIP() << "one rank";
  const Tensor t = values<float>(rank, 5000), x = values<float>(0, 100, 1);
  if (rank == 0) {
    const Work all = world().all_reduce(t);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const Work sent = world().send(x, 1);
    all.wait();
    sent.wait();
  } else {
    const Tensor came = empty({100}, {.device = Device()});
    if (rank == 1) {
      world().receive(came, 0).wait();
      EXPECT_EQ(came.to_vector<float>(), x.to_vector<float>());
    }
    world().all_reduce(t).wait();
  }
  EXPECT_EQ(t.data<float>()[99], reduced<float>(ReduceOp::sum, world().size(), 99));
}

TEST(Messages, AMessageOfAnotherSizeIsAnErrorWhereItArrives) {
  ProcessGroup& all = world();
  if (all.rank() == 0) {
    all.send(values<float>(0, 20000), 1, 1).wait();
    all.send(values<float>(0, 4), 1, 1).wait();
  } else if (all.rank() == 1) {
    const Tensor small = blank<double>(3), right = blank<float>(4);
    EXPECT_EQ(error_of([&] { all.receive(small, 0, 1).wait(); }),
              "receive from rank 0 (tag 1): expected 3 elements of f64, rank 0 sent 20000 of f32");
    all.receive(right, 0, 1).wait();
    EXPECT_EQ(right.data<float>()[3], value<float>(0, 3));
  }
  all.barrier();
  EXPECT_THROW(all.send(blank<float>(1), all.rank()), Error);
  EXPECT_THROW(all.receive(blank<float>(1), all.size()), Error);
  EXPECT_THROW(all.send(blank<float>(1), (all.rank() + 1) % all.size(), -1), Error);
}

}  // namespace
}  // namespace halfstep::dist::test
