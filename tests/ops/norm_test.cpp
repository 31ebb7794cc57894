// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

Tensor at(const Tensors& in, std::size_t i) { return i < in.size() ? in[i] : Tensor{}; }

Tensors call_layer_norm(const GoldenEntry& e, const Tensors& in) {
  return {layer_norm(in[0], Shape(e.integers("normalized_shape")),
                     {.weight = at(in, 1), .bias = at(in, 2), .eps = e.real("eps")})};
}
Tensors call_rms_norm(const GoldenEntry& e, const Tensors& in) {
  return {rms_norm(in[0], Shape(e.integers("normalized_shape")), {.weight = at(in, 1), .eps = e.real("eps")})};
}
Tensors call_group_norm(const GoldenEntry& e, const Tensors& in) {
  return {group_norm(in[0], e.integer("num_groups"), {.weight = at(in, 1), .bias = at(in, 2), .eps = e.real("eps")})};
}
// The golden's outputs are the result and the running statistics after the call.
Tensors call_batch_norm(const GoldenEntry& e, const Tensors& in) {
  const Tensor running_mean = in[3].detach().clone(), running_var = in[4].detach().clone();
  const Tensor y = batch_norm(in[0], {.weight = in[1],
                                      .bias = in[2],
                                      .running_mean = running_mean,
                                      .running_var = running_var,
                                      .training = e.flag("training"),
                                      .momentum = e.real("momentum"),
                                      .eps = e.real("eps")});
  if (e.outputs.size() == 1) return {y};
  return {y, running_mean, running_var};
}

TEST(Norm, AgreesWithPyTorch) {
  test::check_op_goldens("layer_norm", call_layer_norm);
  test::check_op_goldens("rms_norm", call_rms_norm);
  test::check_op_goldens("group_norm", call_group_norm);
  test::check_op_goldens("batch_norm", call_batch_norm);
}
TEST(Norm, FollowsThePolicy) {
  test::check_policy_goldens("layer_norm", call_layer_norm);
  test::check_policy_goldens("rms_norm", call_rms_norm);
  test::check_policy_goldens("group_norm", call_group_norm);
  test::check_policy_goldens("batch_norm", call_batch_norm);
}

Tensor wave(const Shape& sizes, DType dtype = f64, double offset = 0) {
  Values values;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) values.push_back(offset + std::sin(1.7 * static_cast<double>(i)));
  return tensor(values, sizes, {.dtype = dtype});
}
void expect_near(const Tensor& a, const Tensor& b, double bound) {
  const auto p = a.to_vector<double>(), q = b.to_vector<double>();
  ASSERT_EQ(p.size(), q.size());
  for (std::size_t i = 0; i < p.size(); ++i) ASSERT_NEAR(p[i], q[i], bound) << i;
}

TEST(Norm, FirstAndSecondGradients) {
  const Tensor x = wave({3, 4, 2}).requires_grad_(), w = wave({4, 2}, f64, 1).requires_grad_();
  const Tensor b = wave({4, 2}).requires_grad_(), strided = wave({2, 4, 3}).transpose(0, 2).requires_grad_();
  const Tensor cw = wave({4}, f64, 1).requires_grad_(), cb = wave({4}).requires_grad_();
  const Tensor rm = wave({4}), rv = wave({4}, f64, 2);
  const std::vector<std::pair<TensorFunction, Tensors>> cases = {
      {[](const Tensors& v) {
         return Tensors{layer_norm(v[0], {4, 2}, {.weight = v[1], .bias = v[2]})};
       },
       {x, w, b}},
      {[](const Tensors& v) { return Tensors{layer_norm(v[0], {2})}; }, {strided}},
      {[](const Tensors& v) {
         return Tensors{rms_norm(v[0], {4, 2}, {.weight = v[1], .eps = 1e-3})};
       },
       {x, w}},
      {[](const Tensors& v) { return Tensors{group_norm(v[0], 2, {.weight = v[1], .bias = v[2]})}; }, {x, cw, cb}},
      {[](const Tensors& v) { return Tensors{group_norm(v[0], 4)}; }, {wave({2, 4, 3}).requires_grad_()}},
      {[](const Tensors& v) { return Tensors{batch_norm(v[0], {.weight = v[1], .bias = v[2], .training = true})}; },
       {x, cw, cb}},
      {[](const Tensors& v) { return Tensors{batch_norm(v[0], {.weight = v[1], .bias = v[2], .training = true})}; },
       {strided, cw, cb}},
      {[=](const Tensors& v) {
         return Tensors{batch_norm(v[0], {.weight = v[1], .bias = v[2], .running_mean = rm, .running_var = rv})};
       },
       {x, cw, cb}},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    gradcheck(cases[i].first, cases[i].second);
    gradgradcheck(cases[i].first, cases[i].second);
  }
}

