// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_cases.h"

#include <cmath>
#include <limits>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/einsum.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/sort.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"
#include "tests/support/op_case_makers.h"

namespace halfstep::test {

std::vector<OpCase> unary_cases() {
  return {
      unary("abs", abs),
      unary("sign", sign),
      unary("square", square),
      unary("floor", floor),
      unary("ceil", ceil),
      unary("round", round),
      unary("trunc", trunc),
      unary("neg", neg),
      unary("sqrt", sqrt, 0.2, 3),
      unary("rsqrt", rsqrt, 0.2, 3),
      unary("reciprocal", reciprocal, 0.4, 3),
      unary("exp", exp),
      unary("exp2", exp2),
      unary("expm1", expm1),
      unary("log", log, 0.2, 3),
      unary("log2", log2, 0.2, 3),
      unary("log10", log10, 0.2, 3),
      unary("log1p", log1p, -0.6, 3),
      unary("sin", sin, -6, 6),
      unary("cos", cos, -6, 6),
      unary("tan", tan, -1.2, 1.2),
      unary("asin", asin, -0.9, 0.9),
      unary("acos", acos, -0.9, 0.9),
      unary("atan", atan),
      unary("sinh", sinh),
      unary("cosh", cosh),
      unary("tanh", tanh),
      unary("asinh", asinh),
      unary("acosh", acosh, 1.2, 3),
      unary("atanh", atanh, -0.9, 0.9),
      unary("erf", erf),
      unary("erfc", erfc),
      unary("erfinv", erfinv, -0.9, 0.9),
      unary("relu", relu),
      unary("silu", silu),
      unary("mish", mish),
      unary("hardswish", hardswish, -4, 4),
      unary("hardsigmoid", hardsigmoid, -4, 4),
      unary("sigmoid", sigmoid),
      unary("logsigmoid", logsigmoid),
      unary("hardtanh", relu6, -2, 8),
      unary("elu", selu),
      op("gelu", {x({N, 3})}, [](In in) { return gelu(in[0]); }),
      op("gelu_tanh", {x({N, 3})}, [](In in) { return gelu(in[0], GeluForm::tanh); }),
      op("leaky_relu", {x({N, 3})}, [](In in) { return leaky_relu(in[0], 0.1); }),
      op("elu", {x({N, 3})}, [](In in) { return elu(in[0], 0.7); }),
      op("softplus", {x({N, 3})}, [](In in) { return softplus(in[0], 1.5, 2); }),
      op("threshold", {x({N, 3})}, [](In in) { return threshold(in[0], 0.3, -1); }),
      op("hardtanh", {x({N, 3})}, [](In in) { return hardtanh(in[0], -0.7, 1.3); }),
      op("clamp", {x({N, 3})}, [](In in) { return clamp(in[0], -0.7, 1.3); }),
      op("nan_to_num", {x({N, 3})}, [](In in) { return nan_to_num(in[0]); }),
  };
}

std::vector<OpCase> binary_cases() {
  const Args two = {x({N, 3}), x({3})};
  const Args positive = {x({N, 3}, 0.3, 2), x({N, 1}, 0.3, 2)};
  const Args three = {x({N, 3}), x({3}, 0.5, 2), x({N, 1}, 0.5, 2)};
  return {
      op("add", two, [](In in) { return add(in[0], in[1], -1.5); }),
      op("sub", two, [](In in) { return sub(in[0], in[1], 2.5); }),
      op("mul", two, [](In in) { return in[0] * in[1]; }),
      op("mul", {x({N, 3}), x({})}, [](In in) { return in[0] * in[1]; }),
      op("div", {x({N, 3}), x({3}, 0.5, 2)}, [](In in) { return in[0] / in[1]; }),
      op("add_scalar", {x({N, 3})}, [](In in) { return in[0] + 1.25; }),
      op("mul_scalar", {x({N, 3})}, [](In in) { return in[0] * -1.25; }),
      op("div_scalar", {x({N, 3})}, [](In in) { return in[0] / 3; }),
      op("rdiv_scalar", {x({N, 3}, 0.5, 2)}, [](In in) { return 3 / in[0]; }),
      op("maximum", two, [](In in) { return maximum(in[0], in[1]); }),
      op("minimum", two, [](In in) { return minimum(in[0], in[1]); }),
      op("fmod", {x({N, 3}), x({3}, 0.7, 0.9)}, [](In in) { return fmod(in[0], in[1]); }),
      op("remainder", {x({N, 3}), x({3}, 0.7, 0.9)}, [](In in) { return remainder(in[0], in[1]); }),
      op("pow", positive, [](In in) { return pow(in[0], in[1]); }),
      op("pow_scalar", {x({N, 3}, 0.3, 2)}, [](In in) { return pow(in[0], 2.5); }),
      op("pow_scalar", {x({N, 3})}, [](In in) { return pow(in[0], 3); }),
      op("pow_scalar", {x({N, 3})}, [](In in) { return pow(in[0], 2); }),
      op("scalar_pow", {x({N, 3})}, [](In in) { return pow(1.7, in[0]); }),
      op("atan2", two, [](In in) { return atan2(in[0], in[1]); }),
      op("hypot", two, [](In in) { return hypot(in[0], in[1]); }),
      op("lerp", three, [](In in) { return lerp(in[0], in[1], in[2]); }),
      op("lerp_scalar", two, [](In in) { return lerp(in[0], in[1], 0.3); }),
      op("addcmul", three, [](In in) { return addcmul(in[0], in[1], in[2], 1.5); }),
      op("addcdiv", three, [](In in) { return addcdiv(in[0], in[1], in[2], 1.5); }),
      op("maximum", {x({N, 3}), x({3}, -1, -0.5), x({N, 1}, 0.5, 1)}, [](In in) { return clamp(in[0], in[1], in[2]); }),
      op("where", {mask_of({N, 3}), x({N, 3}), x({3})}, [](In in) { return where(in[0], in[1], in[2]); }),
      op("where", {mask_of({N, 3}), x({N, 3})}, [](In in) { return where(in[0], in[1], 2); }),
      op("masked_fill", {mask_of({3}), x({N, 3})}, [](In in) { return masked_fill(in[1], in[0], 0.5); }),
      op("prelu", {x({N, 3}), x({3})}, [](In in) { return prelu(in[0], in[1]); }),
      op("prelu", {x({N, 3}), x({1})}, [](In in) { return prelu(in[0], in[1]); }),
      op("dropout", {x({N, 3})},
         [](In in) {
           manual_seed(5);
           return dropout(in[0], 0.4);
         }),
  };
}

std::vector<OpCase> reduction_cases() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Args three = {x({N, 3, 2})};
  const auto by_norm = [](double p) {
    return op("norm", {x({3, N, 2}, 0.3, 2)}, [p](In in) { return norm(in[0] * -1, p, {0, 2}); }, {.roundings = 1});
  };
  const auto along = [&](const char* name, auto f) { return op(name, {x({N, 3, 2})}, f); };
  return {
      along("sum",
            [](In in) {
              return sum(in[0], {0, 2});
            }),
      along("sum", [](In in) { return sum(in[0], {1}, {.keepdim = true}); }),
      along("mean", [](In in) { return mean(in[0], {1}); }),
      op("mean", {x({3, N})}, [](In in) { return mean(in[0], {0}); }),
      along("prod", [](In in) { return prod(in[0], {0}); }),
      along("prod",
            [](In in) {
              return prod(in[0], {1, 2}, {.keepdim = true});
            }),
      along("var", [](In in) { return var(in[0], {1}); }),
      along("std",
            [](In in) {
              return std(in[0], {1, 2}, {.correction = 0});
            }),
      along("var_mean",
            [](In in) {
              const auto [v, m] = var_mean(in[0], {1});
              return std::vector<Tensor>{v, m};
            }),
      along("amax", [](In in) { return amax(in[0], {1}); }),
      along("amin",
            [](In in) {
              return amin(in[0], {1, 2}, {.keepdim = true});
            }),
      along("max_dim", [](In in) { return max(in[0], 1).values; }),
      along("min_dim", [](In in) { return min(in[0], -1, {.keepdim = true}).values; }),
      by_norm(2),
      by_norm(1),
      by_norm(3),
      by_norm(0.5),
      by_norm(kInfinity),
      by_norm(-kInfinity),
      by_norm(0),
      along("logsumexp",
            [](In in) {
              return logsumexp(in[0], {0, 1});
            }),
      along("logsumexp", [](In in) { return logsumexp(in[0], {2}, {.keepdim = true}); }),
      op("dot", {x({N}), x({N})}, [](In in) { return dot(in[0], in[1]); }),
      along("cumsum", [](In in) { return cumsum(in[0], 1); }),
      along("cumprod", [](In in) { return cumprod(in[0], 1); }),
      op("cumprod", {x({4}), x({N})},
         [](In in) {
           return cumprod(in[0] * tensor(std::vector<double>{1, 0, 1, 0}, {4}, {.dtype = in[0].dtype()}), 0);
         }),
      along("softmax", [](In in) { return softmax(in[0], 1); }),
      along("softmax", [](In in) { return softmax(in[0], -1); }),
      along("log_softmax", [](In in) { return log_softmax(in[0], 1); }),
      op("pick_along", {x({N, 2})},
         [](In in) {
           // The gradient of the gradient of a maximum, as a function of its weights.
           std::vector<double> values(static_cast<std::size_t>(in[0].numel()) * 3);
           for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i * 5 % 7);
           const TensorOptions options{.dtype = in[0].dtype()};
           const Tensor at = tensor(values, {in[0].size(0), 3, 2}, options).requires_grad_();
           const Tensor weights = ones(in[0].sizes(), options).requires_grad_();
           const Tensor first = grad({max(at, 1).values}, {at}, {.grad_outputs = {weights}, .create_graph = true})[0];
           const Tensor along = expand(in[0].unsqueeze(1), first.sizes());
           return grad({first}, {weights}, {.grad_outputs = {along}, .create_graph = true})[0];
         }),
      along("sort", [](In in) { return sort(in[0], 1, {.descending = true}).values; }),
      along("topk", [](In in) { return topk(in[0], 2, 1).values; }),
  };
}

