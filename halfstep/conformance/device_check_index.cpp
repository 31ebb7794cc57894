// SPDX-License-Identifier: Apache-2.0
// The parts of check_device() for reading and writing by index, joining and sorting, and random numbers.
#include <cmath>

#include "halfstep/conformance/device_check_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/sort.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::conformance::detail {

void check_indexing(Checker& c) {
  const Tensor table = c.normal({301, 65}), rows = c.integers(301, {c.size(4099, 515)}),
               grid = c.integers(65, {301, 17}), x = c.normal({29, 13, 7}), many = c.integers(40, {301, 65});
  const Bound exact = Bound::exact();
  // A row's gradient adds up over its indices: 14 on average, 60 at most by far.
  const Bound added = {.rounded = 1, .summed = 60, .of = Of::magnitudes};
  std::vector<OpCase> cases;
  const auto add = [&](const char* name, Tensors inputs, auto f, Bound forward, Bound backward, bool gradients = true) {
    cases.push_back({.name = name,
                     .inputs = std::move(inputs),
                     .run = [f](const Tensors& t) { return f(t); },
                     .forward = forward,
                     .backward = backward,
                     .gradients = gradients});
  };
  add(
      "index_select", {table, rows}, [](const Tensors& t) { return Tensors{index_select(t[0], 0, t[1])}; }, exact,
      added);
  add(
      "index_select along the last", {table, c.integers(65, {33})},
      [](const Tensors& t) { return Tensors{index_select(t[0], 1, t[1])}; }, exact, added);
  add(
      "embedding", {rows, table}, [](const Tensors& t) { return Tensors{embedding(t[0], t[1])}; }, exact, added);
  add(
      "gather", {table, grid}, [](const Tensors& t) { return Tensors{gather(t[0], 1, t[1])}; }, exact, added);
  add(
      "index by lists", {table, rows, c.integers(65, rows.sizes())},
      [](const Tensors& t) {
        return Tensors{index(t[0], {t[1], t[2]})};
      },
      exact, added);
  add(
      "scatter_add", {table, grid, c.normal({301, 17})},
      [](const Tensors& t) { return Tensors{scatter_add(t[0], 1, t[1], t[2])}; }, added, exact);
  add(
      "index_add", {table, c.integers(301, {515}), c.normal({515, 65})},
      [](const Tensors& t) { return Tensors{index_add(t[0], 0, t[1], t[2])}; }, added, exact);
  add(
      "scatter a number", {table, grid}, [](const Tensors& t) { return Tensors{scatter(t[0], 1, t[1], 2.5)}; }, exact,
      exact);
  add(
      "masked_fill", {table, many}, [](const Tensors& t) { return Tensors{masked_fill(t[0], lt(t[1], 9), -3.0)}; },
      exact, exact);
  add(
      "masked_select", {table, many}, [](const Tensors& t) { return Tensors{masked_select(t[0], lt(t[1], 9))}; }, exact,
      exact);
  add(
      "nonzero, one_hot", {many, c.integers(11, {77})},
      [](const Tensors& t) {
        return Tensors{nonzero(lt(t[0], 9)), one_hot(t[1], 11)};
      },
      exact, exact, false);
  add("cat, stack", {x, c.normal({29, 5, 7})},
      [](const Tensors& t) {
        return Tensors{cat({t[0], t[1], t[0]}, 1), stack({t[0], t[0]}, 2)};
      },
      exact, {.rounded = 4, .summed = 4, .of = Of::magnitudes});
  add("pad, flip, roll, tril", {x},
      [](const Tensors& t) {
        return Tensors{pad(t[0], {1, 2, 0, 3}), flip(t[0], {0, 2}), roll(t[0], {3, -2}, {0, 1}), tril(t[0], 1)};
      },
      exact, {.rounded = 4, .summed = 4, .of = Of::magnitudes});
  add("repeat", {x},
      [](const Tensors& t) {
        return Tensors{repeat(t[0], {2, 1, 3})};
      },
      exact, {.rounded = 3, .summed = 8, .of = Of::magnitudes});
  const auto sorted = [](const SortResult& r) { return Tensors{r.values, r.indices}; };
  add(
      "sort", {c.normal({17, 1025})}, [sorted](const Tensors& t) { return sorted(sort(t[0], 1)); }, exact, exact);
  add(
      "sort, falling, equal ones", {many},
      [sorted](const Tensors& t) { return sorted(sort(t[0], 0, {.descending = true})); }, exact, exact, false);
  add(
      "topk", {c.normal({17, 1025})}, [sorted](const Tensors& t) { return sorted(topk(t[0], 5, 1)); }, exact, exact);
  c.family("indexing, joining, sorting", {DType::f32, DType::f16, DType::bf16, DType::f64}, cases);

  c.line("wrong indices are reported", "", [&] {
    const Tensor there = table.to(f32).to(c.device);
    const auto refused = [&](const char* name, auto f) {
      c.one(name, [&] {
        std::string text;
        try {
          f();
          synchronize(c.device);
        } catch (const DeviceLostError&) {
          throw;
        } catch (const Error& e) {
          text = e.what();
        }
        if (text.empty()) c.problem("no error");
        // What comes next is computed as if nothing had happened.
        c.same(there + there, table.to(f32) + table.to(f32), "the next op");
      });
    };
    const auto wrong = [&](std::int64_t i) { return tensor(std::vector<std::int64_t>{0, 3, i}, {3}).to(c.device); };
    refused("index_select", [&] { index_select(there, 0, wrong(301)); });
    refused("index_select, far away", [&] { index_select(there, 0, wrong(std::int64_t{1} << 40)); });
    refused("embedding", [&] { embedding(wrong(-1), there); });
    refused("gather", [&] { gather(there, 1, wrong(65).reshape({1, 3})); });
    refused("scatter_add", [&] {
      const Tensor into = there.clone();
      scatter_add(into, 1, wrong(-2).reshape({1, 3}), there.slice(0, 0, 1).slice(1, 0, 3));
    });
    refused("cross_entropy", [&] { cross_entropy(there.slice(0, 0, 3), wrong(65)); });
  });
}