// The mean is 10,000 deviations away: E[x^2] - E[x]^2 in float32 would have no digit left.
TEST(Norm, LargeMeansKeepTheVariance) {
  const Tensor x = wave({64, 8}, f32, 10000), exact = x.to(f64);
  expect_near(layer_norm(x, {8}), layer_norm(exact, {8}), 1e-5);
  expect_near(batch_norm(x, {.training = true}), batch_norm(exact, {.training = true}), 1e-5);
}

// One value in three is a unit of the last place above the others. Their mean, a third of a unit above, rounds to the
// lower ones: what that loses must come back, or the variance is 1/3 instead of 2/9 of a unit squared.
TEST(Norm, DeviationsOfOneUnitInTheLastPlace) {
  const double unit = 0x1p-9;
  Values values;
  for (int i = 0; i < 48; ++i) values.push_back(16384 + (i % 3 == 0 ? unit : 0));
  const Tensor running_mean = zeros({1}), running_var = zeros({1});
  const Tensor x = tensor(values, {48, 1});
  const Tensor y = batch_norm(
      x, {.running_mean = running_mean, .running_var = running_var, .training = true, .momentum = 1, .eps = 0});
  EXPECT_NEAR(running_var.item<double>(), 2.0 / 9 * unit * unit * 48 / 47, 1e-6 * unit * unit);
  const Tensor z = layer_norm(x.reshape({1, 48}), {48}, {.eps = 0});
  for (const Tensor& t : {y.reshape({48}), z.reshape({48})}) {
    // (1 - 1/3) / sqrt(2/9) and -1/3 / sqrt(2/9)
    EXPECT_NEAR(t.to_vector<double>()[0], std::sqrt(2.0), 1e-6);
    EXPECT_NEAR(t.to_vector<double>()[1], -std::sqrt(0.5), 1e-6);
  }
}

// The fused backward passes go through chunks of rows and blocks of a row; the one that is recorded for second
// derivatives is made of other ops.
TEST(Norm, ManyLongRowsHaveTheGradientsOfTheRecordedPass) {
  const auto check = [](const std::vector<Tensor>& in, const auto& f) {
    std::vector<Tensor> leaves = in;
    for (Tensor& t : leaves) t.requires_grad_();
    const Tensor y = f(leaves);
    const Tensor g = wave(y.sizes(), f64, 0.4);
    const auto fused = grad({y}, leaves, {.grad_outputs = {g}, .retain_graph = true});
    const auto recorded = grad({y}, leaves, {.grad_outputs = {g}, .create_graph = true});
    for (std::size_t i = 0; i < leaves.size(); ++i) expect_near(fused[i], recorded[i].detach(), 1e-9);
  };
  for (const Shape& sizes : {Shape{70, 600}, Shape{5, 5000}, Shape{300, 3}}) {
    const std::int64_t n = sizes[1];
    check({wave(sizes), wave({n}, f64, 1), wave({n})},
          [n](const std::vector<Tensor>& t) { return layer_norm(t[0], {n}, {.weight = t[1], .bias = t[2]}); });
    check({wave(sizes), wave({n}, f64, 1)},
          [n](const std::vector<Tensor>& t) { return rms_norm(t[0], {n}, {.weight = t[1]}); });
  }
  for (const Shape& sizes : {Shape{40, 4, 33}, Shape{3, 6, 2000}}) {
    const std::int64_t n = sizes[1];
    check({wave(sizes), wave({n}, f64, 1), wave({n})},
          [](const std::vector<Tensor>& t) { return group_norm(t[0], 2, {.weight = t[1], .bias = t[2]}); });
    check({wave(sizes), wave({n}, f64, 1), wave({n})}, [](const std::vector<Tensor>& t) {
      return batch_norm(t[0], {.weight = t[1], .bias = t[2], .training = true});
    });
  }
  check({wave({900, 70}), wave({70}, f64, 1), wave({70})}, [](const std::vector<Tensor>& t) {
    return batch_norm(t[0], {.weight = t[1], .bias = t[2], .training = true});
  });
}

