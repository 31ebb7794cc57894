// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Tensor random_tensor(const Shape& sizes, DType dtype = f64) {
  Tensor t = randn(sizes, {.dtype = f64}).to(dtype);
  return t.requires_grad_();
}

TEST(Attention, MatchesPyTorchInFloat64) {
  test::check_op_goldens("scaled_dot_product_attention", [](const test::GoldenEntry& e, const std::vector<Tensor>& in) {
    AttentionOptions options{.is_causal = e.flag("is_causal"), .enable_gqa = e.flag("enable_gqa", false)};
    if (in.size() > 3) options.mask = in[3];
    if (e.has("scale")) options.scale = e.real("scale");
    return std::vector<Tensor>{scaled_dot_product_attention(in[0], in[1], in[2], options)};
  });
}

// The same from other ops: [B, H, L, E] only.
Tensor composed(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, const Tensor& mask,
                double dropped = 0) {
  Tensor scores = matmul(q, matrix_transpose(k)) * (1 / std::sqrt(static_cast<double>(q.size(-1))));
  if (mask.defined()) scores = mask.dtype() == boolean ? where(mask, scores, -kInf) : scores + mask.to(scores.dtype());
  if (causal) scores = where(tril(ones({q.size(2), k.size(2)}, {.dtype = boolean})), scores, -kInf);
  return matmul(dropout(softmax(scores, -1), dropped), v);
}

struct Case {
  Shape q, k, v;
  bool causal = false;
  int mask = 0;  // 1 bool, 2 of the query's dtype, 3 float32
};

// Several blocks of queries (128 at most a block, fewer with many keys), and products of every kind that gemm knows.
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {{2, 3, 5, 8}, {2, 3, 7, 8}, {2, 3, 7, 6}},
      {{1, 2, 300, 16}, {1, 2, 200, 16}, {1, 2, 200, 24}},
      {{1, 2, 300, 16}, {1, 2, 300, 16}, {1, 2, 300, 16}, true},
      {{2, 1, 150, 4}, {2, 1, 40, 4}, {2, 1, 40, 3}, true},
      {{2, 2, 130, 8}, {2, 2, 33, 8}, {2, 2, 33, 5}, false, 1},
      {{2, 2, 130, 8}, {2, 2, 33, 8}, {2, 2, 33, 5}, false, 2},
      {{2, 2, 13, 8}, {2, 2, 600, 8}, {2, 2, 600, 5}, false, 3},
      {{1, 1, 40, 32}, {1, 1, 5000, 32}, {1, 1, 5000, 2}},
      {{1, 2, 5, 8}, {1, 2, 1100, 8}, {1, 2, 1100, 5}, false, 1},
      {{3, 2, 1, 64}, {3, 2, 77, 64}, {3, 2, 77, 64}},
  };
  return all;
}

Tensor mask_for(const Case& c, DType dtype) {
  const Shape sizes{c.q[0], 1, c.q[2], c.k[2]};
  if (c.mask == 0) return {};
  const Tensor values = randn(sizes, {.dtype = f64});
  if (c.mask != 1) return values.to(c.mask == 2 ? dtype : f32);
  Tensor keep = gt(values, -0.5);
  keep.select(2, 0).copy_(ones({c.q[0], 1, c.k[2]}, {.dtype = boolean}));
  // Every query sees the first key: the other composition has 0 / 0 where one sees none.
  keep.select(3, 0).copy_(ones({c.q[0], 1, c.q[2]}, {.dtype = boolean}));
  return keep;
}

TEST(Attention, AgreesWithOtherOpsInResultAndGradients) {
  manual_seed(1);
  int number = 0;
  for (const Case& c : cases()) {
    SCOPED_TRACE(number++);
    const Tensor q = random_tensor(c.q), k = random_tensor(c.k), v = random_tensor(c.v);
    const Tensor mask = mask_for(c, f64);
    const Tensor ours = scaled_dot_product_attention(q, k, v, {.mask = mask, .is_causal = c.causal});
    const Tensor other = composed(q, k, v, c.causal, mask);
    const Tensor g = randn(ours.sizes(), {.dtype = f64});
    const auto a = grad({ours}, {q, k, v}, {.grad_outputs = {g}}), b = grad({other}, {q, k, v}, {.grad_outputs = {g}});
    // Sums of at most 5000 terms of size 1 in float64.
    EXPECT_LT(max(abs(ours - other)).item<double>(), 1e-12);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_LT(max(abs(a[i] - b[i])).item<double>(), 1e-11) << i;
  }
}

