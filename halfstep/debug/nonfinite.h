// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/debug/call_site.h"

namespace halfstep::debug {

/// Thrown by NonFinite, out of the op that made the infinity or NaN.
class HS_API NonFiniteError : public Error {
 public:
  using Error::Error;
};

/// What NonFinite does with what it finds.
enum class OnNonFinite : std::uint8_t {
  raise,    ///< throws NonFiniteError
  log,      ///< warns through the log, once for each op and module; a later object warns anew
  collect,  ///< keeps quiet
};

/// Options of NonFinite.
struct NonFiniteOptions {
  OnNonFinite action = OnNonFinite::log;
  std::size_t most = 1000;   ///< findings that are kept
  bool all_threads = false;  ///< else only the calls of the thread that made it
};

/// An op that made infinities or NaNs out of finite inputs.
struct HS_API NonFiniteFinding {
  CallSite site;
  std::vector<Statistics> inputs = {};  ///< of the floating inputs, as they were before the call
  Statistics output = {};
  int output_index = 0;
  /// The largest magnitude of the result computed in float64 from the same inputs; infinite or NaN when that is no
  /// number either, and none when the op can't be run again.
  std::optional<double> exact = {};

  /// Several sentences: which op of which module, what it got and made, and what may help.
  std::string str() const;
};

/// While it lives, looks at the results of all ops, forward and backward, and finds those that made an infinity or a
/// NaN out of finite inputs; what only passes one on is left out. So the first finding is where the trouble begins:
///
///     debug::NonFinite watch{{.action = debug::OnNonFinite::raise}};
///     loss.backward();
///
/// Works with tensors of any device (their values are copied to the host), in-place ops included. Filling with an
/// infinity that the program asked for (`full`, `masked_fill`) is no finding. An op whose only inputs are numbers of
/// the program has nothing finite to begin with and is left out too.
class HS_API NonFinite {
 public:
  explicit NonFinite(const NonFiniteOptions& options = {});
  ~NonFinite();
  NonFinite(const NonFinite&) = delete;
  NonFinite& operator=(const NonFinite&) = delete;

  /// In the order of the calls.
  std::vector<NonFiniteFinding> findings() const;
  /// How many there were, those over NonFiniteOptions::most included.
  std::uint64_t count() const;
  /// Calls that were looked at.
  std::uint64_t calls() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep::debug