// Devices keep short rows in the registers of some threads, longer ones in those of more, and read the longest twice.
TEST(Norm, RowsOfEveryLengthAgreeWithFloat64) {
  constexpr double kFloat = 0x1p-24;
  struct Rows {
    std::int64_t rows, length;
  };
  for (const DType dtype : {f32, f16, bf16}) {
    const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : kFloat;
    for (const auto& [rows, n] : {Rows{1, 1}, Rows{50, 10}, Rows{70, 64}, Rows{33, 136}, Rows{150, 384}, Rows{9, 1000},
                                  Rows{5, 1032}, Rows{3, 2048}, Rows{2, 8200}, Rows{2, 16392}}) {
      for (const bool rms : {false, true}) {
        manual_seed(3);
        const Tensor x = (randn({rows, n}) + 0.5).to(dtype), g = randn({rows, n}).to(dtype);
        const Tensor weight = rand({n}) + 0.5, bias = rand({n});
        const auto passes = [&](DType d) {
          Tensors leaves{x.to(d).clone(), weight.to(d == f64 ? f64 : f32).clone()};
          if (!rms) leaves.push_back(bias.to(d == f64 ? f64 : f32).clone());
          for (Tensor& t : leaves) t.requires_grad_();
          const Tensor y = rms ? rms_norm(leaves[0], {n}, {.weight = leaves[1], .eps = 1e-5})
                               : layer_norm(leaves[0], {n}, {.weight = leaves[1], .bias = leaves[2]});
          Tensors all = grad({y}, leaves, {.grad_outputs = {g.to(d)}});
          all.insert(all.begin(), y.detach());
          return all;
        };
        const Tensors got = passes(dtype), exact = passes(f64);
        // Roundings of float32, of terms up to 16 (a row of one element has a deviation of eps, 300 times as much).
        const double inner = 32 * kFloat * 16 * (n == 1 ? 320 : 1);
        for (std::size_t i = 0; i < got.size(); ++i) {
          // Columns' sums have an error for each row.
          const double sums = i < 2 ? inner : inner + static_cast<double>(rows) * kFloat * 16 * 8;
          const double own = i < 2 ? u : kFloat;
          const Values a = got[i].to_vector<double>(), b = exact[i].to_vector<double>();
          ASSERT_EQ(a.size(), b.size());
          for (std::size_t k = 0; k < a.size(); ++k) {
            ASSERT_NEAR(a[k], b[k], own * std::abs(b[k]) + sums)
                << name(dtype) << ' ' << rows << " x " << n << (rms ? " rms" : "") << ": " << i << " element " << k;
          }
        }
      }
    }
  }
}

// Groups whose channels begin anywhere in an access or at whole ones, in rows that fit into registers and longer ones.
TEST(Norm, GroupsOfEveryLengthAgreeWithFloat64) {
  constexpr double kFloat = 0x1p-24;
  struct Groups {
    std::int64_t samples, channels, inner, groups;
  };
  for (const DType dtype : {f32, f16, bf16}) {
    const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : kFloat;
    for (const auto& [samples, channels, inner, groups] :
         {Groups{3, 8, 3, 1}, Groups{2, 16, 49, 2}, Groups{2, 9, 5, 3}, Groups{2, 16, 1, 2}, Groups{2, 24, 1029, 3},
          Groups{1, 16, 1032, 2}, Groups{2, 8, 4104, 2}}) {
      manual_seed(4);
      const Tensor x = (randn({samples, channels, inner}) + 0.5).to(dtype);
      const Tensor g = randn({samples, channels, inner}).to(dtype), weight = rand({channels}) + 0.5;
      const Tensor bias = rand({channels});
      const auto passes = [&, groups = groups](DType d) {
        const DType parameters = d == f64 ? f64 : f32;
        Tensors leaves{x.to(d).clone(), weight.to(parameters).clone(), bias.to(parameters).clone()};
        for (Tensor& t : leaves) t.requires_grad_();
        const Tensor y = group_norm(leaves[0], groups, {.weight = leaves[1], .bias = leaves[2]});
        Tensors all = grad({y}, leaves, {.grad_outputs = {g.to(d)}});
        all.insert(all.begin(), y.detach());
        return all;
      };
      const Tensors got = passes(dtype), exact = passes(f64);
      // Roundings of float32, of terms up to 16; a parameter's sum has an error for each place and a common one.
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double places = static_cast<double>(samples * inner);
        const double error = 32 * kFloat * 16 + (i < 2 ? 0 : places * kFloat * 16);
        const Values a = got[i].to_vector<double>(), b = exact[i].to_vector<double>();
        ASSERT_EQ(a.size(), b.size());
        for (std::size_t k = 0; k < a.size(); ++k) {
          ASSERT_NEAR(a[k], b[k], (i < 2 ? u : kFloat) * std::abs(b[k]) + error)
              << name(dtype) << ' ' << channels << " x " << inner << ": " << i << " element " << k;
        }
      }
    }
  }
}

