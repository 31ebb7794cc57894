// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/random.h"

#include <algorithm>
#include <map>
#include <set>

#include "halfstep/core/box_muller.h"
#include "halfstep/runtime/parallel.h"
#include "tests/ops/index_checks.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using namespace test;

TEST(Random, ElementsAreWordsOfTheStream) {
  Generator g(42);
  g.reserve(5);
  const PhiloxState state = g.state();
  const Values u = rand({3, 5}, {}, &g).to_vector<double>();
  for (std::uint64_t i = 0; i < 15; ++i) EXPECT_EQ(u[i], uniform_f32(philox_word(state, i)));
  EXPECT_EQ(g.offset(), state.offset + 4) << "four words a block";
  const PhiloxState next = g.state();
  const Values n = randn({7}, {.dtype = f64}, &g).to_vector<double>();
  for (std::uint64_t i = 0; i < 7; ++i) EXPECT_EQ(n[i], normal_at64(next, i));
  EXPECT_EQ(g.offset(), next.offset + 4) << "two a block";
}

// Each kernel against the function of the stream that core/ defines, which has its own answers to match.
TEST(Random, EveryKernelIsItsFunctionOfTheStream) {
  Generator g(0x123456789abcdefull);
  g.reserve(3);
  const std::int64_t n = 2053;  // several blocks of the kernels, and ends of them
  const auto rounded = [](double v, DType dtype) {
    return tensor(Values{v}, {1}, {.dtype = f64}).to(dtype).item<double>();
  };
  for (const DType dtype : {f32, f16, bf16}) {
    const PhiloxState normal_state = g.state();
    const Values z = randn({n}, {.dtype = dtype}, &g).to_vector<double>();
    const PhiloxState uniform_state = g.state();
    const Values u = rand({n}, {.dtype = dtype}, &g).to_vector<double>();
    const int digits = dtype == f32 ? 24 : dtype == f16 ? 11 : 8;
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(n); ++i) {
      EXPECT_EQ(z[i], rounded(normal_at(normal_state, i), dtype)) << name(dtype) << i;
      EXPECT_EQ(u[i], uniform_bits(philox_word(uniform_state, i), digits)) << name(dtype) << i;
    }
  }
  const PhiloxState wide = g.state();
  const Values w = rand({n}, {.dtype = f64}, &g).to_vector<double>();
  const PhiloxState whole = g.state();
  const auto k = randint(-3, 1000, {n}, {.dtype = i64}, &g).to_vector<std::int64_t>();
  const PhiloxState coin = g.state();
  const Values b = bernoulli_(zeros({n}), 0.3, &g).to_vector<double>();
  const PhiloxState coins = g.state();
  const Values c = bernoulli(full({n}, 0.75), &g).to_vector<double>();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(n); ++i) {
    EXPECT_EQ(w[i], uniform_f64(philox_word64(wide, i)));
    EXPECT_EQ(k[i], -3 + static_cast<std::int64_t>(integer_below(whole, i, 1003)));
    EXPECT_EQ(b[i], philox_word(coin, i) < bernoulli_threshold(0.3) ? 1 : 0);
    EXPECT_EQ(c[i], philox_word(coins, i) < bernoulli_threshold(0.75) ? 1 : 0);
  }
  const PhiloxState order_state = g.state();
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  halfstep::randperm(order_state, n, order.data());
  EXPECT_EQ(halfstep::randperm(n, {.dtype = i64}, &g).to_vector<std::int64_t>(), order);
}

TEST(Random, SeedsDecide) {
  manual_seed(7);
  const Values a = randn({100}).to_vector<double>(), b = randn({100}).to_vector<double>();
  EXPECT_NE(a, b);
  manual_seed(7);
  EXPECT_EQ(randn({100}).to_vector<double>(), a);
  manual_seed(7);
  EXPECT_EQ(randn({10, 20}).to_vector<double>()[57], a[57]) << "the shape doesn't matter";
  manual_seed(8);
  EXPECT_NE(randn({100}).to_vector<double>(), a);
}

