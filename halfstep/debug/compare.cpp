// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "halfstep/core/fail.h"
#include "halfstep/debug/replay_internal.h"
#include "halfstep/ops/pointwise.h"

namespace halfstep::debug {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> values_of(const Tensor& t) {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(t.numel()));
  detail::for_each_value(t, [&](double v) { values.push_back(v); });
  return values;
}

// The distance of a result from the exact value in units of its last place.
double distance(double got, double exact, DType dtype) {
  if (std::isnan(exact) || std::isnan(got)) return std::isnan(exact) && std::isnan(got) ? 0 : kInfinity;
  if (got == exact) return 0;
  if (!is_floating(dtype)) return std::fabs(got - exact);
  const FloatInfo& info = finfo(dtype);
  // From here on rounding gives an infinity (f8e4m3 has none and gives NaN).
  const double overflow = info.max + detail::ulp(info.max, dtype) / 2;
  if (std::isinf(got)) return std::fabs(exact) >= overflow && std::signbit(got) == std::signbit(exact) ? 0 : kInfinity;
  if (std::isinf(exact)) return kInfinity;
  return std::fabs(got - exact) / detail::ulp(exact, dtype);
}

// For ops that add up products or terms, the sums of their magnitudes: the op itself on the magnitudes of its inputs.
// None for others.
std::vector<double> sums_of_magnitudes(const ObservedCall& call, std::span<const Tensor> inputs) {
  constexpr std::string_view kSums[] = {"mm", "bmm", "linear", "sum", "mean"};
  if (std::find(std::begin(kSums), std::end(kSums), call.name) == std::end(kSums)) return {};
  std::vector<Tensor> magnitudes;
  {
    const detail::Unrecorded unrecorded;
    for (const Tensor& t : inputs) {
      magnitudes.push_back(t.defined() && t.is_floating() ? abs(detail::on_host(t).to(DType::f64)) : t);
    }
  }
  const detail::Replay sums = detail::replay(call, magnitudes, DType::f64);
  return sums.outputs.empty() ? std::vector<double>{} : values_of(sums.outputs[0]);
}

void compare(const Tensor& result, const Tensor& reference, const std::vector<double>& sums, Comparison& c) {
  const std::vector<double> got = values_of(result), exact = values_of(reference);
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double ulps = distance(got[i], exact[i], c.dtype);
    double roundings = ulps;
    if (i < sums.size() && std::isfinite(ulps) && ulps > 0) {
      const double unit = detail::ulp(exact[i], c.dtype);
      // Added up in float64, a float64 result has less.
      const double terms = c.dtype == DType::f64 ? 0x1p-53 * sums[i] : 0x1p-24 * sums[i];
      roundings = ulps * unit / (unit + terms);
    }
    c.max_ulp = std::max(c.max_ulp, ulps);
    if (roundings > c.max_roundings || i == 0) {
      c.max_roundings = roundings;
      c.worst_index = static_cast<std::int64_t>(i);
      c.got = got[i];
      c.expected = exact[i];
    }
    if (std::isfinite(exact[i])) largest = std::max(largest, std::fabs(exact[i]));
    if (std::isfinite(exact[i]) && std::isfinite(got[i])) {
      c.max_absolute = std::max(c.max_absolute, std::fabs(got[i] - exact[i]));
    } else if (ulps > 0) {
      c.max_absolute = kInfinity;
    }
  }
  c.max_relative = c.max_absolute == 0 ? 0 : c.max_absolute / largest;
}

bool worse(const Comparison& a, const Comparison& b) {
  if (a.max_roundings != b.max_roundings) return a.max_roundings > b.max_roundings;
  return std::tie(a.site.number, a.output) < std::tie(b.site.number, b.output);
}

}  // namespace

struct Compare::Impl final : detail::CallObserver {
  explicit Impl(const CompareOptions& o) : CallObserver(o.all_threads, true), options(o) {}

