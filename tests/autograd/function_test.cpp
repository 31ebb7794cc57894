// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/function.h"

#include <gtest/gtest.h>

#include <array>

#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/caching_allocator.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

using Values = std::vector<double>;
using Tensors = std::vector<Tensor>;

Tensor leaf(const Values& values, const Shape& sizes, DType dtype = f64) {
  return tensor(values, sizes, {.dtype = dtype, .requires_grad = true});
}

// k / x, whose gradient is written with its output.
struct Inverse : Function<Inverse> {
  static Tensor forward(FunctionContext& c, const Tensor& x, double k) {
    EXPECT_FALSE(GradMode::is_enabled());
    const Tensor y = k / x;
    c.save_for_backward({x, y});
    c.saved_data["k"] = k;
    return y;
  }
  static Tensors backward(FunctionContext& c, const Tensors& grads) {
    EXPECT_EQ(c.saved().size(), 2u);
    EXPECT_EQ(std::any_cast<double>(c.saved_data["k"]), 3);
    return {-grads[0] * c.saved(1) / c.saved(0)};
  }
};

TEST(Function, FirstAndSecondDerivatives) {
  const Tensor x = leaf({1, -2, 4}, {3});
  const auto f = [](const Tensors& in) { return Inverse::apply(in[0], 3.0); };
  EXPECT_EQ(f({x}).to_vector<double>(), (Values{3, -1.5, 0.75}));
  gradcheck(f, {x});
  gradgradcheck(f, {x});
}

TEST(Function, IsFreedWithItsGraph) {
  const Tensor x = leaf(Values(1000, 2), {1000});
  const std::uint64_t before = memory_stats().allocated;
  { const Tensor y = Inverse::apply(x, 3.0); }
  EXPECT_EQ(memory_stats().allocated, before);
}

TEST(Function, ASecondRunNeedsRetainGraph) {
  const Tensor x = leaf({1, 2}, {2});
  const Tensor y = sum(Inverse::apply(x, 3.0));
  y.backward({}, {.retain_graph = true});
  y.backward();
  EXPECT_NE(error_of<Error>([&] { y.backward(); }).find("retain_graph"), std::string::npos);
}

TEST(Function, ChangedSavedTensorsAreNamed) {
  const Tensor x = leaf({1, 2}, {2});
  Tensor a = x * 1;
  Tensor y = Inverse::apply(a, 3.0);
  a.add_(1);
  const std::string text = error_of<Error>([&] { sum(y).backward(); });
  EXPECT_NE(text.find("backward of Inverse: its saved tensor 0"), std::string::npos) << text;
  y = Inverse::apply(x, 3.0);
  y.mul_(2);
  EXPECT_NE(error_of<Error>([&] { sum(y).backward(); }).find("saved tensor 1"), std::string::npos);
}

// Sum and product; the third output, a count, has no gradient. Takes an optional bias and a list.
bool g_materialize = true;
std::vector<bool> g_needs, g_defined;
struct Mixed : Function<Mixed> {
  static std::tuple<Tensor, Tensor, Tensor> forward(FunctionContext& c, const Tensor& x, int times,
                                                    const std::optional<Tensor>& bias, const Tensors& list) {
    c.set_materialize_grads(g_materialize);
    g_needs.clear();
    for (std::size_t i = 0; i < 4; ++i) g_needs.push_back(c.needs_input_grad(i));
    c.saved_data["times"] = times;
    c.saved_data["list"] = list.size();
    c.save_for_backward({x, bias.value_or(Tensor()), list[0]});
    Tensor sum = x * times;
    if (bias) sum = sum + *bias;
    const Tensor fixed = x * 0;
    c.mark_non_differentiable({fixed});
    return {sum, x * list[0], fixed};
  }
  static Tensors backward(FunctionContext& c, const Tensors& grads) {
    g_defined.clear();
    for (const Tensor& g : grads) g_defined.push_back(g.defined());
    const double times = std::any_cast<int>(c.saved_data["times"]);
    Tensor dx, dlist;
    if (grads[0].defined()) dx = grads[0] * times;
    if (grads[1].defined()) {
      dx = dx.defined() ? dx + grads[1] * c.saved(2) : grads[1] * c.saved(2);
      dlist = grads[1] * c.saved(0);
    }
    Tensors result{dx, grads[0], dlist};
    for (std::size_t i = 1; i < std::any_cast<std::size_t>(c.saved_data["list"]); ++i) result.emplace_back();
    return result;
  }
};