// 16-bit storage and float32: against float64 from the same rounded inputs. Scores, softmax and sums are float32, so
// what remains is one rounding of the result, u, and float32's own errors: scores of E terms, relative to the sum of
// |q||k| (its exponential carries them over), and sums of S terms, relative to the sum of |p||v|. With the values here
// (normal, |score| < 8) 64 u32 sqrt(S) max|exact| bounds these.
TEST(Attention, SixteenBitsAndFloat32AreRoundedOnce) {
  for (const DType dtype : {f32, f16, bf16}) {
    manual_seed(2);
    int number = 0;
    for (const Case& c : cases()) {
      SCOPED_TRACE(testing::Message() << name(dtype) << " case " << number++);
      const Tensor q = random_tensor(c.q, dtype), k = random_tensor(c.k, dtype), v = random_tensor(c.v, dtype);
      const Tensor mask = mask_for(c, dtype);
      const Tensor ours = scaled_dot_product_attention(q, k, v, {.mask = mask, .is_causal = c.causal});
      ASSERT_EQ(ours.dtype(), dtype);
      const Tensor g = randn(ours.sizes(), {.dtype = f64}).to(dtype);
      const auto grads = grad({ours}, {q, k, v}, {.grad_outputs = {g}});
      Tensor wide[3];
      for (int i = 0; i < 3; ++i) wide[i] = (i == 0 ? q : i == 1 ? k : v).detach().to(f64).requires_grad_();
      const Tensor exact = composed(wide[0], wide[1], wide[2], c.causal, mask);
      const auto exact_grads = grad({exact}, {wide[0], wide[1], wide[2]}, {.grad_outputs = {g.to(f64)}});
      const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
      const auto within = [&](const Tensor& got, const Tensor& want, const char* what) {
        const auto x = got.detach().to_vector<double>(), y = want.detach().to_vector<double>();
        const double top = max(abs(want.detach())).item<double>();
        const double room = 64 * 0x1p-24 * std::sqrt(static_cast<double>(std::max(c.k[2], c.q[2]))) * top;
        for (std::size_t i = 0; i < x.size(); ++i) {
          ASSERT_NEAR(x[i], y[i], u * std::abs(y[i]) + room + (dtype == f16 ? 0x1p-25 : 0)) << what << ' ' << i;
        }
      };
      within(ours, exact, "result");
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(grads[i].dtype(), dtype);
        within(grads[i], exact_grads[i], "gradient");
      }
    }
  }
}

// The weights that dropout() drops from a tensor [B, H, L, S] with the same generator state.
TEST(Attention, DropoutFollowsTheGeneratorLikeDropout) {
  for (const auto& [sizes, causal] : std::vector<std::pair<Shape, bool>>{
           {{2, 3, 5, 4}, false}, {{1, 2, 260, 4}, false}, {{1, 2, 260, 4}, true}, {{1, 1, 1030, 2}, true}}) {
    manual_seed(3);
    const Tensor q = random_tensor(sizes), k = random_tensor(sizes), v = random_tensor(sizes);
    manual_seed(7);
    const Tensor ours = scaled_dot_product_attention(q, k, v, {.dropout_p = 0.3, .is_causal = causal});
    const Tensor after = randn({3}, {.dtype = f64});
    manual_seed(7);
    const Tensor other = composed(q, k, v, causal, {}, 0.3);
    EXPECT_EQ(after.to_vector<double>(), randn({3}, {.dtype = f64}).to_vector<double>());
    const Tensor g = ones(ours.sizes(), {.dtype = f64});
    const auto a = grad({ours}, {q, k, v}, {.grad_outputs = {g}}), b = grad({other}, {q, k, v}, {.grad_outputs = {g}});
    EXPECT_LT(max(abs(ours - other)).item<double>(), 1e-12);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_LT(max(abs(a[i] - b[i])).item<double>(), 1e-11) << i;
  }
  const Tensor x = ones({1, 2, 3, 4});
  EXPECT_EQ(max(abs(scaled_dot_product_attention(x, x, x, {.dropout_p = 1}))).item<double>(), 0);
}