// That of float32 also in 16 bits, as PyTorch's kernels have it: 2^-7, bf16's own, would turn the results below into
// 0.01.
TEST(Norm, RmsEpsilonIsThatOfTheComputation) {
  for (DType dtype : {f32, f16, bf16}) {
    const Tensor x = full({1, 4}, 0x1p-10, {.dtype = dtype});
    const double exact = 0x1p-10 / std::sqrt(0x1p-20 + 0x1p-23);
    const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
    EXPECT_NEAR(rms_norm(x, {4}).to_vector<double>()[0], exact, exact * (u + 4 * 0x1p-24)) << name(dtype);
  }
  EXPECT_NEAR(rms_norm(full({1, 4}, 1e-8, {.dtype = f64}), {4}).to_vector<double>()[0],
              1e-8 / std::sqrt(1e-16 + 0x1p-52), 1e-14);
}

TEST(Norm, SixteenBitInputsWithFloat32Parameters) {
  for (DType dtype : {f16, bf16}) {
    const double u = dtype == f16 ? 0x1p-11 : 0x1p-8;
    const Tensor x = wave({4, 6, 5}, dtype), w = wave({6}, f32, 1), b = wave({6}, f32);
    Tensor rm = zeros({6}), rv = ones({6});
    const Tensor y = batch_norm(x, {.weight = w, .bias = b, .running_mean = rm, .running_var = rv, .training = true});
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(rm.dtype(), f32);
    const Tensor exact = batch_norm(x.to(f64), {.weight = w.to(f64), .bias = b.to(f64), .training = true});
    // Results up to 4: half a unit of the last place, and some float32 roundings.
    expect_near(y, exact, 4 * u + 1e-5);
    const Tensor l = layer_norm(x, {5});
    EXPECT_EQ(l.dtype(), dtype);
    expect_near(l, layer_norm(x.to(f64), {5}), 4 * u + 1e-5);
  }
}

TEST(Norm, LayoutsAgreeAndAreKept) {
  const Tensor x = wave({3, 5, 4, 6}), last = x.contiguous(MemoryFormat::channels_last);
  const Tensor a = batch_norm(x, {.training = true}), b = batch_norm(last, {.training = true});
  EXPECT_EQ(b.strides(), last.strides());
  expect_near(a, b, 1e-13);
  const Tensor odd = wave({6, 4, 5, 3}).permute({3, 2, 1, 0});
  expect_near(batch_norm(odd, {.training = true}), batch_norm(odd.contiguous(), {.training = true}), 1e-13);
  // Gradients of another layout than the input's.
  const Tensor p = x.detach().requires_grad_(), q = last.detach().requires_grad_();
  const Tensor g = wave({3, 5, 4, 6}, f64, 0.3);
  batch_norm(p, {.training = true}).backward(g.contiguous(MemoryFormat::channels_last));
  batch_norm(q, {.training = true}).backward(g);
  expect_near(p.grad(), q.grad(), 1e-13);
  expect_near(group_norm(last, 5), group_norm(x, 5), 1e-13);
}

