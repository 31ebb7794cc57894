// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/debugging.h"

#include <charconv>
#include <limits>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/debug/compare.h"
#include "halfstep/debug/dump.h"
#include "halfstep/debug/nonfinite.h"
#include "halfstep/debug/profiler.h"
#include "halfstep/debug/twin.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/flags.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;

// Of a name that was checked.
debug::DumpLevel dump_level(const std::string& text) {
  if (text == "first") return debug::DumpLevel::first;
  if (text == "whole") return debug::DumpLevel::whole;
  return debug::DumpLevel::statistics;
}

void write(const fs::path& path, const std::string& text) {
  io::AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace

StepRange parse_steps(const std::string& text, const std::string& flag) {
  constexpr std::int64_t kEnd = std::numeric_limits<std::int64_t>::max();
  if (text == "all") return {1, kEnd};
  const auto whole = [&](std::string_view part) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc{} || end != part.data() + part.size() || part.empty() || value < 1) {
      fail<Error>("{}: expected N, FIRST-LAST, FIRST- or all, steps counted from 1, got '{}'", flag, text);
    }
    return value;
  };
  const std::string_view view = text;
  const auto dash = view.find('-', 1);
  StepRange range;
  range.first = whole(view.substr(0, dash));
  range.last = dash == std::string_view::npos ? range.first
               : dash + 1 == view.size()      ? kEnd
                                              : whole(view.substr(dash + 1));
  if (range.last < range.first) fail<Error>("{}: expected a last step behind the first, got '{}'", flag, text);
  return range;
}

void check(const DebugConfig& config) {
  DebugConfig c = config;
  check(flags(c));
}

struct StepDebugging::Impl {
  Impl(const DebugConfig& c, fs::path out_folder, std::function<void(const std::string&)> say_it)
      : config(c),
        out(std::move(out_folder)),
        say(std::move(say_it)),
        steps(parse_steps(c.steps, "--debug-steps")),
        profile_steps(parse_steps(c.profile_steps, "--profile-steps")) {
    if (!config.nonfinite.empty()) {
      nonfinite.emplace(debug::NonFiniteOptions{.action = config.nonfinite == "raise" ? debug::OnNonFinite::raise
                                                                                      : debug::OnNonFinite::log});
    }
  }

  // A report for the caller, and for the run's folder.
  void report(const std::string& text, const char* file) const {
    if (say) say(text);
    if (!out.empty()) write(out / file, text);
  }

  void begin_steps() {
    if (!config.dump.empty())
      dump.emplace(debug::DumpOptions{.folder = config.dump, .level = dump_level(config.level)});
    if (config.compare == "f64" || config.compare == "f32") {
      compare.emplace(debug::CompareOptions{.reference = config.compare == "f64" ? DType::f64 : DType::f32});
    }
  }

  void end_steps() {
    if (dump) {
      const std::string text = fmt::format("{} calls dumped in {}\n", dump->calls(), shown_path(dump->folder()));
      dump.reset();
      if (say) say(text);
    }
    if (compare) {
      const std::string text = compare->report();
      compare.reset();
      report(text, "debug-compare.txt");
    }
  }

  void end_profile() {
    if (!profiler) return;
    profiler->stop();
    std::error_code error;
    fs::create_directories(config.profile, error);
    if (error) fail<IoError>("{}: can't be made: {}", shown_path(config.profile), error.message());
    profiler->write_trace(config.profile / "trace.json");
    const std::string text = profiler->table();
    profiler.reset();
    write(config.profile / "profile.txt", text);
    if (say) say(text + fmt::format("profile and trace in {}\n", shown_path(config.profile)));
  }

  void finish(bool whole) {
    if (finished) return;
    finished = true;
    end_steps();
    end_profile();
    if (nonfinite) {
      const std::uint64_t count = nonfinite->count();
      std::string text = fmt::format("{} calls made infinities or NaNs out of finite inputs\n", count);
      if (count > 0) text += "the first: " + nonfinite->findings().at(0).str() + "\n";
      nonfinite.reset();
      report(text, "debug-nonfinite.txt");
    }
    const auto missed = [&](bool wanted, const StepRange& range, const char* flag, const std::string& given) {
      if (!whole || !wanted || last_step >= range.first) return;
      log(LogLevel::warning, fmt::format("{} {}: the run ended after step {}", flag, given, last_step));
    };
    missed(!config.dump.empty() || !config.compare.empty(), steps, "--debug-steps", config.steps);
    missed(!config.profile.empty(), profile_steps, "--profile-steps", config.profile_steps);
  }

  DebugConfig config;
  fs::path out;
  std::function<void(const std::string&)> say;
  StepRange steps, profile_steps;
  std::optional<debug::NonFinite> nonfinite;
  std::optional<debug::Dump> dump;
  std::optional<debug::Compare> compare;
  std::optional<debug::Profiler> profiler;
  std::int64_t current = 0;
  std::int64_t last_step = 0;
  bool twin_done = false;
  bool begun = false;
  bool profiled = false;
  bool finished = false;
};

StepDebugging::StepDebugging(const DebugConfig& config, fs::path out, std::function<void(const std::string&)> say) {
  check(config);
  if (config.dump.empty() && config.compare.empty() && config.nonfinite.empty() && config.profile.empty()) return;
  impl_ = std::make_unique<Impl>(config, std::move(out), std::move(say));
}

StepDebugging::~StepDebugging() {
  try {
    if (impl_) impl_->finish(false);  // what a run that fails has recorded is what its user wants to see
  } catch (const std::exception& e) {
    log(LogLevel::error, e.what());
  }
}

void StepDebugging::before_step(std::int64_t number) {
  if (!impl_ || impl_->current == number) return;
  Impl& s = *impl_;
  s.current = number;
  if (!s.begun && s.steps.contains(number)) {
    s.begun = true;
    s.begin_steps();
  }
  if (!s.config.profile.empty() && !s.profiled && s.profile_steps.contains(number)) {
    s.profiled = true;
    s.profiler.emplace();
  }
}

void StepDebugging::after_step(std::int64_t number) {
  if (!impl_) return;
  Impl& s = *impl_;
  s.last_step = number;
  if (number >= s.steps.last) s.end_steps();
  if (number >= s.profile_steps.last) s.end_profile();
}

bool StepDebugging::wants_twin(std::int64_t number) const {
  return impl_ && impl_->config.compare == "twin" && !impl_->twin_done && impl_->steps.contains(number);
}

void StepDebugging::twin(const std::function<void()>& step, DType dtype) {
  if (!impl_) return;
  impl_->twin_done = true;
  const debug::TwinReport report = debug::twin(step, {.dtype = dtype});
  impl_->report(report.str(20), "debug-twin.txt");
}

void StepDebugging::finish() {
  if (impl_) impl_->finish(true);
}

}  // namespace halfstep::training
