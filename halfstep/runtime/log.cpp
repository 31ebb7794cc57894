// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/log.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "halfstep/core/text.h"

namespace halfstep {
namespace {

LogLevel level_from_environment() {
  const char* text = std::getenv("HALFSTEP_LOG");
  const std::string_view value = text ? text : "";
  if (value == "debug") return LogLevel::debug;
  if (value == "info") return LogLevel::info;
  if (value == "error") return LogLevel::error;
  return LogLevel::warning;
}

struct Log {
  std::mutex mutex;
  std::function<void(LogLevel, std::string_view)> sink;
  LogLevel level = level_from_environment();
  std::set<std::string, std::less<>> said;
};

// Never destroyed: messages may still come from destructors at the end of the program.
Log& the_log() {
  static Log& instance = *new Log;
  return instance;
}

// Names of files and classes in it may hold anything, and do nothing to a terminal here.
void write(Log& state, LogLevel level, std::string_view message) {
  if (level < state.level) return;
  const std::string text = printable_lines(message);
  if (state.sink) {
    state.sink(level, text);
    return;
  }
  static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  std::fprintf(stderr, "halfstep: %s: %.*s\n", kNames[static_cast<int>(level)], static_cast<int>(text.size()),
               text.data());
}

}  // namespace

void set_log_sink(std::function<void(LogLevel, std::string_view)> sink) {
  Log& state = the_log();
  std::lock_guard lock(state.mutex);
  state.sink = std::move(sink);
}

void set_log_level(LogLevel level) {
  Log& state = the_log();
  std::lock_guard lock(state.mutex);
  state.level = level;
}

void log(LogLevel level, std::string_view text) {
  Log& state = the_log();
  std::lock_guard lock(state.mutex);
  write(state, level, text);
}

void log_once(LogLevel level, std::string_view key, std::string_view text) {
  Log& state = the_log();
  std::lock_guard lock(state.mutex);
  if (state.said.emplace(key).second) write(state, level, text);
}

}  // namespace halfstep
