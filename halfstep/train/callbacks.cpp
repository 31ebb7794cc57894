// SPDX-License-Identifier: Apache-2.0
// The context and the callbacks that only look.
#include "halfstep/train/callbacks.h"

#include <algorithm>
#include <cmath>
#include <iostream>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/join.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::training {
namespace {

// Losses of a device that wait to be read: few enough to take no memory, enough that reading costs nothing.
constexpr std::size_t kMostPending = 1000;

// A number as MindSpore's users see theirs: the shortest that reads back as the same float32 (or float64), with a
// point.
std::string loss_text(double loss, DType dtype) {
  std::string text = dtype == f64 ? fmt::format("{}", loss) : fmt::format("{}", static_cast<float>(loss));
  if (std::isfinite(loss) && text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

}  // namespace

double RunState::mean_loss() const {
  return loss_samples > 0 ? loss_sum / static_cast<double>(loss_samples) : std::nan("");
}

std::optional<double> TrainContext::watched(const std::string& name) const {
  if (name == "loss") return epoch_loss;
  const std::string metric = name.starts_with("eval_") ? name.substr(5) : name;
  if (!metrics.contains(metric)) return std::nullopt;
  return static_cast<double>(metrics[metric]);
}

void TrainContext::check_watchable(const std::string& who, const std::string& name) const {
  const auto is = [&](const std::string& n) {
    return std::find(watchable_.begin(), watchable_.end(), n) != watchable_.end();
  };
  if (is(name) || is("eval_" + name)) return;
  fail<Error>("{}: expected one of {} to watch, got \"{}\"{}", who, fmt::join(watchable_, ", "), name,
              watchable_.size() > 1 ? "" : "; there is no validation in train(), but in fit()");
}

void TrainContext::request_stop(std::string reason) {
  if (!stop_) reason_ = std::move(reason);
  stop_ = true;
}

CallbackBase::~CallbackBase() = default;
void CallbackBase::on_train_begin(TrainContext&) {}
void CallbackBase::on_train_end(TrainContext&) {}
void CallbackBase::on_epoch_begin(TrainContext&) {}
void CallbackBase::on_epoch_end(TrainContext&) {}
void CallbackBase::on_step_begin(TrainContext&) {}
void CallbackBase::on_step_end(TrainContext&) {}
void CallbackBase::on_values(TrainContext& /*context*/, std::span<const StepRecord> /*steps*/) {}
void CallbackBase::on_eval_begin(TrainContext&) {}
void CallbackBase::on_eval_end(TrainContext&) {}
void CallbackBase::on_eval_batch(TrainContext& /*context*/, const EvalProgress& /*progress*/) {}

Callback::Callback(std::shared_ptr<CallbackBase> callback) : callback_(std::move(callback)) {
  if (!callback_) fail<Error>("Callback: expected a callback, got none");
}

LossMonitor::LossMonitor(std::int64_t every) : LossMonitor(every, std::cout) {}

LossMonitor::LossMonitor(std::int64_t every, std::ostream& out) : every_(every), out_(&out) {
  if (every < 0) fail<Error>("LossMonitor: expected a number of steps, or 0 for silence, got {}", every);
}

void LossMonitor::on_train_begin(TrainContext&) { pending_.clear(); }

void LossMonitor::on_step_end(TrainContext& context) {
  const NoGrad no_grad;
  const bool print = every_ > 0 && context.step % every_ == 0, cheap = context.loss.device().is_cpu();
  // A step that is replayed writes its loss where the one before was.
  pending_.push_back({context.epoch, context.step_in_epoch, cheap ? context.loss : context.loss.detach().clone()});
  if (print || cheap || pending_.size() >= kMostPending) look(print);
}

void LossMonitor::on_epoch_end(TrainContext&) { look(false); }

// Reads all that wait in one go, and prints the last.
void LossMonitor::look(bool print) {
  if (pending_.empty()) return;
  const NoGrad no_grad;
  std::vector<double> values;
  if (pending_.size() == 1) {
    values.push_back(pending_[0].loss.item<double>());
  } else {
    std::vector<Tensor> losses;
    for (const Pending& p : pending_) losses.push_back(p.loss.reshape({}));
    values = stack(losses).to_vector<double>();
  }
  const std::vector<Pending> seen = std::exchange(pending_, {});
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    fail<Error>(
        "LossMonitor: expected a finite loss, got {} in epoch {}, step {}: training stops; a smaller learning rate or "
        "loss scaling may help",
        std::isnan(values[i]) ? "nan" : "inf", seen[i].epoch, seen[i].step);
  }
  if (!print) return;
  const Pending& last = seen.back();
  *out_ << fmt::format("epoch: {} step: {}, loss is {}\n", last.epoch, last.step,
                       loss_text(values.back(), last.loss.dtype()))
        << std::flush;
}

TimeMonitor::TimeMonitor() : TimeMonitor(std::cout) {}
TimeMonitor::TimeMonitor(std::ostream& out) : out_(&out) {}

void TimeMonitor::on_epoch_begin(TrainContext&) {
  evaluation_ = {};
  start_ = Clock::now();
}

void TimeMonitor::on_eval_begin(TrainContext& context) {
  if (context.loss.defined()) synchronize(context.loss.device());  // the steps' work is not the evaluation's
  eval_start_ = Clock::now();
}

void TimeMonitor::on_eval_end(TrainContext&) { evaluation_ += Clock::now() - eval_start_; }

void TimeMonitor::on_epoch_end(TrainContext& context) {
  if (context.loss.defined()) synchronize(context.loss.device());
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start_ - evaluation_).count();
  const auto steps = static_cast<double>(std::max<std::int64_t>(context.step_in_epoch, 1));
  *out_ << fmt::format("epoch time: {:5.3f} ms, per step time: {:5.3f} ms\n", ms, ms / steps) << std::flush;
}

