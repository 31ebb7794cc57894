// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/infer/sites_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/quantize.h"

namespace halfstep::infer::detail {
namespace {

// Whether an observed scale is the one that it starts with: nothing was seen, and nothing was loaded.
bool was_observed(const quant::FakeQuantize& q) {
  if (q.options.source != quant::ScaleSource::observed) return true;
  const std::vector<double> least = q.activation_post_process.min_val.to_vector<double>();
  const std::vector<double> scales = q.scale.to_vector<double>();
  return std::any_of(least.begin(), least.end(), [](double v) { return std::isfinite(v); }) ||
         std::any_of(scales.begin(), scales.end(), [](double s) { return s != 1; });
}

Site read(const quant::FakeQuantize& q, const std::string& name) {
  Site site{.name = name,
            .scale = q.scale.detach().to(f32).clone(),
            .zero_point = q.zero_point.detach().clone(),
            .quant_min = q.quant_min(),
            .quant_max = q.quant_max(),
            .axis = q.options.axis};
  if (q.options.source == quant::ScaleSource::learned) {
    // As the module gives them to its op: training may leave a scale below, and a zero point between integers.
    site.scale = clamp_min(site.scale, q.options.eps);
    if (site.zero_point.is_floating()) site.zero_point = clamp(round(site.zero_point), q.quant_min(), q.quant_max());
  }
  site.zero_point = site.zero_point.to(i32);
  if (q.options.source == quant::ScaleSource::clipped) {
    site.bound = q.alpha.detach().to(f32).clone();
    site.scale = clamp_min(site.bound / static_cast<double>(q.quant_max()), q.options.eps);
  }
  set_grid(site);
  return site;
}

Tensor one(double value, DType dtype, Device device) { return full({1}, value, {.dtype = dtype}).to(device); }

}  // namespace

void set_grid(Site& site) {
  const bool fits = site.quant_min < 0 ? site.quant_min >= -128 && site.quant_max <= 127 : site.quant_max <= 255;
  if (site.axis || !fits || site.scale.numel() != 1) return;
  site.grid = Int8Grid{.scale = site.scale.item<double>(),
                       .zero_point = site.zero_point.item<std::int64_t>(),
                       .quant_min = site.quant_min,
                       .quant_max = site.quant_max,
                       .dtype = site.quant_min < 0 ? i8 : u8};
}

Tensor Site::fake(const Tensor& t) const {
  return fake_quantize(bound.defined() ? pact(t, bound) : t, scale, zero_point, {quant_min, quant_max, axis});
}

Tensor Site::weight(const Tensor& t) const {
  return quantize(t, scale, zero_point, {.dtype = i8, .quant_min = quant_min, .quant_max = quant_max, .axis = axis});
}

Sites::Sites(std::span<const quant::TracedGrid> grids, std::string_view who) {
  const NoGrad no_grad;
  for (const quant::TracedGrid& g : grids) {
    if (!g.quantizer->is_fake_quant_enabled()) continue;
    if (!was_observed(*g.quantizer)) {
      fail<Error>(
          "{}: expected a range for '{}', but its observer has seen nothing; run some batches in training mode first",
          who, g.name);
    }
    sites_.emplace(std::pair(g.call, g.input), read(*g.quantizer, g.name));
  }
}

bool same_grid(const Int8Grid& a, const Int8Grid& b) {
  return a.scale == b.scale && a.zero_point == b.zero_point && a.dtype == b.dtype && a.quant_min == b.quant_min &&
         a.quant_max == b.quant_max;
}

Tensor to_grid(const Tensor& values, const Int8Grid& grid) {
  const Device device = values.device();
  return quantize(values, one(grid.scale, f32, device), one(static_cast<double>(grid.zero_point), i32, device),
                  {.dtype = grid.dtype, .quant_min = grid.quant_min, .quant_max = grid.quant_max});
}

Tensor from_grid(const Tensor& integers, const Int8Grid& grid) {
  const Device device = integers.device();
  return dequantize(integers, one(grid.scale, f32, device), one(static_cast<double>(grid.zero_point), i32, device));
}

Tensor table_of(const Int8Grid& from, const Int8Grid& to, Device device,
                const std::function<Tensor(const Tensor&)>& function) {
  // By the integer's byte: those below 0 are the upper half.
  const Tensor bytes = arange(256).to(u8);
  const Tensor wide = bytes.to(i32);
  const Tensor integers = from.dtype == u8 ? bytes : where(lt(wide, 128), wide, wide - 256).to(i8);
  const Tensor values = from_grid(integers, from);
  return to_grid(function ? function(values) : values, to).to(device);
}

QuantizedSource make_quantized_source(std::string_view who, const nn::ModuleBase& network,
                                      const nn::TracedForward& forward, std::span<const Tensor> example,
                                      bool dynamic_batch) {
  if (!quant::quantization_of(network)) {
    Sites sites;
    Source source = make_source(
        who,
        [&](std::vector<Tensor> in) {
          nn::Trace trace = nn::trace(network, forward, std::move(in), who);
          sites = take_fake_quantization(trace);
          return trace;
        },
        example, dynamic_batch);
    if (sites.empty()) {
      fail<Error>(
          "{}: expected a network that quant::prepare() has prepared, or one of a quantized ONNX file, got one without "
          "fake quantization",
          who);
    }
    return {std::move(source), std::move(sites)};
  }
  std::vector<quant::TracedGrid> grids;
  Source source = make_source(
      who,
      [&](std::vector<Tensor> in) {
        quant::QuantizedTrace traced = quant::trace_quantized(network, forward, std::move(in), who);
        grids = std::move(traced.grids);
        return std::move(traced.trace);
      },
      example, dynamic_batch);
  return {std::move(source), Sites(grids, who)};
}

}  // namespace halfstep::infer::detail
