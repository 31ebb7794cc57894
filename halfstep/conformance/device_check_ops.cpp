// SPDX-License-Identifier: Apache-2.0
// The parts of check_device() for copies, elementwise ops, reductions, indexing and random numbers.
#include <cmath>
#include <cstring>

#include "halfstep/conformance/device_check_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/sort.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::conformance::detail {
namespace {

using Function = Tensor (*)(const Tensor&);
using Function2 = Tensor (*)(const Tensor&, const Tensor&);

// All bit patterns of a 16-bit dtype.
Tensor every_pattern(DType dtype) {
  Tensor t = empty({65536}, {.dtype = dtype, .device = Device{}});
  auto* bits = static_cast<std::uint16_t*>(write_raw_data(t));
  for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
  return t;
}

// float32 values on, and on both sides of, every place where rounding to f16 or bf16 turns, and on the values
// themselves: all upper 19 bits, each with four patterns below.
Tensor rounding_turns(bool quick) {
  constexpr std::uint32_t kLow[] = {0x0000, 0x0FFF, 0x1000, 0x1001};
  const std::uint32_t step = quick ? 16 : 1;
  const std::uint32_t count = (1u << 19) / step;
  Tensor t = empty({static_cast<std::int64_t>(count) * 4}, {.dtype = f32, .device = Device{}});
  auto* bits = static_cast<unsigned char*>(write_raw_data(t));
  for (std::uint32_t i = 0; i < count; ++i) {
    for (std::uint32_t low : kLow) {
      const std::uint32_t word = (i * step) << 13 | low;
      std::memcpy(bits, &word, 4);
      bits += 4;
    }
  }
  return t;
}

void check_casts(Checker& c) {
  for (DType from : {DType::f16, DType::bf16}) {
    c.line("casts, every pattern", name(from), [&] {
      const Tensor here = every_pattern(from), there = here.to(c.device);
      for (DType to : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2, DType::i32,
                       DType::boolean}) {
        c.one(fmt::format("to {}", name(to)), [&] { c.same(there.to(to), here.to(to), "result"); });
      }
    });
  }
  c.line("casts, where rounding turns", "f32", [&] {
    const Tensor here = rounding_turns(c.quick), there = here.to(c.device);
    for (DType to : {DType::f16, DType::bf16, DType::f64, DType::f8e4m3, DType::f8e5m2, DType::i64, DType::u8}) {
      c.one(fmt::format("to {}", name(to)), [&] { c.same(there.to(to), here.to(to), "result"); });
    }
  });
}

// One tensor through views of strides of many kinds, the same on both sides.
std::vector<std::pair<const char*, Tensor>> views_of(const Tensor& t) {
  return {{"transposed", t.permute({3, 1, 0, 2})},
          {"every second", t.slice(1, 1, 12, 2).slice(0, 0, 6, 3)},
          {"a row", t.select(2, 3)},
          {"channels last", t.contiguous(MemoryFormat::channels_last)},
          {"repeated", t.slice(0, 0, 1).expand({3, t.size(1), t.size(2), t.size(3)})},
          {"from an odd place", t.view({-1}).slice(0, 3)},
          {"transposed and every second", t.permute({1, 3, 2, 0}).slice(3, 1, 6, 2)}};
}

