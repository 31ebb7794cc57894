// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/config.h"

#include <cmath>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/train/flag_numbers_internal.h"
#include "halfstep/train/schedule.h"

namespace halfstep::train {
namespace {

constexpr const char* kForms =
    "expected a number, none, dynamic[:INIT[,GROWTH,BACKOFF,INTERVAL]], fixed:N or mindspore:INIT,FACTOR,WINDOW";

std::vector<double> numbers(const std::string& list, const std::string& whole) {
  return flag_numbers("--loss-scale", kForms, list, whole);
}

int whole_number(double value, const std::string& text) {
  if (!(value >= 1) || value > 1e9 || value != std::floor(value)) {
    fail<Error>("--loss-scale: expected a whole number of steps of at least 1 in '{}', got {}", text, value);
  }
  return static_cast<int>(value);
}

amp::GradScalerOptions options_of(const std::string& text) {
  amp::GradScalerOptions options;
  const std::size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  const bool has_list = colon != std::string::npos;
  const auto list = [&] { return numbers(text.substr(colon + 1), text); };
  if (text == "none") {
    options.enabled = false;
  } else if (kind == "dynamic") {
    if (has_list) {
      const auto n = list();
      if (n.size() != 1 && n.size() != 4) fail<Error>("--loss-scale: {}, got '{}'", kForms, text);
      options.init_scale = n[0];
      if (n.size() == 4) {
        options.growth_factor = n[1];
        options.backoff_factor = n[2];
        options.growth_interval = whole_number(n[3], text);
      }
    }
  } else if (kind == "mindspore") {
    const auto n = has_list ? list() : std::vector<double>{};
    if (n.size() != 3 || !(n[1] > 1)) fail<Error>("--loss-scale: {}, got '{}'", kForms, text);
    const int window = whole_number(n[2], text);
    return amp::GradScaler{amp::LossScalePolicy::mindspore(n[0], n[1], window)}.options();
  } else {
    const auto n = kind == "fixed" && has_list ? list() : has_list ? std::vector<double>{} : numbers(text, text);
    if (n.size() != 1) fail<Error>("--loss-scale: {}, got '{}'", kForms, text);
    options.init_scale = n[0];
    options.dynamic = false;
  }
  return options;
}

}  // namespace

amp::GradScalerOptions parse_loss_scale(const std::string& text) {
  try {
    return amp::GradScaler{options_of(text)}.options();  // the scaler knows what makes sense
  } catch (const AmpError& e) {
    fail<Error>("--loss-scale '{}': {}", text, e.what());
  }
}

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

amp::GradScalerOptions scaler_options(const TrainConfig& config) {
  if (!config.loss_scale.empty()) return parse_loss_scale(config.loss_scale);
  amp::GradScalerOptions options;
  options.enabled = amp_mode(config).dtype() == DType::f16;
  return options;
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
  scaler_options(c);
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

}  // namespace halfstep::train
