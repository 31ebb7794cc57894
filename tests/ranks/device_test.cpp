// SPDX-License-Identifier: Apache-2.0
// Tensors on a device go through the host.
#include <algorithm>

#include "halfstep/dist/functional.h"
#include "halfstep/ops/arithmetic.h"
#include "tests/ranks/ranks.h"

namespace halfstep::dist::test {
namespace {

class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    try {
      device_ = Device("sim");
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
  Tensor there(std::int64_t n, int salt = 0) const { return values<float>(world().rank(), n, salt).to(device_); }
  Device device_;
};

TEST_F(OnDevice, CollectivesReadAndWriteIt) {
  ProcessGroup& all = world();
  const std::int64_t n = 5003;
  // What a device still computes when the collective is called counts.
  const Tensor x = there(n) * 2.0;
  const Work work = all.all_reduce(x);
  work.wait();
  EXPECT_TRUE(work.done());
  Tensor on_host = x.to(Device());
  for (std::int64_t i = 0; i < n; ++i) {
    float expected = 2 * value<float>(0, i);
    for (int r = 1; r < all.size(); ++r) expected += 2 * value<float>(r, i);
    ASSERT_EQ(on_host.data<const float>()[i], expected) << i;
  }
  const Tensor sent = there(n), output = empty({n * all.size()}, {.device = device_});
  all.all_gather(output, sent).wait();
  on_host = output.to(Device());
  EXPECT_EQ(on_host.data<const float>()[n * (all.size() - 1) + 7], value<float>(all.size() - 1, 7));
  const Tensor b = there(n);
  all.broadcast(b, 1).wait();
  EXPECT_EQ(b.to(Device()).data<const float>()[n - 1], value<float>(1, n - 1));
  const Tensor part = empty({n}, {.device = device_});
  all.reduce_scatter(part, there(n * all.size())).wait();
  EXPECT_EQ(part.to(Device()).data<const float>()[3], reduced<float>(ReduceOp::sum, all.size(), n * all.rank() + 3));
  const Tensor swapped = empty({n * all.size()}, {.device = device_});
  all.all_to_all(swapped, there(n * all.size())).wait();
  EXPECT_EQ(swapped.to(Device()).data<const float>()[n + 1], value<float>(1, n * all.rank() + 1));
}

TEST_F(OnDevice, MessagesAndGradients) {
  ProcessGroup& all = world();
  const Tensor got = empty({100}, {.device = device_});
  const Work sent = all.send(there(100), (all.rank() + 1) % all.size());
  const int last = (all.rank() + all.size() - 1) % all.size();
  all.receive(got, last).wait();
  sent.wait();
  EXPECT_EQ(got.to(Device()).data<const float>()[99], value<float>(last, 99));
  Tensor x = there(10);
  x.requires_grad_();
  all_reduce(x, all).backward(there(10, 1));
  EXPECT_EQ(x.grad().to(Device()).data<const float>()[4], reduced<float>(ReduceOp::sum, all.size(), 4, 1));
}

TEST_F(OnDevice, OneRankMayUseTheHost) {
  Tensor t = values<float>(world().rank(), 64);
  if (world().rank() == 0) t = t.to(device_);
  world().all_reduce(t).wait();
  EXPECT_EQ(t.to(Device()).data<const float>()[63], reduced<float>(ReduceOp::sum, world().size(), 63));
}

}  // namespace
}  // namespace halfstep::dist::test
