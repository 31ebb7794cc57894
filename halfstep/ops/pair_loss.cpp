// SPDX-License-Identifier: Apache-2.0
// Losses of two tensors of one shape: one kernel computes and sums the terms, another their slopes.
#include <limits>

#include "halfstep/core/fail.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

// Of input, target and the weights that there are, the first of them being input number `first`.
DType common_dtype(const InferContext& ctx, int first) {
  const Tensor* all[4];
  std::size_t n = 0;
  for (int i = first; i < first + 4; ++i) {
    if (ctx.has(i)) all[n++] = &ctx.input(i);
  }
  return result_type({all, n}, ctx.name());
}

// Inputs: input, target, weight, pos_weight, all of one shape and row-major.
void infer_pair_loss(InferContext& ctx) {
  const DType dtype = common_dtype(ctx, 0);
  ctx.cast(dtype);
  ctx.output(ctx.attributes<PairLossAttributes>().reduction == 0 ? ctx.input(0).sizes() : Shape{}, dtype);
}

// Inputs: gradient, then as above. Outputs: gradients of input and target, empty where not asked for.
const Op& pair_loss_backward_op = define_op({
    .name = "pair_loss_backward",
    .signature = "pair_loss_backward(gradient, input, target, weight, pos_weight)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<PairLossAttributes>();
          const DType dtype = common_dtype(ctx, 1);
          ctx.cast(dtype, 0b11110);
          ctx.output(a.want_input ? ctx.input(1).sizes() : Shape{0}, dtype_or(a.dtype, dtype));
          ctx.output(a.want_target ? ctx.input(1).sizes() : Shape{0}, dtype);
        },
    .attributes = &attribute_struct<PairLossAttributes>(),
    .key = 1,
    .backward = true,
});

// Slopes of recorded ops, for second derivatives.
Tensor input_slope(const GradContext& c, const PairLossAttributes& a) {
  const Tensor &x = c.input(0), &y = c.input(1);
  switch (a.kind) {
    case HALFSTEP_LOSS_MSE:
      return (x - y) * 2;
    case HALFSTEP_LOSS_L1:
      return sign(x - y);
    case HALFSTEP_LOSS_SMOOTH_L1:
      return a.parameter == 0 ? sign(x - y) : clamp((x - y) / a.parameter, -1.0, 1.0);
    case HALFSTEP_LOSS_HUBER:
      return clamp(x - y, -a.parameter, a.parameter);
    case HALFSTEP_LOSS_KL_DIV:
      return a.parameter != 0 ? neg(exp(y)) : neg(y);
    case HALFSTEP_LOSS_BCE_WITH_LOGITS: {
      // 1 - sigmoid(-x) would leave nothing of the slope of a confident negative.
      return (1 - y) * sigmoid(x) - (c.input(3).defined() ? c.input(3) * y : y) * sigmoid(neg(x));
    }
    case HALFSTEP_LOSS_BCE:
      return (x - y) / clamp(x * (1 - x), static_cast<double>(1e-12f), std::numeric_limits<double>::infinity());
  }
  return {};
}
Tensor target_slope(const GradContext& c, const PairLossAttributes& a) {
  const Tensor &x = c.input(0), &y = c.input(1);
  switch (a.kind) {
    case HALFSTEP_LOSS_KL_DIV:
      return a.parameter != 0 ? exp(y) * ((y - x) + 1) : (log(y) + 1) - x;
    case HALFSTEP_LOSS_BCE_WITH_LOGITS:
      // softplus(-x) = -log(sigmoid(x))
      return c.input(3).defined() ? neg(x) + (c.input(3) - 1) * neg(logsigmoid(x)) : neg(x);
    case HALFSTEP_LOSS_BCE: {
      const double most = std::numeric_limits<double>::infinity();
      return clamp(log(1 - x), -100.0, most) - clamp(log(x), -100.0, most);
    }
    default:
      return neg(input_slope(c, a));
  }
}

void pair_loss_gradient(GradContext& c) {
  PairLossAttributes a = c.attributes<PairLossAttributes>();
  if (!c.create_graph) {
    a.want_input = c.needs(0);
    a.want_target = c.needs(1);
    a.dtype = dtype_code(c.grad_dtype(0));
    const Tensor g = c.grad().contiguous();
    const auto d = call_n<2>(pair_loss_backward_op, {&g, &c.input(0), &c.input(1), &c.input(2), &c.input(3)}, a);
    if (a.want_input) c.set(0, d[0]);
    if (a.want_target) c.set(1, d[1]);
    return;
  }
  Tensor g = a.divisor == 1 ? c.grad() : c.grad() / a.divisor;
  if (c.input(2).defined()) g = g * c.input(2);
  if (c.needs(0)) c.set(0, g * input_slope(c, a));
  if (c.needs(1)) c.set(1, g * target_slope(c, a));
}

Op declaration(const char* name, const char* signature) {
  return {.name = name,
          .signature = signature,
          .infer = infer_pair_loss,
          .grad = pair_loss_gradient,
          .saves = {in(0, 1, 2, 3), in(0, 1, 2, 3)},
          .attributes = &attribute_struct<PairLossAttributes>()};
}
const Op& mse_loss_op = define_op(declaration("mse_loss", "mse_loss(input, target, reduction=mean)"));
const Op& l1_loss_op = define_op(declaration("l1_loss", "l1_loss(input, target, reduction=mean)"));
const Op& smooth_l1_loss_op =
    define_op(declaration("smooth_l1_loss", "smooth_l1_loss(input, target, reduction=mean, beta=1)"));