TEST(Random, ThreadsAndLayoutsDoNotMatter) {
  const int threads = num_threads();
  std::vector<Values> results[2];
  for (int k = 0; k < 2; ++k) {
    set_num_threads(k == 0 ? 1 : 4);
    Generator g(3);
    results[k] = {rand({30001}, {}, &g).to_vector<double>(), randn({30001}, {.dtype = f16}, &g).to_vector<double>(),
                  randint(-5, 1000000007, {30001}, {.dtype = i64}, &g).to_vector<double>()};
  }
  set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
  Generator a(3), b(3);
  const Tensor like = zeros({2, 3, 4, 5}).contiguous(MemoryFormat::channels_last);
  const Tensor x = randn_like(like, &a);
  EXPECT_TRUE(x.is_contiguous(MemoryFormat::channels_last));
  EXPECT_EQ(x.to_vector<double>(), randn({2, 3, 4, 5}, {}, &b).to_vector<double>());
  Tensor whole = zeros({4, 6});
  Generator c(3), d(3);
  normal_(whole.slice(1, 0, 6, 2), 0, 1, &c);
  EXPECT_EQ(whole.slice(1, 0, 6, 2).to_vector<double>(), randn({4, 3}, {}, &d).to_vector<double>());
  EXPECT_EQ(sum(whole.slice(1, 1, 6, 2)).item<double>(), 0);
}

TEST(Random, UniformStaysInside) {
  Generator g(1);
  for (const DType d : {f64, f32, f16, bf16}) {
    const Values u = rand({20000}, {.dtype = d}, &g).to_vector<double>();
    double total = 0;
    for (double v : u) {
      ASSERT_GE(v, 0) << name(d);
      ASSERT_LT(v, 1) << name(d);
      total += v;
    }
    // Mean of n uniforms: standard deviation sqrt(1 / 12 n) = 0.002; truncation to 8 bits lowers it by up to 0.002.
    EXPECT_NEAR(total / 20000, 0.5, 0.012) << name(d);
    // 1000 to 1001 has few numbers of 16 bits, and 1001 must not be one of them.
    for (double v : uniform_(empty({5000}, {.dtype = d}), 1000, 1001, &g).to_vector<double>()) {
      ASSERT_LT(v, 1001) << name(d);
      ASSERT_GE(v, 995) << name(d);
    }
  }
  EXPECT_EQ(uniform_(empty({3}), 2, 2, &g).to_vector<double>(), (Values{2, 2, 2}));
}

TEST(Random, NormalHasItsMoments) {
  Generator g(2);
  const std::int64_t n = 100000;
  for (const DType d : {f64, f32, f16, bf16}) {
    const Values v = normal_(empty({n}, {.dtype = d}), 3, 0.5, &g).to_vector<double>();
    double mean = 0, square = 0;
    for (double x : v) mean += x;
    mean /= n;
    for (double x : v) square += (x - mean) * (x - mean);
    // Standard deviations of the estimates: 0.5 / sqrt(n) = 0.0016 and 0.5 / sqrt(2 n) = 0.0011; six of each.
    EXPECT_NEAR(mean, 3, 0.01) << name(d);
    EXPECT_NEAR(std::sqrt(square / n), 0.5, 0.007) << name(d);
  }
}

TEST(Random, Integers) {
  Generator g(4);
  const Tensor x = randint(-2, 3, {5000}, {.dtype = i64}, &g);
  EXPECT_EQ(x.dtype(), i64);
  std::map<std::int64_t, int> counts;
  for (std::int64_t v : x.to_vector<std::int64_t>()) ++counts[v];
  EXPECT_EQ(counts.size(), 5u);
  // Binomial with n = 5000, p = 1 / 5: standard deviation 28; six of them.
  for (const auto& [v, count] : counts) EXPECT_NEAR(count, 1000, 170) << v;
  EXPECT_EQ(randint(0, 2, {4}, {.dtype = boolean}, &g).dtype(), boolean);
  const Tensor wide = randint(INT64_MIN, INT64_MAX, {100}, {.dtype = i64}, &g);
  const auto numbers = wide.to_vector<std::int64_t>();
  EXPECT_GT(*std::max_element(numbers.begin(), numbers.end()), INT64_MAX / 2);
  EXPECT_LT(*std::min_element(numbers.begin(), numbers.end()), INT64_MIN / 2);
  EXPECT_EQ(randint_like(zeros({2, 2}, {.dtype = u8}), 0, 256, &g).dtype(), u8);
  EXPECT_THROW(randint(3, 3, {1}), Error);
  EXPECT_THROW(randint(0, 300, {1}, {.dtype = u8}), DTypeError);
}

TEST(Random, Permutations) {
  Generator g(5);
  const auto order = randperm(1000, {.dtype = i64}, &g).to_vector<std::int64_t>();
  EXPECT_EQ(std::set<std::int64_t>(order.begin(), order.end()).size(), 1000u);
  EXPECT_EQ(*std::min_element(order.begin(), order.end()), 0);
  EXPECT_NE(order, randperm(1000, {.dtype = i64}, &g).to_vector<std::int64_t>());
  EXPECT_EQ(randperm(0).numel(), 0);
  EXPECT_EQ(randperm(5, {.dtype = f32}).dtype(), f32);
  EXPECT_THROW(randperm(-1), Error);
}

