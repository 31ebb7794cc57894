// SPDX-License-Identifier: Apache-2.0
#include "halfstep/conformance/device_check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/conformance/device_check_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::conformance {
namespace detail {
namespace {

constexpr std::size_t kMostProblems = 5;  // of a line

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double roundoff(DType dtype) { return finfo(dtype).eps / 2; }
// What sums of a dtype are taken in.
double sum_roundoff(DType dtype) { return dtype == DType::f64 ? 0x1p-53 : 0x1p-24; }

std::map<std::string, std::uint64_t> fallback_calls() {
  std::map<std::string, std::uint64_t> calls;
  for (const FallbackCount& f : fallback_counts()) calls[f.op] = f.calls;
  return calls;
}

// The results of a call and, where asked for, the gradients of its floating inputs.
struct Results {
  Tensors outputs;
  Tensors gradients;
};
Results evaluate(const OpCase& c, Tensors inputs, const Tensors& from) {
  Results r;
  if (!c.gradients) {
    const NoGrad no_grad;
    r.outputs = c.run(inputs);
    return r;
  }
  for (Tensor& t : inputs) {
    if (t.is_floating()) t = t.detach().requires_grad_();
  }
  r.outputs = c.run(inputs);
  Tensors roots, gradients;
  for (std::size_t i = 0; i < r.outputs.size(); ++i) {
    const Tensor& out = r.outputs[i];
    if (!out.is_floating() || !out.requires_grad()) continue;
    roots.push_back(out);
    gradients.push_back(from.at(i).to(out.device(), out.dtype()));
  }
  if (!roots.empty()) backward(roots, gradients);
  for (const Tensor& t : inputs) r.gradients.push_back(t.is_floating() ? t.grad() : Tensor());
  for (Tensor& t : r.outputs) t = t.detach();
  return r;
}

Tensor as_double(const Tensor& t) { return t.to(Device{}).to(DType::f64).contiguous(); }

}  // namespace

std::string Bound::str(DType dtype) const {
  if (is_exact()) return "the same bits";
  const char* what = of == Of::value ? "|x|" : of == Of::magnitudes ? "the sum of magnitudes" : "the largest |x|";
  std::string text;
  if (rounded > 0) text = fmt::format("{:g} x 2^{:g} |x|", std::min(rounded, 1.0), std::log2(roundoff(dtype)));
  if (rounded > 1) text = fmt::format("{} + {:g} x 2^{:g} of {}", text, rounded - 1, std::log2(roundoff(dtype)), what);
  if (summed > 0) {
    text +=
        fmt::format("{}{:.0f} x 2^{:g} of {}", text.empty() ? "" : " + ", summed, std::log2(sum_roundoff(dtype)), what);
  }
  return text;
}

Tensor Checker::normal(const Shape& sizes, double scale) {
  Tensor t = randn(sizes, {.dtype = DType::f64, .device = Device{}}, &generator_);
  return scale == 1 ? t : t * scale;
}
Tensor Checker::uniform(const Shape& sizes, double low, double high) {
  return rand(sizes, {.dtype = DType::f64, .device = Device{}}, &generator_) * (high - low) + low;
}
Tensor Checker::integers(std::int64_t bound, const Shape& sizes) {
  return randint(0, bound, sizes, {.dtype = i64, .device = Device{}}, &generator_);
}

void Checker::line(const std::string& name, const std::string& dtype, const std::function<void()>& body) {
  if (report_.lost) return;
  DeviceCheckLine line;
  line.name = name;
  line.dtype = dtype;
  current_ = &line;
  const double start = now();
  const auto before = fallback_calls();
  one("", body);
  for (const auto& [op, calls] : fallback_calls()) {
    const auto it = before.find(op);
    if (it == before.end() || it->second != calls) line.on_cpu.push_back(op);
  }
  line.seconds = now() - start;
  current_ = nullptr;
  report_.lines.push_back(line);
  if (options_.on_line) options_.on_line(report_.lines.back());
}

void Checker::one(const std::string& name, const std::function<void()>& body) {
  if (report_.lost) return;
  if (!name.empty()) ++current_->cases;
  const std::string outer = std::exchange(case_, name);
  // A failure may be found out by a later call that waits: what is to be said of this case is said here.
  const auto guarded = [&](const auto& f) {
    try {
      f();
    } catch (const DeviceLostError& e) {
      problem(e.what());
      report_.lost = true;
    } catch (const std::exception& e) {
      problem(e.what());
    }
  };
  guarded(body);
  if (!report_.lost) guarded([&] { synchronize(device); });
  case_ = outer;
}

void Checker::problem(const std::string& text) {
  std::vector<std::string>& all = current_->problems;
  if (all.size() < kMostProblems) all.push_back(case_.empty() ? text : fmt::format("{}: {}", case_, text));
  if (all.size() == kMostProblems) all.push_back("and more");
}

void Checker::note(const std::string& text) { current_->note = text; }

void Checker::measured(double error, const std::string& bound, const std::string& what) {
  if (std::isnan(error)) error = kInfinity;
  if (error > current_->worst || current_->bound.empty()) {
    current_->worst = error;
    current_->worst_case = case_.empty() ? what : case_;
    current_->bound = bound;
  }
  if (error > 1) problem(fmt::format("{}: {:.3g} times the bound, {}", what, error, bound));
}

void Checker::same(const Tensor& got, const Tensor& expected, const std::string& what) {
  if (got.sizes() != expected.sizes() || got.dtype() != expected.dtype()) {
    problem(fmt::format("{}: expected {} {}, got {} {}", what, name(expected.dtype()), expected.sizes().str(),
                        name(got.dtype()), got.sizes().str()));
    return;
  }
  const Tensor a = got.to(Device{}).contiguous(), b = expected.to(Device{}).contiguous();
  const std::size_t size = a.item_size();
  const auto* x = static_cast<const char*>(a.const_raw_data());
  const auto* y = static_cast<const char*>(b.const_raw_data());
  std::int64_t wrong = 0, first = 0;
  if (a.numel() > 0 && std::memcmp(x, y, static_cast<std::size_t>(a.numel()) * size) != 0) {
    const bool floating = a.is_floating();
    const std::vector<double> u = a.to_vector<double>(), v = b.to_vector<double>();
    for (std::int64_t i = 0; i < a.numel(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (std::memcmp(x + at * size, y + at * size, size) == 0) continue;
      if (floating && std::isnan(u[at]) && std::isnan(v[at])) continue;
      if (wrong++ == 0) first = i;
    }
    if (wrong > 0) {
      const auto at = static_cast<std::size_t>(first);
      problem(fmt::format("{}: {} of {} values differ; the first is element {}: expected {:.9g}, got {:.9g}", what,
                          wrong, a.numel(), first, v[at], u[at]));
    }
  }
  if (wrong > 0) {
    current_->worst = kInfinity;
    current_->worst_case = case_.empty() ? what : case_;
  }
  if (current_->bound.empty() || wrong > 0) current_->bound = Bound::exact().str(got.dtype());
}

void Checker::near(const Tensor& got, const Tensor& exact, const Tensor& scale, const Bound& bound,
                   const std::string& what) {
  if (got.sizes() != exact.sizes()) {
    problem(fmt::format("{}: expected {}, got {}", what, exact.sizes().str(), got.sizes().str()));
    return;
  }
  const DType dtype = got.dtype();
  const std::vector<double> g = as_double(got).to_vector<double>(), e = as_double(exact).to_vector<double>();
  std::vector<double> s;
  if (bound.of == Of::magnitudes) s = as_double(scale).to_vector<double>();
  double largest = 0;
  for (double v : e) {
    if (std::isfinite(v)) largest = std::max(largest, std::fabs(v));
  }
  const double u = roundoff(dtype), v = sum_roundoff(dtype);
  // In float64 the reference is no more exact than the device.
  const double both = dtype == DType::f64 ? 2 : 1;
  double worst = 0;
  std::size_t at = 0;
  double worst_allowed = 0;
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double of = bound.of == Of::value ? std::fabs(e[i]) : bound.of == Of::magnitudes ? std::fabs(s[i]) : largest;
    const double allowed =
        both * (u * (std::min(bound.rounded, 1.0) * std::fabs(e[i]) + std::max(bound.rounded - 1, 0.0) * of) +
                v * bound.summed * of + finfo(dtype).smallest_subnormal);
    double error;
    if (!std::isfinite(e[i]) || !std::isfinite(g[i])) {
      // Beyond the largest number of its dtype a result is an infinity.
      const bool overflow =
          std::isinf(g[i]) && std::signbit(g[i]) == std::signbit(e[i]) && std::fabs(e[i]) + allowed > finfo(dtype).max;
      error = (std::isnan(e[i]) && std::isnan(g[i])) || e[i] == g[i] || overflow ? 0 : kInfinity;
    } else {
      error = std::fabs(g[i] - e[i]) / allowed;
    }
    if (error > worst) worst = error, at = i, worst_allowed = allowed;
  }
  if (worst > 1) {
    measured(
        worst, bound.str(dtype),
        fmt::format("{}, element {}: expected {:.9g} +- {:.2g}, got {:.9g}", what, at, e[at], worst_allowed, g[at]));
  } else {
    measured(worst, bound.str(dtype), what);
  }
}

void Checker::check(const OpCase& c, DType dtype) {
  // Both sides begin with the same values: those that the dtype has.
  Tensors here, there, exact, magnitudes;
  for (const Tensor& t : c.inputs) {
    const Tensor own = t.dtype() == DType::f64 ? t.to(dtype) : t;
    here.push_back(own);
    there.push_back(own.to(device));
    exact.push_back(t.dtype() == DType::f64 ? own.to(DType::f64) : own);
    magnitudes.push_back(t.dtype() == DType::f64 ? abs(exact.back()) : own);
  }
  const bool in_bits = c.forward.is_exact() && (!c.gradients || c.backward.is_exact());
  Tensors from, from_magnitudes;
  if (c.gradients) {
    // One call to learn the shapes of the results.
    const NoGrad no_grad;
    for (const Tensor& t : c.run(in_bits ? here : exact)) {
      from.push_back(t.is_floating() ? normal(t.sizes()).to(dtype).to(DType::f64) : Tensor());
      from_magnitudes.push_back(t.is_floating() ? abs(from.back()) : Tensor());
    }
  }
  const Results got = evaluate(c, there, from);
  const Results reference = evaluate(c, in_bits ? here : exact, from);
  Results scale;
  const bool needs_scale = c.forward.of == Of::magnitudes || (c.gradients && c.backward.of == Of::magnitudes);
  if (needs_scale) scale = evaluate(c, magnitudes, from_magnitudes);

  const auto compare = [&](const Tensors& g, const Tensors& e, const Tensors& s, const Bound& bound, const char* what) {
    if (g.size() != e.size()) return problem("another number of results");
    for (std::size_t i = 0; i < g.size(); ++i) {
      const std::string which = fmt::format("{} {}", what, i);
      if (g[i].defined() != e[i].defined()) return problem(which + " is missing");
      if (!g[i].defined()) continue;
      if (!g[i].is_floating()) {
        same(g[i], e[i], which);
      } else if (bound.is_exact()) {
        same(g[i], e[i].to(g[i].dtype()), which);
      } else {
        near(g[i], e[i], bound.of == Of::magnitudes ? s.at(i) : Tensor(), bound, which);
      }
    }
  };
  compare(got.outputs, reference.outputs, scale.outputs, c.forward, "result");
  compare(got.gradients, reference.gradients, scale.gradients, c.backward, "gradient");
}

void Checker::family(const std::string& name, const std::vector<DType>& dtypes, const std::vector<OpCase>& cases) {
  for (DType dtype : dtypes) {
    line(name, halfstep::name(dtype), [&] {
      for (const OpCase& c : cases) {
        one(c.name, [&] { check(c, dtype); });
      }
    });
  }
}

}  // namespace detail

