// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/config.h"

#include <algorithm>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/data/parts_internal.h"
#include "halfstep/train/flags.h"

namespace halfstep::training {
std::optional<DType> amp_dtype(const std::string& amp) {
  if (amp == "off") return std::nullopt;
  if (amp == "f16" || amp == "fp16" || amp == "float16") return DType::f16;
  if (amp == "bf16" || amp == "bfloat16") return DType::bf16;
  const bool level = amp == "O0" || amp == "O1" || amp == "O2" || amp == "O3" || amp == "auto";
  fail<Error>("--amp: expected off, bf16 or f16, got '{}'{}", amp,
              level ? "; train, eval, predict, bench and devices --model take levels" : "");
}

std::string canonical_amp(const std::string& amp) {
  try {
    const std::optional<DType> dtype = amp_dtype(amp);
    return dtype ? name(*dtype) : amp;
  } catch (const Error&) {
    return amp;
  }
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

std::vector<std::int64_t> samples_of_ranks(const TrainConfig& config) {
  const std::int64_t batch = config.batch_size, ranks = config.group.size();
  const std::int64_t parts = std::max(config.reproducible, ranks), own = parts / ranks;
  const auto begin_of = [&](std::int64_t rank) { return data::detail::part_begin(batch, batch, rank * own, parts); };
  std::vector<std::int64_t> samples;
  for (std::int64_t r = 0; r < ranks; ++r) samples.push_back((begin_of(r + 1) - begin_of(r)) * config.accumulate);
  return samples;
}

std::string amp_text(const TrainConfig& config) {
  const AmpMode mode = amp_mode(config);
  return mode.level == amp::Level::O0 || mode.level_dtype == DType::f16
             ? canonical_amp(config.amp)
             : fmt::format("{} {}", config.amp, name(mode.level_dtype));
}

std::map<std::string, std::string> recipe(const TrainConfig& config) {
  TrainConfig c = config;
  std::vector<Flag> rows = flags(c);
  // A network without images has none of their flags; its data's own stand in data_flags.
  std::erase_if(rows, [](const Flag& flag) { return !flag.data.empty(); });
  std::map<std::string, std::string> all = recipe(rows);
  all.insert(config.data_flags.begin(), config.data_flags.end());
  return all;
}

void check(const TrainConfig& config) {
  TrainConfig c = config;
  std::vector<Flag> rows = flags(c);
  std::erase_if(rows, [](const Flag& flag) { return !flag.data.empty(); });
  check(rows);
  if (c.mixup > 0 && c.num_classes < 0) fail<Error>("num_classes: expected at least 0, got {}", c.num_classes);
  if (c.prefetch < 1) fail<Error>("prefetch: expected at least 1, got {}", c.prefetch);
  if (c.eval_batch_size < 1) fail<Error>("eval_batch_size: expected at least 1, got {}", c.eval_batch_size);
}

}  // namespace halfstep::training
