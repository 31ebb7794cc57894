// SPDX-License-Identifier: Apache-2.0
// The loop that all training runs through: Model's, the program's and the benchmarks'.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "halfstep/train/batches.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/model.h"
#include "halfstep/train/step_reader_internal.h"

namespace halfstep::training {

class Loop {
 public:
  /// `evaluation` is evaluated, `step` trained; `who` names the caller in messages; `context` has what callbacks see
  /// from the start.
  Loop(TrainStep& step, Task& evaluation, TrainContext& context, const std::vector<Callback>& callbacks,
       const FitOptions& options, bool captured, const char* who);
  ~Loop() { context_.read_ = {}; }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// Evaluates on `validation`, if any, as the options say.
  void run(int epochs, const Batches& training, const Batches* validation);

 private:
  using Clock = std::chrono::steady_clock;

  bool stopped();
  /// Ranks stop together: after this they agree on it.
  void agree();
  std::int64_t steps_of(const Batches& training) const;
  void epoch(const Batches& training, const Batches* validation);
  /// All batches of the epoch; false when it was stopped before the last one.
  bool steps(const Batches& training);
  void step(std::vector<data::Batch>& group);
  void read();
  template <class... Args>
  void tell(void (CallbackBase::*event)(TrainContext&, Args...), std::type_identity_t<Args>... args) {
    for (const Callback& c : callbacks_) ((*c.operator->()).*event)(context_, args...);
  }

  TrainStep& step_;
  Task& evaluation_;
  TrainContext& context_;
  const std::vector<Callback>& callbacks_;
  const FitOptions& options_;
  bool captured_;
  const char* who_;
  Device device_;
  dist::ProcessGroup group_;  // of the step
  bool agreed_ = false;       // to stop
  StepReader reader_;
  Clock::time_point epoch_start_ = {}, step_start_ = {};
  double data_seconds_ = 0;
  std::int64_t seen_ = 0;  // samples since epoch_start_
  bool has_read_ = false;  // values of a step
};

}  // namespace halfstep::training
