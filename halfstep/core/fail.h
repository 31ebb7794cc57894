// SPDX-License-Identifier: Apache-2.0
// Internal: formatted throwing, for .cpp files only (it includes fmt, which no public header may).
#pragma once

#include <fmt/format.h>

#include <utility>

#include "halfstep/core/error.h"

namespace halfstep {

/// Throws `E` with the formatted text.
template <class E = Error, class... Args>
[[noreturn, gnu::cold, gnu::noinline]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw E(fmt::vformat(format, fmt::make_format_args(args...)));
}

}  // namespace halfstep