void check_moves(Checker& c) {
  // Small ones, and some that are brought from one order into another by tiles.
  const std::pair<const char*, Tensor> bases[] = {{"", c.integers(100, {6, 13, 5, 4})},
                                                  {", larger", c.integers(100, {6, 67, 9, c.size(129, 35)})}};
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64, DType::i64, DType::u8, DType::boolean}) {
    c.line("copies", name(dtype), [&] {
      for (const auto& [how, base] : bases) {
        const Tensor here = base.to(dtype), there = here.to(c.device);
        const auto u = views_of(here), v = views_of(there);
        for (std::size_t i = 0; i < u.size(); ++i) {
          const Tensor &a = u[i].second, &b = v[i].second;
          c.one(fmt::format("{}{}", u[i].first, how), [&] {
            const DType other = dtype == DType::f32 ? DType::f16 : DType::f32;
            c.same(b.contiguous(), a.contiguous(), "made contiguous");
            c.same(b, a, "read");
            c.same(a.to(c.device), a, "brought there and back");
            c.same(b.clone(), a.clone(), "clone");
            c.same(b.to(other), a.to(other), "converted");
            if (b.dim() == 4) c.same(b.contiguous(MemoryFormat::channels_last), a, "made channels-last");
          });
        }
        c.one(fmt::format("written into a view{}", how), [&] {
          Tensor x = zeros(here.sizes(), {.dtype = dtype, .device = Device{}}), y = x.to(c.device);
          const std::int64_t third = (here.size(1) + 2) / 3;
          x.slice(1, 0, here.size(1), 3).permute({0, 3, 2, 1}).copy_(here.slice(1, 2, 2 + third).permute({0, 3, 2, 1}));
          y.slice(1, 0, here.size(1), 3)
              .permute({0, 3, 2, 1})
              .copy_(there.slice(1, 2, 2 + third).permute({0, 3, 2, 1}));
          x.select(0, 2).fill_(1);
          y.select(0, 2).fill_(1);
          c.same(y, x, "result");
        });
      }
    });
  }
}

OpCase unary(const char* name, Function f, const Tensor& x, Bound forward, Bound backward) {
  return {.name = name,
          .inputs = {x},
          .run = [f](const Tensors& in) { return Tensors{f(in[0])}; },
          .forward = forward,
          .backward = backward};
}
OpCase binary(const char* name, Function2 f, const Tensor& x, const Tensor& y, Bound forward, Bound backward) {
  return {.name = name,
          .inputs = {x, y},
          .run = [f](const Tensors& in) { return Tensors{f(in[0], in[1])}; },
          .forward = forward,
          .backward = backward};
}

}  // namespace

void check_copies(Checker& c) {
  check_casts(c);
  check_moves(c);
}

