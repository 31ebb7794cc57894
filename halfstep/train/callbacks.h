// SPDX-License-Identifier: Apache-2.0
// The callbacks of a Model, with the names and rules of MindSpore's.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/io/tensorboard.h"
#include "halfstep/optim/ema.h"
#include "halfstep/optim/schedule.h"
#include "halfstep/train/callback.h"

namespace halfstep::training {

/// Prints the loss every `every` steps of the whole run (0: never):
///
///     epoch: 1 step: 100, loss is 2.2883859
///
/// Epoch and step count from 1, the step within its epoch, so that the tenth epoch of 938 steps begins with step 58.
/// Throws Error when a loss is NaN or infinite, which ends the run: on the CPU after that step; on other devices, where
/// each check would make the queue wait, when the next line is due or the epoch ends, with a message that names the
/// step.
class HS_API LossMonitor : public CallbackBase {
 public:
  explicit LossMonitor(std::int64_t every = 1);
  /// Prints there instead of on standard output.
  LossMonitor(std::int64_t every, std::ostream& out);
  void on_train_begin(TrainContext& context) override;
  void on_step_end(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;

 private:
  struct Pending {
    int epoch;
    std::int64_t step;
    Tensor loss;
  };
  void look(bool print);

  std::int64_t every_;
  std::ostream* out_;
  std::vector<Pending> pending_;
};

/// Prints at the end of each epoch how long it took, without evaluation, and its mean step:
///
///     epoch time: 4199.746 ms, per step time: 4.477 ms
class HS_API TimeMonitor : public CallbackBase {
 public:
  TimeMonitor();
  /// Prints there instead of on standard output.
  explicit TimeMonitor(std::ostream& out);
  void on_epoch_begin(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;
  void on_eval_begin(TrainContext& context) override;
  void on_eval_end(TrainContext& context) override;

 private:
  using Clock = std::chrono::steady_clock;
  std::ostream* out_;
  Clock::time_point start_ = {}, eval_start_ = {};
  Clock::duration evaluation_ = {};
};

/// The results of a run, epoch by epoch: `loss`, `lr` (of group 0 at the epoch's end), `skipped`, and `eval_NAME` for
/// every metric that is a number (NaN for epochs without evaluation). A handle: keep a copy to read it after the run.
/// Model::train returns one.
class HS_API History : public CallbackBase {
 public:
  History();
  void on_train_begin(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;

  /// Values of all epochs. Throws Error naming what there is.
  const std::vector<double>& operator[](const std::string& name) const;
  /// All of them.
  const std::map<std::string, std::vector<double>>& values() const { return data_->values; }
  /// Epochs that were recorded.
  int epochs() const { return data_->epochs; }
  /// Steps of the run.
  std::int64_t steps() const { return data_->steps; }
  /// Why the run ended early; empty when it didn't or no reason was given.
  const std::string& stop_reason() const { return data_->stop_reason; }

 private:
  struct Data {
    std::map<std::string, std::vector<double>> values;
    int epochs = 0;
    std::int64_t steps = 0;
    std::string stop_reason;
  };
  std::shared_ptr<Data> data_;
};

/// Functions of Lambda; any may be empty.
struct LambdaOptions {
  std::function<void(TrainContext&)> on_train_begin = {};
  std::function<void(TrainContext&)> on_train_end = {};
  std::function<void(TrainContext&)> on_epoch_begin = {};
  std::function<void(TrainContext&)> on_epoch_end = {};
  std::function<void(TrainContext&)> on_step_begin = {};
  std::function<void(TrainContext&)> on_step_end = {};
  std::function<void(TrainContext&)> on_eval_begin = {};
  std::function<void(TrainContext&)> on_eval_end = {};
};
/// A callback of functions: `training::Lambda{{.on_step_end = [](training::TrainContext& c) { … }}}`.
class HS_API Lambda : public CallbackBase {
 public:
  explicit Lambda(LambdaOptions functions) : functions_(std::move(functions)) {}
  void on_train_begin(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;
  void on_epoch_begin(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;
  void on_step_begin(TrainContext& context) override;
  void on_step_end(TrainContext& context) override;
  void on_eval_begin(TrainContext& context) override;
  void on_eval_end(TrainContext& context) override;

 private:
  LambdaOptions functions_;
};

/// Options of LearningRateSchedule.
struct LearningRateScheduleOptions {
  bool by_epoch = false;  ///< the schedule's steps are epochs
};

/// Advances a schedule (optim/schedule.h) by each step of the run, as MindSpore's LearningRateScheduler. A run that
/// resumes (FitOptions::from) begins with its rate there. Steps that a loss scale skipped count, so that the rate
/// follows from the place in the run.
class HS_API LearningRateSchedule : public CallbackBase {
 public:
  /// `schedule` is of the model's optimizer and must outlive the run.
  explicit LearningRateSchedule(optim::Schedule& schedule, const LearningRateScheduleOptions& options = {})
      : schedule_(schedule), options_(options) {}
  void on_train_begin(TrainContext& context) override;
  void on_step_end(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;

 private:
  optim::Schedule& schedule_;
  LearningRateScheduleOptions options_;
};

/// Updates a moving average of the weights after each step that wasn't skipped, and lets evaluations see the averages
/// in place of the weights, as PyTorch Lightning's WeightAveraging. After the run EMA::swap() puts them into the
/// network. (ModelCheckpoint saves the weights; io::save_checkpoint takes the average as a part.)
class HS_API WeightAverage : public CallbackBase {
 public:
  /// `average` is of the model's network and must outlive the run.
  explicit WeightAverage(optim::EMA& average) : average_(average) {}
  void on_step_end(TrainContext& context) override;
  void on_eval_begin(TrainContext& context) override;
  void on_eval_end(TrainContext& context) override { go_back(context); }
  // An evaluation that was stopped has no end.
  void on_epoch_end(TrainContext& context) override { go_back(context); }

 private:
  void go_back(TrainContext& context);
  optim::EMA& average_;
};

/// Whether the monitored quantity is better when it is smaller or larger.
enum class Better : std::uint8_t {
  /// Larger for names with `acc`, `precision`, `recall`, `f1`, `top`, `mAP`, `COCO_AP`, `IoU` or `fitness` in them,
  /// smaller for others.
  automatic,
  smaller,
  larger,
};

namespace detail {
/// The best value so far of the monitored quantity, and the epoch that it is of.
class HS_API Best {
 public:
  Best(std::string name, Better better);
  const std::string& name() const { return name_; }
  /// Whether `value` is better than `than` by more than `by`; NaN never is.
  bool improves(double value, double than, double by = 0) const;
  /// Keeps it if it is better than the best so far by more than `by`, or the first that isn't NaN.
  bool offer(double value, std::int64_t epoch, double by = 0);
  /// None before the first.
  const std::optional<double>& value() const { return value_; }
  std::int64_t epoch() const { return epoch_; }
  /// Begins anew, or with the best of the run so far.
  void reset(std::optional<double> value = {}, std::int64_t epoch = 0);

 private:
  std::string name_;
  bool larger_;
  std::optional<double> value_;
  std::int64_t epoch_ = 0;
};
}  // namespace detail

/// Options of EarlyStopping.
struct EarlyStoppingOptions {
  std::string monitor = "eval_loss";    ///< what is watched, see TrainContext::watchable
  double min_delta = 0;                 ///< smaller improvements don't count
  int patience = 0;                     ///< epochs in a row without improvement that end the run; 0 is as 1
  Better better = Better::automatic;    ///< which way is up
  std::optional<double> baseline = {};  ///< epochs that aren't better than this count as not improved
  bool restore_best_weights = false;    ///< restores the weights of the best epoch when it ends the run
};
/// Ends the run when the monitored quantity has stopped improving. Epochs without an evaluation don't count; NaN is no
/// improvement.
class HS_API EarlyStopping : public CallbackBase {
 public:
  explicit EarlyStopping(const EarlyStoppingOptions& options = {});
  void on_train_begin(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;

 private:
  EarlyStoppingOptions options_;
  detail::Best best_;
  int waited_ = 0;
  NamedTensors best_weights_;
};

/// Options of the callback ReduceLROnPlateau.
struct PlateauOptions {
  std::string monitor = "eval_loss";  ///< what is watched, see TrainContext::watchable
  double factor = 0.1;                ///< of each reduction; above 0, under 1
  int patience = 10;                  ///< epochs in a row without improvement before a reduction; 0 is as 1
  Better better = Better::automatic;  ///< which way is up
  double min_delta = 1e-4;            ///< smaller improvements don't count (a difference, not a share)
  int cooldown = 0;                   ///< epochs after a reduction that don't count
  double min_lr = 0;                  ///< no rate falls below this
};
/// Lowers the rates of all groups when the monitored quantity has stopped improving, as MindSpore's and Keras's
/// callbacks do. (optim::ReduceLROnPlateau is PyTorch's: its threshold is relative to the best value, and it waits one
/// epoch longer.)
class HS_API ReduceLROnPlateau : public CallbackBase {
 public:
  explicit ReduceLROnPlateau(const PlateauOptions& options = {});
  void on_train_begin(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;

 private:
  PlateauOptions options_;
  detail::Best best_;
  int waited_ = 0;
  int cooldown_left_ = 0;
};

/// Options of ModelCheckpoint.
struct ModelCheckpointOptions {
  std::filesystem::path directory = ".";  ///< made if it isn't there
  std::string prefix = "CKP";             ///< begin of the files' names
  std::int64_t steps = 0;                 ///< of the run between two files (one more at its end); 0: one an epoch
  int keep = 5;                           ///< number of the run's newest files to keep; 0: all
  std::string monitor = "";               ///< what is watched, see TrainContext::watchable; empty: nothing
  Better better = Better::automatic;      ///< which way is up
};
/// Writes checkpoints `PREFIX-EPOCH_STEP.safetensors` (the step within its epoch): weights, the states of the optimizer
/// and the loss scale and the run's position, with a checksum, written atomically; older files are removed once the new
/// one is complete. With `monitor` the weights of the best epoch are in `PREFIX-best.safetensors` too. Model::restore,
/// load_weights and every reader of safetensors read them. Nothing is saved while the loss isn't finite. Throws
/// IoError.
class HS_API ModelCheckpoint : public CallbackBase {
 public:
  explicit ModelCheckpoint(const ModelCheckpointOptions& options = {});
  void on_train_begin(TrainContext& context) override;
  void on_step_end(TrainContext& context) override;
  void on_epoch_end(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;

 private:
  void save(const TrainContext& context, const std::string& name) const;
  void save_and_clean(TrainContext& context);

  ModelCheckpointOptions options_;
  detail::Best best_;
  std::vector<std::filesystem::path> written_;
  std::int64_t saved_step_ = 0;
};

/// Options of the callback TensorBoard.
struct TensorBoardCallbackOptions {
  std::int64_t steps = 10;  ///< steps of the run between two points of the curves
  int histograms = 1;       ///< epochs between histograms of weights and gradients; 0: none
};
/// Writes curves and histograms for TensorBoard (io::TensorBoardWriter): `train/loss`, `train/lr` and `train/scale` by
/// step; `epoch/loss`, `epoch/skipped` and `eval/NAME` by finished epoch, at the step that ends it; `weights/NAME` and,
/// where the step leaves them, `gradients/NAME`. The file is made with the first of them. Values of steps are handed to
/// the system as they are read, so before a checkpoint behind them is written; of a run that resumes, TensorBoard drops
/// what the folder has from behind that checkpoint.
class HS_API TensorBoard : public CallbackBase {
 public:
  explicit TensorBoard(std::filesystem::path folder, const TensorBoardCallbackOptions& options = {});
  void on_train_begin(TrainContext& context) override;
  void on_values(TrainContext& context, std::span<const StepRecord> steps) override;
  void on_epoch_end(TrainContext& context) override;
  void on_train_end(TrainContext& context) override;

 private:
  io::TensorBoardWriter& writer();

  std::filesystem::path folder_;
  TensorBoardCallbackOptions options_;
  std::int64_t from_ = 0;  // steps of the run so far when it began
  std::shared_ptr<io::TensorBoardWriter> writer_;
};

}  // namespace halfstep::training
