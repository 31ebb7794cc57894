// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "halfstep/core/export.h"

namespace halfstep {

/// How much a message matters.
enum class LogLevel : int { debug, info, warning, error };

/// Where the library's messages go; by default warnings and errors go to standard error as `halfstep: warning: ...`. An
/// empty sink restores the default. The sink may be called from any thread, one call at a time.
HS_API void set_log_sink(std::function<void(LogLevel, std::string_view)> sink);
/// Messages under this level are dropped (default: warning, or HALFSTEP_LOG=debug|info|warning|error).
HS_API void set_log_level(LogLevel level);
/// Logs a message through the sink.
HS_API void log(LogLevel level, std::string_view text);
/// As log(), but each `key` is logged once per run.
HS_API void log_once(LogLevel level, std::string_view key, std::string_view text);

}  // namespace halfstep
