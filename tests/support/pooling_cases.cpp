// SPDX-License-Identifier: Apache-2.0
// Cases of pooling. The second derivatives of maxima are those of picking, which is called there alone: it has cases of
// its own.
#include "halfstep/autograd/engine.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pool.h"
#include "tests/support/op_case_makers.h"

namespace halfstep::test {
namespace {

// The gradient of the gradient of f at values that are all different, as a function of what it picks from.
template <class F>
Tensor picked(const Tensor& from, F f) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < from.numel(); ++i) values.push_back(static_cast<double>(i * 37 % 101));
  const Tensor image = tensor(values, from.sizes(), {.dtype = from.dtype()}).requires_grad_();
  const Tensor y = f(image);
  const Tensor weights = ones(y.sizes(), {.dtype = from.dtype()}).requires_grad_();
  const Tensor first = grad({y}, {image}, {.grad_outputs = {weights}, .create_graph = true})[0];
  return grad({first}, {weights}, {.grad_outputs = {from}, .create_graph = true})[0];
}

}  // namespace

std::vector<OpCase> pooling_cases() {
  const auto overlapping = [](const Tensor& t) { return max_pool2d(t, {3}, {.stride = {2}, .padding = {1}}); };
  const auto adaptive = [](const Tensor& t) { return adaptive_max_pool2d(t, {3, 2}); };
  return {
      op("max_pool2d", {x({N, 5, 6, 5})}, [=](In in) { return overlapping(in[0]); }),
      op("max_pool2d", {x({N, 2, 6, 7})},
         [](In in) {
           return max_pool2d(in[0], {3, 2},
                             {.stride = {1, 2}, .padding = {1, 0}, .dilation = {2, 1}, .ceil_mode = true});
         }),
      op("max_pool2d", {x({N, 2, 7})}, [](In in) { return max_pool1d(in[0], {3}, {.stride = {2}}); }),
      op("max_pool2d_pick", {x({N, 5, 6, 5})}, [=](In in) { return picked(in[0], overlapping); }),
      op("avg_pool2d", {x({N, 5, 6, 5})},
         [](In in) {
           return avg_pool2d(in[0], {3, 2}, {.stride = {2}, .padding = {1}, .ceil_mode = true});
         }),
      op("avg_pool2d", {x({N, 2, 5, 6})},
         [](In in) { return avg_pool2d(in[0], {3}, {.stride = {2}, .padding = {1}, .count_include_pad = false}); }),
      op("avg_pool2d", {x({N, 2, 5})}, [](In in) { return avg_pool1d(in[0], {2}, {.divisor_override = 3}); }),
      op("adaptive_avg_pool2d", {x({N, 5, 4, 5})}, [](In in) { return adaptive_avg_pool2d(in[0], {1}); }),
      op("adaptive_avg_pool2d", {x({N, 4, 5, 4})},
         [](In in) {
           return adaptive_avg_pool2d(in[0], {3, 6});
         }),
      op("adaptive_avg_pool2d", {x({N, 2, 5})}, [](In in) { return adaptive_avg_pool1d(in[0], {3}); }),
      op("adaptive_max_pool2d", {x({N, 5, 5, 4})}, [=](In in) { return adaptive(in[0]); }),
      op("adaptive_max_pool2d_pick", {x({N, 5, 5, 4})}, [=](In in) { return picked(in[0], adaptive); }),
  };
}

}  // namespace halfstep::test
