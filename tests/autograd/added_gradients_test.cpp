// SPDX-License-Identifier: Apache-2.0
// Two gradients of one result, which the engine leaves to a kernel that adds them up while it reads them
// (Op::adds_gradients).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/random.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

struct Layer {
  Shape sizes;
  DType dtype;
  MemoryFormat format;
  Activation activation;
  bool with_residual;
  bool training;

  std::string str() const {
    return std::string(name(dtype)) + ' ' + sizes.str() + ' ' + name(activation) + (with_residual ? " residual" : "") +
           (format == MemoryFormat::channels_last ? " channels-last" : "");
  }
  /// Those of input, weight, bias and residual where the result is used so often. `seen`: a hook looks at the sum.
  std::vector<Values> gradients(int uses, bool seen) const {
    manual_seed(3);
    const Shape channels{sizes[1]};
    const DType inner = dtype == f64 ? f64 : f32;
    const auto image = [&] { return randn(sizes, {.dtype = f64}).to(dtype).contiguous(format); };
    const Tensor x = image().requires_grad_(), residual = with_residual ? image().requires_grad_() : Tensor();
    const Tensor weight = randn(channels, {.dtype = inner}).requires_grad_();
    const Tensor bias = randn(channels, {.dtype = inner}).requires_grad_();
    const Tensor y = batch_norm_act(x,
                                    {.weight = weight,
                                     .bias = bias,
                                     .running_mean = training ? Tensor() : zeros(channels, {.dtype = inner}),
                                     .running_var = training ? Tensor() : ones(channels, {.dtype = inner}),
                                     .training = training},
                                    activation, residual);
    if (seen) y.register_hook([](const Tensor&) { return Tensor(); });
    std::vector<Tensor> outputs, given, from{x, weight, bias};
    for (int i = 0; i < uses; ++i) {
      outputs.push_back(y * image());
      given.push_back(image());
    }
    if (with_residual) from.push_back(residual);
    std::vector<Values> all;
    for (const Tensor& g : grad(outputs, from, {.grad_outputs = given})) all.push_back(g.to_vector<double>());
    return all;
  }
};

// Whoever adds them up, the bits are the same.
TEST(AddedGradients, HaveTheBitsOfASumMadeFirst) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const MemoryFormat format : {MemoryFormat::channels_last, MemoryFormat::contiguous}) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::relu6}) {
        for (const bool with_residual : {true, false}) {
          for (const Shape& sizes : {Shape{2, 16, 7, 9}, Shape{3, 5, 6, 7}, Shape{2, 64, 9, 8}}) {
            const Layer layer{sizes, dtype, format, activation, with_residual, sizes[1] != 5};
            for (const int uses : {2, 3}) {
              EXPECT_EQ(layer.gradients(uses, false), layer.gradients(uses, true)) << layer.str() << uses;
            }
          }
        }
      }
    }
  }
}

// A gradient that comes in pieces (of slices), and one of another layout.
TEST(AddedGradients, MeetSlicesAndOtherLayouts) {
  const auto gradients = [&](bool seen) {
    manual_seed(5);
    const Shape sizes{2, 8, 6, 4};
    const Tensor x = randn(sizes).contiguous(MemoryFormat::channels_last).requires_grad_();
    const Tensor residual = randn(sizes).contiguous(MemoryFormat::channels_last).requires_grad_();
    const Tensor y = batch_norm_act(x, {.training = true}, Activation::relu, residual);
    if (seen) y.register_hook([](const Tensor&) { return Tensor(); });
    const Tensor a = y * randn(sizes), b = y.slice(1, 2, 5) * 2, c = y * 3;
    std::vector<Values> all;
    for (const Tensor& g :
         grad({a, b, c}, {x, residual}, {.grad_outputs = {randn(sizes), randn({2, 3, 6, 4}), randn(sizes)}})) {
      all.push_back(g.to_vector<double>());
    }
    return all;
  };
  EXPECT_EQ(gradients(false), gradients(true));
}

}  // namespace
}  // namespace halfstep