const Op& huber_loss_op = define_op(declaration("huber_loss", "huber_loss(input, target, reduction=mean, delta=1)"));
const Op& kl_div_op = define_op(declaration("kl_div", "kl_div(input, target, reduction=mean, log_target=false)"));
const Op& bce_with_logits_op = define_op(
    declaration("binary_cross_entropy_with_logits",
                "binary_cross_entropy_with_logits(input, target, weight=none, pos_weight=none, reduction=mean)"));
const Op& bce_op =
    define_op(declaration("binary_cross_entropy", "binary_cross_entropy(input, target, weight=none, reduction=mean)"));
const Op& cosine_similarity_op = define_op({
    .name = "cosine_similarity",
    .signature = "cosine_similarity(input, other, dim=1, eps=1e-8)",
    .composite = true,
});

Tensor call_pair_loss(const Op& op, std::int32_t kind, const Tensor& input, const Tensor& target, Reduction reduction,
                      double parameter = 0, const Tensor& weight = {}, const Tensor& pos_weight = {}) {
  check_defined(input, op.name, "an input");
  check_defined(target, op.name, "a target");
  check_floating(input, op.name);
  check_floating(target, op.name);
  if (input.sizes() != target.sizes()) {
    fail<ShapeError>("{}: expected a target of the input's shape {}, got {}; reshape or expand one?", op.name,
                     input.sizes().str(), target.sizes().str());
  }
  if (reduction == Reduction::batchmean && kind != HALFSTEP_LOSS_KL_DIV) {
    fail<Error>("{}: expected reduction none, mean or sum, got batchmean", op.name);
  }
  PairLossAttributes a{.kind = kind, .reduction = static_cast<std::int32_t>(reduction), .parameter = parameter};
  if (reduction == Reduction::mean) a.divisor = static_cast<double>(input.numel());
  if (reduction == Reduction::batchmean) a.divisor = input.dim() == 0 ? 1 : static_cast<double>(input.sizes()[0]);
  const auto like_input = [&](const Tensor& t) {
    return t.defined() ? t.detach().expand(input.sizes()).contiguous() : t;
  };
  const Tensor x = input.contiguous(), y = target.contiguous(), w = like_input(weight), p = like_input(pos_weight);
  return call(op, {&x, &y, &w, &p}, a);
}

}  // namespace

Tensor mse_loss(const Tensor& input, const Tensor& target, const LossOptions& options) {
  return call_pair_loss(mse_loss_op, HALFSTEP_LOSS_MSE, input, target, options.reduction);
}
Tensor l1_loss(const Tensor& input, const Tensor& target, const LossOptions& options) {
  return call_pair_loss(l1_loss_op, HALFSTEP_LOSS_L1, input, target, options.reduction);
}
Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, const SmoothL1Options& options) {
  if (!(options.beta >= 0)) fail<Error>("smooth_l1_loss: expected a beta of at least 0, got {}", options.beta);
  return call_pair_loss(smooth_l1_loss_op, HALFSTEP_LOSS_SMOOTH_L1, input, target, options.reduction, options.beta);
}
Tensor huber_loss(const Tensor& input, const Tensor& target, const HuberOptions& options) {
  if (!(options.delta > 0)) fail<Error>("huber_loss: expected a delta above 0, got {}", options.delta);
  return call_pair_loss(huber_loss_op, HALFSTEP_LOSS_HUBER, input, target, options.reduction, options.delta);
}
Tensor kl_div(const Tensor& input, const Tensor& target, const KlDivOptions& options) {
  return call_pair_loss(kl_div_op, HALFSTEP_LOSS_KL_DIV, input, target, options.reduction, options.log_target ? 1 : 0);
}
Tensor binary_cross_entropy_with_logits(const Tensor& input, const Tensor& target,
                                        const BceWithLogitsOptions& options) {
  return call_pair_loss(bce_with_logits_op, HALFSTEP_LOSS_BCE_WITH_LOGITS, input, target, options.reduction, 0,
                        options.weight, options.pos_weight);
}
Tensor binary_cross_entropy(const Tensor& input, const Tensor& target, const BceOptions& options) {
  return call_pair_loss(bce_op, HALFSTEP_LOSS_BCE, input, target, options.reduction, 0, options.weight);
}

Tensor cosine_similarity(const Tensor& input, const Tensor& other, const CosineSimilarityOptions& options) {
  check_defined(input, "cosine_similarity", "input 0");
  check_defined(other, "cosine_similarity", "input 1");
  check_floating(input, "cosine_similarity");
  check_floating(other, "cosine_similarity");
  return composite(cosine_similarity_op, {&input, &other}, [&](std::span<const Tensor> t) {
    const Shape sizes = broadcast_shapes(t[0].sizes(), t[1].sizes(), "cosine_similarity");
    const Shape dims{wrap_dim(options.dim, sizes.size(), "cosine_similarity")};
    // In 16 bits everything between is float32, so that the result is rounded once.
    const Tensor* both[] = {&t[0], &t[1]};
    const DType dtype = result_type(both, "cosine_similarity");
    const DType inner = is_low_precision(dtype) ? DType::f32 : dtype;
    const Tensor a = t[0].to(inner).expand(sizes), b = t[1].to(inner).expand(sizes);
    const double most = std::numeric_limits<double>::infinity();
    // Unit vectors first: their products neither overflow nor vanish.
    const Tensor na = clamp(norm(a, 2, dims, {.keepdim = true}), options.eps, most);
    const Tensor nb = clamp(norm(b, 2, dims, {.keepdim = true}), options.eps, most);
    return sum((a / na) * (b / nb), dims).to(dtype);
  });
}

}  // namespace halfstep
