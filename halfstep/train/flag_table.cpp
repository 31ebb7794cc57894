// SPDX-License-Identifier: Apache-2.0
// The flags of training: one row each, in the order of the help, the documentation and config.yaml.
#include <bit>
#include <cstdint>
#include <iterator>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/runtime/tuning.h"
#include "halfstep/train/compression_internal.h"
#include "halfstep/train/flags.h"
#include "halfstep/train/memory_plan.h"
#include "halfstep/train/schedule.h"

namespace halfstep::training {
namespace {

constexpr double kMostPixels = 1 << 14;  // of a side before the crop

void add(std::vector<Flag>& all, const char* group, std::vector<Flag> rows) {
  for (Flag& row : rows) {
    row.group = group;
    all.push_back(std::move(row));
  }
}

void append(std::vector<Flag>& all, std::vector<Flag> rows) {
  std::move(rows.begin(), rows.end(), std::back_inserter(all));
}

// What compares a step in 16 bits with float32 needs one.
void check_twin(const TrainConfig& c, const AmpMode& mode) {
  if (c.debug.compare != "twin") return;
  if (mode.level != amp::Level::O0) {
    fail<Error>(
        "--debug-compare twin: runs the step without and with autocast, and --amp {} is a precision of the network "
        "itself; use --amp f16 or bf16",
        c.amp);
  }
  if (!mode.dtype()) {
    fail<Error>("--debug-compare twin: compares a step in 16 bits with float32, and --amp is off; add --amp f16?");
  }
}

// What a prediction of a step's memory knows.
void check_budget(const TrainConfig& c) {
  if (c.memory_budget.empty()) return;
  try {
    parse_bytes(c.memory_budget);
  } catch (const Error& e) {
    fail<Error>("--memory-budget: {}", e.what());
  }
  const auto refuse = [](const char* flag, const char* why) {
    fail<Error>("--memory-budget: {} {}; name the modules by --recompute instead", flag, why);
  };
  if (!c.recompute.empty())
    fail<Error>("--memory-budget: chooses the modules that --recompute names; give one of them");
  if (c.quantization.is_on()) refuse("--qat", "needs memory that isn't predicted");
  if (c.zero > 0) refuse("--zero", "divides memory among ranks, which isn't predicted");
  if (c.reproducible > 0) refuse("--reproducible", "needs memory for sums of gradients that isn't predicted");
}

bool known_length(const TrainConfig& c) {
  const auto kind = parse_rate_rule(c.lr_schedule, c.warmup_epochs).kind;
  return kind == RateRule::Kind::cosine || kind == RateRule::Kind::linear || kind == RateRule::Kind::one_cycle;
}

std::string saved_amp_dtype(const TrainConfig& c) {
  const AmpMode mode = amp_mode(c);
  return mode.level != amp::Level::O0 ? name(mode.level_dtype) : c.amp_dtype;
}

}  // namespace

std::vector<Flag> flags(ImageDataOptions& o) {
  std::vector<Flag> all;
  add(all, "Images",
      {{.names = "--image-size,--imgsz,--img",
        .field = &o.image_size,
        .help = "Side length of the network's input in pixels",
        .range = FlagRange::from_to(1, data::kLargestInputSide),
        .by_network = true,
        .resume = FlagResume::recipe,
        .evaluation = true},
       {.names = "--resize",
        .field = &o.resize,
        .help = "Shorter side in pixels before the centre crop of evaluation; 0: use the whole image",
        .range = FlagRange::from_to(0, kMostPixels),
        .by_network = true,
        .resume = FlagResume::recipe,
        .evaluation = true,
        .check =
            [&o] {
              if (o.resize == 0 || o.resize >= o.image_size) return;
              fail<Error>("--resize: expected at least the --image-size of {}, or 0, got {}", o.image_size, o.resize);
            }},
       {.names = "--crop",
        .field = &o.crop,
        .help = "Training pictures: random-resized, padded (4 pixels) or none",
        .by_network = true,
        .resume = FlagResume::recipe,
        .check = [&o] { parse_crop(o.crop); }},
       {.names = "--min-area",
        .field = &o.min_area,
        .help = "Smallest share of the picture that random-resized takes",
        .range = FlagRange::above_to(0, 1),
        .resume = FlagResume::recipe},
       {.names = "--color-jitter",
        .field = &o.color_jitter,
        .help = "Random change of brightness, contrast and saturation",
        .range = FlagRange::from_to(0, 1),
        .resume = FlagResume::recipe},
       {.names = "--max-damaged",
        .field = &o.max_damaged,
        .help = "Damaged images tolerated before the run ends",
        .range = FlagRange::at_least(0)}});
  for (Flag& flag : all) {
    const bool of_any = flag.name() == "--image-size" || flag.name() == "--max-damaged";
    flag.data = of_any ? "images,boxes" : "images";
  }
  return all;
}

std::vector<Flag> flags(DebugConfig& d) {
  const FlagNeeds dump{"--debug-dump", !d.dump.empty()}, profile{"--profile", !d.profile.empty()};
  std::vector<Flag> all;
  add(all, "Debugging",
      {{.names = "--debug-dump",
        .field = &d.dump,
        .help = "Folder for inputs and results of every op call of --debug-steps",
        .kept = FlagKept::given},
       {.names = "--debug-level",
        .field = &d.level,
        .help = "Detail of the dump: statistics, first (values too) or whole (tensors too)",
        .choices = {"statistics", "first", "whole"},
        .kept = FlagKept::given,
        .needs = dump},
       {.names = "--debug-compare",
        .field = &d.compare,
        .help = "Run every op of --debug-steps again on the CPU in f64 (or f32) and report the worst errors; twin: run "
                "the first of these steps in float32 too and name the first op that deviates",
        .choices = {"f64", "f32", "twin"},
        .standard = "f64",
        .kept = FlagKept::given},
       {.names = "--debug-nonfinite",
        .field = &d.nonfinite,
        .help = "Find ops that make infinities or NaNs out of finite inputs, and log them or raise an error",
        .choices = {"log", "raise"},
        .standard = "log",
        .kept = FlagKept::given},
       {.names = "--debug-steps",
        .field = &d.steps,
        .help = "Steps to dump and compare: N, FIRST-LAST, FIRST- or all",
        .kept = FlagKept::given,
        .needs = FlagNeeds{"--debug-dump or --debug-compare", !d.dump.empty() || !d.compare.empty()},
        .check = [&d] { parse_steps(d.steps, "--debug-steps"); }},
       {.names = "--profile",
        .field = &d.profile,
        .help = "Folder for a profile of --profile-steps: profile.txt, and trace.json for chrome://tracing",
        .kept = FlagKept::given},
       {.names = "--profile-steps",
        .field = &d.profile_steps,
        .help = "Steps to profile: N, FIRST-LAST, FIRST- or all",
        .kept = FlagKept::given,
        .needs = profile,
        .check = [&d] { parse_steps(d.profile_steps, "--profile-steps"); }}});
  return all;
}

std::vector<Flag> flags(TrainConfig& c) {
  std::vector<Flag> all;
  add(all, "Data",
      {{.names = "DIR,--data",
        .field = &c.data,
        .help = "Folder with the data set: MNIST's format for mlp (default: built-in digits), else train and val with "
                "class folders, list files or archives; for detectors a description such as coco.yaml too",
        .kept = FlagKept::given,
        .resume = FlagResume::reported},
       {.names = "--batch-size,-b",
        .field = &c.batch_size,
        .help = "Samples of a batch",
        .range = FlagRange::at_least(1),
        .by_network = true,
        .resume = FlagResume::same},
       {.names = "--limit",
        .field = &c.limit,
        .help = "Maximum number of training samples; 0: all",
        .range = FlagRange::at_least(0),
        .resume = FlagResume::same},
       {.names = "--workers,-j",
        .field = &c.workers,
        .help = "Threads that load data",
        .range = FlagRange::from_to(0, 256)},
       {.names = "--seed",
        .field = &c.seed,
        .help = "Seed of weights, order, augmentation and built-in data",
        .resume = FlagResume::same},
       {.names = "--mixup",
        .field = &c.mixup,
        .help = "Mix pairs of samples; alpha of the beta distribution, such as 0.2; 0: off",
        .range = FlagRange::at_least(0),
        .resume = FlagResume::recipe,
        .task = "classification"}});
  append(all, flags(c.images));
  NetworkDescription& d = c.description;
  add(all, "Detection",
      {{.names = "--cfg",
        .field = &d.file,
        .help = "File that describes the network (YAML), the description itself in braces, or a name as yolov5n.yaml",
        .kept = FlagKept::given,
        .resume = FlagResume::same,
        // The file may change, or be somewhere else than who reads the configuration.
        .text = [&d] { return d.text.empty() ? d.file.string() : d.text; },
        .data = "boxes"}});
  append(all, flags(c.detection));
  add(all, "Optimization",
      {{.names = "--epochs,--epoch",
        .field = &c.epochs,
        .help = "Passes over the training data",
        .range = FlagRange::at_least(1),
        .by_network = true,
        .resume = FlagResume::reported,
        .in_recipe = [&c] { return known_length(c); }},
       {.names = "--lr,--learning-rate",
        .field = &c.lr,
        .help = "Learning rate, the highest of the run",
        .range = FlagRange::above(0),
        .by_network = true,
        .resume = FlagResume::recipe},
       {.names = "--lr-schedule",
        .field = &c.lr_schedule,
        .help = "constant, step[:EPOCHS[,FACTOR]], cosine[:LAST], linear[:LAST] or onecycle[:PART that rises]",
        .by_network = true,
        .resume = FlagResume::recipe,
        .check = [&c] { parse_rate_rule(c.lr_schedule, c.warmup_epochs); }},
       {.names = "--warmup-epochs",
        .field = &c.warmup_epochs,
        .help = "Epochs of linear warm-up",
        .range = FlagRange::at_least(0),
        .by_network = true,
        .resume = FlagResume::recipe},
       {.names = "--warmup-steps",
        .field = &c.warmup_steps,
        .help = "Least number of steps of a warm-up",
        .range = FlagRange::at_least(0),
        .by_network = true,
        .resume = FlagResume::recipe},
       {.names = "--warmup-momentum",
        .field = &c.warmup_momentum,
        .help = "Momentum in the warm-up's first step, from where it rises to --momentum; 0: --momentum",
        .range = FlagRange::from_under(0, 1),
        .by_network = true,
        .resume = FlagResume::recipe,
        .check =
            [&c] {
              if (c.warmup_momentum == 0 || c.momentum > 0) return;
              fail<Error>("--warmup-momentum: belongs to sgd with a --momentum above 0");
            }},
       {.names = "--warmup-bias-lr",
        .field = &c.warmup_bias_lr,
        .help = "Learning rate of biases in the warm-up's first step, from where it moves to --lr; 0: as the others",
        .range = FlagRange::at_least(0),
        .by_network = true,
        .resume = FlagResume::recipe},
       {.names = "--optimizer",
        .field = &c.optimizer,
        .help = "sgd, adam or adamw",
        .choices = {"sgd", "adam", "adamw"},
        .resume = FlagResume::same},
       {.names = "--momentum",
        .field = &c.momentum,
        .help = "Momentum of sgd",
        .range = FlagRange::from_under(0, 1),
        .by_network = true,
        .resume = FlagResume::recipe,
        .check =
            [&c] {
              if (c.momentum == 0 || c.optimizer == "sgd") return;
              fail<Error>("--momentum: only sgd has it, got {}", c.optimizer);
            }},
       {.names = "--nesterov",
        .field = &c.nesterov,
        .help = "Nesterov's momentum",
        .by_network = true,
        .resume = FlagResume::recipe,
        .check =
            [&c] {
              if (!c.nesterov || c.momentum > 0) return;
              fail<Error>("--nesterov: belongs to sgd with a --momentum above 0");
            }},
       {.names = "--weight-decay,--wd",
        .field = &c.weight_decay,
        .help = "Weight decay",
        .range = FlagRange::at_least(0),
        .by_network = true,
        .resume = FlagResume::recipe},
       {.names = "--no-norm-decay",
        .field = TurnsOff{&c.norm_decay},
        .help = "No weight decay of biases and of normalisation's weights",
        .by_network = true,
        .resume = FlagResume::recipe,
        .needs = FlagNeeds{"--weight-decay", c.weight_decay > 0, "above 0"}},
       {.names = "--label-smoothing",
        .field = &c.label_smoothing,
        .help = "Share of each target that is spread over all classes",
        .range = FlagRange::from_under(0, 1),
        .resume = FlagResume::recipe,
        .task = "classification,detection"},
       {.names = "--zero-init-residual",
        .field = &c.zero_init_residual,
        .help = "Initialise the last norm weight of each residual block to 0",
        .data = "images"}});
  add(all, "Precision",
      {{.names = "--amp",
        .field = &c.amp,
        .help = "Mixed precision: off, bf16, f16, or a level O0, O1, O2, O3 or auto",
        .resume = FlagResume::reported,
        .check = [&c] { check_twin(c, amp_mode(c)); },
        .text = [&c] { return canonical_amp(c.amp); }},
       {.names = "--amp-dtype",
        .field = &c.amp_dtype,
        .help = "Dtype of a level: f16 (default) or bf16",
        .kept = FlagKept::given,
        .resume = FlagResume::reported,
        .text = [&c] { return saved_amp_dtype(c); }},
       {.names = "--loss-scale",
        .field = &c.loss_scale,
        .help = loss_scale_forms() + " (default: dynamic for f16, none otherwise)",
        .resume = FlagResume::of_precision,
        .check = [&c] { loss_scale_policy(c); },
        .text = [&c] { return loss_scale_text(c); }}});
  add(all, "Steps",
      {{.names = "--accumulate",
        .field = &c.accumulate,
        .help = "Batches whose gradients make one step",
        .range = FlagRange::at_least(1),
        .by_network = true,
        .resume = FlagResume::at_epoch_end},
       {.names = "--nominal-batch",
        .field = &c.nominal_batch,
        .help = "Gradients of the loss times the samples of a step, and weight decay for steps of so many; 0: of the "
                "mean loss",
        .range = FlagRange::at_least(0),
        .by_network = true,
        .resume = FlagResume::recipe},
       {.names = "--clip-norm",
        .field = &c.clip_norm,
        .help = "Largest norm of all gradients together; 0: no clipping",
        .range = FlagRange::at_least(0),
        .by_network = true,
        .resume = FlagResume::recipe},
       {.names = "--ema",
        .field = &c.ema,
        .help = "Decay of a moving average of the weights, which is evaluated and saved; 0: none",
        .range = FlagRange::from_under(0, 1),
        .by_network = true,
        .resume = FlagResume::recipe,
        .check =
            [&c] {
              if (c.ema > 0 && c.zero == 3)
                fail<Error>("--ema: ranks have parts of the weights under --zero 3; add --ema 0");
            }},
       {.names = "--ema-warmup",
        .field = &c.ema_warmup,
        .help = "Steps in which the decay rises: it is --ema (1 - exp(-steps / N)); 0: at once",
        .range = FlagRange::at_least(0),
        .resume = FlagResume::recipe},
       {.names = "--patience",
        .field = &c.patience,
        .help = "End the run when so many epochs had no better evaluation; 0: never",
        .range = FlagRange::at_least(0)},
       {.names = "--no-capture", .field = TurnsOff{&c.capture}, .help = "Don't capture and replay steps"},
       {.names = "--recompute",
        .field = &c.recompute,
        .help = "Modules whose forward pass runs again in the backward pass instead of being kept, for less memory: "
                "paths with commas between, all (the blocks that the network repeats) or none",
        .value = "MODULES",
        .kept = FlagKept::given},
       {.names = "--memory-budget",
        .field = &c.memory_budget,
        .help = "The most memory of tensors in a step, such as 1GB or 800MB: chooses the modules to recompute, of all "
                "sets that fit the one that takes the least time",
        .value = "SIZE",
        .kept = FlagKept::given,
        .check = [&c] { check_budget(c); }}});
  add(all, "Quantization", flags(c.quantization));
  add(all, "Several processes",
      {{.names = "--compress-gradients",
        .field = &c.compress_gradients,
        .help =
            "What ranks send gradients in: off, f16, bf16, or powersgd[:RANK[,START]], factors of low rank (1) behind "
            "START steps (1000)",
        .resume = FlagResume::reported,
        .check = [&c] { parse_compression(c.compress_gradients); }},
       {.names = "--bucket-mb",
        .field = &c.bucket_mb,
        .help = "Gradients that ranks reduce together, in MiB; 0: the first steps find out how many",
        .range = FlagRange::at_least(0)},
       {.names = "--reproducible",
        .field = &c.reproducible,
        .help = "Shards of each batch, a power of 2, for the same bits on any number of ranks that divides it; 0: off",
        .range = FlagRange::from_to(0, 1024),
        .resume = FlagResume::reported,
        .check =
            [&c] {
              if (c.reproducible == 0) return;
              if (tuning()) {
                fail<Error>(
                    "--reproducible: gives the same bits on any number of ranks, and --tune (or HALFSTEP_TUNE) chooses "
                    "kernels by timing");
              }
              if (!std::has_single_bit(static_cast<std::uint64_t>(c.reproducible))) {
                fail<Error>("--reproducible: expected a power of 2, got {}", c.reproducible);
              }
              if (c.sync_batch_norm) {
                fail<Error>("--reproducible: --sync-batch-norm takes the statistics of whole batches, not of shards");
              }
              if (c.mixup > 0) {
                fail<Error>(
                    "--reproducible: --mixup mixes the samples that a rank has of a batch, which are others on "
                    "another number of ranks");
              }
              if (c.compress_gradients != "off") {
                fail<Error>("--reproducible: adds up gradients in float32, and --compress-gradients is {}",
                            c.compress_gradients);
              }
            }},
       {.names = "--zero",
        .field = &c.zero,
        .help = "What ranks divide instead of each having all: 1, the optimizer's state; 2, gradients too; 3, "
                "parameters too; 0: nothing",
        .range = FlagRange::from_to(0, 3),
        .check =
            [&c] {
              if (c.zero > 0 && c.debug.compare == "twin") {
                fail<Error>("--zero: --debug-compare twin runs a step twice, from a state that is whole on each rank");
              }
              if (c.zero == 3 && c.reproducible > 0) {
                fail<Error>(
                    "--zero 3: ranks bring parameters together, which they can't where --reproducible {} gives some of "
                    "them shards without samples; use --zero 2",
                    c.reproducible);
              }
            }},
       {.names = "--sync-batch-norm",
        .field = &c.sync_batch_norm,
        .help = "Batch norms take the statistics of all ranks' samples",
        .resume = FlagResume::reported}});
  add(all, "Runs",
      {{.names = "--out",
        .field = &c.out,
        .help = "Folder for checkpoints and log (default: runs/MODEL-TIME)",
        .kept = FlagKept::never},
       {.names = "--overwrite",
        .field = &c.overwrite,
        .help = "Replace the run that is in --out; other files there stay",
        .kept = FlagKept::never,
        .needs = FlagNeeds{"--out", !c.overwrite || !c.out.empty()}},
       {.names = "--save-every",
        .field = &c.save_every,
        .help = "Steps between checkpoints; 0: one an epoch",
        .range = FlagRange::at_least(0)},
       {.names = "--sync-checkpoints",
        .field = &c.sync_checkpoints,
        .help = "Write checkpoints while training waits: without a copy of weights and optimizer in memory"},
       {.names = "--resume",
        .field = &c.resume,
        .help = "Checkpoint, or the folder of a run, to resume from; the run's config.yaml says what isn't given here",
        .kept = FlagKept::never,
        .begins = true},
       {.names = "--start-epoch",
        .field = &c.start_epoch,
        .help = "Epoch, from 0, to begin with",
        .range = FlagRange::at_least(0),
        .kept = FlagKept::given,
        .begins = true,
        .check =
            [&c] {
              if (c.start_epoch == 0 || c.resume.empty()) return;
              fail<Error>("--start-epoch: --resume is given, and its checkpoint says where the run resumes");
            }},
       {.names = "--log-json",
        .field = &c.log_json,
        .help = "File for one JSON object a step (default: log.jsonl in --out)",
        .kept = FlagKept::never},
       {.names = "--tensorboard",
        .field = &c.tensorboard,
        .help = "Write curves for TensorBoard into the folder of the run"}});
  append(all, flags(c.debug));
  return all;
}

}  // namespace halfstep::training