TEST(Function, SeveralOutputsOptionalInputsAndLists) {
  const Tensor x = leaf({1, 2}, {2}), bias = leaf({5, 6}, {2}), w = leaf({3, 4}, {2}), other = leaf({1}, {});
  const auto f = [&](const Tensors& in) {
    const auto [s, p, fixed] = Mixed::apply(in[0], 3, std::optional<Tensor>(in[1]), Tensors{in[2], other});
    EXPECT_FALSE(fixed.requires_grad());
    return Tensors{s, p};
  };
  gradcheck(f, {x, bias, w});
  gradgradcheck(f, {x, bias, w});
  const auto [s, p, fixed] = Mixed::apply(x, 3, std::nullopt, Tensors{w.detach()});
  EXPECT_EQ(g_needs, (std::vector<bool>{true, false, false, false}));
  g_materialize = false;
  const auto [s2, p2, fixed2] = Mixed::apply(x, 3, std::nullopt, Tensors{w});
  g_materialize = true;
  sum(p).backward();
  EXPECT_EQ(g_defined, (std::vector<bool>{true, true, true}));
  sum(p2).backward();
  EXPECT_EQ(g_defined, (std::vector<bool>{false, true, false}));
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{6, 8}));
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{1, 2}));
  EXPECT_FALSE(other.grad().defined());
}

struct PerArgument : Function<PerArgument> {
  static Tensor forward(FunctionContext&, double k, const Tensor& x) { return x * k; }
  static Tensors backward(FunctionContext&, const Tensors& grads) { return {Tensor(), grads[0] * 2}; }
};
struct TooMany : Function<TooMany> {
  static Tensor forward(FunctionContext&, const Tensor& x) { return x * 2; }
  static Tensors backward(FunctionContext&, const Tensors& grads) { return {grads[0], grads[0]}; }
};
struct WrongShape : Function<WrongShape> {
  static Tensor forward(FunctionContext&, const Tensor& x) { return x * 2; }
  static Tensors backward(FunctionContext&, const Tensors&) { return {ones({7})}; }
};
struct InPlace : Function<InPlace> {
  static Tensor forward(FunctionContext&, Tensor x) { return x.mul_(2); }
  static Tensors backward(FunctionContext&, const Tensors& grads) { return grads; }
};
struct Identity : Function<Identity> {
  static Tensor forward(FunctionContext&, const Tensor& x) { return x; }
  static Tensors backward(FunctionContext&, const Tensors& grads) { return {grads[0] * 10}; }
};
struct Throws : Function<Throws> {
  static Tensor forward(FunctionContext&, const Tensor& x) { return x * 2; }
  static Tensors backward(FunctionContext&, const Tensors&) { throw std::runtime_error("mine"); }
};

TEST(Function, GradientsForEachArgumentAreFineToo) {
  const Tensor x = leaf({1, 2}, {2});
  sum(PerArgument::apply(2.0, x)).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{2, 2}));
}

TEST(Function, MistakesAreNamed) {
  const Tensor x = leaf({1, 2}, {2});
  EXPECT_NE(error_of<Error>([&] { sum(TooMany::apply(x)).backward(); }).find("TooMany: expected 1 gradient"),
            std::string::npos);
  EXPECT_NE(error_of<Error>([&] { sum(WrongShape::apply(x)).backward(); }).find("WrongShape"), std::string::npos);
  EXPECT_NE(error_of<Error>([&] { InPlace::apply(x * 1); }).find("InPlace: tensor argument 0"), std::string::npos);
  EXPECT_THROW(sum(Throws::apply(x)).backward(), std::runtime_error);
  EXPECT_TRUE(GradMode::is_enabled());
  sum(x * 2).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{2, 2}));
}

