// SPDX-License-Identifier: Apache-2.0
// Callbacks that look into the steps of a Model with the tools of halfstep/debug: dump, compare, check and profile. A
// run with them computes the same bits as one without.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/debug/compare.h"
#include "halfstep/debug/dump.h"
#include "halfstep/debug/nonfinite.h"
#include "halfstep/debug/profiler.h"
#include "halfstep/debug/twin.h"
#include "halfstep/train/callback.h"
#include "halfstep/train/debugging.h"

namespace halfstep::training {
namespace detail {
class StepsWork;
}

/// Where a callback of this header leaves what it found.
struct DebugReport {
  std::filesystem::path file = {};                        ///< holds it as text; empty: no file
  std::function<void(const std::string& text)> say = {};  ///< gets the same text; empty: it is printed
  std::string name = {};  ///< begins the warning that the run ended before the steps; empty: the callback's name
  bool warns = true;      ///< whether there is such a warning
};

/// The base of the callbacks below, which work during a range of steps: from before the first of them until after the
/// last one or the end of the run. If the run throws, they report when the last copy of the callback is destroyed.
class HS_API StepsCallback : public CallbackBase {
 public:
  void on_train_begin(TrainContext& context) override;
  void on_step_begin(TrainContext& context) override;
  void on_step_end(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;

 protected:
  StepsCallback(const StepRange& steps, const DebugReport& report, const char* name,
                std::unique_ptr<detail::StepsWork> work);
  void begin(TrainContext& context);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Options of DumpTensors.
struct DumpTensorsOptions {
  debug::DumpOptions dump = {};  ///< folder, level, and which calls
  StepRange steps = {};          ///< counted over the run; by default the first one
  DebugReport report = {};       ///< how many calls were dumped where
};
/// Writes the inputs and results of every op call of some steps, forward and backward (debug::Dump).
class HS_API DumpTensors : public StepsCallback {
 public:
  explicit DumpTensors(const DumpTensorsOptions& options = {});
};

/// Options of CompareSteps.
struct CompareStepsOptions {
  debug::CompareOptions compare = {};  ///< the reference: float64 or float32
  StepRange steps = {};                ///< counted over the run; by default the first one
  DebugReport report = {};
};
/// Runs every op of some steps again on the CPU, in float64 or float32, and reports the worst errors (debug::Compare).
/// The steps use their own results.
class HS_API CompareSteps : public StepsCallback {
 public:
  explicit CompareSteps(const CompareStepsOptions& options = {});
};

/// Options of CompareTwin.
struct CompareTwinOptions {
  StepRange steps = {};   ///< the first of them that is made is run twice; by default the first of the run
  std::size_t rows = 20;  ///< of the report
  DebugReport report = {};
};
/// Runs the first batch of a step in float32 and in the precision of the step's autocast region, before the step, and
/// names the first op that deviates by more than rounding explains (debug::twin). Weights, buffers and random numbers
/// are afterwards as they were. Throws Error before the first step for a step without a region (StepOptions::autocast).
class HS_API CompareTwin : public StepsCallback {
 public:
  explicit CompareTwin(const CompareTwinOptions& options = {});
};

/// Options of NonFiniteMonitor.
struct NonFiniteMonitorOptions {
  debug::NonFiniteOptions check = {};  ///< what is done with a finding
  DebugReport report = {};             ///< how many calls there were, and the first
};
/// Finds the ops of a run, evaluations among them, that make infinities or NaNs out of finite inputs
/// (debug::NonFinite).
class HS_API NonFiniteMonitor : public StepsCallback {
 public:
  explicit NonFiniteMonitor(const NonFiniteMonitorOptions& options = {});
  void on_train_begin(TrainContext& context) override;
};

/// Options of ProfileSteps.
struct ProfileStepsOptions {
  std::filesystem::path folder = "profile";    ///< made; gets `trace.json` and `profile.txt`
  StepRange steps = {.first = 2, .last = 11};  ///< counted over the run; the first one has costs of its own
  debug::ProfilerOptions profiler = {};
  DebugReport report = {};  ///< the tables; their file is profile.txt
};
/// Profiles some steps (debug::Profiler): time, bytes and casts of every op and module, as tables and as a trace in
/// Chrome's format.
class HS_API ProfileSteps : public StepsCallback {
 public:
  explicit ProfileSteps(const ProfileStepsOptions& options = {});
};

/// The callbacks that a configuration asks for, in the order in which they are to be called. `out`: folder for reports;
/// empty: none are written. `say` gets their text; it may be empty. Throws Error for a value that is none of the
/// choices.
HS_API std::vector<Callback> debug_callbacks(const DebugConfig& config, const std::filesystem::path& out,
                                             const std::function<void(const std::string& text)>& say = {});

}  // namespace halfstep::training