void check_gradients(const AttentionOptions& options, const std::vector<Tensor>& inputs) {
  const auto f = [&](const std::vector<Tensor>& in) {
    manual_seed(11);
    AttentionOptions o = options;
    if (in.size() > 3) o.mask = in[3];
    return scaled_dot_product_attention(in[0], in[1], in[2], o);
  };
  gradcheck(f, inputs);
  gradgradcheck(f, inputs);
}

TEST(Attention, FirstAndSecondGradients) {
  manual_seed(4);
  const auto strided = [](const Shape& s) {
    return randn({s[0], s[2], s[1], 2 * s[3]}, {.dtype = f64})
        .transpose(1, 2)
        .slice(3, 0, INT64_MAX, 2)
        .requires_grad_();
  };
  check_gradients({}, {random_tensor({2, 1, 3, 2}), random_tensor({1, 2, 4, 2}), random_tensor({2, 2, 4, 3})});
  check_gradients({.is_causal = true}, {strided({1, 2, 4, 2}), strided({1, 2, 3, 2}), strided({1, 2, 3, 2})});
  check_gradients({}, {strided({1, 2, 3, 2}), strided({1, 2, 4, 2}), strided({1, 2, 4, 1}), random_tensor({2, 1, 4})});
  const Tensor keep = tensor(std::vector<std::int64_t>{1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1}, {3, 4}).to(boolean);
  check_gradients({.mask = keep}, {random_tensor({2, 3, 2}), random_tensor({2, 4, 2}), random_tensor({2, 4, 2})});
  check_gradients({.scale = -0.7, .enable_gqa = true},
                  {random_tensor({4, 3, 2}), random_tensor({2, 4, 2}), random_tensor({1, 4, 2})});
  check_gradients({.dropout_p = 0.4, .enable_gqa = true},
                  {random_tensor({4, 3, 2}), random_tensor({2, 4, 2}), random_tensor({4, 4, 2})});
  // Heads of key and value whose groups don't nest in each other.
  check_gradients({.enable_gqa = true}, {random_tensor({6, 2, 2}), random_tensor({2, 3, 2}), random_tensor({3, 3, 1})});
  // One gradient at a time: what the others read is not saved.
  for (std::size_t only = 0; only < 3; ++only) {
    std::vector<Tensor> in = {random_tensor({2, 3, 2}), random_tensor({2, 4, 2}), random_tensor({2, 4, 2})};
    for (std::size_t i = 0; i < 3; ++i) {
      if (i != only) in[i] = in[i].detach();
    }
    check_gradients({}, in);
  }
}

TEST(Attention, QueriesThatSeeNothingGiveZeros) {
  manual_seed(5);
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const Tensor q = random_tensor({1, 2, 3, 4}, dtype), k = random_tensor({1, 2, 5, 4}, dtype), v = k;
    Tensor keep = ones({3, 5}, {.dtype = boolean});
    keep.select(0, 1).copy_(zeros({5}, {.dtype = boolean}));
    const Tensor added = where(keep, 0.0, full({3, 5}, -kInf, {.dtype = dtype}));
    for (const Tensor& mask : {keep, added}) {
      const Tensor y = scaled_dot_product_attention(q, k, v, {.mask = mask});
      EXPECT_EQ(max(abs(y.select(2, 1).detach())).item<double>(), 0);
      EXPECT_GT(max(abs(y.select(2, 0).detach())).item<double>(), 0);
      const auto d = grad({sum(y)}, {q, k});
      EXPECT_EQ(max(abs(d[0].select(2, 1))).item<double>(), 0);
      EXPECT_TRUE(all(isfinite(d[1])).item<bool>());
    }
  }
  // A NaN among the keys that are seen comes through, one among the others does not.
  Tensor q = ones({2, 1}), k = ones({3, 1});
  k.select(0, 2).copy_(full({1}, std::nan("")));
  const Tensor keep = tensor(std::vector<std::int64_t>{1, 1, 0, 1, 1, 1}, {2, 3}).to(boolean);
  const auto y = scaled_dot_product_attention(q, k, ones({3, 1}), {.mask = keep}).to_vector<double>();
  EXPECT_EQ(y[0], 1);
  EXPECT_TRUE(std::isnan(y[1]));
  // In a long row too, where all others are hidden.
  Tensor keys = ones({40, 1});
  keys.select(0, 17).copy_(full({1}, std::nan("")));
  Tensor only = zeros({1, 40}, {.dtype = boolean});
  only.select(1, 17).copy_(ones({1}, {.dtype = boolean}));
  EXPECT_TRUE(
      std::isnan(scaled_dot_product_attention(ones({1, 1}), keys, ones({40, 1}), {.mask = only}).item<double>()));
}