std::vector<OpCase> product_cases() {
  return {
      op("mm", {x({N, 3}), x({3, 2})}, [](In in) { return mm(in[0], in[1]); }),
      op("mm", {x({3, N}), x({N, 2})}, [](In in) { return mm(in[0], in[1]); }),
      op("bmm", {x({N, 2, 3}), x({N, 3, 2})}, [](In in) { return bmm(in[0], in[1]); }),
      op("mv", {x({N, 3}), x({3})}, [](In in) { return mv(in[0], in[1]); }),
      op("matmul", {x({N, 1, 2, 3}), x({2, 3, 2})}, [](In in) { return matmul(in[0], in[1]); }),
      op("matmul", {x({3}), x({N, 3, 2})}, [](In in) { return matmul(in[0], in[1]); }),
      op("matmul", {x({N}), x({N})}, [](In in) { return matmul(in[0], in[1]); }),
      op("outer", {x({N}), x({3})}, [](In in) { return outer(in[0], in[1]); }),
      op("linear", {x({N, 3}), x({2, 3}), x({2})}, [](In in) { return linear(in[0], in[1], in[2]); }),
      op("linear", {x({2, N, 3}), x({2, 3})}, [](In in) { return linear(in[0], in[1]); }),
      op("addmm", {x({2}), x({N, 3}), x({3, 2})},
         [](In in) { return addmm(in[0], in[1], in[2], {.beta = 0.5, .alpha = 2}); }),
      op("addmv", {x({N}), x({N, 3}), x({3})},
         [](In in) { return addmv(in[0], in[1], in[2], {.beta = 0.5, .alpha = 2}); }),
      op("addr", {x({N, 1}), x({N}), x({3})},
         [](In in) { return addr(in[0], in[1], in[2], {.beta = 0.5, .alpha = 2}); }),
      op("addbmm", {x({2, 2}), x({N, 2, 3}), x({N, 3, 2})},
         [](In in) { return addbmm(in[0], in[1], in[2], {.beta = 0.5, .alpha = 2}); }),
      op("baddbmm", {x({2, 2}), x({N, 2, 3}), x({N, 3, 2})},
         [](In in) { return baddbmm(in[0], in[1], in[2], {.beta = 0.5, .alpha = 2}); }),
      op("einsum", {x({N, 3}), x({3, 2})},
         [](In in) {
           return einsum("ij,jk->ki", std::vector<Tensor>{in[0], in[1]});
         }),
      op("einsum", {x({N, 2, 2}), x({N, 2})},
         [](In in) {
           return einsum("bii,bi->b", std::vector<Tensor>{in[0], in[1]});
         }),
      op("tensordot", {x({N, 3, 2}), x({3, 2, 2})}, [](In in) { return tensordot(in[0], in[1], 2); }),
      op("scaled_dot_product_attention", {x({N, 2, 3, 2}), x({N, 1, 3, 2}), x({2, 3, 2})},
         [](In in) { return scaled_dot_product_attention(in[0], in[1], in[2], {.is_causal = true}); }),
      op("scaled_dot_product_attention", {x({4, N, 2}), x({2, 3, 2}), x({1, 3, 2}), x({N, 3})},
         [](In in) {
           manual_seed(6);
           return scaled_dot_product_attention(in[0], in[1], in[2],
                                               {.mask = in[3], .dropout_p = 0.3, .scale = 0.9, .enable_gqa = true});
         }),
  };
}

