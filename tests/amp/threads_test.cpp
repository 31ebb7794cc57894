// SPDX-License-Identifier: Apache-2.0
// Threads with regions of their own over shared parameters; meant for the thread sanitizer too.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

constexpr int kThreads = 4, kRounds = 25;

Tensor matrix(std::int64_t n, double phase, bool requires_grad) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n * n; ++i) values.push_back(std::sin(phase + static_cast<double>(i)));
  return tensor(values, {n, n}, {.requires_grad = requires_grad});
}

template <class F>
void in_threads(F f) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back([&f, t] { f(t); });
}

TEST(Threads, InferenceOverSharedParametersInRegionsOfTheirOwn) {
  const Tensor w = matrix(16, 1, true), x = matrix(16, 2, false);
  const DType dtypes[] = {f16, bf16};
  std::vector<float> expected[2];
  for (int d = 0; d < 2; ++d) expected[d] = mm(x.to(dtypes[d]), w.detach().to(dtypes[d])).to_vector<float>();
  std::vector<int> wrong(kThreads);
  in_threads([&](int t) {
    const NoGrad no_grad;
    for (int round = 0; round < kRounds; ++round) {
      const int d = (t + round) % 2;
      const amp::Autocast region{{.dtype = dtypes[d]}};
      for (int use = 0; use < 3; ++use)
        wrong[static_cast<std::size_t>(t)] += mm(x, w).to_vector<float>() != expected[d];
    }
  });
  EXPECT_EQ(wrong, std::vector<int>(kThreads));
}

TEST(Threads, EachMayTakeGradientsOfSharedParameters) {
  const Tensor w = matrix(16, 1, true), x = matrix(16, 2, false);
  const auto gradient = [&] {
    const amp::Autocast region{{.dtype = bf16}};
    return grad({sum(mm(mm(x, w), w))}, {w})[0].to_vector<float>();
  };
  const auto expected = gradient();
  std::vector<int> wrong(kThreads);
  in_threads([&](int t) {
    for (int round = 0; round < kRounds; ++round) wrong[static_cast<std::size_t>(t)] += gradient() != expected;
  });
  EXPECT_EQ(wrong, std::vector<int>(kThreads));
}

TEST(Threads, BackwardPassesAddUpInSharedParameters) {
  const Tensor w = tensor({1, 2, 3}, {3}, {.requires_grad = true});
  in_threads([&](int) {
    for (int round = 0; round < kRounds; ++round) sum(w * 2).backward();
  });
  // Whole numbers: the order doesn't matter.
  EXPECT_EQ(w.grad().to_vector<float>(), std::vector<float>(3, 2.0f * kThreads * kRounds));
}

TEST(Threads, OneGraphRunByManyThreads) {
  const Tensor x = tensor({1, 2, 3}, {3}, {.dtype = f64, .requires_grad = true});
  const Tensor y = sum(x * x * x);
  in_threads([&](int) {
    for (int round = 0; round < kRounds; ++round) {
      const Tensor g = grad({y}, {x}, {.retain_graph = true})[0];
      EXPECT_EQ(g.to_vector<double>(), (std::vector<double>{3, 12, 27}));
    }
  });
}

}  // namespace
}  // namespace halfstep