// Images of group_norm whose channels lie next to each other, with statistics of every kind of group: against the same
// in float64, row-major, for any number of threads. Channels that don't fill vectors, channels in pieces of a strip,
// images in pieces, one place.
TEST(Norm, GroupsOfChannelsLastImagesAgreeWithFloat64) {
  constexpr double kFloat = 0x1p-24;
  struct Groups {
    Shape sizes;
    std::int64_t groups;
  };
  const auto last = [](const Tensor& t) {  // [N, C, ...] with the channels next to each other
    const int n = t.dim();
    return n == 3 ? t.transpose(1, 2).contiguous().transpose(1, 2) : t.contiguous(MemoryFormat::channels_last);
  };
  const int threads = num_threads();
  for (const auto& [sizes, groups] :
       {Groups{{3, 8, 5, 7}, 2}, Groups{{2, 6, 3, 3}, 6}, Groups{{2, 6, 4, 3}, 1}, Groups{{5, 48, 2, 1}, 3},
        Groups{{2, 40, 9}, 5}, Groups{{1, 2112, 3, 3}, 33}, Groups{{2, 64, 30, 41}, 32}, Groups{{3, 32, 1, 1}, 4}}) {
    for (const DType dtype : {f64, f32, f16, bf16}) {
      const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : dtype == f64 ? 0x1p-53 : kFloat;
      manual_seed(5);
      const Tensor x = (randn(sizes) + 0.5).to(dtype), g = randn(sizes).to(dtype);
      const Tensor weight = rand({sizes[1]}) + 0.5, bias = rand({sizes[1]});
      for (const bool affine : {true, false}) {
        const auto passes = [&, groups = groups](DType d, bool channels_last, bool other_gradient) {
          const DType parameters = d == f64 ? f64 : f32;
          Tensors leaves{channels_last ? last(x.to(d)) : x.to(d).clone()};
          if (affine) {
            leaves.push_back(weight.to(parameters).clone());
            leaves.push_back(bias.to(parameters).clone());
          }
          for (Tensor& t : leaves) t.requires_grad_();
          const Tensor y = group_norm(leaves[0], groups,
                                      {.weight = affine ? leaves[1] : Tensor(), .bias = affine ? leaves[2] : Tensor()});
          EXPECT_EQ(y.strides(), leaves[0].strides());
          const Tensor given = g.to(d);
          Tensors all =
              grad({y}, leaves, {.grad_outputs = {channels_last != other_gradient ? last(given) : given.clone()}});
          EXPECT_EQ(all[0].strides(), leaves[0].strides());
          all.insert(all.begin(), y.detach());
          return all;
        };
        const Tensors exact = passes(f64, false, false);
        std::vector<Values> before;
        for (const int n : {1, 2, 3}) {
          if (n > 1 && !x.device().is_cpu()) break;
          set_num_threads(n);
          for (const bool other_gradient : {false, true}) {
            const Tensors got = passes(dtype, true, other_gradient);
            // As above; float64 has its own rounding.
            const double rounding = dtype == f64 ? 0x1p-53 : kFloat;
            const auto places = static_cast<double>(x.numel() / sizes[1]);
            for (std::size_t i = 0; i < got.size(); ++i) {
              const double error = 32 * rounding * 16 + (i < 2 ? 0 : places * rounding * 16);
              const Values a = got[i].to_vector<double>(), b = exact[i].to_vector<double>();
              ASSERT_EQ(a.size(), b.size());
              for (std::size_t k = 0; k < a.size(); ++k) {
                ASSERT_NEAR(a[k], b[k], (i < 2 ? u : rounding) * std::abs(b[k]) + error)
                    << name(dtype) << ' ' << sizes.str() << ": " << i << " element " << k;
              }
              if (before.size() > i && !other_gradient) {
                ASSERT_EQ(a, before[i]) << name(dtype) << ' ' << sizes.str() << ' ' << n;
              }
              if (n == 1 && !other_gradient) before.push_back(a);
            }
          }
        }
      }
    }
  }
  set_num_threads(threads);
}

// A mean between two numbers, of which one must be taken: what rounding lost comes back.
TEST(Norm, GroupsOfLargeChannelsLastNumbersAreCentred) {
  // Floats of that size are 8 apart.
  Tensor x = full({2, 24, 9, 31}, 1e8f);
  for (std::int64_t c = 0; c < 24; c += 2) x.select(1, c).fill_(1e8f + 8);
  x = x.contiguous(MemoryFormat::channels_last);
  const Values y = group_norm(x, 3).contiguous().to_vector<double>();
  for (std::size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], i / 279 % 2 == 0 ? 1 : -1, 1e-5) << i;
}