std::vector<OpCase> moving_cases() {
  // Rounding to another dtype has no differences to look at; random numbers are other ones in each dtype.
  const Extra rounds{.differences = false}, random{.sixteen_bits = false};
  const auto overwritten = [random](const char* name, Tensor (*fill)(Tensor)) {
    return op(
        name, {x({N, 3})},
        [fill](In in) {
          manual_seed(9);
          Tensor t = in[0] * 1;
          fill(t.select(1, 1));
          return t * in[0];
        },
        random);
  };
  return {
      op(
          "to", {x({N, 3})}, [](In in) { return in[0].to(f32).to(in[0].dtype()); }, rounds),
      op("clone", {x({N, 3})}, [](In in) { return in[0].clone(); }),
      op("copy", {x({N, 3}), x({3})},
         [](In in) {
           Tensor t = in[0] * 1;
           t.copy_(in[1].expand(t.sizes()));
           return t * in[0];
         }),
      op("fill", {x({N, 3})},
         [](In in) {
           Tensor t = in[0] * 1;
           t.select(1, 0).fill_(3);
           return t * in[0];
         }),
      op("view", {x({N, 3})},
         [](In in) {
           return in[0].contiguous().view({3, in[0].size(0)});
         }),
      op("squeeze", {x({N, 1, 3})}, [](In in) { return in[0].squeeze(1); }),
      op("unsqueeze", {x({N, 3})}, [](In in) { return in[0].unsqueeze(1); }),
      op("expand", {x({N, 1})},
         [](In in) {
           return in[0].expand({2, -1, 3});
         }),
      op("permute", {x({N, 3, 2})},
         [](In in) {
           return in[0].permute({2, 0, 1});
         }),
      op("select", {x({N, 3})}, [](In in) { return in[0].select(1, -1); }),
      op("slice", {x({N, 5})}, [](In in) { return in[0].slice(1, 1, 5, 2); }),
      op("slice_backward", {x({N, 2})},
         [](In in) {
           return slice_backward(in[0], {in[0].size(0), 5}, 1, 1, 5, 2);
         }),
      op("as_strided", {x({N, 3})},
         [](In in) {
           const Tensor t = in[0].contiguous();
           return as_strided(t * 1, {t.size(0), 2}, {3, 2}, 0);
         }),
      op("cat", {x({N, 3}), x({2, 3}), x({1, 3})},
         [](In in) {
           return cat(std::vector<Tensor>{in[0], in[1], in[2]});
         }),
      op("flip", {x({N, 3})},
         [](In in) {
           return flip(in[0], {0, 1});
         }),
      op("tril", {x({N, 3, 3})}, [](In in) { return tril(in[0], 1); }),
      op("triu", {x({N, 3, 3})}, [](In in) { return triu(in[0], -1); }),
      op("diagonal", {x({3, N, 4})}, [](In in) { return diagonal(in[0], 1, 0, 2); }),
      op("diagonal_backward", {x({N, 3})}, [](In in) { return diag_embed(in[0], 1); }),
      op("gather", {x({3, 2}), index_of({N, 2}, 3)}, [](In in) { return gather(in[0], 0, in[1]); }),
      op("scatter", {x({N, 4}), index_of({N, 2}, 2), x({N, 2})},
         [](In in) {
           // Every place is written once.
           const Tensor to = in[1] * 0 + tensor(std::vector<std::int64_t>{3, 1}, {2});
           return scatter(in[0], 1, to, in[2]);
         }),
      op("scatter_value", {x({N, 4}), index_of({N, 2}, 4)}, [](In in) { return scatter(in[0], 1, in[1], 0.5); }),
      op("scatter_add", {x({3, 2}), index_of({N, 2}, 3), x({N, 2})},
         [](In in) { return scatter_add(in[0], 0, in[1], in[2]); }),
      op("scatter_amax", {x({3, 2}), index_of({N, 2}, 3), x({N, 3})},
         [](In in) { return scatter_amax(in[0], 0, in[1], in[2]); }),
      op("index_select", {x({3, 2}), index_of({N}, 3)}, [](In in) { return index_select(in[0], 0, in[1]); }),
      op("index_add", {x({3, 2}), index_of({N}, 3), x({N, 2})},
         [](In in) { return index_add(in[0], 0, in[1], in[2], 1.5); }),
      op("index", {x({3, 4}), index_of({N}, 3), index_of({N}, 4)},
         [](In in) {
           return index(in[0], {in[1], in[2]});
         }),
      op("index_put", {x({3, 2}), index_of({N}, 3), x({N, 2})},
         [](In in) { return index_put(in[0], {in[1]}, in[2], true); }),
      op("index_put", {x({3, 2}), index_of({1}, 3), x({2}), x({N})},
         [](In in) { return index_put(in[0], {in[1]}, in[2]); }),
      op("embedding", {x({5, 2}), index_of({N, 2}, 5)}, [](In in) { return embedding(in[1], in[0]); }),
      overwritten("uniform", [](Tensor t) { return uniform_(t); }),
      overwritten("normal", [](Tensor t) { return normal_(t); }),
      overwritten("bernoulli_p", [](Tensor t) { return bernoulli_(t); }),
      op(
          "bernoulli", {x({N, 3}, 0.1, 0.9)},
          [](In in) {
            manual_seed(9);
            return bernoulli(in[0]) * in[0];
          },
          random),
  };
}

