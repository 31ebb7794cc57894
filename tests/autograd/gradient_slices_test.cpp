// SPDX-License-Identifier: Apache-2.0
// Gradients of slices of one tensor, which the backward pass puts together without padding each with zeros.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/debug/call_trace.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/caching_allocator.h"

namespace halfstep {
namespace {

using Function = std::function<Tensor(const Tensor&)>;

// Small integers, whose sums and products are exact in every dtype here, so that gradients can be compared exactly.
Tensor integers(const Shape& sizes, DType dtype = f32) {
  std::vector<double> v(static_cast<std::size_t>(sizes.numel()));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(i * 5 % 7) - 3;
  return tensor(v, sizes, {.dtype = dtype});
}

// d/dx of a linear function, element by element: f of the unit vectors.
std::vector<double> closed_form(const Function& f, const Shape& sizes) {
  NoGrad off;
  std::vector<double> d;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) {
    Tensor unit = zeros({sizes.numel()}, {.dtype = f64});
    unit[i].fill_(1);
    d.push_back(f(unit.reshape(sizes)).item<double>());
  }
  return d;
}

struct Case {
  const char* name;
  Shape sizes;
  Function f;
};

// A weighted sum with different weights for each slice: a gradient in the wrong place changes the result.
Tensor weighted(const Tensor& x, double factor) {
  return sum(x * (integers(x.sizes(), f64).to(x.dtype()) + 1) * factor);
}
Tensor weighted(const std::vector<Tensor>& parts) {
  Tensor total = weighted(parts[0], 1);
  for (std::size_t i = 1; i < parts.size(); ++i) total = total + weighted(parts[i], static_cast<double>(i + 1));
  return total;
}

std::vector<Case> cases() {
  return {
      {"unbind", {2, 3, 4}, [](const Tensor& x) { return weighted(unbind(x, 1)); }},
      {"split", {2, 7}, [](const Tensor& x) { return weighted(split(x, 3, 1)); }},
      {"split into sizes, one of them 0",
       {5, 2},
       [](const Tensor& x) {
         return weighted(split(x, {2, 0, 3}, 0));
       }},
      {"chunk, used in another order",
       {6, 2},
       [](const Tensor& x) {
         const auto c = chunk(x, 3, 0);
         return weighted({c[2], c[0], c[1]});
       }},
      {"one part is not used",
       {6, 2},
       [](const Tensor& x) {
         const auto c = chunk(x, 3, 0);
         return weighted({c[2], c[0]});
       }},
      {"one part is used twice",
       {6, 2},
       [](const Tensor& x) {
         const auto c = chunk(x, 3, 0);
         return weighted({c[0], c[1], c[2], c[1] * 3});
       }},
      {"the same slice is made twice",
       {6},
       [](const Tensor& x) {
         return weighted({x.slice(0, 0, 3), x.slice(0, 3, 6), x.slice(0, 0, 3)});
       }},
      {"steps",
       {7},
       [](const Tensor& x) {
         return weighted({x.slice(0, 0, 7, 2), x.slice(0, 1, 7, 2)});
       }},
      {"along two dimensions",
       {3, 4},
       [](const Tensor& x) {
         return weighted({x.narrow(0, 1, 2), x.narrow(1, 0, 3), x[0], x.select(1, 3)});
       }},
      {"what would tile one dimension, of two",
       {3, 3},
       [](const Tensor& x) {
         return weighted({x.narrow(0, 0, 1), x.narrow(1, 1, 2)});
       }},
      {"overlaps",
       {6},
       [](const Tensor& x) {
         return weighted({x.narrow(0, 0, 5), x.narrow(0, 1, 5), x.narrow(0, 0, 4), x.narrow(0, 2, 4)});
       }},
      {"the whole too, first",
       {4, 2},
       [](const Tensor& x) {
         return weighted({x, x[0], x[3], x * 2});
       }},
      {"the whole too, last",
       {4, 2},
       [](const Tensor& x) {
         return weighted({x[0], x[3], x * 2, x});
       }},
      {"the whole, broadcast",
       {4, 2},
       [](const Tensor& x) {
         return weighted({x[1], x[2]}) + sum(x);
       }},
      {"one slice", {4, 2}, [](const Tensor& x) { return weighted({x[1]}); }},
      {"a slice of a slice",
       {4, 6},
       [](const Tensor& x) {
         const Tensor y = x.narrow(1, 1, 4);
         return weighted({y[0], y[1], y[2], y[3], x.narrow(1, 0, 1), x.narrow(1, 5, 1)});
       }},
      {"no elements",
       {0, 3},
       [](const Tensor& x) {
         return weighted({x.select(1, 0), x.select(1, 2)});
       }},
      {"an empty slice", {4}, [](const Tensor& x) { return weighted({x.slice(0, 2, 2)}); }},
  };
}

TEST(GradientSlices, EqualTheClosedForm) {
  for (const DType dtype : {f64, f32, bf16, f16}) {
    for (const Case& c : cases()) {
      SCOPED_TRACE(std::string(c.name) + ", " + std::string(name(dtype)));
      const Tensor x = integers(c.sizes, dtype).requires_grad_();
      c.f(x).backward();
      EXPECT_EQ(x.grad().to_vector<double>(), closed_form(c.f, c.sizes));
      EXPECT_EQ(x.grad().dtype(), dtype);
      // Of a result, and recorded: gradients are padded one by one there.
      const Tensor y = integers(c.sizes, dtype).requires_grad_();
      c.f(y * 1).backward();
      EXPECT_EQ(y.grad().to_vector<double>(), x.grad().to_vector<double>());
      const Tensor z = integers(c.sizes, dtype).requires_grad_();
      EXPECT_EQ(grad({c.f(z * 1)}, {z}, {.create_graph = true})[0].to_vector<double>(), x.grad().to_vector<double>());
    }
  }
}

// The calls of the backward pass of `f`, by op.
std::vector<std::string> backward_calls(const Function& f, const Tensor& x) {
  const Tensor loss = f(x * 1);
  debug::CallTrace trace;
  loss.backward();
  std::vector<std::string> ops;
  for (const debug::TracedCall& call : trace.calls()) ops.push_back(call.site.op);
  return ops;
}
std::int64_t count(const std::vector<std::string>& ops, const std::string& op) {
  return std::count(ops.begin(), ops.end(), op);
}

TEST(GradientSlices, TilesAreJoinedInOnePass) {
  const Function f = [](const Tensor& x) {
    const auto parts = unbind(x, 1);
    return sum(parts[0] * parts[1] * parts[2]);
  };
  const auto ops = backward_calls(f, ones({4, 3, 5}).requires_grad_());
  EXPECT_EQ(count(ops, "cat"), 1);
  EXPECT_EQ(count(ops, "slice_backward"), 0);
  EXPECT_EQ(count(ops, "add"), 0);
}

TEST(GradientSlices, StepsOfASequenceTakeLinearTime) {
  // Each step reads one row, as a recurrent network does; padded one by one, the gradients of 300 steps would be 300
  // tensors of full size.
  constexpr std::int64_t kSteps = 300, kWidth = 1000;
  const Function f = [](const Tensor& x) {
    Tensor state = zeros({kWidth});
    for (std::int64_t t = 0; t < kSteps; ++t) state = state + x[t];
    return sum(state);
  };
  const Tensor x = ones({kSteps, kWidth}).requires_grad_();
  EXPECT_EQ(count(backward_calls(f, x), "slice_backward"), 0);
  EXPECT_EQ(sum(x.grad()).item<float>(), kSteps * kWidth);
}

TEST(GradientSlices, OverlappingSlicesHoldNoMoreThanTheirSumNeeds) {
  // 40 windows of nearly the whole: their gradients, 4 MB each, must not wait for each other.
  constexpr std::int64_t n = 1 << 20, kWindows = 40;
  const Tensor x = ones({n}).requires_grad_();
  const Tensor y = x * 1;
  Tensor total = zeros({});
  for (std::int64_t i = 0; i < kWindows; ++i) {
    const Tensor window = y.narrow(0, i, n - kWindows);
    total = total + sum(window * window) / 2;
  }
  reset_peak_memory();
  const std::uint64_t before = memory_stats().allocated;
  total.backward();
  EXPECT_LT(memory_stats().allocated_peak - before, 8 * n * sizeof(float));
  EXPECT_EQ(x.grad()[n / 2].item<float>(), kWindows);
  EXPECT_EQ(x.grad()[0].item<float>(), 1);
}

TEST(GradientSlices, UsesOfOneCastWeightAddUpInFloat32) {
  // 1 + 256 times 2^-8 is 2 in float32; in bf16, whose steps above 1 are 2^-7, the sum would stay at 1.
  const Tensor w = ones({2, 4}).requires_grad_();
  const Tensor x = full({1, 4}, 1), small = full({1, 4}, 1.0 / 256);
  {
    amp::Autocast on{{.dtype = bf16}};
    const Tensor cast = w.to(bf16);
    Tensor total = zeros({});
    for (int i = 0; i < 256; ++i) total = total + sum(matmul(small, cast.narrow(0, 0, 1).t()));
    total = total + sum(matmul(x, cast.narrow(0, 0, 1).t()));  // the backward pass begins here
    total.backward();
  }
  EXPECT_EQ(w.grad().to_vector<double>(), (std::vector<double>{2, 2, 2, 2, 0, 0, 0, 0}));
}

TEST(GradientSlices, PicturesKeepTheirLayout) {
  const Tensor x = to_channels_last(integers({2, 4, 3, 3})).requires_grad_();
  const Tensor y = x * 1;
  Tensor seen;
  y.register_hook([&](const Tensor& g) {
    seen = g;
    return Tensor();
  });
  const auto halves = chunk(y, 2, 1);
  constexpr auto kFormat = MemoryFormat::channels_last;
  sum(halves[0].clone(kFormat) * halves[1].clone(kFormat)).backward();
  EXPECT_TRUE(is_channels_last(seen));
}

TEST(GradientSlices, HooksAndRetainedGradientsSeeThem) {
  const Tensor x = ones({3}).requires_grad_();
  const Tensor y = x * 1;
  y.retain_grad();
  const Tensor part = y.narrow(0, 0, 2);
  part.retain_grad();
  part.register_hook([](const Tensor& g) { return g * 10; });
  y.register_hook([](const Tensor& g) { return g + 1; });
  (sum(part) + sum(y.narrow(0, 1, 2)) * 5).backward();
  EXPECT_EQ(part.grad().to_vector<double>(), (std::vector<double>{10, 10}));
  EXPECT_EQ(y.grad().to_vector<double>(), (std::vector<double>{11, 16, 6}));
  EXPECT_EQ(x.grad().to_vector<double>(), (std::vector<double>{11, 16, 6}));
  // As an input of grad(), a view's own gradient comes back.
  const Tensor z = ones({3}).requires_grad_();
  const Tensor first = z.narrow(0, 0, 1);
  const auto d = grad({sum(first * 3) + sum(z[1])}, {first, z}, {.allow_unused = true});
  EXPECT_EQ(d[0].to_vector<double>(), (std::vector<double>{3}));
  EXPECT_EQ(d[1].to_vector<double>(), (std::vector<double>{3, 1, 0}));
}

TEST(GradientSlices, ASecondBackwardPassAddsToTheFirst) {
  const Tensor x = ones({4}).requires_grad_();
  const Tensor y = x * 2;
  const Tensor loss = weighted(chunk(y, 2, 0));
  loss.backward({}, {.retain_graph = true});
  const auto once = x.grad().to_vector<double>();
  loss.backward();
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_EQ(x.grad().to_vector<double>()[i], 2 * once[i]);
}

}  // namespace
}  // namespace halfstep
