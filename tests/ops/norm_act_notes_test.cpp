// SPDX-License-Identifier: Apache-2.0
// The CPU's backward pass of batch_norm_act notes with its sums which elements the activation let pass, and writes
// gradients by that. Gradients are those of the ops that it is made of, whatever the number of channels.
#include <gtest/gtest.h>

#include "halfstep/autograd/engine.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep {
namespace {

// Both compute the same sums in float32 in the same order, of the same gradients: results have the same bits.
void check(const Shape& sizes) {
  const Tensor x = randn(sizes).contiguous(MemoryFormat::channels_last).requires_grad_(),
               weight = randn({sizes[1]}).requires_grad_(), bias = (randn({sizes[1]}) + 1).requires_grad_(),
               g = randn(sizes).contiguous(MemoryFormat::channels_last);
  for (const Activation activation : {Activation::relu, Activation::relu6}) {
    const auto gradients = [&](bool fused) {
      const BatchNormFuncOptions norm{.weight = weight, .bias = bias, .training = true};
      const auto act = [&](const Tensor& t) { return activation == Activation::relu ? relu(t) : relu6(t); };
      const Tensor y = fused ? batch_norm_act(x, norm, activation) : act(batch_norm(x, norm));
      return grad({y}, {x, weight, bias}, {.grad_outputs = {g}});
    };
    const auto fused = gradients(true), composed = gradients(false);
    for (std::size_t i = 0; i < fused.size(); ++i) {
      EXPECT_EQ(fused[i].to_vector<float>(), composed[i].to_vector<float>())
          << sizes.str() << ' ' << name(activation) << " gradient " << i;
    }
  }
}

TEST(BatchNormActNotes, GradientsAreThoseOfTheOps) {
  manual_seed(1);
  const int threads = num_threads();
  const cpu::Isa best = cpu::compute_isa();
  for (const cpu::Isa isa : {cpu::Isa::avx2, best}) {
    cpu::set_isa_for_test(isa);
    for (const int n : {1, 3}) {
      set_num_threads(n);
      // Rows that fill vectors and rows that don't, more channels than a strip has, of which the rest fills vectors or
      // bytes of notes or neither, one channel, and pieces that end in the middle of a vector.
      for (const std::int64_t channels : {16, 24, 40, 7, 1, 3, 100, 2064, 2056, 2053, 1500}) {
        check({2, channels, 3, 5});
        check({3, channels, 1, 1});
      }
      check({5, 24, 41, 37});
      check({2, 37, 61, 67});
    }
  }
  cpu::set_isa_for_test(best);
  set_num_threads(threads);
}

}  // namespace
}  // namespace halfstep
