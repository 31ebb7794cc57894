// SPDX-License-Identifier: Apache-2.0
// cross_entropy and nll_loss; the losses of two tensors of one shape are in pair_loss.cpp.
#include "halfstep/ops/loss.h"

#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"

namespace halfstep {
namespace {

// The weight is cast to the type that is computed in.
void check_class_loss(InferContext& ctx) {
  const Tensor &x = ctx.input(0), &target = ctx.input(1);
  check_floating(x, ctx.name());
  const DType t = target.dtype();
  if (t != DType::i64 && t != DType::i32 && t != DType::u8) {
    fail<DTypeError>("{}: expected class indices as i64, i32 or u8, got {} {}", ctx.name(), name(t),
                     target.sizes().str());
  }
  Shape expected = x.sizes();
  if (expected.size() >= 2) expected.erase(1);
  if (x.dim() < 2 || target.sizes() != expected) {
    fail<ShapeError>("{}: expected class indices {} for an input {}, got {}", ctx.name(), expected.str(),
                     x.sizes().str(), target.sizes().str());
  }
  if (ctx.has(2)) {
    const Tensor& weight = ctx.input(2);
    if (weight.sizes() != Shape{x.size(1)}) {
      fail<ShapeError>("{}: expected class weights [{}], got {}", ctx.name(), x.size(1), weight.sizes().str());
    }
    if (weight.dtype() != accumulate_dtype(x.dtype())) ctx.cast(accumulate_dtype(x.dtype()), 4);
  }
}

void infer_class_loss(InferContext& ctx, bool logits) {
  check_class_loss(ctx);
  const auto& a = ctx.attributes<ClassLossAttributes>();
  const Tensor &x = ctx.input(0), &target = ctx.input(1);
  ctx.output(a.reduction == 0 ? target.sizes() : Shape{}, x.dtype());
  const DType kept = accumulate_dtype(x.dtype());
  if (logits) {  // each sample's largest logit, and the sum of exponentials above it
    Shape parts = target.sizes();
    parts.insert(0, 2);
    ctx.output(parts, kept);
  }
  ctx.output({}, kept);  // what the mean divides by
}

// Inputs: gradient, input, target, weight, divisor (, maxima and sums).
void infer_class_loss_backward(InferContext& ctx) {
  const Tensor& x = ctx.input(1);
  ctx.output(x.sizes(), dtype_or(ctx.attributes<ClassLossAttributes>().dtype, x.dtype()));
  if (ctx.has(3)) ctx.cast(accumulate_dtype(x.dtype()), 8);
}

const Op& cross_entropy_backward_op = define_op({
    .name = "cross_entropy_backward",
    .signature = "cross_entropy_backward(gradient, input, target, weight, divisor, parts)",
    .infer = infer_class_loss_backward,
    .attributes = &attribute_struct<ClassLossAttributes>(),
    .key = 1,
    .backward = true,
});
const Op& nll_loss_backward_op = define_op({
    .name = "nll_loss_backward",
    .signature = "nll_loss_backward(gradient, input, target, weight, divisor)",
    .infer = infer_class_loss_backward,
    .attributes = &attribute_struct<ClassLossAttributes>(),
    .key = 1,
    .backward = true,
});
// The weight that each sample gives each class: what the loss is linear in.
const Op& cross_entropy_targets_op = define_op({
    .name = "cross_entropy_targets",
    .signature = "cross_entropy_targets(target, weight, classes, label_smoothing, ignore_index)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<ClassLossAttributes>();
          Shape sizes = ctx.input(0).sizes();
          sizes.insert(1, a.classes);
          ctx.output(sizes, dtype_or(a.dtype, DType::f32));
          if (ctx.has(1)) ctx.cast(dtype_or(a.dtype, DType::f32), 2);
        },
    .attributes = &attribute_struct<ClassLossAttributes>(),
    .key = -1,
    .backward = true,
});

Tensor dense_targets(const GradContext& c) {
  ClassLossAttributes a = c.attributes<ClassLossAttributes>();
  a.classes = c.input_sizes(0)[1];
  a.dtype = dtype_code(accumulate_dtype(c.input_dtype(0)));
  return call(cross_entropy_targets_op, {&c.input(1), &c.input(2)}, a);
}
// The gradient of one term a sample, [N, 1, ...] or a number.
Tensor term_gradient(const GradContext& c, const Tensor& divisor) {
  const auto& a = c.attributes<ClassLossAttributes>();
  if (a.reduction == 0) return c.grad().unsqueeze(1);
  return a.reduction == 1 ? c.grad() / divisor.detach() : c.grad();
}

const Op& cross_entropy_op = define_op({
    .name = "cross_entropy",
    .signature = "cross_entropy(input, target, weight=none, reduction=mean, ignore_index=-100, label_smoothing=0)",
    .infer = [](InferContext& ctx) { infer_class_loss(ctx, true); },
    .grad =
        [](GradContext& c) {
          if (!c.needs(0) || !c.grad(0).defined()) return;
          const Tensor &x = c.input(0), &divisor = c.output(2);
          if (!c.create_graph) {
            ClassLossAttributes a = c.attributes<ClassLossAttributes>();
            a.dtype = dtype_code(c.grad_dtype(0));
            c.set(0, call(cross_entropy_backward_op, {&c.grad(), &x, &c.input(1), &c.input(2), &divisor, &c.output(1)},
                          a));
            return;
          }
          const Tensor q = dense_targets(c);
          const Tensor p = softmax(x, 1, {.dtype = q.dtype()});
          c.set(0, term_gradient(c, divisor) * (sum(q, {1}, {.keepdim = true}) * p - q));
        },
    .saves = {in(0, 1, 2) | out(1, 2)},
    .attributes = &attribute_struct<ClassLossAttributes>(),
});
const Op& nll_loss_op = define_op({
    .name = "nll_loss",
    .signature = "nll_loss(input, target, weight=none, reduction=mean, ignore_index=-100)",
    .infer = [](InferContext& ctx) { infer_class_loss(ctx, false); },
    .grad =
        [](GradContext& c) {
          if (!c.needs(0) || !c.grad(0).defined()) return;
          const Tensor& divisor = c.output(1);
          if (!c.create_graph) {
            ClassLossAttributes a = c.attributes<ClassLossAttributes>();
            a.dtype = dtype_code(c.grad_dtype(0));
            c.set(0, call(nll_loss_backward_op, {&c.grad(), &c.input(0), &c.input(1), &c.input(2), &divisor}, a));
            return;
          }
          c.set(0, neg(term_gradient(c, divisor) * dense_targets(c)));
        },
    .saves = {in(0, 1, 2) | out(1)},
    .attributes = &attribute_struct<ClassLossAttributes>(),
});

void check_reduction(Reduction reduction, const char* op) {
  if (reduction == Reduction::batchmean) fail<Error>("{}: expected reduction none, mean or sum, got batchmean", op);
}

// A single sample [C] is a batch of one.
Tensor call_class_loss(const Op& op, const Tensor& input, const Tensor& target, const Tensor& weight,
                       const ClassLossAttributes& a) {
  const bool single = input.dim() == 1 && target.dim() == 0;
  const Tensor x = single ? input.unsqueeze(0) : input, t = single ? target.unsqueeze(0) : target;
  const Tensor loss =
      &op == &nll_loss_op ? call_n<2>(op, {&x, &t, &weight}, a)[0] : call_n<3>(op, {&x, &t, &weight}, a)[0];
  return single && a.reduction == 0 ? loss.reshape({}) : loss;
}

// -sum over classes of target * log_softmax, of recorded ops: the target may need a gradient too.
Tensor cross_entropy_of_probabilities(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options) {
  const int dim = input.dim() == 1 ? 0 : 1;
  const std::int64_t classes = input.size(dim);
  const Tensor log_p = log_softmax(input, dim, {.dtype = accumulate_dtype(input.dtype())});
  Tensor q = target;
  if (options.label_smoothing != 0) {
    q = q * (1 - options.label_smoothing) + options.label_smoothing / static_cast<double>(classes);
  }
  if (options.weight.defined()) {
    if (options.weight.sizes() != Shape{classes}) {
      fail<ShapeError>("cross_entropy: expected class weights [{}], got {}", classes, options.weight.sizes().str());
    }
    Shape sizes = Shape::filled(input.dim(), 1);
    sizes[dim] = classes;
    q = q * options.weight.reshape(sizes);
  }
  Tensor loss = neg(sum(q * log_p, {dim}));
  if (options.reduction != Reduction::none) {
    const std::int64_t samples = loss.numel();
    loss = sum(loss);
    if (options.reduction == Reduction::mean) loss = loss / static_cast<double>(samples);
  }
  return loss.dtype() == input.dtype() ? loss : loss.to(input.dtype());
}

}  // namespace

Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options) {
  check_defined(input, "cross_entropy", "an input");
  check_defined(target, "cross_entropy", "a target");
  check_reduction(options.reduction, "cross_entropy");
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    fail<Error>("cross_entropy: expected a label smoothing from 0 to 1, got {}", options.label_smoothing);
  }
  if (target.is_floating()) {
    if (target.sizes() != input.sizes() || input.dim() == 0) {
      fail<ShapeError>("cross_entropy: expected probabilities of the input's shape {}, got {}; class indices are i64",
                       input.sizes().str(), target.sizes().str());
    }
    return composite(cross_entropy_op, {&input, &target, &options.weight}, [&](std::span<const Tensor> t) {
      CrossEntropyOptions inner = options;
      inner.weight = t[2];
      return cross_entropy_of_probabilities(t[0], t[1], inner);
    });
  }
  const ClassLossAttributes a{.reduction = static_cast<std::int32_t>(options.reduction),
                              .ignore_index = options.ignore_index,
                              .label_smoothing = options.label_smoothing};
  return call_class_loss(cross_entropy_op, input, target, options.weight, a);
}

Tensor nll_loss(const Tensor& input, const Tensor& target, const NllLossOptions& options) {
  check_defined(input, "nll_loss", "an input");
  check_defined(target, "nll_loss", "a target");
  check_reduction(options.reduction, "nll_loss");
  const ClassLossAttributes a{.reduction = static_cast<std::int32_t>(options.reduction),
                              .ignore_index = options.ignore_index};
  return call_class_loss(nll_loss_op, input, target, options.weight, a);
}

}  // namespace halfstep
