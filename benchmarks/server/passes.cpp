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
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/view.h"

namespace halfstep::bench {
namespace {

constexpr std::int64_t kRows = 2048, kWidth = 1024, kChannels = 64;

// An op of one leaf, [2048, 1024] or [16, 64, 56, 56] with the channels last.
struct Pass {
  std::string name;
  bool image;
  double moved;  // tensors of the leaf's size that are read or written at least, forward and backward
  std::function<std::function<Tensor(const Tensor&)>(DType)> make;
};

std::vector<Pass> passes() {
  const auto plain = [](Tensor (*f)(const Tensor&)) {
    return [f](DType) { return std::function<Tensor(const Tensor&)>(f); };
  };
  return {
      // Forward x and y, backward g, x (or y) and dx.
      {"layer_norm", false, 5,
       [](DType dtype) {
         const Tensor weight = ones({kWidth}).to(dtype), bias = zeros({kWidth}).to(dtype);
         return [=](const Tensor& x) { return layer_norm(x, {kWidth}, {.weight = weight, .bias = bias}); };
       }},
      {"rms_norm", false, 5,
       [](DType dtype) {
         const Tensor weight = ones({kWidth}).to(dtype);
         return [=](const Tensor& x) { return rms_norm(x, {kWidth}, {.weight = weight}); };
       }},
      {"group_norm", true, 5, plain([](const Tensor& x) { return group_norm(x, 32); })},
      {"softmax", false, 5, plain([](const Tensor& x) { return softmax(x, 1); })},
      {"softmax_down", false, 5, plain([](const Tensor& x) { return softmax(x, 0); })},
      {"log_softmax", false, 5, plain([](const Tensor& x) { return log_softmax(x, 1); })},
      {"gelu", false, 5, plain([](const Tensor& x) { return gelu(x); })},
      {"silu", false, 5, plain([](const Tensor& x) { return silu(x); })},
      // Forward x, backward x and dx.
      {"logsumexp", false, 3, plain([](const Tensor& x) { return logsumexp(x, {1}); })},
      {"amax_down", false, 3, plain([](const Tensor& x) { return amax(x, {0}); })},
      {"bce_with_logits", false, 5,
       [](DType dtype) {
         const Tensor target = rand({kRows, kWidth}).to(dtype);
         return [=](const Tensor& x) { return binary_cross_entropy_with_logits(x, target); };
       }},
      // Forward x and y, backward g and dx.
      {"transpose", false, 4, plain([](const Tensor& x) { return x.t().contiguous(); })},
      {"cumsum", false, 4, plain([](const Tensor& x) { return cumsum(x, 1); })},
      {"index_select", false, 4,
       [](DType) {
         const Tensor rows = randint(0, kRows, {kRows});
         return [=](const Tensor& x) { return index_select(x, 0, rows); };
       }},
      {"max_pool2d", true, 2.75,  // places of the largest elements aside
       plain([](const Tensor& x) { return max_pool2d(x, {3}, {.stride = {2}, .padding = {1}}); })},
      {"avg_pool2d", true, 2.5, plain([](const Tensor& x) { return avg_pool2d(x, {2}); })},
  };
}

Prepared prepare_pass(const Pass& pass, DType dtype) {
  manual_seed(1);
  Tensor x = pass.image ? randn({16, kChannels, 56, 56}).clone(MemoryFormat::channels_last) : randn({kRows, kWidth});
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
      const double elements = pass.image ? 16.0 * kChannels * 56 * 56 : static_cast<double>(kRows * kWidth);
      cases.push_back({fmt::format("pass/{}/{}", pass.name, name(dtype)), [=] { return prepare_pass(pass, dtype); }, 0,
                       pass.moved * elements * static_cast<double>(item_size(dtype))});
    }
  }
}

}  // namespace halfstep::bench
