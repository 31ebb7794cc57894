// SPDX-License-Identifier: Apache-2.0
// Ops that do little with each element, forward and backward: what counts is how memory is passed over.
#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/server/server.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/resample.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/sort.h"
#include "halfstep/ops/view.h"

namespace halfstep::bench {
namespace {

constexpr std::int64_t kRows = 2048, kWidth = 1024, kChannels = 64;

// The leaf: [2048, 1024], or [16, 64, 56, 56] with the channels last or row by row.
enum class Leaf { matrix, last, rows };

// An op of one leaf.
struct Pass {
  std::string name;
  Leaf leaf;
  double moved;  // tensors of the leaf's size that are read or written at least, forward and backward
  std::function<std::function<Tensor(const Tensor&)>(DType)> make;
};

std::vector<Pass> passes() {
  const auto plain = [](Tensor (*f)(const Tensor&)) {
    return [f](DType) { return std::function<Tensor(const Tensor&)>(f); };
  };
  using enum Leaf;
  return {
      // Forward x and y, backward g, x (or y) and dx.
      {"layer_norm", matrix, 5,
       [](DType dtype) {
         const Tensor weight = ones({kWidth}).to(dtype), bias = zeros({kWidth}).to(dtype);
         return [=](const Tensor& x) { return layer_norm(x, {kWidth}, {.weight = weight, .bias = bias}); };
       }},
      {"rms_norm", matrix, 5,
       [](DType dtype) {
         const Tensor weight = ones({kWidth}).to(dtype);
         return [=](const Tensor& x) { return rms_norm(x, {kWidth}, {.weight = weight}); };
       }},
      {"group_norm", last, 5, plain([](const Tensor& x) { return group_norm(x, 32); })},
      {"softmax", matrix, 5, plain([](const Tensor& x) { return softmax(x, 1); })},
      {"softmax_down", matrix, 5, plain([](const Tensor& x) { return softmax(x, 0); })},
      {"log_softmax", matrix, 5, plain([](const Tensor& x) { return log_softmax(x, 1); })},
      {"gelu", matrix, 5, plain([](const Tensor& x) { return gelu(x); })},
      {"silu", matrix, 5, plain([](const Tensor& x) { return silu(x); })},
      // Forward x, backward x and dx.
      {"logsumexp", matrix, 3, plain([](const Tensor& x) { return logsumexp(x, {1}); })},
      {"amax_down", matrix, 3, plain([](const Tensor& x) { return amax(x, {0}); })},
      {"bce_with_logits", matrix, 5,
       [](DType dtype) {
         const Tensor target = rand({kRows, kWidth}).to(dtype);
         return [=](const Tensor& x) { return binary_cross_entropy_with_logits(x, target); };
       }},
      // Forward x and y, backward g and dx.
      {"transpose", matrix, 4, plain([](const Tensor& x) { return x.t().contiguous(); })},
      {"cumsum", matrix, 4, plain([](const Tensor& x) { return cumsum(x, 1); })},
      {"index_select", matrix, 4,
       [](DType) {
         const Tensor rows = randint(0, kRows, {kRows});
         return [=](const Tensor& x) { return index_select(x, 0, rows); };
       }},
      {"index_select_last", matrix, 4,
       [](DType) {
         const Tensor columns = randint(0, kWidth, {kWidth});
         return [=](const Tensor& x) { return index_select(x, 1, columns); };
       }},
      // And an index of 8 bytes an element, twice: four tensors of float32.
      {"gather", matrix, 8,
       [](DType) {
         const Tensor index = randint(0, kWidth, {kRows, kWidth});
         return [=](const Tensor& x) { return gather(x, 1, index); };
       }},
      {"masked_select", matrix, 4,
       [](DType) {
         const Tensor mask = gt(rand({kRows, kWidth}), 0.5);
         return [=](const Tensor& x) { return masked_select(x, mask); };
       }},
      {"flip", matrix, 4, plain([](const Tensor& x) { return flip(x, {1}); })},
      {"cumsum_down", matrix, 4, plain([](const Tensor& x) { return cumsum(x, 0); })},
      // Forward x; backward dx.
      {"topk", matrix, 2, plain([](const Tensor& x) { return topk(x, 10, 1).values; })},
      {"max", matrix, 2, plain([](const Tensor& x) { return max(x, 1).values; })},
      // Forward x, backward x and dx.
      {"logsumexp_down", matrix, 3, plain([](const Tensor& x) { return logsumexp(x, {0}); })},
      {"smooth_l1", matrix, 5,
       [](DType dtype) {
         const Tensor target = rand({kRows, kWidth}).to(dtype);
         return [=](const Tensor& x) { return smooth_l1_loss(x, target); };
       }},
      {"cross_entropy_rows", rows, 3,
       [](DType) {
         const Tensor target = randint(0, kChannels, {16, 56, 56});
         return [=](const Tensor& x) { return cross_entropy(x, target); };
       }},
      // Forward x and y, backward g, x and dx.
      {"sin", matrix, 5, plain([](const Tensor& x) { return sin(x); })},
      {"pow", matrix, 9, plain([](const Tensor& x) { return pow(abs(x), 1.7); })},
      {"max_pool2d", last, 2.75,  // places of the largest elements aside
       plain([](const Tensor& x) { return max_pool2d(x, {3}, {.stride = {2}, .padding = {1}}); })},
      {"avg_pool2d", last, 2.5, plain([](const Tensor& x) { return avg_pool2d(x, {2}); })},
      {"max_pool2d_rows", rows, 2.75,
       plain([](const Tensor& x) { return max_pool2d(x, {3}, {.stride = {2}, .padding = {1}}); })},
      {"avg_pool2d_rows", rows, 2.5, plain([](const Tensor& x) { return avg_pool2d(x, {2}); })},
      {"mean_rows", rows, 2, plain([](const Tensor& x) { return adaptive_avg_pool2d(x, {1}); })},
      {"bilinear_rows", rows, 10, plain([](const Tensor& x) {
         return interpolate(x, {.scale_factor = {2, 2}, .mode = InterpolateMode::bilinear});
       })},
  };
}

Prepared prepare_pass(const Pass& pass, DType dtype) {
  manual_seed(1);
  Tensor x = pass.leaf == Leaf::matrix ? randn({kRows, kWidth}) : randn({16, kChannels, 56, 56});
  if (pass.leaf == Leaf::last) x = x.clone(MemoryFormat::channels_last);
  x = x.to(dtype);
  x.requires_grad_();
  const auto f = pass.make(dtype);
  const Tensor g = ones_like(f(x).detach());
  return {[x, f, g] { grad({f(x)}, {x}, {.grad_outputs = {g}}); }};
}

}  // namespace

void add_pass_cases(std::vector<Case>& cases) {
  for (const Pass& pass : passes()) {
    for (const DType dtype : {f32, bf16}) {
      const double elements =
          pass.leaf != Leaf::matrix ? 16.0 * kChannels * 56 * 56 : static_cast<double>(kRows * kWidth);
      cases.push_back({fmt::format("pass/{}/{}", pass.name, name(dtype)), [=] { return prepare_pass(pass, dtype); }, 0,
                       pass.moved * elements * static_cast<double>(item_size(dtype))});
    }
  }
}

}  // namespace halfstep::bench
