// SPDX-License-Identifier: Apache-2.0
// Ranks that do different things are told so, all of them, before data are sent; the group can be used afterwards.
#include "tests/ranks/ranks.h"

namespace halfstep::dist::test {
namespace {

bool is_last() { return world().rank() == world().size() - 1; }

// `rank 0`, `ranks 0 and 1`, `ranks 0, 1 and 2`: all but the last.
std::string all_but_last() {
  switch (world().size()) {
    case 2:
      return "rank 0";
    case 3:
      return "ranks 0 and 1";
    default:
      return "ranks 0, 1 and 2";
  }
}
std::string last() { return "rank " + std::to_string(world().size() - 1); }

// What follows the collective's own name and number.
std::string after_title(const std::string& text) {
  const auto at = text.find(": ");
  return at == std::string::npos ? text : text.substr(at + 2);
}

void expect_usable() {
  const Tensor t = values<float>(world().rank(), 100);
  world().all_reduce(t).wait();
  EXPECT_EQ(t.data<float>()[99], reduced<float>(ReduceOp::sum, world().size(), 99));
}

TEST(Disagreement, Counts) {
  const Tensor t = values<float>(world().rank(), is_last() ? 5000 : 4096);
  const std::vector<float> before = t.to_vector<float>();
  const std::string text = error_of([&] { world().all_reduce(t, ReduceOp::sum, "bucket 3").wait(); });
  EXPECT_TRUE(text.starts_with("all_reduce #")) << text;
  EXPECT_NE(text.find(" (bucket 3): "), std::string::npos) << text;
  EXPECT_EQ(after_title(text), "expected all ranks to do the same, got " + all_but_last() +
                                   ": all_reduce f32 [4096] sum (bucket 3); " + last() +
                                   ": all_reduce f32 [5000] sum (bucket 3)");
  EXPECT_EQ(t.to_vector<float>(), before);  // nothing was added up
  expect_usable();
}

TEST(Disagreement, Dtypes) {
  const std::string text = error_of([&] {
    if (is_last()) {
      world().all_reduce(values<Half>(world().rank(), 64)).wait();
    } else {
      world().all_reduce(values<BFloat16>(world().rank(), 64)).wait();
    }
  });
  EXPECT_EQ(after_title(text), "expected all ranks to do the same, got " + all_but_last() +
                                   ": all_reduce bf16 [64] sum; " + last() + ": all_reduce f16 [64] sum");
  expect_usable();
}

TEST(Disagreement, Operations) {
  const std::string text = error_of([&] {
    world().all_reduce(values<float>(world().rank(), 64), is_last() ? ReduceOp::max : ReduceOp::mean).wait();
  });
  EXPECT_EQ(after_title(text), "expected all ranks to do the same, got " + all_but_last() +
                                   ": all_reduce f32 [64] mean; " + last() + ": all_reduce f32 [64] max");
  expect_usable();
}

TEST(Disagreement, Order) {
  const Tensor gradient = values<float>(world().rank(), 4096), weights = values<float>(world().rank(), 16);
  const Work a = is_last() ? world().broadcast(weights, 0, "weights") : world().all_reduce(gradient);
  const Work b = is_last() ? world().all_reduce(gradient) : world().broadcast(weights, 0, "weights");
  EXPECT_EQ(after_title(error_of([&] { a.wait(); })), "expected all ranks to do the same, got " + all_but_last() +
                                                          ": all_reduce f32 [4096] sum; " + last() +
                                                          ": broadcast f32 [16] from 0 (weights)");
  EXPECT_NE(error_of([&] { b.wait(); }), "");
  EXPECT_NE(error_of([&] { b.wait(); }), "");  // on every call
  expect_usable();
}

TEST(Disagreement, LabelsRootsAndLayouts) {
  const Tensor t = values<float>(world().rank(), 12).view({3, 4});
  EXPECT_EQ(after_title(error_of([&] { world().all_reduce(t, ReduceOp::sum, is_last() ? "b" : "a").wait(); })),
            "expected all ranks to do the same, got " + all_but_last() + ": all_reduce f32 [3, 4] sum (a); " + last() +
                ": all_reduce f32 [3, 4] sum (b)");
  EXPECT_EQ(after_title(error_of([&] { world().broadcast(t, is_last() ? 1 : 0).wait(); })),
            "expected all ranks to do the same, got " + all_but_last() + ": broadcast f32 [3, 4] from 0; " + last() +
                ": broadcast f32 [3, 4] from 1");
  EXPECT_NE(error_of([&] { world().all_reduce(is_last() ? t.t() : t).wait(); }), "");
  EXPECT_NE(error_of([&] {
              if (is_last()) {
                world().barrier();
              } else {
                world().all_gather_text("x");
              }
            }),
            "");
  expect_usable();
}

// What one rank can see alone is refused before it waits for others.
TEST(Disagreement, WrongArgumentsOfOneRank) {
  const Tensor t = values<float>(world().rank(), 12), other = values<float>(world().rank(), 5);
  EXPECT_THROW(world().all_gather(t, other), ShapeError);
  EXPECT_THROW(world().reduce_scatter(t, other), ShapeError);
  EXPECT_THROW(world().all_gather(t, values<double>(0, 1)), DTypeError);
  EXPECT_THROW(world().all_reduce(values<bool>(0, 4)), DTypeError);
  EXPECT_THROW(world().all_reduce(values<std::int32_t>(0, 4), ReduceOp::mean), DTypeError);
  EXPECT_THROW(world().all_reduce(t.expand({3, 12})), ShapeError);
  EXPECT_THROW(world().all_reduce(Tensor()), Error);
  EXPECT_THROW(world().broadcast(t, -1), Error);
  EXPECT_THROW(world().broadcast(t, world().size()), Error);
  EXPECT_THROW(world().all_to_all(t, t), Error);  // it can't be done in place
  EXPECT_THROW(world().split(-1), Error);
  expect_usable();
}

}  // namespace
}  // namespace halfstep::dist::test
