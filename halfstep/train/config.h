// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/amp/level.h"
#include "halfstep/core/device.h"
#include "halfstep/core/dtype.h"
#include "halfstep/dist/process_group.h"
#include "halfstep/train/data.h"
#include "halfstep/train/debugging.h"
#include "halfstep/train/detection_config.h"

namespace halfstep::training {

/// Quantization-aware training (quant/quantization.h).
struct QuantizationConfig {
  bool on = false;                          ///< see is_on()
  bool off = false;                         ///< not even where `on` asks for it
  int weight_bits = 8;                      ///< 2 to 8, and 16
  int activation_bits = 8;                  ///< 2 to 8, and 16
  std::string observer = "moving_average";  ///< of activations: the name of an ObserverKind
  bool symmetric = false;                   ///< activations too have no zero point
  bool reduce_range = false;                ///< activations have a bit less
  bool learned = false;                     ///< scales are trained (LSQ)
  std::string skip = {};  ///< paths of modules that stay in floating point, by commas; `*` stands for any text
  bool first = true;      ///< quantize the first product with weights
  bool last = true;       ///< quantize the last one
  int freeze_ranges = 0;  ///< epochs after which the ranges of activations stay as they are; 0: never
  int freeze_norms = 0;   ///< epochs after which batch norms use and keep their running statistics; 0: never