TEST(Function, AnOutputIsNeverAnInput) {
  Tensor x = leaf({1, 2}, {2});
  Tensor y = Identity::apply(x);
  y.add_(1);
  EXPECT_EQ(x.to_vector<double>(), (Values{1, 2}));
  sum(y).backward();
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{10, 10}));
}

TEST(Function, NothingIsRecordedInNoGrad) {
  const Tensor x = leaf({1, 2}, {2});
  const NoGrad no_grad;
  EXPECT_FALSE(Inverse::apply(x, 3.0).requires_grad());
}

// What both passes saw of autocast.
struct Seen {
  bool enabled;
  DType dtype, given;
};
Seen g_forward, g_backward;
template <bool cast>
struct Product : Function<Product<cast>> {
  static Tensor forward(FunctionContext& c, const Tensor& x, const Tensor& w) {
    g_forward = {thread_state().autocast.enabled, mm(x, w).dtype(), x.dtype()};
    c.save_for_backward({x, w});
    return mm(x, w);
  }
  static Tensors backward(FunctionContext& c, const Tensors& grads) {
    g_backward = {thread_state().autocast.enabled, mm(c.saved(0), c.saved(1)).dtype(), grads[0].dtype()};
    return {mm(grads[0], c.saved(1).t()), mm(c.saved(0).t(), grads[0])};
  }
};
struct CastProduct : Function<CastProduct> {
  static constexpr DType cast_inputs = f32;
  static Tensor forward(FunctionContext& c, const Tensor& x, const Tensor& w) {
    return Product<true>::forward(c, x, w);
  }
  static Tensors backward(FunctionContext& c, const Tensors& grads) { return Product<true>::backward(c, grads); }
};

class InRegion {
 public:
  explicit InRegion(DType dtype) : was_(thread_state().autocast) {
    thread_state().autocast.enabled = true;
    thread_state().autocast.dtype = dtype;
  }
  ~InRegion() { thread_state().autocast = was_; }

 private:
  AutocastState was_;
};

TEST(Function, BackwardRunsInTheAutocastStateOfForward) {
  const Tensor x = leaf({1, 2, 3, 4}, {2, 2}, f32), w = leaf({1, 0, 0, 1}, {2, 2}, f32);
  const Tensor y = [&] {
    const InRegion region(bf16);
    return Product<false>::apply(x, w);
  }();
  EXPECT_EQ(y.dtype(), bf16);
  EXPECT_TRUE(g_forward.enabled);
  EXPECT_EQ(g_forward.given, f32);
  sum(y).backward();
  EXPECT_TRUE(g_backward.enabled);
  EXPECT_EQ(g_backward.dtype, bf16);
  EXPECT_EQ(x.grad().dtype(), f32);
  EXPECT_FALSE(thread_state().autocast.enabled);
}

TEST(Function, CastInputs) {
  const Tensor x = leaf({1, 2, 3, 4}, {2, 2}, bf16), w = leaf({1, 0, 0, 1}, {2, 2}, f32);
  const Tensor d = leaf({1, 2, 3, 4}, {2, 2}, f64);
  {
    const InRegion region(bf16);
    const Tensor y = CastProduct::apply(x, w);
    EXPECT_EQ(y.dtype(), f32);
    EXPECT_FALSE(g_forward.enabled);
    EXPECT_EQ(g_forward.given, f32);
    EXPECT_EQ(CastProduct::apply(d, d).dtype(), f64);
    sum(y).backward();
    EXPECT_TRUE(thread_state().autocast.enabled);
  }
  EXPECT_EQ(x.grad().dtype(), bf16);
  EXPECT_EQ(x.grad().to_vector<double>(), (Values{1, 1, 1, 1}));
  EXPECT_EQ(w.grad().to_vector<double>(), (Values{4, 4, 6, 6}));
  CastProduct::apply(x, x);
  EXPECT_EQ(g_forward.given, bf16);  // outside a region it does nothing
}

