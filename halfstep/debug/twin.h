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
  /// The allowed number of roundings per op: its own error, relative in sums of magnitudes, must be at most `slack`
  /// units of roundoff of its result's dtype.
  double slack = 8;
  /// How much an op may amplify the relative errors of its inputs. Products, sums and activations amplify by a small
  /// factor; exp and softmax by up to the magnitude of their inputs; a difference of nearly equal numbers by any
  /// factor.
  double amplification = 32;
};

/// A call of the 16-bit run compared with the same call in float32.
struct HS_API TwinCall {
  CallSite site;
  DType dtype = DType::f32;  ///< of the result in the tested run
  double error = 0;          ///< |tested - reference|, summed, relative to the summed |reference|
  double own_error = 0;      ///< the same against the op in float64 on the tested run's own inputs
  double input_error = 0;    ///< the inputs' errors, summed
  bool departs = false;      ///< beyond what rounding explains
  std::string reason = {};   ///< in words, if it deviates
};

/// What twin() found.
struct HS_API TwinReport {
  DType dtype = DType::f16;
  std::vector<TwinCall> calls;       ///< matched calls and casts, in the order of the tested run
  std::uint64_t only_reference = 0;  ///< calls of the reference run without a partner
  std::uint64_t only_tested = 0;     ///< and of the other
  /// The first call that deviates; null if none does.
  const TwinCall* first() const;
  /// The first deviation with its reason, and the largest errors.
  std::string str(std::size_t rows = 10) const;
};

/// Runs a training step twice, in float32 and then under autocast, with the same random numbers, and names the first
/// op, forward or backward, whose result deviates from float32's by more than the dtype's rounding explains.
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
/// f16, 2^-8 for bf16) adds at most u as long as values are in the normal range. A call deviates when
/// - its own error, against the op in float64 on the inputs it received, is over `slack` u: it overflowed, underflowed,
///   or its kernel is wrong; for a cast, against what it cast. For float32 results, over 2^-14, which covers sums of a
///   thousand terms of either sign in float32;
/// - or its distance from float32 is over `amplification` times that of its inputs, plus `slack` u: the op is
///   ill-conditioned there, like a difference of nearly equal numbers. Inputs count with the larger of their errors in
///   sums of magnitudes and of squares, since a few wrong elements, such as at relu's kink, spread in the next product.
///
/// Results of the float32 run are kept until the end, so memory for a copy of all of them is needed. Throws AmpError
/// for another dtype, and Error when the first run has 16-bit results: the step opens its own region, or its weights
/// are in 16 bits.
HS_API TwinReport twin(const std::function<void()>& step, const TwinOptions& options = {});
/// The same for two arbitrary functions, such as with regions of their own.
HS_API TwinReport twin(const std::function<void()>& reference, const std::function<void()>& tested,
                       const TwinOptions& options = {});

}  // namespace halfstep::debug
