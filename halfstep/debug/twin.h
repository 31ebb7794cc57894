// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/debug/call_site.h"

namespace halfstep::debug {

/// Options of twin().
struct TwinOptions {
  DType dtype = f16;  ///< f16 or bf16
  /// How many roundings an op may make: its own error, relative in sums of magnitudes, is to be at most `slack` units
  /// of roundoff of its result's dtype.
  double slack = 8;
  /// By how much an op may enlarge the relative errors of its inputs. Products, sums and activations stay at a few; exp
  /// and softmax reach the magnitude of their inputs; a difference of near numbers any value.
  double amplification = 32;
};

/// A call of the run in 16 bits beside the same call in float32.
struct HS_API TwinCall {
  CallSite site;
  DType dtype = DType::f32;  ///< of the result in the tested run
  double error = 0;          ///< |tested - reference|, summed, as a part of the summed |reference|
  double own_error = 0;      ///< the same against the op in float64 on the tested run's own inputs
  double input_error = 0;    ///< what the inputs brought along, added up
  bool departs = false;      ///< beyond what rounding explains
  std::string reason = {};   ///< in words, when it departs
};

/// What twin() found.
struct HS_API TwinReport {
  DType dtype = DType::f16;
  std::vector<TwinCall> calls;       ///< matched calls and casts, in the order of the tested run
  std::uint64_t only_reference = 0;  ///< calls of the reference run without a partner
  std::uint64_t only_tested = 0;     ///< and of the other
  /// The first call that departs; null when none does.
  const TwinCall* first() const;
  /// The first departure with its reason, and the largest errors.
  std::string str(std::size_t rows = 10) const;
};

/// Runs a training step twice, in float32 and then under autocast, with the same random numbers, and names the first
/// op, forward or backward, whose result departs from float32's beyond what the dtype's rounding explains.
///
///     const auto report = debug::twin([&] {
///       optimizer.zero_grad();
///       cross_entropy(net(x), y).backward();
///     });
///     std::cout << report.str();
///
/// The step opens no region of its own, starts from the same state each time (so it clears gradients and runs no
/// optimizer), and calls the same ops; casts, views and copies between devices don't count. Calls are matched in order
/// by op, module, place in the backward pass and shape.
///
/// Errors are relative, in sums of magnitudes over a tensor: each rounding to a dtype with unit roundoff u (2^-11 for
/// f16, 2^-8 for bf16) adds at most u as long as values are in the normal range. A call departs when
/// - its own error, against the op in float64 on the inputs that it got, is over `slack` u: it overflowed, underflowed,
///   or its kernel is wrong; for a cast, against what it cast. For float32 results, over 2^-14, which covers sums of a
///   thousand terms of either sign in float32;
/// - or its distance from float32 is over `amplification` times that of its inputs, plus `slack` u: the op is
///   ill-conditioned there, as a difference of nearly equal numbers is. Inputs count with the larger of their errors in
///   sums of magnitudes and of squares, since a few wrong elements, as at relu's kink, spread in the next product.
///
/// Results of the float32 run are kept until the end, so memory for one copy of all is needed. Throws AmpError for
/// another dtype, and Error when the first run has 16-bit results: the step has a region of its own, or its weights are
/// in 16 bits.
HS_API TwinReport twin(const std::function<void()>& step, const TwinOptions& options = {});
/// The same for two functions that do what they like, such as regions with other options.
HS_API TwinReport twin(const std::function<void()>& reference, const std::function<void()>& tested,
                       const TwinOptions& options = {});

}  // namespace halfstep::debug
