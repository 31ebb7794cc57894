// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/runtime/trace.h"
#include "halfstep/train/loop_internal.h"

namespace halfstep::training {
namespace {

// No run has so many.
constexpr std::int64_t kMostSteps = std::int64_t{1} << 60;

// Each rank has its own random numbers in a step: a stream of the state that all ranks are in, so that one checkpoint
// has those of all.
PhiloxState random_of(const PhiloxState& state, int rank) {
  constexpr std::uint64_t kPurpose = 0x72616E6B;  // keeps the streams apart from other uses of the seed
  const std::uint64_t step = derive_seed(state.seed, state.offset, kPurpose);
  return {.seed = derive_seed(step, static_cast<std::uint64_t>(rank), kPurpose), .offset = 0};
}

double seconds_between(std::chrono::steady_clock::time_point a, std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

}  // namespace

Loop::Loop(TrainStep& step, Task& evaluation, TrainContext& context, const std::vector<Callback>& callbacks,
           const FitOptions& options, bool captured, const char* who)
    : step_(step),
      evaluation_(evaluation),
      context_(context),
      callbacks_(callbacks),
      options_(options),
      captured_(captured),
      who_(who),
      device_(device_of(step.network())),
      group_(step.options().parallel ? step.options().parallel->group() : dist::ProcessGroup()) {
  if (options.every < 1) fail<Error>("{}: expected at least 1 epoch between evaluations, got {}", who, options.every);
  if (options.accumulate < 1) fail<Error>("{}: expected at least 1 batch a step, got {}", who, options.accumulate);
  if (options.read_every < 1)
    fail<Error>("{}: expected at least 1 step between reads, got {}", who, options.read_every);
  const RunState& from = options.from;
  if (from.epoch < 0 || from.batch < 0 || from.step < 0 || from.skipped < 0 || from.loss_samples < 0 ||
      from.samples < 0 || from.step > kMostSteps) {
    fail<Error>("{}: expected a state to resume from that TrainContext::state() gave, got epoch {}, batch {}, step {}",
                who, from.epoch, from.batch, from.step);
  }
  context_.state_ = options.from;
  context_.epoch = options.from.epoch;
  context_.step = options.from.step;
  context_.read_ = [this] { read(); };
}

bool Loop::stopped() {
  if (options_.stop && options_.stop->load(std::memory_order_relaxed)) {
    context_.interrupted_ = true;
    context_.request_stop("interrupted");
  }
  return group_.size() > 1 ? agreed_ : context_.stop_requested();
}

void Loop::agree() {
  if (group_.size() == 1) return;
  stopped();
  constexpr double kRequested = 1, kInterrupted = 2;
  const double most = max_of(group_, context_.interrupted_ ? kInterrupted : context_.stop_requested() ? kRequested : 0);
  agreed_ = most != 0;
  context_.interrupted_ = most == kInterrupted;
  if (agreed_ && !context_.stop_requested()) context_.request_stop("another rank was stopped");
}

void Loop::run(int epochs, const Batches& training, const Batches* validation) {
  context_.epochs = epochs;
  context_.accumulate = options_.accumulate;
  context_.steps_in_epoch = steps_of(training);
  if (const auto at = training.position(); at && (context_.state_.epoch > 0 || context_.state_.batch > 0) &&
                                           *at != data::LoaderState{context_.state_.epoch, context_.state_.batch}) {
    fail<Error>("{}: expected a loader at epoch {}, batch {}, where the run resumes, got one at epoch {}, batch {}",
                who_, context_.state_.epoch, context_.state_.batch, at->epoch, at->batch);
  }
  tell(&CallbackBase::on_train_begin);
  agree();
  while (context_.state_.epoch < epochs && !stopped()) epoch(training, validation);
  tell(&CallbackBase::on_train_end);
}

std::int64_t Loop::steps_of(const Batches& training) const {
  return (training.size() + options_.accumulate - 1) / options_.accumulate;
}

void Loop::epoch(const Batches& training, const Batches* validation) {
  RunState& state = context_.state_;
  context_.epoch = state.epoch + 1;
  context_.steps_in_epoch = steps_of(training);
  context_.step_in_epoch = (state.batch + options_.accumulate - 1) / options_.accumulate;
  context_.metrics = {};
  if (state.batch == 0) {
    state.loss_sum = 0;
    state.loss_samples = state.samples = 0;
    state.parts.clear();
  }
  tell(&CallbackBase::on_epoch_begin);
  const bool whole = steps(training);
  read();
  context_.epoch_loss = state.mean_loss();
  context_.skipped = state.skipped;
  const bool due = validation && (context_.epoch % options_.every == 0 || context_.epoch == context_.epochs);
  // A resumed run makes the evaluation that was stopped.
  bool over = whole && !(due && stopped());
  if (over && due) {
    step_.release_captured();
    const nn::EvalMode mode(evaluation_.network());
    tell(&CallbackBase::on_eval_begin);
    const EvaluationOptions evaluation{
        .autocast = step_.options().autocast,
        .read_every = options_.read_every,
        .on_batch = [&](const EvalProgress& p) { tell(&CallbackBase::on_eval_batch, p); },
        .stop = [&] { return stopped() || context_.stop_requested(); },
        .group = group_,
        .sharding = step_.optimizer().sharding(),
        .who = who_};
    over = evaluate(evaluation_, *validation, context_.metrics, evaluation);
    if (over) tell(&CallbackBase::on_eval_end);
  }
  if (over) {
    training.finish_epoch();
    state.epoch = context_.epoch;
    state.batch = 0;
  }
  tell(&CallbackBase::on_epoch_end);
  agree();
}

bool Loop::steps(const Batches& training) {
  const std::int64_t batches = training.size();
  std::int64_t& at = context_.state_.batch;
  const bool resumed = at > 0;
  std::vector<data::Batch> group;
  seen_ = 0;
  data_seconds_ = 0;
  epoch_start_ = step_start_ = Clock::now();
  auto waiting_since = epoch_start_;
  std::optional<TraceRange> data(std::in_place, "data");
  training.each([&](const data::Batch& batch) {
    if (group.empty() && stopped()) return false;
    data_seconds_ += seconds_between(waiting_since, Clock::now());
    group.push_back(batch);
    visit_tensors(group.back(), [&](Tensor& t) {
      if (t.defined()) t = t.to(device_);
    });
    data.reset();
    ++at;
    if (at % options_.accumulate == 0 || at >= batches) {
      step(group);
      group.clear();
      data_seconds_ = 0;
    }
    waiting_since = Clock::now();
    data.emplace("data");
    return group.empty() ? !stopped() || at >= batches : true;
  });
  data.reset();
  if (!group.empty()) step(group);  // the loop had fewer batches than it said
  if (context_.step_in_epoch == 0 && !resumed && !stopped()) {
    fail<Error>("{}: expected at least one batch an epoch, got none", who_);
  }
  return at >= batches || !stopped();
}

void Loop::step(std::vector<data::Batch>& group) {
  ++context_.step;
  ++context_.step_in_epoch;
  context_.batch_size = 0;
  for (const data::Batch& b : group) context_.batch_size += step_.task().samples(b);
  context_.batches = group;
  tell(&CallbackBase::on_step_begin);
  const double lr = step_.optimizer().lr();
  const PhiloxState random = default_generator().state();
  // Shards have numbers of their own.
  const bool of_rank = group_.size() > 1 && step_.options().shards == 0;
  if (of_rank) default_generator().set_state(random_of(random, group_.rank()));
  const StepValues values = captured_ ? step_.run_captured(group) : step_.run(group);
  if (of_rank) default_generator().set_state({.seed = random.seed, .offset = random.offset + 1});
  context_.loss = values.loss();
  context_.overflow = values.overflow;
  context_.scale = values.scale;
  seen_ += values.samples;
  const auto now = Clock::now();
  StepRecord record{.epoch = context_.epoch,
                    .step = context_.step,
                    .step_in_epoch = context_.step_in_epoch,
                    .samples = values.samples,
                    .lr = lr,
                    .seconds = seconds_between(step_start_, now),
                    .data_seconds = data_seconds_,
                    .samples_per_s = static_cast<double>(seen_) / seconds_between(epoch_start_, now)};
  step_start_ = now;
  reader_.add(values, std::move(record));
  if (device_.is_cpu() || reader_.size() >= static_cast<std::size_t>(options_.read_every)) read();
  tell(&CallbackBase::on_step_end);
  context_.batches = {};
  agree();
}

void Loop::read() {
  std::vector<StepRecord> records = reader_.take();
  if (records.empty()) return;
  // Reading the scale looks at the limits of its policy, which the CPU does in every step.
  if (!device_.is_cpu() && step_.scaler()) step_.scaler()->get_scale();
  RunState& state = context_.state_;
  // A run may count other parts than the one that it resumes: accuracy is counted where it is shown.
  if (!std::exchange(has_read_, true) &&
      !std::equal(state.parts.begin(), state.parts.end(), records[0].parts.begin(), records[0].parts.end(),
                  [](const auto& a, const auto& b) { return a.first == b.first; })) {
    state.parts.clear();
    state.samples = 0;
  }
  for (StepRecord& r : records) {
    state.step = r.step;
    r.skipped_steps = state.skipped += r.skipped ? 1 : 0;
    state.samples += r.samples;
    // One overflowing batch is not to take the epoch's means with it.
    for (const auto& [name, sum] : r.parts) state.parts[name] += std::isfinite(sum) ? sum : 0;
    r.epoch_parts = state.parts;
    r.epoch_samples = state.samples;
    if (std::isfinite(r.loss)) {
      state.loss_sum += r.loss * static_cast<double>(r.samples);
      state.loss_samples += r.samples;
    }
    r.mean_loss = state.loss_samples > 0 ? state.mean_loss() : r.loss;
  }
  tell(&CallbackBase::on_values, std::span<const StepRecord>(records));
}

}  // namespace halfstep::training
