// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/call_site.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "halfstep/debug/replay_internal.h"

namespace halfstep::debug {

std::string CallSite::str() const {
  return fmt::format("{}{}{}", module.empty() ? "" : module + ": ", op,
                     backward_of.empty() ? "" : fmt::format(" (backward of {})", backward_of));
}

const char* CallSite::pass() const {
  if (!backward_of.empty()) return "backward";
  // An optimizer's or a scaler's pass; what is converted inside of a module belongs to its forward pass.
  return standalone && module.empty() ? "in no pass" : "forward";
}

CallSite call_site(const ObservedCall& call, std::uint64_t number) {
  const CallOrigin& here = call_origin();
  CallSite site{
      .number = number, .op = call.name, .standalone = call.op == nullptr, .device = call.device, .path = call.path};
  if (here.backward_of) {
    site.backward_of = here.backward_of;
    // A module that is entered in a backward pass runs its forward again for a checkpoint.
    if (!here.module_path.empty()) {
      site.module = here.module_path;
    } else if (here.backward_module) {
      site.module = *here.backward_module;
    }
  } else {
    site.module = here.module_path;
  }
  return site;
}

Statistics statistics(const Tensor& tensor) {
  Statistics s{.sizes = tensor.sizes(), .dtype = tensor.dtype(), .device = tensor.device(), .numel = tensor.numel()};
  s.min = std::numeric_limits<double>::infinity();
  s.max = -s.min;
  const double normal = is_floating(s.dtype) ? finfo(s.dtype).smallest_normal : 0;
  std::int64_t finite = 0;
  double sum = 0;
  detail::for_each_value(tensor, [&](double v) {
    if (std::isnan(v)) {
      ++s.nan;
    } else if (std::isinf(v)) {
      ++s.inf;
    } else {
      ++finite;
      sum += v;
      s.abs_sum += std::fabs(v);
      s.min = std::min(s.min, v);
      s.max = std::max(s.max, v);
      s.zero += v == 0 ? 1 : 0;
      s.subnormal += v != 0 && std::fabs(v) < normal ? 1 : 0;
    }
  });
  const double none = std::numeric_limits<double>::quiet_NaN();
  if (finite == 0) s.min = s.max = none;
  s.mean = finite == 0 ? none : sum / static_cast<double>(finite);
  return s;
}

std::string Statistics::str() const {
  std::string text = fmt::format("{} {}", name(dtype), sizes.str());
  if (!std::isnan(mean))
    text += fmt::format(": min {:.6g}, max {:.6g}, mean {:.6g}, sum|x| {:.6g}", min, max, mean, abs_sum);
  const char* before = std::isnan(mean) ? ": " : "; ";
  const std::pair<std::int64_t, const char*> counts[] = {
      {nan, "nan"}, {inf, "inf"}, {zero, "zero"}, {subnormal, "subnormal"}};
  for (const auto& [count, what] : counts) {
    if (count == 0) continue;
    text += fmt::format("{}{} {}", before, count, what);
    before = ", ";
  }
  return text;
}

}  // namespace halfstep::debug