// What PyTorch's custom_fwd and custom_bwd give: forward() ran with autocast off, and so does backward(). In f16 the
// product 1000 * 300 + 1000 * 300 is infinite.
TEST(Function, BackwardOfCastInputsRunsWithoutAutocast) {
  const Tensor x = leaf(Values(4, 300), {2, 2}, f16), w = leaf(Values(4, 300), {2, 2}, f32);
  Tensor y;
  {
    const InRegion region(f16);
    y = CastProduct::apply(x, w);
    EXPECT_EQ(y.dtype(), f32);
    EXPECT_EQ(y.to_vector<double>(), Values(4, 180000));
  }
  const Tensor factor = full({2, 2}, 1000);
  for (const bool inside : {false, true}) {
    w.set_grad({});
    if (inside) {
      const InRegion region(bf16);
      y.backward(factor, {.retain_graph = true});
      EXPECT_TRUE(thread_state().autocast.enabled);
      EXPECT_EQ(thread_state().autocast.dtype, bf16);
    } else {
      y.backward(factor, {.retain_graph = true});
      EXPECT_FALSE(thread_state().autocast.enabled);
    }
    EXPECT_FALSE(g_backward.enabled);
    EXPECT_EQ(g_backward.given, f32);
    EXPECT_EQ(g_backward.dtype, f32);
    EXPECT_EQ(w.grad().to_vector<double>(), Values(4, 600000));
  }
}

TEST(Function, BackwardOfCastInputsOutsideARegionFollowsForwardToo) {
  // Outside a region `cast_inputs` does nothing; a region around backward() changes nothing either.
  const Tensor x = leaf(Values(4, 300), {2, 2}, f32), w = leaf(Values(4, 300), {2, 2}, f32);
  const Tensor y = CastProduct::apply(x, w);
  const InRegion region(f16);
  y.backward(full({2, 2}, 1000));
  EXPECT_FALSE(g_backward.enabled);
  EXPECT_EQ(w.grad().to_vector<double>(), Values(4, 600000));
}

TEST(Function, WithoutCastInputsBackwardRunsInForwardsRegionWhereverItIsCalled) {
  const Tensor x = leaf({1, 2, 3, 4}, {2, 2}, f32), w = leaf({1, 0, 0, 1}, {2, 2}, f32);
  const Tensor outside = Product<false>::apply(x, w);
  Tensor inside;
  {
    const InRegion region(f16);
    inside = Product<false>::apply(x, w);
  }
  const InRegion region(bf16);
  sum(outside).backward();
  EXPECT_FALSE(g_backward.enabled);
  EXPECT_EQ(g_backward.dtype, f32);
  sum(inside).backward();
  EXPECT_TRUE(g_backward.enabled);
  EXPECT_EQ(g_backward.dtype, f16);
}

TEST(Function, CastInputsInsideACheckpoint) {
  const Tensor x = leaf(Values(4, 300), {2, 2}, f16), w = leaf(Values(4, 300), {2, 2}, f32);
  Tensor y;
  {
    const InRegion region(f16);
    y = checkpoint([&](const Tensor& t) { return CastProduct::apply(t * 1, w); }, x);
  }
  y.backward(full({2, 2}, 1000));
  EXPECT_FALSE(g_backward.enabled);
  EXPECT_EQ(w.grad().to_vector<double>(), Values(4, 600000));
}

// Hooks run outside of any region, whatever the caller is in: the gradients that they see are those of the graph.
TEST(Function, HooksRunWithoutAutocast) {
  const Tensor x = leaf({1, 2, 3, 4}, {2, 2}, f32), w = leaf({1, 0, 0, 1}, {2, 2}, f32);
  Tensor y;
  std::vector<bool> on;
  {
    const InRegion region(f16);
    y = mm(x, w);
    y.register_hook([&](const Tensor& g) {
      on.push_back(thread_state().autocast.enabled);
      return g;
    });
  }
  const InRegion region(bf16);
  sum(y).backward();
  EXPECT_EQ(on, std::vector<bool>{false});
}

TEST(Function, InsideACheckpoint) {
  const Tensor x = leaf({1, -2, 4}, {3});
  const auto f = [](const Tensors& in) {
    return checkpoint([](const Tensor& t) { return Inverse::apply(t * t, 3.0) * t; }, in[0]);
  };
  gradcheck(f, {x});
  gradgradcheck(f, {x});
}

}  // namespace
}  // namespace halfstep