namespace {

// What a check changes and puts back.
class Settings {
 public:
  Settings() {
    set_fallback_options({.missing = true, .failing = false});
    set_float32_precision(Float32Precision::highest);
    set_device_graphs(true);
  }
  ~Settings() {
    set_fallback_options(fallback_);
    set_float32_precision(precision_);
    set_device_graphs(graphs_);
    default_generator().set_state(random_);
  }
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;

 private:
  FallbackOptions fallback_ = fallback_options();
  Float32Precision precision_ = float32_precision();
  bool graphs_ = device_graphs();
  PhiloxState random_ = default_generator().state();
  DeviceGuard guard_{Device{}};
};

}  // namespace

bool DeviceCheckReport::passed() const {
  return !lost && std::all_of(lines.begin(), lines.end(), [](const DeviceCheckLine& l) { return l.passed(); });
}

DeviceCheckReport check_device(Device device, const DeviceCheckOptions& options) {
  DeviceCheckReport report;
  report.device = device;
  (void)device_info(device);  // throws for a device that isn't there
  const double start = detail::now();
  const Settings settings;
  detail::Checker c(device, options, report);
  for (const auto part : {detail::check_copies, detail::check_elementwise, detail::check_reductions,
                          detail::check_products, detail::check_layers, detail::check_losses, detail::check_indexing,
                          detail::check_random, detail::check_scaling, detail::check_optimizers, detail::check_networks,
                          detail::check_graphs, detail::check_collectives, detail::check_queues}) {
    part(c);
  }
  report.seconds = detail::now() - start;
  return report;
}

}  // namespace halfstep::conformance