std::vector<OpCase> network_cases() {
  const auto pair = [](const char* name, auto f, double low = -2, double high = 2) {
    return op(name, {x({N, 3}, low, high), x({N, 3}, low, high)}, f);
  };
  constexpr auto kSum = Reduction::sum;
  return {
      op("layer_norm", {x({N, 2, 3}), x({3}), x({3})},
         [](In in) { return layer_norm(in[0], {3}, {.weight = in[1], .bias = in[2]}); }),
      op("rms_norm", {x({N, 2, 3}), x({2, 3})},
         [](In in) {
           return rms_norm(in[0], {2, 3}, {.weight = in[1], .eps = 1e-5});
         }),
      op("group_norm", {x({N, 4, 2}), x({4}), x({4})},
         [](In in) { return group_norm(in[0], 2, {.weight = in[1], .bias = in[2]}); }),
      op("batch_norm", {x({3, 2, N}), x({2}), x({2}), fixed({2}), fixed({2}, 0.5, 2)},
         [](In in) {
           return batch_norm(in[0], {.weight = in[1], .bias = in[2], .running_mean = in[3], .running_var = in[4]});
         }),
      op("batch_norm", {x({4, 2}), x({2}), x({2}), x({N})},
         [](In in) { return batch_norm(in[0], {.weight = in[1], .bias = in[2], .training = true}); }),
      op("cross_entropy", {x({N, 4}), index_of({N}, 4), fixed({4}, 0.5, 2)},
         [](In in) {
           return cross_entropy(in[0], in[1], {.weight = in[2], .reduction = kSum, .label_smoothing = 0.2});
         }),
      op("log_softmax", {x({N, 4}), x({N, 4}, 0, 1)},
         [](In in) { return cross_entropy(in[0], in[1], {.reduction = Reduction::none}); }),
      op("nll_loss", {x({N, 4}), index_of({N}, 4)}, [](In in) { return nll_loss(in[0], in[1], {.reduction = kSum}); }),
      pair("mse_loss", [](In in) { return mse_loss(in[0], in[1], {.reduction = kSum}); }),
      pair("l1_loss", [](In in) { return l1_loss(in[0], in[1], {.reduction = kSum}); }),
      pair("smooth_l1_loss",
           [](In in) { return smooth_l1_loss(in[0], in[1], {.reduction = Reduction::none, .beta = 0.7}); }),
      pair("huber_loss", [](In in) { return huber_loss(in[0], in[1], {.reduction = kSum, .delta = 0.7}); }),
      pair(
          "kl_div", [](In in) { return kl_div(in[0], in[1], {.reduction = kSum}); }, 0.1, 0.9),
      pair("kl_div", [](In in) { return kl_div(in[0], in[1], {.reduction = kSum, .log_target = true}); }),
      pair(
          "binary_cross_entropy", [](In in) { return binary_cross_entropy(in[0], in[1], {.reduction = kSum}); }, 0.1,
          0.9),
      op("binary_cross_entropy_with_logits", {x({N, 3}), x({N, 3}, 0.1, 0.9), fixed({3}, 0.5, 2)},
         [](In in) {
           return binary_cross_entropy_with_logits(in[0], in[1], {.pos_weight = in[2], .reduction = Reduction::none});
         }),
      op("cosine_similarity", {x({N, 3}), x({N, 3})}, [](In in) { return cosine_similarity(in[0], in[1]); }),
  };
}