TEST(Norm, GroupsOfEqualChannelsLastImagesAreTheBias) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const DType parameters = dtype == f64 ? f64 : f32;
    const Tensor bias = full({24}, 0.75, {.dtype = parameters});
    for (const double value : {1e8, -3.3e9, 1234.567, 0.0}) {
      if (dtype == f16 && std::abs(value) > 65504) continue;
      const Tensor x = full({2, 24, 9, 31}, value, {.dtype = dtype}).contiguous(MemoryFormat::channels_last);
      for (const double v : group_norm(x, 3, {.bias = bias}).to_vector<double>()) {
        ASSERT_EQ(v, 0.75) << name(dtype) << value;
      }
    }
  }
}

TEST(Norm, LongRows) {
  const Tensor x = wave({2, 5000}).requires_grad_();
  const auto f = [&](const Tensor& v) { return layer_norm(v, {5000}); };
  const Tensor y = f(x);
  EXPECT_NEAR(mean(y).item<double>(), 0, 1e-13);
  EXPECT_NEAR(var(y, {1}, {.correction = 0}).to_vector<double>()[1], 1, 1e-4);
  y.backward(x.detach());
  // y is x scaled, and what is parallel to x or constant has no gradient but through eps.
  for (double v : x.grad().to_vector<double>()) ASSERT_NEAR(v, 0, 1e-4);
}

TEST(Norm, SumsOfVeryLongRowsDoNotDrift) {
  // 2^22 equal terms, added in float32 in few chains, would be off by a thousandth or more. At most 64 are: the sum of
  // squares is off by 64 roundings of 2^-24 at most, its root by half of that.
  constexpr std::int64_t n = 1 << 22;
  const Tensor x = full({1, n}, 0.1), g = ones({1, n});
  const double value = static_cast<double>(0.1f), rms = std::sqrt(value * value + 1e-5);
  EXPECT_NEAR(rms_norm(x, {n}, {.eps = 1e-5})[0][n - 1].item<float>(), value / rms, 0x1p-19);
  // The sums of h z in the gradient: z = x / rms, so that dx = (g - z mean(z)) / rms = (1 - z^2) / rms.
  const Tensor leaf = x.clone().requires_grad_();
  rms_norm(leaf, {n}, {.eps = 1e-5}).backward(g);
  const double z = value / rms;
  EXPECT_NEAR(leaf.grad()[0][0].item<float>(), (1 - z * z) / rms, 0x1p-17 / rms);
}

TEST(Norm, RunningStatisticsAreWrittenInPlace) {
  const Tensor rm = zeros({2}), rv = ones({2});
  const auto version = rm.version();
  const Tensor x = tensor(Values{1, 10, 3, 30}, {2, 2});
  batch_norm(x, {.running_mean = rm, .running_var = rv, .training = true, .momentum = 0.5});
  EXPECT_EQ(rm.to_vector<double>(), (Values{1, 10}));
  EXPECT_EQ(rv.to_vector<double>(), (Values{1.5, 100.5}));  // unbiased: 2 and 200
  EXPECT_GT(rm.version(), version);
}

TEST(Norm, Errors) {
  EXPECT_THROW(layer_norm(ones({2, 3}), {4}), ShapeError);
  EXPECT_THROW(layer_norm(ones({2, 3}), {3}, {.weight = ones({2})}), ShapeError);
  EXPECT_THROW(layer_norm(ones({2, 3}, {.dtype = i64}), {3}), DTypeError);
  EXPECT_THROW(group_norm(ones({2, 3}), 2), ShapeError);
  EXPECT_THROW(batch_norm(ones({3}), {.training = true}), ShapeError);
  EXPECT_THROW(batch_norm(ones({1, 3}), {.training = true}), ShapeError);
  EXPECT_THROW(batch_norm(ones({2, 3})), Error);
  EXPECT_THROW(batch_norm(ones({2, 3}), {.running_mean = ones({3})}), Error);
}

TEST(Norm, NothingToNormalise) {
  EXPECT_EQ(layer_norm(empty({0, 3}), {3}).sizes(), (Shape{0, 3}));
  EXPECT_EQ(group_norm(empty({0, 4, 2}), 2).sizes(), (Shape{0, 4, 2}));
  EXPECT_EQ(batch_norm(empty({0, 3}), {.running_mean = zeros({3}), .running_var = ones({3})}).sizes(), (Shape{0, 3}));
}

}  // namespace
}  // namespace halfstep