TEST(Attention, EmptyTensors) {
  const auto run = [](const Shape& q, const Shape& k, const Shape& v, const AttentionOptions& options = {}) {
    const std::vector<Tensor> in = {zeros(q, {.dtype = f64}).requires_grad_(),
                                    zeros(k, {.dtype = f64}).requires_grad_(),
                                    ones(v, {.dtype = f64}).requires_grad_()};
    const Tensor y = scaled_dot_product_attention(in[0], in[1], in[2], options);
    for (const bool twice : {false, true}) {
      const auto d = grad({sum(y)}, in, {.create_graph = twice, .retain_graph = true});
      for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(d[i].sizes(), in[i].sizes());
      EXPECT_TRUE(d[1].numel() == 0 || max(abs(d[1].detach())).item<double>() == 0);
    }
    return y.detach();
  };
  EXPECT_EQ(run({2, 0, 4}, {2, 5, 4}, {2, 5, 6}).sizes(), (Shape{2, 0, 6}));
  EXPECT_EQ(run({2, 3, 4}, {2, 5, 4}, {2, 5, 0}).sizes(), (Shape{2, 3, 0}));
  EXPECT_EQ(run({0, 3, 4}, {0, 5, 4}, {0, 5, 6}).sizes(), (Shape{0, 3, 6}));
  EXPECT_EQ(run({0, 2, 3, 4}, {1, 2, 5, 4}, {1, 1, 5, 6}).sizes(), (Shape{0, 2, 3, 6}));
  EXPECT_EQ(run({1, 0, 3, 4}, {1, 1, 5, 4}, {1, 1, 5, 6}).sizes(), (Shape{1, 0, 3, 6}));
  // No key: nothing to see. No width: all keys are alike.
  EXPECT_EQ(run({1, 2, 4}, {1, 0, 4}, {1, 0, 3}).to_vector<double>(), std::vector<double>(6, 0.0));
  EXPECT_EQ(run({1, 2, 0}, {1, 5, 0}, {1, 5, 3}).to_vector<double>(), std::vector<double>(6, 1.0));
}