std::vector<OpCase> all_op_cases() {
  std::vector<OpCase> all;
  for (const auto& family : {unary_cases(), binary_cases(), reduction_cases(), product_cases(), moving_cases(),
                             network_cases(), convolution_cases(), pooling_cases(), resampling_cases(),
                             image_norm_cases(), detection_cases(), quantize_cases()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

namespace {

Tensor laid_out(const Tensor& t, OpLayout layout) {
  if (layout != OpLayout::strided || t.dim() == 0) return t;
  Shape sizes, order;
  for (int d = t.dim() - 1; d >= 0; --d) {
    sizes.push_back(t.sizes()[d]);
    order.push_back(d);
  }
  sizes.back() *= 2;
  Tensor turned = zeros(sizes, {.dtype = t.dtype()}).slice(-1, 0, INT64_MAX, 2).permute(order);
  turned.copy_(t);
  return turned.detach();
}

}  // namespace

std::vector<Tensor> op_arguments(const OpCase& c, OpLayout layout, DType dtype) {
  std::uint64_t seed = 20260;
  for (const char letter : c.op) seed = seed * 31 + static_cast<unsigned char>(letter);
  RandomStream stream(seed);
  std::vector<Tensor> result;
  for (const OpArg& a : c.args) {
    Shape sizes = a.sizes;
    for (std::int64_t& s : sizes) {
      if (s == N) s = layout == OpLayout::empty ? 0 : 2;
    }
    std::vector<double> values(static_cast<std::size_t>(sizes.numel()));
    for (double& v : values) {
      v = stream.uniform(a.low, a.high);
      if (a.kind == OpArg::index) v = std::floor(v);
      if (a.kind == OpArg::mask) v = v > 0;
    }
    const bool floating = a.kind == OpArg::real || a.kind == OpArg::constant;
    const DType wanted = floating ? dtype : a.kind == OpArg::index ? i64 : boolean;
    Tensor t = laid_out(tensor(values, sizes, {.dtype = f64}).to(wanted), layout);
    result.push_back(a.kind == OpArg::real ? t.requires_grad_() : t);
  }
  return result;
}

}  // namespace halfstep::test
