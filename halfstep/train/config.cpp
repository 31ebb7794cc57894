// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/config.h"

#include <cmath>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/train/schedule.h"

namespace halfstep::training {
std::optional<DType> amp_dtype(const std::string& amp) {
  if (amp == "off") return std::nullopt;
  if (amp == "f16" || amp == "fp16" || amp == "float16") return DType::f16;
  if (amp == "bf16" || amp == "bfloat16") return DType::bf16;
  const bool level = amp == "O0" || amp == "O1" || amp == "O2" || amp == "O3" || amp == "auto";
  fail<Error>("--amp: expected off, bf16 or f16, got '{}'{}", amp,
              level ? "; levels are of training (halfstep train)" : "");
}

AmpMode amp_mode(const TrainConfig& config) {
  const std::string& amp = config.amp;
  const bool level = amp == "O0" || amp == "O1" || amp == "O2" || amp == "O3" || amp == "auto";
  if (!level) {
    AmpMode mode;
    try {
      mode.region = amp_dtype(amp);
    } catch (const Error&) {
      fail<Error>("--amp: expected off, bf16, f16, O0, O1, O2, O3 or auto, got '{}'", amp);
    }
    if (!config.amp_dtype.empty()) {
      fail<Error>("--amp-dtype: belongs to a level, such as --amp O2; --amp {} says its dtype itself", amp);
    }
    return mode;
  }
  AmpMode mode{.level = amp::parse_level(amp)};
  if (!config.amp_dtype.empty()) {
    if (config.amp_dtype == "off") fail<Error>("--amp-dtype: expected f16 or bf16, got 'off'");
    try {
      mode.level_dtype = *amp_dtype(config.amp_dtype);
    } catch (const Error&) {
      fail<Error>("--amp-dtype: expected f16 or bf16, got '{}'", config.amp_dtype);
    }
  }
  return mode;
}

std::string amp_text(const TrainConfig& config) {
  const AmpMode mode = amp_mode(config);
  return mode.level == amp::Level::O0 || mode.level_dtype == DType::f16
             ? config.amp
             : fmt::format("{} {}", config.amp, name(mode.level_dtype));
}

std::map<std::string, std::string> recipe(const TrainConfig& c) {
  const auto yes = [](bool on) { return on ? std::string("yes") : std::string("no"); };
  std::map<std::string, std::string> r = c.data_flags;
  r["lr"] = fmt::format("{}", c.lr);
  r["momentum"] = fmt::format("{}", c.momentum);
  r["nesterov"] = yes(c.nesterov);
  r["weight-decay"] = fmt::format("{}", c.weight_decay);
  r["no-norm-decay"] = yes(!c.norm_decay);
  r["label-smoothing"] = fmt::format("{}", c.label_smoothing);
  r["clip-norm"] = fmt::format("{}", c.clip_norm);
  r["mixup"] = fmt::format("{}", c.mixup);
  r["lr-schedule"] = c.lr_schedule;
  r["warmup-epochs"] = fmt::format("{}", c.warmup_epochs);
  const auto kind = parse_rate_rule(c.lr_schedule, c.warmup_epochs).kind;
  if (kind == RateRule::Kind::cosine || kind == RateRule::Kind::one_cycle) r["epochs"] = fmt::format("{}", c.epochs);
  return r;
}

void check(const TrainConfig& c) {
  if (c.epochs < 1) fail<Error>("--epochs: expected at least 1, got {}", c.epochs);
  if (c.batch_size < 1) fail<Error>("--batch-size: expected at least 1, got {}", c.batch_size);
  if (!(c.lr > 0) || !std::isfinite(c.lr)) fail<Error>("--lr: expected a number above 0, got {}", c.lr);
  if (c.optimizer != "sgd" && c.optimizer != "adam" && c.optimizer != "adamw") {
    fail<Error>("--optimizer: expected sgd, adam or adamw, got '{}'", c.optimizer);
  }
  if (!(c.momentum >= 0) || c.momentum >= 1) fail<Error>("--momentum: expected 0 to under 1, got {}", c.momentum);
  if (c.momentum != 0 && c.optimizer != "sgd") fail<Error>("--momentum: only sgd has it, got {}", c.optimizer);
  if (c.nesterov && !(c.momentum > 0)) fail<Error>("--nesterov: belongs to sgd with a --momentum above 0");
  parse_rate_rule(c.lr_schedule, c.warmup_epochs);
  if (!(c.label_smoothing >= 0) || c.label_smoothing >= 1) {
    fail<Error>("--label-smoothing: expected 0 to under 1, got {}", c.label_smoothing);
  }
  if (!(c.mixup >= 0) || !std::isfinite(c.mixup)) {
    fail<Error>("--mixup: expected a number of at least 0, got {}", c.mixup);
  }
  if (c.mixup > 0 && c.num_classes < 0) fail<Error>("num_classes: expected at least 0, got {}", c.num_classes);
  if (c.start_epoch < 0) fail<Error>("--start-epoch: expected at least 0, got {}", c.start_epoch);
  if (c.start_epoch > 0 && !c.resume.empty()) {
    fail<Error>("--start-epoch: --resume is given, and its checkpoint says where the run goes on");
  }
  if (c.prefetch < 1) fail<Error>("prefetch: expected at least 1, got {}", c.prefetch);
  if (c.eval_batch_size < 1) fail<Error>("eval_batch_size: expected at least 1, got {}", c.eval_batch_size);
  if (!(c.weight_decay >= 0) || !std::isfinite(c.weight_decay)) {
    fail<Error>("--weight-decay: expected a number of at least 0, got {}", c.weight_decay);
  }
  if (c.accumulate < 1) fail<Error>("--accumulate: expected at least 1, got {}", c.accumulate);
  if (!(c.clip_norm >= 0) || !std::isfinite(c.clip_norm)) {
    fail<Error>("--clip-norm: expected a number of at least 0, got {}", c.clip_norm);
  }
  if (c.save_every < 0) fail<Error>("--save-every: expected at least 0, got {}", c.save_every);
  if (c.workers < 0 || c.workers > 256) fail<Error>("--workers: expected 0 to 256, got {}", c.workers);
  if (c.limit < 0) fail<Error>("--limit: expected at least 0, got {}", c.limit);
  loss_scale_policy(c);
  check(c.debug);
  const AmpMode mode = amp_mode(c);
  if (c.debug.compare == "twin" && mode.level != amp::Level::O0) {
    fail<Error>(
        "--debug-compare twin: runs the step without and with autocast, and --amp {} is a precision of the network "
        "itself; use --amp f16 or bf16",
        c.amp);
  }
  if (c.debug.compare == "twin" && !mode.dtype()) {
    fail<Error>("--debug-compare twin: compares a step in 16 bits with float32, and --amp is off; add --amp f16?");
  }
}

}  // namespace halfstep::training
