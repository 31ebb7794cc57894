// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/nonfinite.h"

#include <cmath>
#include <set>

#include "halfstep/core/fail.h"
#include "halfstep/debug/replay_internal.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/recomputing.h"
#include "halfstep/runtime/log.h"

namespace halfstep::debug {
namespace {

// The program asked for an infinity: masks are made so.
bool asked_for(const ObservedCall& call) {
  if (!call.op || !call.attributes) return false;
  const std::string_view op = call.name;
  const ScalarValue* value = nullptr;
  if (op == "fill" || op == "full") value = &static_cast<const FillAttributes*>(call.attributes)->value;
  if (op == "masked_fill") value = &static_cast<const ScalarAttributes*>(call.attributes)->value;
  if (op == "scatter_value") value = &static_cast<const ScatterValueAttributes*>(call.attributes)->value;
  return value && value->kind == 2 && !std::isfinite(value->floating);
}

std::optional<double> largest_exact(const ObservedCall& call, std::span<const Tensor> inputs, std::size_t output) {
  const detail::Replay again = detail::replay(call, inputs, DType::f64);
  if (again.outputs.size() <= output) return std::nullopt;
  double largest = 0;
  detail::for_each_value(again.outputs[output], [&](double v) {
    if (std::isnan(v) || std::isnan(largest)) {
      largest = std::numeric_limits<double>::quiet_NaN();
    } else {
      largest = std::max(largest, std::fabs(v));
    }
  });
  return largest;
}

}  // namespace

std::string NonFiniteFinding::str() const {
  std::string made;
  if (output.inf > 0) made = fmt::format("{} inf", output.inf);
  if (output.nan > 0) made += fmt::format("{}{} NaN", made.empty() ? "" : " and ", output.nan);
  std::string text =
      fmt::format("{}: made {} among {} values out of finite inputs, {} {} on {}, {}, call {}", site.str(), made,
                  output.numel, name(output.dtype), output.sizes.str(), site.device.str(), site.pass(), site.number);
  text += "; inputs:";
  const char* before = " ";
  for (const Statistics& s : inputs) {
    text += fmt::format("{}{} {} from {:.6g} to {:.6g}", before, name(s.dtype), s.sizes.str(), s.min, s.max);
    before = ", ";
  }
  if (!exact) return text;
  const double reach = finfo(output.dtype).max;
  if (!std::isfinite(*exact)) {
    return text +
           "; the exact result is no finite number either, so that no other dtype would help: look at the inputs";
  }
  if (*exact <= reach) {
    return text + fmt::format(
                      "; the exact result reaches {:.6g} only, which {} holds: something inside overflowed, or the "
                      "kernel is wrong (debug::Compare tells)",
                      *exact, name(output.dtype));
  }
  text += fmt::format("; {} overflow: the largest |value| of the exact result is {:.6g}, {} reaches {:.6g}",
                      name(output.dtype), *exact, name(output.dtype), reach);
  if (is_low_precision(output.dtype) || is_float8(output.dtype)) {
    text += site.backward_of.empty() ? "; run the module in float32 (AutocastOptions::modules) or in bf16?"
                                     : "; a smaller loss scale, or bf16?";
  }
  return text;
}

struct NonFinite::Impl final : detail::CallObserver {
  explicit Impl(const NonFiniteOptions& o) : CallObserver(o.all_threads, true), options(o) {}

  void seen(const ObservedCall& call, std::uint64_t number, std::span<const Tensor> inputs) override {
    if (call.path == ExecutionPath::view || call.path == ExecutionPath::transfer) return;
    if (halfstep::detail::recomputing()) return;  // the first run was seen
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      if (detail::has_nonfinite(*call.outputs[i])) {
        found(call, number, inputs, i);
        return;
      }
    }
  }

  void found(const ObservedCall& call, std::uint64_t number, std::span<const Tensor> inputs, std::size_t output) {
    if (asked_for(call)) return;
    NonFiniteFinding finding{.site = call_site(call, number), .output_index = static_cast<int>(output)};
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& t = inputs[i];
      // copy_ and fill_ write over whatever their destination held.
      if (i == 0 && call.op && std::string_view(call.name) == "copy") continue;
      if (!t.defined() || !t.is_floating()) continue;
      finding.inputs.push_back(statistics(t));
      if (!finding.inputs.back().finite()) return;
    }
    if (finding.inputs.empty()) return;
    finding.output = statistics(*call.outputs[output]);
    finding.exact = largest_exact(call, inputs, output);
    ++count;
    if (findings.size() < options.most) findings.push_back(finding);
    if (options.action == OnNonFinite::raise) throw NonFiniteError(finding.str());
    if (options.action == OnNonFinite::log && said.insert(finding.site.str()).second) {
      log(LogLevel::warning, finding.str());
    }
  }

  NonFiniteOptions options;
  std::vector<NonFiniteFinding> findings;
  std::uint64_t count = 0;
  std::set<std::string> said;
  std::mutex& mutex() { return mutex_; }
  std::uint64_t calls() const { return calls_; }
  Observing observing{this};
};

NonFinite::NonFinite(const NonFiniteOptions& options) : impl_(std::make_unique<Impl>(options)) {}
NonFinite::~NonFinite() = default;

std::vector<NonFiniteFinding> NonFinite::findings() const {
  const std::lock_guard lock(impl_->mutex());
  return impl_->findings;
}
std::uint64_t NonFinite::count() const {
  const std::lock_guard lock(impl_->mutex());
  return impl_->count;
}
std::uint64_t NonFinite::calls() const {
  const std::lock_guard lock(impl_->mutex());
  return impl_->calls();
}

}  // namespace halfstep::debug
