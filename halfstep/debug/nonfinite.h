// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/debug/call_site.h"

namespace halfstep::debug {

/// Thrown by NonFinite, from the op that produced the infinity or NaN.
class HS_API NonFiniteError : public Error {
 public:
  using Error::Error;
};

/// What NonFinite does with what it finds.
enum class OnNonFinite : std::uint8_t {
  raise,    ///< throws NonFiniteError
  log,      ///< logs a warning, once for each op and module; a later object warns again
  collect,  ///< is silent
};

/// Options of NonFinite.
struct NonFiniteOptions {
  OnNonFinite action = OnNonFinite::log;
  std::size_t most = 1000;   ///< findings that are kept
  bool all_threads = false;  ///< else only the calls of the thread that made it
};

/// An op that produced infinities or NaNs from finite inputs.
struct HS_API NonFiniteFinding {
  CallSite site;
  std::vector<Statistics> inputs = {};  ///< of the floating inputs, as they were before the call
  Statistics output = {};
  int output_index = 0;
  /// The largest magnitude of the result computed in float64 from the same inputs; infinite or NaN if that is not
  /// finite either, and none if the op can't be run again.
  std::optional<double> exact = {};

  /// Several sentences: which op of which module, its inputs and results, and what may help.
  std::string str() const;
};

/// For its lifetime, checks the results of all ops, forward and backward, and reports those that produced an infinity
/// or NaN from finite inputs; ops that only pass one on are not reported. So the first finding is where the problem
/// starts:
///
///     debug::NonFinite watch{{.action = debug::OnNonFinite::raise}};
///     loss.backward();
///
/// Works with tensors on any device (their values are copied to the host), including in-place ops. Filling with an
/// infinity requested by the program (`full`, `masked_fill`) is not a finding. An op whose only inputs are scalars has
/// no finite tensor inputs and is not reported either.
class HS_API NonFinite {
 public:
  explicit NonFinite(const NonFiniteOptions& options = {});
  ~NonFinite();
  NonFinite(const NonFinite&) = delete;
  NonFinite& operator=(const NonFinite&) = delete;

  /// In the order of the calls.
  std::vector<NonFiniteFinding> findings() const;
  /// Their number, including those beyond NonFiniteOptions::most.
  std::uint64_t count() const;
  /// Number of calls checked.
  std::uint64_t calls() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep::debug
