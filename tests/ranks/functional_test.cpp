// SPDX-License-Identifier: Apache-2.0
// Gradients of collectives against closed forms. Rank r's loss is sum_i w_r[i] y_r[i], where y_r is what the collective
// gives it; the gradient is that of the sum of all ranks' losses. Values are small integers: sums of them are exact.
#include "halfstep/dist/functional.h"

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "tests/ranks/ranks.h"

namespace halfstep::dist::test {
namespace {

using Values = std::vector<double>;

double input(int rank, std::int64_t i) { return rank * 10 + static_cast<double>(i); }
double weight(int rank, std::int64_t i) { return static_cast<double>((rank + 2) * (i + 3)); }

Tensor inputs(std::int64_t n) {
  Values v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(input(world().rank(), i));
  return tensor(v, {n}, {.dtype = f64, .device = Device(), .requires_grad = true});
}
Tensor weights(std::int64_t n) {
  Values v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(weight(world().rank(), i));
  return tensor(v, {n}, {.dtype = f64, .device = Device()});
}

template <class F>
Values filled(std::int64_t n, F&& f) {
  Values v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(f(i));
  return v;
}
template <class F>
double over_ranks(F&& f) {
  double total = 0;
  for (int r = 0; r < world().size(); ++r) total += f(r);
  return total;
}

// y = f(x), then x's gradient.
template <class F>
void check(std::int64_t n, F&& f, const Values& expected, const Values& expected_grad) {
  const Tensor x = inputs(n), y = f(x);
  EXPECT_EQ(y.to_vector<double>(), expected);
  sum(y * weights(y.numel())).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), expected_grad);
}

TEST(Differentiable, AllReduce) {
  const int size = world().size();
  const auto sum_in = [](std::int64_t i) { return over_ranks([&](int r) { return input(r, i); }); };
  const auto sum_w = [](std::int64_t i) { return over_ranks([&](int r) { return weight(r, i); }); };
  check(
      5, [](const Tensor& x) { return all_reduce(x, world()); }, filled(5, sum_in), filled(5, sum_w));
  check(
      5, [](const Tensor& x) { return all_reduce(x, world(), ReduceOp::mean); },
      filled(5, [&](auto i) { return sum_in(i) / size; }), filled(5, [&](auto i) { return sum_w(i) / size; }));
  EXPECT_THROW(all_reduce(inputs(5), world(), ReduceOp::max), AutogradError);
  EXPECT_EQ(all_reduce(inputs(5).detach(), world(), ReduceOp::max).to_vector<double>()[0], input(size - 1, 0));
}

TEST(Differentiable, Reduce) {
  const int root = world().size() - 1;
  const bool here = world().rank() == root;
  check(
      4, [&](const Tensor& x) { return reduce(x, world(), root); },
      filled(4, [&](auto i) { return here ? over_ranks([&](int r) { return input(r, i); }) : 0; }),
      filled(4, [&](auto i) { return weight(root, i); }));
}

TEST(Differentiable, Broadcast) {
  const int root = world().size() - 1;
  const bool here = world().rank() == root;
  check(
      4, [&](const Tensor& x) { return broadcast(x, world(), root); },
      filled(4, [&](auto i) { return input(root, i); }),
      filled(4, [&](auto i) { return here ? over_ranks([&](int r) { return weight(r, i); }) : 0; }));
}

TEST(Differentiable, AllGather) {
  const std::int64_t n = 3;
  check(
      n, [&](const Tensor& x) { return all_gather(x, world()); },
      filled(n * world().size(), [&](auto i) { return input(static_cast<int>(i / n), i % n); }),
      filled(n, [&](auto i) { return over_ranks([&](int r) { return weight(r, n * world().rank() + i); }); }));
  const Tensor scalar =
      tensor(Values{world().rank() + 1.0}, {}, {.dtype = f64, .device = Device(), .requires_grad = true});
  const Tensor all = all_gather(scalar, world());
  EXPECT_EQ(all.sizes(), Shape({world().size()}));
  sum(all * all).backward();
  EXPECT_EQ(scalar.grad().sizes(), Shape({}));
  EXPECT_EQ(scalar.grad().item<double>(), 2.0 * (world().rank() + 1) * world().size());
}

TEST(Differentiable, Gather) {
  const int root = world().size() - 1;
  const bool here = world().rank() == root;
  const std::int64_t n = 3, first = n * world().rank();
  check(
      n, [&](const Tensor& x) { return gather(x, world(), root); },
      filled(n * world().size(), [&](auto i) { return here ? input(static_cast<int>(i / n), i % n) : 0; }),
      filled(n, [&](auto i) { return weight(root, first + i); }));
  const Tensor scalar =
      tensor(Values{world().rank() + 1.0}, {}, {.dtype = f64, .device = Device(), .requires_grad = true});
  const Tensor all = gather(scalar, world(), root);
  EXPECT_EQ(all.sizes(), Shape({world().size()}));
  sum(all * all).backward();
  EXPECT_EQ(scalar.grad().sizes(), Shape({}));
  EXPECT_EQ(scalar.grad().item<double>(), 2.0 * (world().rank() + 1));
  EXPECT_THROW(gather(scalar, world(), world().size()), Error);
}