void check_random(Checker& c) {
  c.line("random numbers", "", [&] {
    const auto both = [&](const char* name, auto make, const Bound& bound = Bound::exact()) {
      c.one(name, [&] {
        manual_seed(99);
        const Tensor skip = rand({5}, {.device = Device{}});  // begins within a block of the generator
        const Tensor here = make(Device{});
        manual_seed(99);
        const Tensor skip_too = rand({5}, {.device = Device{}});
        const Tensor there = make(c.device);
        if (bound.is_exact()) {
          c.same(there, here, "result");
        } else {
          c.near(there, here.to(DType::f64), {}, bound, "result");
        }
      });
    };
    const Shape shape = {37, c.size(10007, 103)};
    for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
      both(fmt::format("uniform {}", name(dtype)).c_str(),
           [&](Device d) { return rand(shape, {.dtype = dtype, .device = d}); });
      // Logarithm, root, sine and cosine in float32, on either side.
      both(fmt::format("normal {}", name(dtype)).c_str(),
           [&](Device d) { return randn(shape, {.dtype = dtype, .device = d}); },
           {.rounded = dtype == DType::f16 || dtype == DType::bf16 ? 2.0 : 1.0, .summed = 32, .of = Of::largest});
      both(fmt::format("bernoulli {}", name(dtype)).c_str(),
           [&](Device d) { return bernoulli_(empty(shape, {.dtype = dtype, .device = d}), 0.3); });
      both(fmt::format("dropout {}", name(dtype)).c_str(),
           [&](Device d) { return dropout(ones(shape, {.dtype = dtype, .device = d}), 0.25); });
    }
    both("integers", [&](Device d) { return randint(-5, 1000, shape, {.dtype = i64, .device = d}); });
    both("permutation", [&](Device d) { return randperm(1001, {.dtype = i64, .device = d}); });
    both("dropout, transposed", [&](Device d) { return dropout(ones({65, 43}, {.device = d}).t(), 0.5); });
  });
}

}  // namespace halfstep::conformance::detail
