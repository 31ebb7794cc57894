// SPDX-License-Identifier: Apache-2.0
// Cases of convolutions. Sums of up to 27 products: 16 bits are held against float64 by the bound of their sum.
#include "halfstep/ops/conv.h"
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> convolution_cases() {
  return {
      op("conv2d", {x({N, 3, 5, 4}), x({2, 3, 3, 3}), x({2})}, [](In in) { return conv2d(in[0], in[1], in[2]); }),
      op("conv2d", {x({N, 4, 6, 7}), x({6, 2, 3, 2})},
         [](In in) {
           return conv2d(in[0], in[1], {}, {.stride = {2, 1}, .padding = {1, 2}, .dilation = {1, 2}, .groups = 2});
         }),
      op("conv2d", {x({N, 3, 5, 5}), x({3, 1, 3, 3}), x({3})},
         [](In in) { return conv2d(in[0], in[1], in[2], {.stride = {2}, .padding = {1}, .groups = 3}); }),
      op("conv2d", {x({N, 4, 4, 5}), x({3, 4, 1, 1})}, [](In in) { return conv2d(in[0], in[1], {}, {.stride = {2}}); }),
      op("conv1d", {x({N, 3, 7}), x({2, 3, 3}), x({2})},
         [](In in) { return conv1d(in[0], in[1], in[2], {.stride = {2}, .padding = {1}}); }),
      op("conv_transpose2d", {x({N, 4, 3, 4}), x({4, 3, 3, 2}), x({3})},
         [](In in) { return conv_transpose2d(in[0], in[1], in[2]); }),
      op("conv_transpose2d", {x({N, 4, 3, 3}), x({4, 3, 3, 3}), x({6})},
         [](In in) {
           return conv_transpose2d(in[0], in[1], in[2],
                                   {.stride = {2}, .padding = {1}, .output_padding = {1, 0}, .groups = 2});
         }),
      op("conv_transpose2d", {x({N, 2, 3, 3}), x({2, 2, 2, 2})},
         [](In in) { return conv_transpose2d(in[0], in[1], {}, {.output_padding = {1}, .dilation = {2}}); }),
      op("conv_transpose1d", {x({N, 3, 4}), x({3, 2, 3}), x({2})},
         [](In in) { return conv_transpose1d(in[0], in[1], in[2], {.stride = {2}, .output_padding = {1}}); }),
  };
}

}  // namespace halfstep::test