TEST(Differentiable, Scatter) {
  const int size = world().size(), root = size - 1;
  const bool here = world().rank() == root;
  const std::int64_t n = 3, first = n * world().rank();
  check(
      n * size, [&](const Tensor& x) { return scatter(x, world(), root); },
      filled(n, [&](auto i) { return input(root, first + i); }),
      filled(n * size, [&](auto i) { return here ? weight(static_cast<int>(i / n), i % n) : 0; }));
  EXPECT_THROW(scatter(inputs(size + 1), world()), ShapeError);
}

// Each rank multiplies its part of the root's tensor by a factor of its own: all gradients, and theirs, are those of
// one process that multiplies the whole by all factors.
TEST(Differentiable, ScatterAndGatherAreOneProcesssComputation) {
  const int size = world().size(), root = 0;
  const std::int64_t n = 2;
  const Tensor x = inputs(n * size);
  const Tensor a = tensor(Values{world().rank() + 2.0}, {1}, {.dtype = f64, .device = Device(), .requires_grad = true});
  const Tensor y = gather(scatter(x, world(), root) * a, world(), root);
  sum(y * y).backward({}, {.create_graph = true});
  // The whole, on every rank: y = x * a by parts.
  const Tensor whole = tensor(filled(n * size, [&](auto i) { return input(root, i); }), {n * size},
                              {.dtype = f64, .device = Device(), .requires_grad = true});
  Values factors;
  for (int r = 0; r < size; ++r) factors.push_back(r + 2.0);
  const Tensor all = tensor(factors, {size, 1}, {.dtype = f64, .device = Device(), .requires_grad = true});
  const Tensor z = whole.view({size, n}) * all;
  sum(z * z).backward({}, {.create_graph = true});
  const bool here = world().rank() == root;
  const auto expected = [&](const Tensor& g) { return here ? g.to_vector<double>() : Values(g.numel(), 0); };
  EXPECT_EQ(x.grad().to_vector<double>(), expected(whole.grad()));
  EXPECT_EQ(a.grad().item<double>(), all.grad().to_vector<double>()[static_cast<std::size_t>(world().rank())]);
  // And again.
  const Tensor first = x.grad(), first_whole = whole.grad();
  for (const Tensor* t : {&x, &a, &whole, &all}) Tensor(*t).set_grad({});
  sum(first * first).backward();
  sum(first_whole * first_whole).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), expected(whole.grad()));
  EXPECT_EQ(a.grad().item<double>(), all.grad().to_vector<double>()[static_cast<std::size_t>(world().rank())]);
}

TEST(Differentiable, ReduceScatter) {
  const int size = world().size();
  const std::int64_t n = 3;
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean}) {
    const double divisor = op == ReduceOp::mean ? size : 1;
    check(
        n * size, [&](const Tensor& x) { return reduce_scatter(x, world(), op); },
        filled(n,
               [&](auto i) { return over_ranks([&](int r) { return input(r, n * world().rank() + i); }) / divisor; }),
        filled(n * size, [&](auto i) { return weight(static_cast<int>(i / n), i % n) / divisor; }));
  }
  EXPECT_THROW(reduce_scatter(inputs(size + 1), world()), ShapeError);
}

TEST(Differentiable, AllToAll) {
  const std::int64_t n = 2, me = world().rank();
  check(
      n * world().size(), [&](const Tensor& x) { return all_to_all(x, world()); },
      filled(n * world().size(), [&](auto i) { return input(static_cast<int>(i / n), me * n + i % n); }),
      filled(n * world().size(), [&](auto i) { return weight(static_cast<int>(i / n), me * n + i % n); }));
}

// L = sum_r (sum_s x_s)^2 = W S^2: dL/dx = 2 W S, and its gradient again, summed over ranks: 2 W * W.
TEST(Differentiable, Twice) {
  const double size = world().size();
  const Tensor x = tensor(Values{world().rank() + 1.0}, {1}, {.dtype = f64, .device = Device(), .requires_grad = true});
  const Tensor y = all_reduce(x, world());
  sum(y * y).backward({}, {.create_graph = true});
  const double total = size * (size + 1) / 2;
  EXPECT_EQ(x.grad().item<double>(), 2 * size * total);
  const Tensor first = x.grad();
  x.set_grad({});
  sum(first).backward();
  EXPECT_EQ(x.grad().item<double>(), 2 * size * size);
}

}  // namespace
}  // namespace halfstep::dist::test