TEST(Attention, KeepsNoMatrixOfScores) {
  // 8 x 512 x 512 scores in float32 are 8.4 MB; query, key, value and result 0.5 MB each.
  const Shape sizes{1, 8, 512, 32};
  manual_seed(6);
  const Tensor q = random_tensor(sizes, f32), k = random_tensor(sizes, f32), v = random_tensor(sizes, f32);
  set_memory_caching(true);
  reset_peak_memory();
  const auto before = memory_stats().allocated;
  const Tensor y = scaled_dot_product_attention(q, k, v, {.is_causal = true});
  EXPECT_LT(memory_stats().allocated - before, 600'000u);  // the result and a number a query
  sum(y).backward();
  // A half megabyte of scores twice for each of a few threads, and the products' own.
  const auto peak = memory_stats().allocated_peak - before;
  EXPECT_LT(peak, static_cast<std::uint64_t>(2'600'000 + 3'000'000 * std::min(num_threads(), 8)));
}

TEST(Attention, GivesTheSameBitsAgain) {
  const auto run = [] {
    manual_seed(8);
    const Shape sizes{2, 3, 140, 16};
    const Tensor q = random_tensor(sizes, bf16), k = random_tensor(sizes, bf16), v = random_tensor(sizes, bf16);
    const Tensor y = scaled_dot_product_attention(q, k, v, {.dropout_p = 0.1, .is_causal = true});
    const auto d = grad({sum(y)}, {q, k, v});
    return cat(std::vector<Tensor>{y.detach(), d[0], d[1], d[2]}).to_vector<double>();
  };
  const auto first = run(), second = run();
  EXPECT_EQ(std::memcmp(first.data(), second.data(), first.size() * sizeof(double)), 0);
}

TEST(Attention, HeadsMergeWithoutACopy) {
  // [B, L, H, E] -> [B, H, L, E], as models split their heads.
  const Tensor q = randn({2, 5, 3, 4}).transpose(1, 2);
  const Tensor y = scaled_dot_product_attention(q, q, q);
  EXPECT_TRUE(y.transpose(1, 2).is_contiguous());
  EXPECT_TRUE(scaled_dot_product_attention(q.contiguous(), q, q).is_contiguous());
}

TEST(Attention, RunsInTheRegionsDType) {
  const Tensor q = random_tensor({1, 2, 3, 4}, f32), k = random_tensor({1, 2, 5, 4}, f32),
               v = random_tensor({1, 2, 5, 4}, f32);
  const Tensor mask = zeros({3, 5});
  {
    const amp::Autocast region{{.dtype = bf16}};
    const Tensor y = scaled_dot_product_attention(q, k, v, {.mask = mask});
    EXPECT_EQ(y.dtype(), bf16);
    const auto d = grad({sum(y)}, {q, k, v});
    for (const Tensor& t : d) EXPECT_EQ(t.dtype(), f32);
    EXPECT_EQ(scaled_dot_product_attention(q.to(f64), k.to(f64), v.to(f64)).dtype(), f64);
  }
  // Outside of a region dtypes are promoted, as by every op.
  EXPECT_EQ(scaled_dot_product_attention(q.to(f16), k, v).dtype(), f32);
}

template <class E>
std::string error_of(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {}) {
  try {
    scaled_dot_product_attention(q, k, v, options);
  } catch (const E& e) {
    return e.what();
  }
  return "no error";
}

TEST(Attention, SaysWhatDoesNotFit) {
  const Tensor q = zeros({2, 4, 3, 8}), k = zeros({2, 4, 5, 8}), v = zeros({2, 4, 5, 6});
  EXPECT_EQ(error_of<ShapeError>(q, zeros({2, 4, 5, 7}), v),
            "scaled_dot_product_attention: expected [..., L, E], [..., S, E] and [..., S, Ev], got query [2, 4, 3, 8], "
            "key [2, 4, 5, 7], value [2, 4, 5, 6]");
  EXPECT_NE(error_of<ShapeError>(q, k, zeros({2, 4, 4, 6})).find("[..., S, Ev]"), std::string::npos);
  EXPECT_NE(error_of<ShapeError>(zeros({8}), k, v).find("[..., L, E]"), std::string::npos);
  EXPECT_NE(error_of<ShapeError>(q, zeros({2, 2, 5, 8}), zeros({2, 2, 5, 6})).find("enable_gqa"), std::string::npos);
  EXPECT_NE(error_of<ShapeError>(q, zeros({2, 3, 5, 8}), v).find("broadcast"), std::string::npos);
  EXPECT_NE(error_of<ShapeError>(q, zeros({3, 4, 5, 8}), v).find("[3]"), std::string::npos);
  EXPECT_NE(error_of<ShapeError>(q, zeros({2, 3, 5, 8}), v, {.enable_gqa = true}).find("divide"), std::string::npos);
  EXPECT_NE(error_of<ShapeError>(zeros({3, 8}), zeros({5, 8}), zeros({5, 8}), {.enable_gqa = true}).find("three"),
            std::string::npos);
  EXPECT_EQ(error_of<ShapeError>(q, k, v, {.mask = zeros({4, 5})}),
            "scaled_dot_product_attention: expected a mask that broadcasts to [2, 4, 3, 5], got [4, 5]");
  EXPECT_NE(error_of<ShapeError>(q, k, v, {.mask = zeros({2, 2, 4, 3, 5})}).find("broadcasts"), std::string::npos);
  EXPECT_NE(error_of<DTypeError>(q, k, v, {.mask = zeros({3, 5}, {.dtype = i64})}).find("got i64"), std::string::npos);
  EXPECT_NE(error_of<Error>(q, k, v, {.mask = zeros({3, 5}), .is_causal = true}).find("got both"), std::string::npos);
  EXPECT_NE(error_of<Error>(q, k, v, {.dropout_p = 1.5}).find("between 0 and 1"), std::string::npos);
  EXPECT_NE(error_of<Error>(q, k, {}).find("a value"), std::string::npos);
  EXPECT_NE(error_of<DTypeError>(zeros({3, 8}, {.dtype = i64}), k, v).find("i64"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