  void seen(const ObservedCall& call, std::uint64_t number, std::span<const Tensor> inputs) override {
    if (call.path == ExecutionPath::view || call.path == ExecutionPath::transfer) return;
    const detail::Replay again = detail::replay(call, inputs, options.reference);
    if (!again.skipped.empty()) {
      ++skipped[fmt::format("{}: {}", call.name, again.skipped)];
      return;
    }
    const std::vector<double> sums = sums_of_magnitudes(call, inputs);
    for (std::size_t i = 0; i < again.outputs.size(); ++i) {
      const Tensor& result = *call.outputs[i];
      if (!result.defined()) continue;
      if (result.sizes() != again.outputs[i].sizes()) {
        ++skipped[fmt::format("{}: its shape follows from its values", call.name)];
        return;
      }
      Comparison c{.site = call_site(call, number),
                   .output = static_cast<int>(i),
                   .dtype = result.dtype(),
                   .sizes = result.sizes()};
      compare(result, again.outputs[i], sums, c);
      add(std::move(c));
    }
  }

  void add(Comparison c) {
    ++compared;
    const auto [it, fresh] = by_op.try_emplace({c.site.op, c.dtype}, Summary{0, c});
    Summary& s = it->second;
    ++s.results;
    if (!fresh && worse(c, s.worst)) s.worst = c;
    kept.push_back(std::move(c));
    // The better half goes when there are twice as many as are wanted.
    if (kept.size() >= 2 * std::max<std::size_t>(options.most, 1)) cut();
  }

  void cut() {
    std::stable_sort(kept.begin(), kept.end(), worse);
    if (kept.size() > options.most) kept.resize(options.most);
  }

  struct Summary {
    std::uint64_t results;
    Comparison worst;
  };
  CompareOptions options;
  std::vector<Comparison> kept;
  std::map<std::pair<std::string, DType>, Summary> by_op;
  std::map<std::string, std::uint64_t> skipped;
  std::uint64_t compared = 0;
  std::mutex& mutex() { return mutex_; }
  Observing observing{this};
};

Compare::Compare(const CompareOptions& options) {
  if (options.reference != DType::f64 && options.reference != DType::f32) {
    fail<DTypeError>("Compare: expected f64 or f32 as reference, got {}", name(options.reference));
  }
  impl_ = std::make_unique<Impl>(options);
}
Compare::~Compare() = default;

std::vector<Comparison> Compare::worst() const {
  const std::lock_guard lock(impl_->mutex());
  impl_->cut();
  return impl_->kept;
}

std::uint64_t Compare::compared() const {
  const std::lock_guard lock(impl_->mutex());
  return impl_->compared;
}

std::map<std::string, std::uint64_t> Compare::skipped() const {
  const std::lock_guard lock(impl_->mutex());
  return impl_->skipped;
}

std::string Compare::report(std::size_t rows) const {
  const std::vector<Comparison> list = worst();
  const std::lock_guard lock(impl_->mutex());
  const Impl& impl = *impl_;
  std::string text =
      fmt::format("{} results compared with the CPU in {}\n", impl.compared, name(impl.options.reference));
  const auto line = [&](const Comparison& c) {
    text += fmt::format("{:>10.4g} roundings  {:>9.4g} ulp  {:>9.3g} relative  {} {}  {}, call {}", c.max_roundings,
                        c.max_ulp, c.max_relative, name(c.dtype), c.sizes.str(), c.site.str(), c.site.number);
    if (c.output > 0) text += fmt::format(", result {}", c.output);
    if (!c.site.device.is_cpu()) text += ", " + c.site.device.str();
  };
  if (!list.empty()) text += "\nworst results\n";
  for (std::size_t i = 0; i < std::min(rows, list.size()); ++i) {
    line(list[i]);
    if (list[i].max_ulp > 0) {
      text +=
          fmt::format(": element {} is {:.9g}, expected {:.9g}", list[i].worst_index, list[i].got, list[i].expected);
    }
    text += "\n";
  }
  std::vector<const Impl::Summary*> ops;
  for (const auto& [key, summary] : impl.by_op) ops.push_back(&summary);
  std::stable_sort(ops.begin(), ops.end(),
                   [](const Impl::Summary* a, const Impl::Summary* b) { return worse(a->worst, b->worst); });
  if (!ops.empty()) text += "\nworst of each op\n";
  for (const Impl::Summary* s : ops) {
    text +=
        fmt::format("{:>10.4g} roundings  {:>9.4g} ulp  {:>9.3g} relative  {} {}, {} results\n", s->worst.max_roundings,
                    s->worst.max_ulp, s->worst.max_relative, s->worst.site.op, name(s->worst.dtype), s->results);
  }
  if (!impl.skipped.empty()) text += "\nnot compared\n";
  for (const auto& [why, count] : impl.skipped) text += fmt::format("{:>10}x {}\n", count, why);
  return text;
}

}  // namespace halfstep::debug
