// SPDX-License-Identifier: Apache-2.0
// Cases of fake quantization. Those of integers and ranges, which have no gradient, are in tests/ops/quantize_test.cpp.
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/quantize.h"
#include "tests/support/op_case_makers.h"

namespace halfstep::test {
namespace {

// Scales and bounds are f32, or f64 with f64.
Tensor as_scale(const Tensor& t) { return t.to(t.dtype() == f64 ? f64 : f32); }

}  // namespace

std::vector<OpCase> quantize_cases() {
  // Gradients are straight-through: no differences find them. A value near the middle of a step goes to either side of
  // it in float32 and float64, so that 16 bits have tests of their own.
  const Extra steps{.sixteen_bits = false, .differences = false};
  const auto zero = [](std::int64_t n) { return zeros({n}, {.dtype = i32}); };
  return {
      op(
          "fake_quantize", {x({N, 3}), fixed({1}, 0.1, 0.2)},
          [zero](In in) { return fake_quantize(in[0], in[1].to(f32), zero(1), {.quant_min = -8, .quant_max = 7}); },
          steps),
      op(
          "fake_quantize", {x({N, 3}), fixed({3}, 0.1, 0.2)},
          [zero](In in) {
            return fake_quantize(in[0], in[1].to(f32), zero(3).to(f32), {.quant_min = -8, .quant_max = 7, .axis = 1});
          },
          steps),
      op(
          "fake_quantize_learnable", {x({N, 3}), x({1}, 0.1, 0.2), x({1}, -3, 3)},
          [](In in) {
            return fake_quantize_learnable(in[0], as_scale(in[1]), as_scale(in[2]), {.quant_min = -8, .quant_max = 7});
          },
          steps),
      op(
          "fake_quantize_learnable", {x({N, 3}), x({3}, 0.1, 0.2)},
          [zero](In in) {
            return fake_quantize_learnable(in[0], as_scale(in[1]), zero(3),
                                           {.quant_min = -8, .quant_max = 7, .axis = 1, .grad_factor = 0.5});
          },
          steps),
      op("pact", {x({N, 3}), x({1}, 0.5, 1.5)}, [](In in) { return pact(in[0], as_scale(in[1])); }),
  };
}

}  // namespace halfstep::test
