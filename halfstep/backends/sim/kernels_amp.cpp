// SPDX-License-Identifier: Apache-2.0
// Gradient scaling: unscale and check many gradients at once, check them only, and follow up with the scale;
// and whether tensors are finite. Gradients are dense and lie as their results do, so that the order of elements
// doesn't matter.
#include <algorithm>

#include "gradients.h"

namespace sim {
namespace {

double inverse_scale(const Call& call) { return 1.0 / static_cast<double>(*call.in[0].at<float>()); }

template <class T>
bool finite(T value) {
  return std::isfinite(load(value));
}

void report(const Call& call, std::size_t gradient) {
  *call.out[0].at<float>() = 1;
  *call.out[1].at<float>(static_cast<int64_t>(gradient)) = 1;
}

uint64_t norm_bytes(const Call& call) { return call.out[2].defined ? (call.in.size() - 1) * sizeof(double) : 0; }

// Inputs: scale, gradients. Outputs: found [] and found for each gradient, which are set to 1 where something is not
// finite and left alone otherwise; the norm of all (may be absent); the unscaled gradients.
std::string amp_unscale(const Call& call) {
  const double inverse = inverse_scale(call);
  const bool wants_norm = call.out[2].defined;
  auto* squares = reinterpret_cast<double*>(call.workspace);
  for (std::size_t i = 0; i + 1 < call.in.size(); ++i) {
    const View &from = call.in[1 + i], &to = call.out[3 + i];
    double total = 0;
    const bool fine = with_floating(from.dtype, [&](auto zero) {
      using T = decltype(zero);
      const T* x = from.at<T>();
      auto* y = to.at<Unscaled<T>>();
      bool all_finite = true;
      for (int64_t j = 0; j < from.numel; ++j) {
        const auto v = unscale(x[j], inverse);
        y[j] = v;
        all_finite &= finite(v);
        if (wants_norm) {
          const auto wide = static_cast<double>(load(v));
          total += wide * wide;
        }
      }
      return all_finite;
    });
    if (!fine) report(call, i);
    if (wants_norm) squares[i] = total;
  }
  if (wants_norm) {
    double total = 0;
    for (std::size_t i = 0; i + 1 < call.in.size(); ++i) total += squares[i];
    *call.out[2].at<float>() = static_cast<float>(std::sqrt(total));
  }
  return {};
}

// Inputs: scale, gradients, a bound on the magnitudes in each. Outputs: found [] and found for each gradient.
std::string amp_check(const Call& call) {
  const double inverse = inverse_scale(call);
  const View& bounds = call.in.back();
  for (std::size_t i = 0; i + 2 < call.in.size(); ++i) {
    const double bound = static_cast<double>(*bounds.at<float>(static_cast<int64_t>(i)));
    if (bound * inverse <= static_cast<double>(std::numeric_limits<float>::max())) continue;
    const View& from = call.in[1 + i];
    const bool fine = with_floating(from.dtype, [&](auto zero) {
      using T = decltype(zero);
      const T* x = from.at<T>();
      bool all_finite = true;
      for (int64_t j = 0; j < from.numel; ++j) all_finite &= finite(unscale(x[j], inverse));
      return all_finite;
    });
    if (!fine) report(call, i);
  }
  return {};
}

// Inputs: tensors. Output: whether all of their values are finite.
std::string all_finite(const Call& call) {
  bool fine = true;
  for (const View& from : call.in) {
    fine = fine && with_floating(from.dtype, [&](auto zero) {
             using T = decltype(zero);
             return std::all_of(from.at<T>(), from.at<T>() + from.numel, finite<T>);
           });
  }
  *call.out[0].at<bool>() = fine;
  return {};
}

bool is_set(const View& flag) { return flag.dtype == HALFSTEP_BOOL ? *flag.at<bool>() : *flag.at<float>() != 0; }

// Inputs: scale, counters, found of each optimizer. Outputs: scale and counters themselves.
std::string amp_update_scale(const Call& call) {
  const auto& a = call.attributes<halfstep_scale_update_attributes>();
  float* scale = call.out[0].at<float>();
  int32_t* count = call.out[1].at<int32_t>();
  bool found = false;
  for (std::size_t i = 2; i < call.in.size(); ++i) found |= is_set(call.in[i]);
  if (!found) {
    count[HALFSTEP_SCALE_IN_A_ROW] = 0;
    if (a.refill_on_good_step) count[HALFSTEP_SCALE_USED] = 0;
    if (++count[HALFSTEP_SCALE_GROWTH] < a.growth_interval) return {};
    const auto more = static_cast<float>(static_cast<double>(*scale) * a.growth_factor);
    if (std::isfinite(more)) *scale = std::fmax(*scale, std::fmin(more, a.cap));
    count[HALFSTEP_SCALE_GROWTH] = count[HALFSTEP_SCALE_USED] = 0;
    return {};
  }
  count[HALFSTEP_SCALE_GROWTH] = a.restart;
  ++count[HALFSTEP_SCALE_IN_A_ROW];
  if (++count[HALFSTEP_SCALE_USED] < a.hysteresis) return {};
  count[HALFSTEP_SCALE_USED] = a.hysteresis;
  if (*scale <= a.floor) ++count[HALFSTEP_SCALE_STUCK];
  const auto less = static_cast<float>(static_cast<double>(*scale) * a.backoff_factor);
  // A scale that is under the floor already is not raised.
  *scale = std::fmax(less, std::fmin(a.floor, *scale));
  if (*scale <= a.floor) ++count[HALFSTEP_SCALE_AT_FLOOR];
  return {};
}

// All are asked for with f32, whatever the gradients are.
constexpr uint32_t kAsked = dtypes({HALFSTEP_F32});
constexpr KernelDef kUnscale{.op = "amp_unscale",
                             .dtypes = kAsked,
                             .layouts = HALFSTEP_LAYOUT_STRIDED,
                             .attribute_bytes = 0,
                             .run = amp_unscale,
                             .workspace = norm_bytes};
constexpr KernelDef kCheck{
    .op = "amp_check", .dtypes = kAsked, .layouts = HALFSTEP_LAYOUT_STRIDED, .attribute_bytes = 0, .run = amp_check};
constexpr KernelDef kAllFinite{
    .op = "all_finite", .dtypes = kAsked, .layouts = HALFSTEP_LAYOUT_STRIDED, .attribute_bytes = 0, .run = all_finite};
constexpr KernelDef kUpdateScale{.op = "amp_update_scale",
                                 .dtypes = kAsked,
                                 .layouts = HALFSTEP_LAYOUT_CONTIGUOUS,
                                 .attribute_bytes = sizeof(halfstep_scale_update_attributes),
                                 .run = amp_update_scale};

}  // namespace

std::span<const Kernel> amp_kernels() {
  static constexpr Kernel kKernels[] = {kernel<kUnscale>, kernel<kCheck>, kernel<kAllFinite>, kernel<kUpdateScale>};
  return kKernels;
}

}  // namespace sim