  /// Whether there is any.
  bool is_on() const { return on && !off; }
};

/// What a network is built from, where its name alone doesn't say it (--cfg); see NetworkKind::description.
struct NetworkDescription {
  std::filesystem::path file = {};  ///< with the description; messages name it
  std::string text = {};            ///< the description itself, where it isn't to be read from `file`
  /// Whether there is none: the network is the published one of its name.
  bool empty() const { return file.empty() && text.empty(); }
};

/// The configuration of a training run. What is a flag of `halfstep train` has its row in train/flag_table.cpp.
struct TrainConfig {
  std::string model = "mlp";
  std::filesystem::path data = {};      ///< folder with the data set; empty: the built-in digits
  NetworkDescription description = {};  ///< of networks that can be described
  int epochs = 1;
  std::int64_t batch_size = 64;
  double lr = 0.01;                      ///< the highest of the run
  std::string lr_schedule = "constant";  ///< see parse_rate_rule (train/schedule.h)
  double warmup_epochs = 0;              ///< of a linear rise before the schedule's rule
  std::int64_t warmup_steps = 0;         ///< a warm-up is at least so long
  double warmup_momentum = 0;            ///< of the warm-up's first step; 0: the momentum doesn't change
  double warmup_bias_lr = 0;             ///< rate of biases in the warm-up's first step; 0: that of the others
  std::string optimizer = "sgd";         ///< sgd, adam or adamw
  double momentum = 0;                   ///< of sgd
  bool nesterov = false;                 ///< of sgd
  double weight_decay = 0;
  bool norm_decay = true;       ///< whether biases and the weights of normalisation decay too
  double label_smoothing = 0;   ///< fraction of the target spread over all classes
  double mixup = 0;             ///< alpha of mixup (data/mixup.h); 0: none
  std::string amp = "off";      ///< off, f16, bf16 (autocast), O0, O1, O2, O3 or auto (levels)
  std::string amp_dtype = "";   ///< f16 or bf16, of a level; empty: f16
  std::string loss_scale = "";  ///< see parse_loss_scale; empty: dynamic for f16, none for others
  int accumulate = 1;           ///< batches whose gradients make one step
  /// Above 0: gradients are those of the loss times the samples of a step, and `weight_decay` is for a step of so many
  /// samples: what a recipe for sums of losses means. 0: those of the mean.
  std::int64_t nominal_batch = 0;
  double clip_norm = 0;               ///< 0: no clipping
  double ema = 0;                     ///< decay of an average of the weights, which is evaluated and saved; 0: none
  double ema_warmup = 2000;           ///< updates in which the decay rises, see optim::EMAOptions
  int patience = 0;                   ///< epochs without a better evaluation that end the run; 0: any number
  std::int64_t save_every = 0;        ///< steps between checkpoints; 0: at the end of each epoch
  std::filesystem::path resume = {};  ///< checkpoint or the folder with one
  int start_epoch = 0;                ///< epoch, from 0, to begin with; a checkpoint says that itself
  std::filesystem::path out = {};     ///< folder for checkpoints; empty: none are written
  bool overwrite = false;             ///< an existing run in `out` is replaced by this one
  bool sync_checkpoints = false;      ///< training waits for checkpoints, which then need no copy of the state
  std::filesystem::path log_json = {};
  bool tensorboard = false;  ///< write curves for TensorBoard into `out`/tensorboard
  std::uint64_t seed = 0;
  Device device = {};      ///< where it trains
  int workers = 1;         ///< threads that load batches
  std::int64_t limit = 0;  ///< maximum number of training samples; 0: all
  int prefetch = 4;        ///< batches that each worker prefetches
  std::int64_t eval_batch_size = 1000;
  bool zero_init_residual = false;  ///< see ClassifierOptions
  ImageDataOptions images = {};     ///< of networks of images; `data` and `limit` stand for its folder and limit
  DetectionConfig detection = {};   ///< of detectors; the size of the pictures is `images.image_size`
  bool train_accuracy = false;      ///< count top-1 and top-5 of the training batches
  QuantizationConfig quantization = {};
  /// Modules whose forward pass runs again in the backward pass: paths with commas between, `all` (the blocks that the
  /// network repeats, see set_recomputed) or `none`; empty: none.
  std::string recompute = {};
  /// The most bytes that tensors may have in a step, such as 1GB: modules to recompute are chosen for it (plan_memory);
  /// empty: any.
  std::string memory_budget = {};
  bool capture = true;           ///< replay steps from memory where they can be (capture/capture.h)
  int read_every = 1;            ///< steps between two reads of a device's losses, see FitOptions
  std::int64_t num_classes = 0;  ///< for mixup; 0: as many as there are names
  /// Names of the classes, which go into the checkpoints; may be empty.
  std::vector<std::string> classes = {};
  /// Further settings that determine the run's data, such as the image size, as flag (without dashes) and value: saved
  /// with the checkpoints, and a run resumes only with the same ones.
  std::map<std::string, std::string> data_flags = {};
  /// Of the data's parts, such as `train` and `test`: an identifier of their contents. Saved with the checkpoints, and
  /// a run resumes only with the same ones.
  std::map<std::string, std::string> data_checksums = {};
  /// The ranks that train together: each takes its part of each batch (data::LoaderOptions::ranks) and of the test
  /// part, and `batch_size` and `eval_batch_size` are those of all. Rank 0 alone writes files and makes reports; with
  /// `zero` each writes its shard of a checkpoint into rank 0's `out`, a folder that all ranks share.
  dist::ProcessGroup group = {};
  std::string compress_gradients = "off";  ///< off, f16, bf16 or powersgd[:RANK[,START]]: what ranks send gradients in
  double bucket_mb = 25;                   ///< of gradients that are reduced together; 0: tuned in the first steps
  /// Shards of each batch whose gradients are summed in one fixed tree, so that any number of ranks that divides it
  /// gives the same bits: a power of 2 (StepOptions::shards); 0: none.
  std::int64_t reproducible = 0;
  int zero = 0;                  ///< stage of dist::ZeroRedundancy, 1 to 3: what ranks divide among them; 0: nothing
  bool sync_batch_norm = false;  ///< batch norms take the statistics of all ranks' parts
  DebugConfig debug = {};        ///< what is dumped, compared, monitored and profiled
};

/// A loss scale as the command line writes it: `none`, `1024` or `fixed:1024` (static), or a policy of
/// amp::LossScalePolicy with as many of its values as are wanted, in the order of its options or by their names:
/// `dynamic`, `dynamic:INIT`, `dynamic:INIT,GROWTH,BACKOFF,INTERVAL` and all others of amp::LossScaleRules
/// (`dynamic:1024,hysteresis=4,overflow_limit=100`); `torch`; `mindspore:INIT,FACTOR,WINDOW`, `apex`, `keras`, `jmp`,
/// `deepspeed:65536,hysteresis=4`, `megatron`. Nothing for `none`. Throws Error naming what was expected.
HS_API std::optional<amp::LossScalePolicy> parse_loss_scale(const std::string& text);
/// What parse_loss_scale accepts, for messages.
HS_API std::string loss_scale_forms();
/// The policy of a run's loss scale: the one given by loss_scale, else PyTorch's for f16 and none for other precisions.
HS_API std::optional<amp::LossScalePolicy> loss_scale_policy(const TrainConfig& config);
/// A scaler of that policy, or a disabled one.
HS_API amp::GradScaler make_scaler(const TrainConfig& config);
/// loss_scale, or its default if it is empty, in the syntax of parse_loss_scale.
HS_API std::string loss_scale_text(const TrainConfig& config);
/// The rules that must match for a run to resume, by name; for a dynamic scale all but the first scale.
HS_API std::map<std::string, double> loss_scale_rules(const amp::LossScalePolicy& policy);
/// The dtype of a region `amp`, or none for off. Throws Error naming the choices, which don't include levels.
HS_API std::optional<DType> amp_dtype(const std::string& amp);

/// One name for each: `f16` for `fp16` and `float16`, `bf16` for `bfloat16`; anything else as it is.
HS_API std::string canonical_amp(const std::string& amp);

/// The meaning of `amp` and `amp_dtype`.
struct AmpMode {
  std::optional<DType> region = {};   ///< of autocast around forward pass and loss: f16 and bf16
  amp::Level level = amp::Level::O0;  ///< that the network is put at: O0 to auto
  DType level_dtype = DType::f16;     ///< of the level

  /// The 16-bit dtype that the run computes in; none for float32.
  std::optional<DType> dtype() const { return level == amp::Level::O0 ? region : std::optional(level_dtype); }
};
/// Throws Error naming the choices.
HS_API AmpMode amp_mode(const TrainConfig& config);
/// As text: `off`, `f16`, `O2`, `O2 bf16`.
HS_API std::string amp_text(const TrainConfig& config);
/// The samples of each rank in a step of whole batches, by rank.
HS_API std::vector<std::int64_t> samples_of_ranks(const TrainConfig& config);
/// The settings that must match for a run to resume, flag (without dashes) and value: of the optimizer, the schedule,
/// the loss and the data.
HS_API std::map<std::string, std::string> recipe(const TrainConfig& config);
/// Throws Error, naming the option, when a number is out of its range.
HS_API void check(const TrainConfig& config);

}  // namespace halfstep::training