TEST(Random, Bernoulli) {
  Generator g(6);
  const Tensor p = tensor({0, 1, 0.25, 0.75}).expand({4000, 4});
  const Tensor x = bernoulli(p, &g);
  const Values counts = sum(x, {0}).to_vector<double>();
  EXPECT_EQ(counts[0], 0);
  EXPECT_EQ(counts[1], 4000);
  // Standard deviation sqrt(4000 * 3 / 16) = 27; six of them.
  EXPECT_NEAR(counts[2], 1000, 165);
  EXPECT_NEAR(counts[3], 3000, 165);
  EXPECT_EQ(sum(bernoulli_(zeros({100}, {.dtype = i64}), 1, &g)).item<int>(), 100);
  EXPECT_THROW(bernoulli(tensor({0.5, 1.5})), Error);
  EXPECT_THROW(bernoulli(tensor({NAN})), Error);
  EXPECT_THROW(bernoulli_(zeros({1}), -0.1), Error);
}

// The same words decide in every dtype and layout; a probability is what its dtype makes of it, here exact.
TEST(Random, CoinsAreThoseOfTheStreamInEveryDType) {
  const std::int64_t rows = 131, columns = 67, n = rows * columns;
  const auto chance = [](std::int64_t i) { return static_cast<double>(i % 9) / 8; };
  Values chances;
  for (std::int64_t i = 0; i < n; ++i) chances.push_back(chance(i));
  for (const DType d : {f32, f64, f16, bf16}) {
    for (const int threads : {1, 3}) {
      test::ThreadsGuard guard(threads);
      Generator g(11);
      PhiloxState state = g.state();
      const auto expect_coins = [&](const Tensor& coins, const auto& p, const char* what) {
        const Values got = coins.to_vector<double>();
        for (std::int64_t i = 0; i < n; ++i) {
          const bool below = philox_word(state, static_cast<std::uint64_t>(i)) < bernoulli_threshold(p(i));
          ASSERT_EQ(got[static_cast<std::size_t>(i)], below ? 1 : 0) << what << " " << i << " " << name(d);
        }
        state = g.state();
      };
      const auto fixed = [](std::int64_t) { return 0.3; };
      expect_coins(bernoulli_(empty({n}, {.dtype = d}), 0.3, &g), fixed, "all alike");
      expect_coins(bernoulli_(empty({columns, rows}, {.dtype = d}).t(), 0.3, &g), fixed, "all alike, turned");
      const Tensor p = tensor(chances, {rows, columns}, {.dtype = d});
      expect_coins(bernoulli(p, &g), chance, "each its own");
      expect_coins(bernoulli(p.t().contiguous().t(), &g), chance, "each its own, turned");
      Tensor wrong = p.clone();
      wrong[rows - 1][columns - 1].fill_(1.5);
      EXPECT_THROW(bernoulli(wrong, &g), Error);
    }
  }
  EXPECT_EQ(sum(bernoulli_(ones({1000}, {.dtype = f16}), 0)).item<double>(), 0);
}

// Probabilities about each element's own word, halfway between two thresholds too: with a probability of
// (word + step) / 2^32 the threshold is word + step rounded to the nearest, up at a half, and the word is below from a
// step of 1/2 on.
TEST(Random, CoinsOfProbabilitiesAboutTheirWords) {
  const double steps[] = {-1, 0, 0.25, 0.499, 0.5, 0.501, 0.75, 1, 2};
  Generator g(12);
  for (const double step : steps) {
    const PhiloxState state = g.state();
    Values p, expected;
    for (std::uint64_t i = 0; i < 1000; ++i) {
      p.push_back(std::clamp((static_cast<double>(philox_word(state, i)) + step) * 0x1p-32, 0.0, 1.0));
      expected.push_back(step >= 0.5 ? 1 : 0);
    }
    EXPECT_EQ(bernoulli(tensor(p, {.dtype = f64}), &g).to_vector<double>(), expected) << step;
  }
}

TEST(Random, GradientsAndErrors) {
  const Tensor x = sample({3}).requires_grad_();
  Tensor y = x * 2;
  normal_(y.slice(0, 0, 2));
  sum(y).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{0, 0, 2}));
  EXPECT_TRUE(randn({2}, {.requires_grad = true}).requires_grad());
  EXPECT_THROW(normal_(empty({2}), 0, -1), Error);
  EXPECT_THROW(uniform_(empty({2}), 1, 0), Error);
  EXPECT_THROW(rand({2}, {.dtype = i64}), DTypeError);
  EXPECT_THROW(uniform_(Tensor()), Error);
  EXPECT_EQ(rand({0, 3}).sizes(), Shape({0, 3}));
}

}  // namespace
}  // namespace halfstep
