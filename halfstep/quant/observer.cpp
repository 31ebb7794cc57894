// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/observer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/no_samples_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/quant/histogram_internal.h"
#include "halfstep/quant/pending_internal.h"

namespace halfstep::quant {
namespace {

constexpr const char* kKinds[] = {"min_max", "moving_average", "histogram", "percentile", "entropy"};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

ObserverOptions checked(const ObserverOptions& o) {
  if (o.quant_min >= o.quant_max) {
    fail<Error>("Observer: expected quant_min below quant_max, got {} and {}", o.quant_min, o.quant_max);
  }
  const bool plain = o.kind == ObserverKind::min_max || o.kind == ObserverKind::moving_average;
  if (o.axis && !plain) fail<Error>("Observer: {} has one range for all channels; leave out the axis", name(o.kind));
  if (o.axis && o.channels < 1) {
    fail<Error>("Observer: an axis needs the number of channels, as in {{.axis = 0, .channels = 64}}; got {}",
                o.channels);
  }
  if (!o.axis && o.channels != 0) fail<Error>("Observer: {} channels need an axis", o.channels);
  if (!(o.averaging_constant >= 0 && o.averaging_constant <= 1)) {
    fail<Error>("Observer: expected an averaging_constant from 0 to 1, got {}", o.averaging_constant);
  }
  if (!(o.eps > 0)) fail<Error>("Observer: expected an eps above 0, got {}", o.eps);
  if (o.bins < 2 || o.bins > (1 << 20)) fail<Error>("Observer: expected 2 to 1048576 bins, got {}", o.bins);
  if (!(o.percentile > 0 && o.percentile <= 100)) {
    fail<Error>("Observer: expected a percentile above 0, up to 100, got {}", o.percentile);
  }
  return o;
}

Tensor range_end(const ObserverOptions& o, double value) {
  return o.axis ? full({o.channels}, value) : full({}, value);
}

// What `to(f64)` made of a buffer.
void narrow_again(const Tensor& t) {
  if (t.dtype() != DType::f32) nn::replace_contents(t, t.to(DType::f32));
}

// The numbers of a tensor on any device.
std::vector<float> on_host(const Tensor& t) { return t.detach().to(DType::f32).to_vector<float>(); }
void write(const Tensor& to, const std::vector<float>& numbers) {
  Tensor destination = to;
  destination.copy_(tensor(std::vector<double>(numbers.begin(), numbers.end()), to.sizes()).to(to.device()));
}

}  // namespace

const char* name(ObserverKind kind) { return kKinds[static_cast<int>(kind)]; }

std::optional<ObserverKind> parse_observer_kind(std::string_view text) {
  for (std::size_t i = 0; i < std::size(kKinds); ++i) {
    if (text == kKinds[i]) return static_cast<ObserverKind>(i);
  }
  return std::nullopt;
}

Observer::Observer(const ObserverOptions& o)
    : options(checked(o)),
      eps(buffer("eps", full({1}, o.eps))),
      histogram(buffer("histogram", has_histogram() ? zeros({o.bins}) : Tensor())),
      min_val(buffer("min_val", range_end(o, kInfinity))),
      max_val(buffer("max_val", range_end(o, -kInfinity))),
      pending_(std::make_shared<Pending>()) {}

bool Observer::has_histogram() const {
  return options.kind != ObserverKind::min_max && options.kind != ObserverKind::moving_average;
}

Tensor Observer::forward(const Tensor& input) const {
  check_defined(input, "Observer", "a tensor");
  check_floating(input, "Observer");
  if (input.numel() == 0 || nn::detail::NoSamples::active()) return input;
  const NoGrad no_grad;
  for (const Tensor* t : {static_cast<const Tensor*>(&min_val), static_cast<const Tensor*>(&max_val)}) narrow_again(*t);
  if (has_histogram()) {
    narrow_again(histogram);
    pending_->hold({&min_val, &max_val, &histogram});
    see_on_host(input);
    return input;
  }
  pending_->hold({&min_val, &max_val});
  Tensor low = min_val, high = max_val;
  ObserveRangeOptions range{.axis = options.axis, .averaging_constant = {}};
  if (options.kind == ObserverKind::moving_average) range.averaging_constant = options.averaging_constant;
  observe_range(input, low, high, range);
  return input;
}

void Observer::see_on_host(const Tensor& input) const {
  std::vector<float> values = on_host(input);
  std::erase_if(values, [](float v) { return !std::isfinite(v); });
  if (values.empty()) return;
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const float low = *least, high = *most;
  const float seen_low = min_val.item<float>(), seen_high = max_val.item<float>();
  const bool first = seen_low > seen_high;
  const float new_low = first ? low : std::min(seen_low, low), new_high = first ? high : std::max(seen_high, high);
  Histogram h{first ? std::vector<float>() : on_host(histogram), seen_low, seen_high};
  const auto bins = static_cast<std::size_t>(options.bins);
  if (options.kind == ObserverKind::entropy) {
    // Of magnitudes. What was seen before may have been zeros only, which leave no counts.
    h.low = 0;
    h.high = std::max(-seen_low, seen_high);
    if (!first && h.high == 0) h.counts.clear();
    std::erase(values, 0.0F);
    for (float& v : values) v = std::abs(v);
    const float top = std::max(-low, high);
    if (top > 0) add_to(h, values, bins, 0, top);
  } else {
    add_to(h, values, bins, low, high);
  }
  if (!h.counts.empty()) write(histogram, h.counts);
  write(min_val, {new_low});
  write(max_val, {new_high});
}

QuantizationParameters Observer::calculate_qparams() const {
  const NoGrad no_grad;
  const QuantizationParametersOptions o{options.quant_min, options.quant_max, options.symmetric, options.eps};
  if (!has_histogram()) {
    narrow_again(min_val);
    narrow_again(max_val);
    return quantization_parameters(min_val, max_val, o);
  }
  const float low = min_val.item<float>(), high = max_val.item<float>();
  ValueRange range{low, high};
  if (low <= high) {
    const Histogram h{on_host(histogram), low, high};
    const std::int64_t steps = options.quant_max - options.quant_min + 1;
    if (options.kind == ObserverKind::histogram) {
      // PyTorch counts the levels of the dtype, whatever part of it is used.
      range = least_squares_range(h, steps <= 256 ? 256 : static_cast<int>(steps));
    } else if (options.kind == ObserverKind::percentile) {
      range = percentile_range(h, options.percentile / 100);
    } else if (const float top = std::max(-low, high); top > 0) {
      // Values of one sign have all levels; of two, and on a symmetric grid, each sign has half.
      const bool half = options.symmetric || (low < 0 && high > 0);
      const std::int64_t levels = std::max<std::int64_t>(half ? steps / 2 : steps, 1);
      const float bound = least_divergent_bound({h.counts, 0, top}, static_cast<std::size_t>(levels));
      range = {std::max(low, -bound), std::min(high, bound)};
    }
  }
  const TensorOptions there{.device = min_val.device()};
  return quantization_parameters(full({}, static_cast<double>(range.low), there),
                                 full({}, static_cast<double>(range.high), there), o);
}

void Observer::commit(const Tensor& found_inf) const {
  const NoGrad no_grad;
  if (has_histogram()) {
    pending_->settle(found_inf, {&min_val, &max_val, &histogram});
  } else {
    pending_->settle(found_inf, {&min_val, &max_val});
  }
}

void Observer::reset_min_max_vals() const {
  const NoGrad no_grad;
  Tensor low = min_val, high = max_val, counts = histogram;
  low.fill_(kInfinity);
  high.fill_(-kInfinity);
  if (counts.defined()) counts.fill_(0);
}

std::string Observer::kind() const {
  switch (options.kind) {
    case ObserverKind::min_max:
      return options.axis ? "PerChannelMinMaxObserver" : "MinMaxObserver";
    case ObserverKind::moving_average:
      return options.axis ? "MovingAveragePerChannelMinMaxObserver" : "MovingAverageMinMaxObserver";
    case ObserverKind::histogram:
      return "HistogramObserver";
    case ObserverKind::percentile:
      return "PercentileObserver";
    case ObserverKind::entropy:
      break;
  }
  return "EntropyObserver";
}

std::string Observer::describe() const {
  std::string text = fmt::format("{} to {}", options.quant_min, options.quant_max);
  if (options.symmetric) text += ", symmetric";
  if (options.axis) text += fmt::format(", axis {}", *options.axis);
  return text;
}

void Observer::unshare() {
  ModuleBase::unshare();
  pending_ = std::make_shared<Pending>();
}

}  // namespace halfstep::quant
