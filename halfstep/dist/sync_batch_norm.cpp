// SPDX-License-Identifier: Apache-2.0
#include "halfstep/dist/sync_batch_norm.h"

#include <any>
#include <optional>

#include "halfstep/autograd/checkpoint.h"
#include "halfstep/autograd/function.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/dist/captured_internal.h"
#include "halfstep/nn/no_samples_internal.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/norm_internal.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/recorder.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep::dist {
namespace {

// The dimensions that are summed over: all but the channels'.
Shape places_of(const Tensor& x) {
  std::vector<std::int64_t> dims;
  for (int d = 0; d < x.dim(); ++d) {
    if (d != 1) dims.push_back(d);
  }
  return Shape(std::span<const std::int64_t>(dims));
}
// A value a channel, as it is combined with x.
Tensor as_channels(const Tensor& values, const Tensor& x) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[1] = values.numel();
  return values.view(Shape(std::span<const std::int64_t>(sizes)));
}

// The statistics of all ranks together, in float64.
struct Statistics {
  Tensor mean, var;  // [C], of places; biased
  Tensor count;      // []
};

// Of x + shift; no shift is 0. `none`: x stands in for an empty batch.
Statistics gather_statistics(const Tensor& x, const Tensor& shift, bool none, const ProcessGroup& of) {
  const std::int64_t channels = x.size(1);
  const auto count = static_cast<double>(channels > 0 ? x.numel() / channels : 0);
  const TensorOptions f64_there{.dtype = f64, .device = x.device()};
  Tensor own;
  if (count > 0 && !none) {
    const auto [var, mean] = var_mean(x.to(accumulate_dtype(x.dtype())), places_of(x), {.correction = 0});
    const Tensor whole = shift.defined() ? mean.to(f64) + shift.to(f64) : mean.to(f64);
    own = cat({whole, var.to(f64), full({1}, count, f64_there)}, 0);
  } else {
    own = zeros({2 * channels + 1}, f64_there);  // no part in any sum
  }
  const Tensor all = empty({of.size() * own.numel()}, f64_there);
  detail::repeated({own, all},
                   [own, all, group = of]() mutable { group.all_gather(all, own, "statistics of batch norm").wait(); });
  const Tensor table = all.view({of.size(), own.numel()});
  const Tensor means = table.narrow(1, 0, channels), vars = table.narrow(1, channels, channels),
               counts = table.narrow(1, 2 * channels, 1);
  const Tensor n = sum(counts), mean = sum(means * counts, {0}) / n, apart = means - mean;
  return {.mean = mean, .var = sum((vars + apart * apart) * counts, {0}) / n, .count = n};
}

struct Setup {
  BatchNormFuncOptions options;
  Activation activation;
  ProcessGroup group;
  bool none;  // the rank has no samples, and what it is given stands in for them
};

struct SyncBatchNorm : Function<SyncBatchNorm> {
  // Of the tensors that backward() finds.
  enum Saved : std::size_t { kInput, kWeight, kOutput, kMean, kRstd, kCount, kBias, kResidual };

  static Tensor forward(FunctionContext& c, const Tensor& input, const Tensor& weight, const Tensor& bias,
                        const Tensor& residual, const Setup& setup) {
    const BatchNormFuncOptions& o = setup.options;
    // A mean in float32 would cost as many digits as it is larger than the deviation: without it, the rest is small.
    Tensor x = input, shift;
    if (x.dtype() == f32 && x.numel() > 0) {
      shift = mean(x, places_of(x));
      x = x - as_channels(shift, x);
    }
    const Statistics s = gather_statistics(x, shift, setup.none, setup.group);
    // Only a rank with fewer has to ask, and none while a step is recorded, which reads nothing.
    if (x.numel() < 2 * x.size(1) && !kernel_recorder()) {
      if (const double n = s.count.item<double>(); n < 2) {
        fail<ShapeError>("sync_batch_norm: expected more than one value a channel on all ranks together, got {}", n);
      }
    }
    const DType kept_dtype = accumulate_dtype(x.dtype());
    if (o.running_mean.defined() && !is_recomputing()) {
      const Tensor unbiased = s.var * (s.count / (s.count - 1));
      for (const auto& [running, batch] : {std::pair(o.running_mean, s.mean), std::pair(o.running_var, unbiased)}) {
        Tensor to = running;
        to.copy_(to * (1 - o.momentum) + batch.to(to.dtype()) * o.momentum);
      }
    }
    const Tensor apart = shift.defined() ? s.mean - shift.to(f64) : s.mean;  // of x
    const Tensor factor = weight.defined() ? weight : ones({x.size(1)}, {.dtype = kept_dtype, .device = x.device()});
    const Tensor y = batch_norm_act(x,
                                    {.weight = factor,
                                     .bias = bias,
                                     .running_mean = apart.to(kept_dtype),
                                     .running_var = s.var.to(kept_dtype),
                                     .training = false,
                                     .eps = o.eps},
                                    setup.activation, residual);
    // The gradient of silu reads its input, which is computed again, those of the others the result.
    const bool silu = setup.activation == Activation::silu;
    c.save_for_backward({x, factor, silu ? Tensor() : y, apart, rsqrt(s.var + o.eps), s.count, silu ? bias : Tensor(),
                         silu ? residual : Tensor()});
    c.saved_data["setup"] = setup;
    c.saved_data["residual"] = residual.defined() ? std::optional(residual.dtype()) : std::nullopt;
    return y;
  }