History::History() : data_(std::make_shared<Data>()) {}

void History::on_train_begin(TrainContext&) { *data_ = {}; }

void History::on_epoch_end(TrainContext& context) {
  Data& d = *data_;
  const auto put = [&](const std::string& name, double value) {
    std::vector<double>& values = d.values[name];
    values.resize(static_cast<std::size_t>(d.epochs), std::nan(""));
    values.push_back(value);
  };
  put("loss", context.epoch_loss);
  put("skipped", static_cast<double>(context.skipped));
  if (context.optimizer) put("lr", context.optimizer->lr());
  for (const auto& [name, value] : context.metrics) {
    if (value.is_number()) put("eval_" + name, value);
  }
  ++d.epochs;
  for (auto& [name, values] : d.values) values.resize(static_cast<std::size_t>(d.epochs), std::nan(""));
}

void History::on_train_end(TrainContext& context) {
  data_->steps = context.step;
  data_->stop_reason = context.stop_reason();
}

const std::vector<double>& History::operator[](const std::string& name) const {
  const auto found = data_->values.find(name);
  if (found != data_->values.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& v : data_->values) names.push_back(v.first);
  fail<Error>("History: expected one of {}, got \"{}\"",
              names.empty() ? "(nothing was recorded)" : fmt::format("{}", fmt::join(names, ", ")), name);
}

namespace {
void call(const std::function<void(TrainContext&)>& function, TrainContext& context) {
  if (function) function(context);
}
}  // namespace

void Lambda::on_train_begin(TrainContext& context) { call(functions_.on_train_begin, context); }
void Lambda::on_train_end(TrainContext& context) { call(functions_.on_train_end, context); }
void Lambda::on_epoch_begin(TrainContext& context) { call(functions_.on_epoch_begin, context); }
void Lambda::on_epoch_end(TrainContext& context) { call(functions_.on_epoch_end, context); }
void Lambda::on_step_begin(TrainContext& context) { call(functions_.on_step_begin, context); }
void Lambda::on_step_end(TrainContext& context) { call(functions_.on_step_end, context); }
void Lambda::on_eval_begin(TrainContext& context) { call(functions_.on_eval_begin, context); }
void Lambda::on_eval_end(TrainContext& context) { call(functions_.on_eval_end, context); }

void LearningRateSchedule::on_train_begin(TrainContext& context) {
  std::map<std::string, double> state = schedule_.state_dict();
  state["steps"] = static_cast<double>(options_.by_epoch ? context.state().epoch : context.state().step);
  schedule_.load_state_dict(state);
}

void LearningRateSchedule::on_step_end(TrainContext& /*context*/) {
  if (!options_.by_epoch) schedule_.step();
}

void LearningRateSchedule::on_epoch_end(TrainContext& /*context*/) {
  if (options_.by_epoch) schedule_.step();
}

void WeightAverage::on_step_end(TrainContext& context) { average_.update_unless(context.overflow); }

void WeightAverage::on_eval_begin(TrainContext& /*context*/) { average_.swap(); }

void WeightAverage::go_back(TrainContext& /*context*/) {
  if (average_.is_swapped()) average_.swap();
}

}  // namespace halfstep::training
