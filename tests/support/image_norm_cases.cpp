// SPDX-License-Identifier: Apache-2.0
// Cases of normalisation fused with what follows it.
#include "halfstep/ops/norm_act.h"
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> image_norm_cases() {
  std::vector<OpCase> cases;
  // Differences need values away from the bounds of the activations, for which the cases' fixed values are right: no
  // sum of theirs is as near to 0 or 6 as a step.
  for (const Activation activation : {Activation::none, Activation::relu, Activation::relu6, Activation::silu}) {
    for (const bool with_residual : {false, true}) {
      const bool silu = activation == Activation::silu;
      if (silu && with_residual) continue;  // is composed
      // Without either there is nothing to fuse.
      const char* name = silu                                               ? "batch_norm_silu"
                         : activation == Activation::none && !with_residual ? "batch_norm"
                                                                            : "batch_norm_act";
      const auto add = [&](const Shape& sizes, bool training) {
        Args args = {x(sizes), x({2}, 1, 4), x({2}, -1, 2)};
        if (training) {
          // A size that can be 0: the statistics of nothing are refused.
          args.push_back(x({N}));
        } else {
          args.push_back(fixed({2}));
          args.push_back(fixed({2}, 0.5, 2));
        }
        if (with_residual) args.push_back(x(sizes));
        cases.push_back(op(name, args, [=](In in) {
          BatchNormFuncOptions norm{.weight = in[1], .bias = in[2], .training = training};
          if (!training) norm.running_mean = in[3], norm.running_var = in[4];
          return batch_norm_act(in[0], norm, activation, with_residual ? in.back() : Tensor());
        }));
      };
      add({3, 2, N, 2}, false);
      add({4, 2, 2, 3}, true);
    }
  }
  return cases;
}

}  // namespace halfstep::test