  // With constant statistics dx is scale g. The batch's own take scale (mean(g) + z mean(g z)) away from it, with
  // z = (x - mean) rstd, where g is the gradient in front of the activation: its sums are the gradients of bias and
  // weight.
  static std::vector<Tensor> backward(FunctionContext& c, const std::vector<Tensor>& grads) {
    const NoGrad no_grad;
    const auto setup = std::any_cast<Setup>(c.saved_data.at("setup"));
    const auto residual = std::any_cast<std::optional<DType>>(c.saved_data.at("residual"));
    const Tensor x = c.saved(kInput), weight = c.saved(kWeight), mean = c.saved(kMean), rstd = c.saved(kRstd);
    const DType inner = accumulate_dtype(x.dtype());
    const auto d = halfstep::detail::batch_norm_act_gradients(grads[0],
                                                              {.input = x,
                                                               .weight = weight,
                                                               .mean = mean.to(inner),
                                                               .rstd = rstd.to(inner),
                                                               .y = c.saved(kOutput),
                                                               .bias = c.saved(kBias),
                                                               .residual = c.saved(kResidual),
                                                               .with_residual = residual.has_value()},
                                                              setup.activation);
    const Tensor sums = cat({d[2].to(f64), d[1].to(f64)}, 0);
    detail::repeated({sums}, [sums, group = setup.group]() mutable {
      group.all_reduce(sums, ReduceOp::sum, "gradients of batch norm").wait();
    });
    const std::int64_t channels = x.size(1);
    const Tensor mean_g = sums.narrow(0, 0, channels) / c.saved(kCount),
                 mean_gz = sums.narrow(0, channels, channels) / c.saved(kCount);
    // scale (mean_g + (x - mean) rstd mean_gz), as a + b x
    const Tensor scale = weight.to(f64) * rstd;
    const Tensor b = scale * rstd * mean_gz, a = scale * mean_g - b * mean;
    const Tensor away = x * as_channels(b.to(inner), x) + as_channels(a.to(inner), x);
    // The statistics don't depend on what stands in for none.
    return {(setup.none ? d[0] : d[0] - away).to(x.dtype()), d[1].to(weight.dtype()), d[2].to(weight.dtype()),
            residual ? d[3].to(*residual) : Tensor()};
  }
};

}  // namespace

Tensor sync_batch_norm(const Tensor& input, const BatchNormFuncOptions& options, const ProcessGroup& group,
                       Activation activation, const Tensor& residual) {
  if (!options.training || group.size() == 1) return batch_norm_act(input, options, activation, residual);
  if (input.dim() < 2) {
    fail<ShapeError>("sync_batch_norm: expected an input [N, C, ...], got {}", input.sizes().str());
  }
  return SyncBatchNorm::apply(input, options.weight, options.bias, residual,
                              Setup{options, activation, group, nn::detail::NoSamples::active()});
}

int convert_sync_batch_norm(const nn::ModuleBase& module, const ProcessGroup& group) {
  int converted = 0;
  if (const auto* norm = dynamic_cast<const nn::BatchNormBase*>(&module)) {
    ++converted;
    norm->set_training_function(
        [group](const Tensor& input, const BatchNormFuncOptions& options, Activation activation,
                const Tensor& residual) { return sync_batch_norm(input, options, group, activation, residual); },
        "synchronised");
  }
  for (const auto& [name, child] : module.children()) converted += convert_sync_batch_norm(*child, group);
  return converted;
}

}  // namespace halfstep::dist