void check_elementwise(Checker& c) {
  const Shape shape = {33, c.size(1031, 131)};
  const Tensor any = c.normal(shape, 2), small = c.uniform(shape, -0.7, 0.7), positive = c.uniform(shape, 0.05, 8);
  // The libraries' functions are good to a few units; a gradient is a handful of ops, each of which may round, of a
  // saved result perhaps.
  const Bound exact = Bound::exact(), few = {.summed = 8}, more = {.summed = 16},
              absolute = {.summed = 8, .of = Of::largest}, back = {.rounded = 6, .summed = 32, .of = Of::largest};
  std::vector<OpCase> one;
  const auto add = [&](const char* name, Function f, const Tensor& x, Bound forward, Bound backward) {
    one.push_back(unary(name, f, x, forward, backward));
  };
  add("neg", neg, any, exact, exact);
  add("abs", abs, any, exact, exact);
  add("relu", relu, any, exact, exact);
  add("floor", floor, any, exact, exact);
  add("round", round, any, exact, exact);
  add("square", square, any, {}, back);
  add("sqrt", sqrt, positive, few, back);
  add("rsqrt", rsqrt, positive, few, back);
  add("reciprocal", reciprocal, positive, few, back);
  add("exp", exp, any, more, back);
  add("expm1", expm1, any, more, back);
  add("log", log, positive, {.summed = 8, .of = Of::largest}, back);
  add("log1p", log1p, positive, few, back);
  add("sin", sin, any, absolute, back);
  add("cos", cos, any, absolute, back);
  add("tan", tan, small, more, back);
  add("asin", asin, small, more, back);
  add("atan", atan, any, few, back);
  add("sinh", sinh, small, more, back);
  add("cosh", cosh, any, more, back);
  add("atanh", atanh, small, more, back);
  add("tanh", tanh, any, more, back);
  add("erf", erf, any, more, back);
  add("erfc", erfc, small, more, back);
  add("erfinv", erfinv, small, more, back);
  add("sigmoid", sigmoid, any, more, back);
  add("logsigmoid", logsigmoid, any, more, back);
  add("silu", silu, any, absolute, back);
  add("mish", mish, any, absolute, back);
  add("relu6", relu6, any, exact, exact);
  add("hardswish", hardswish, any, absolute, back);
  add("selu", selu, any, absolute, back);
  add(
      "gelu", [](const Tensor& x) { return gelu(x); }, any, absolute, back);
  add(
      "gelu, tanh", [](const Tensor& x) { return gelu(x, GeluForm::tanh); }, any, absolute, back);
  add(
      "elu", [](const Tensor& x) { return elu(x); }, any, absolute, back);
  add("leaky_relu", [](const Tensor& x) { return leaky_relu(x, 0.125); }, any, {}, {});
  add(
      "softplus", [](const Tensor& x) { return softplus(x); }, any, absolute, back);
  add(
      "clamp", [](const Tensor& x) { return clamp(x, -1.0, 2.0); }, any, exact, exact);
  add(
      "a number", [](const Tensor& x) { return (x * 0.375 + 2.5) / 3.0; }, any,
      {.rounded = 3, .summed = 4, .of = Of::largest}, back);
  c.family("functions of one tensor", kAll, one);

  const Tensor row = c.normal({1, shape[1]}, 3), column = c.normal({33, 1}, 3), other = c.normal(shape, 3),
               positive2 = c.uniform(shape, 0.5, 3);
  std::vector<OpCase> two;
  const auto add2 = [&](const char* name, Function2 f, const Tensor& x, const Tensor& y, Bound forward,
                        Bound backward) { two.push_back(binary(name, f, x, y, forward, backward)); };
  // A gradient that is broadcast back is a sum over the rows or columns.
  const double n = static_cast<double>(shape[1]);
  const Bound reduced = {.rounded = 3, .summed = 2 * std::sqrt(n) + 32, .of = Of::magnitudes};
  const Bound reduced_from = {.rounded = 4, .summed = 2 * std::sqrt(n) + 64, .of = Of::largest};
  add2(
      "add", [](const Tensor& x, const Tensor& y) { return x + y; }, any, other, {}, exact);
  add2(
      "sub, a row", [](const Tensor& x, const Tensor& y) { return x - y; }, any, row, {}, reduced_from);
  add2(
      "mul, a column", [](const Tensor& x, const Tensor& y) { return x * y; }, any, column, {}, reduced);
  add2(
      "mul, row and column", [](const Tensor& x, const Tensor& y) { return x * y; }, row, column, {}, reduced);
  add2(
      "div", [](const Tensor& x, const Tensor& y) { return x / y; }, any, positive2, few, back);
  add2("mul, transposed", [](const Tensor& x, const Tensor& y) { return x.t() * y.t(); }, any, other, {}, {});
  add2("maximum", maximum, any, other, exact, exact);
  add2(
      "pow", [](const Tensor& x, const Tensor& y) { return pow(x, y); }, positive2, small, more, back);
  add2("atan2", atan2, any, positive2, more, back);
  add2(
      "where", [](const Tensor& x, const Tensor& y) { return where(gt(x, 0.0), x, y); }, any, other, exact, exact);
  add2(
      "lerp", [](const Tensor& x, const Tensor& y) { return lerp(x, y, 0.25); }, any, other,
      {.summed = 8, .of = Of::largest}, back);
  c.family("functions of two tensors", kAll, two);

  c.line("comparisons and logic", "", [&] {
    const Tensor x = c.integers(5, {7, 301}), y = c.integers(5, {7, 301});
    for (DType dtype : {DType::f32, DType::f16, DType::i64, DType::u8}) {
      const Tensor a = x.to(dtype), b = y.to(dtype), p = a.to(c.device), q = b.to(c.device);
      c.one(name(dtype), [&] {
        c.same(eq(p, q), eq(a, b), "eq");
        c.same(lt(p, q), lt(a, b), "lt");
        c.same(ge(p, 2), ge(a, 2), "ge");
        c.same(logical_and(p, q), logical_and(a, b), "logical_and");
        c.same(logical_not(p), logical_not(a), "logical_not");
        c.same(masked_fill(p, eq(q, 1), 3), masked_fill(a, eq(b, 1), 3), "masked_fill");
        c.same(p + q, a + b, "add");
        if (dtype != DType::f16) c.same(p * q, a * b, "mul");
      });
    }
    c.one("special values", [&] {
      const Tensor a = every_pattern(f16), p = a.to(c.device);
      c.same(isnan(p), isnan(a), "isnan");
      c.same(isinf(p), isinf(a), "isinf");
      c.same(isfinite(p), isfinite(a), "isfinite");
      c.same(relu(p), relu(a), "relu");
    });
  });
}

}  // namespace halfstep::conformance::detail
