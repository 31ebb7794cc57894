// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/checkpoint.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/checkpoint_file_internal.h"
#include "halfstep/io/checkpoint_shards_internal.h"
#include "halfstep/io/weights.h"
#include "halfstep/train/checkpoint_internal.h"
#include "halfstep/train/config.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/run_folder.h"
#include "halfstep/train/weight_only.h"

namespace halfstep::training {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kOptimizer = io::kOptimizerPrefix;
constexpr const char* kCommunication = io::kCommunicationPrefix;
constexpr const char* kTraining = io::kTrainingPrefix;

fs::path file_of(const fs::path& path, std::initializer_list<const char*> names) {
  if (!fs::is_directory(path)) return path;
  for (const char* name : names) {
    if (fs::exists(path / name)) return path / name;
  }
  fail<IoError>("{}: expected {} in this folder", shown_path(path), fmt::join(names, " or "));
}

// JSON has UTF-8 only. Names that data sets give are so already.
std::vector<std::string> printable_all(std::vector<std::string> names) {
  for (std::string& name : names) name = printable(name);
  return names;
}

// Names of the parts of a loop of its own.
std::string parts(const io::StateReader& state) {
  std::vector<std::string> names;
  for (const auto& [name, kind] : state.texts(io::kHolds)) names.push_back(name);
  return fmt::format("a checkpoint of {}", fmt::join(names, ", "));
}

void refuse_own_parts(const io::StateReader& state) {
  if (!state.has(io::kHolds)) return;
  fail<IoError>(
      "{}: expected a checkpoint of a run, got {}, written by io::save_checkpoint; io::load_checkpoint reads it",
      state.file(), parts(state));
}

// Of files of before there is none.
std::string network_in(const io::StateReader& state) {
  constexpr std::size_t kMostBytes = 1 << 20;
  if (!state.has("network")) return {};
  const json value = state.at("network");
  if (!value.is_string() || value.get_ref<const std::string&>().size() > kMostBytes) {
    io::damaged_checkpoint(state.file(), fmt::format("a text of at most {} bytes", kMostBytes), "network", value);
  }
  return value.get<std::string>();
}

// What the names of tensors begin with that are not the network's.
std::vector<std::string> other_prefixes(const io::StateReader& state) {
  if (!state.has(io::kHolds)) return {kOptimizer, kCommunication, kTraining};
  std::vector<std::string> result;
  for (const auto& [name, kind] : state.texts(io::kHolds)) {
    if (name != "model") result.push_back(name + ".");
  }
  return result;
}

}  // namespace

RunState run_state(const Checkpoint& c) {
  return {.epoch = static_cast<int>(c.loader.epoch),
          .batch = c.loader.batch,
          .step = c.step,
          .skipped = c.skipped,
          .loss_sum = c.loss_sum,
          .loss_samples = c.loss_samples,
          .parts = c.parts,
          .samples = c.part_samples};
}

void save_checkpoint(const fs::path& path, const Checkpoint& c) { save_checkpoint(path, c, {}); }

void save_checkpoint(const fs::path& path, const Checkpoint& c, const json& shards) {
  json state = {
      {"model", c.model},
      {"optimizer_kind", c.optimizer_kind},
      {"optimizer", c.optimizer.numbers},
      {"scaler", c.scaler},
      {"epoch", c.loader.epoch},
      {"batch", c.loader.batch},
      {"loader_seed", c.loader_seed},
      {"batch_size", c.batch_size},
      {"samples", c.samples},
      {"accumulate", c.accumulate},
      {"random_seed", c.random.seed},
      {"random_offset", c.random.offset},
      {"step", c.step},
      {"skipped", c.skipped},
      {"loss_sum", c.loss_sum},
      {"loss_samples", c.loss_samples},
      {"best", c.best ? json(*c.best) : json(nullptr)},
      {"best_by", c.best_by},
      {"best_epoch", c.best_epoch},
      {"amp", c.amp},
      {"parts", c.parts},
      {"part_samples", c.part_samples},
      {"classes", printable_all(c.classes)},
      {"recipe", c.recipe},
      {"scale_rules", c.scale_rules},
      {"data", c.data_checksums},
  };
  if (!c.network.empty()) state["network"] = c.network;
  if (!c.finite) state["finite"] = false;
  if (c.shuffle) state["shuffle"] = *c.shuffle;
  if (c.drop_last) state["drop_last"] = *c.drop_last;
  if (c.repeat) state["repeat"] = *c.repeat;
  if (!c.training_weights.empty()) state["ema_updates"] = c.ema_updates;
  NamedTensors tensors = c.weights;
  for (const NamedTensor& t : c.optimizer.tensors) tensors.push_back({kOptimizer + t.name, t.tensor});
  for (const NamedTensor& t : c.communication) tensors.push_back({kCommunication + t.name, t.tensor});
  for (const NamedTensor& t : c.training_weights) tensors.push_back({kTraining + t.name, t.tensor});
  io::write_checkpoint_file(path, std::move(state), tensors, shards);
}

Checkpoint load_checkpoint(const fs::path& given) { return load_checkpoint(given, {}); }

Checkpoint load_checkpoint(const fs::path& given, const io::detail::Wanted& wanted) {
  const fs::path path = file_of(given, {kLastCheckpoint, kBestCheckpoint});
  const std::string file = shown_path(path);
  io::Safetensors content = io::load_checkpoint_file(path, io::read_limits(), io::Portion::all, wanted);
  if (!io::has_checkpoint_state(content)) {
    fail<IoError>("{}: expected a checkpoint, got a safetensors file without training state; use it as --weights",
                  file);
  }
  const io::StateReader state(io::checkpoint_state(content, file), file);
  refuse_own_parts(state);
  Checkpoint c;
  c.model = state.text("model");
  c.network = network_in(state);
  c.optimizer_kind = state.text("optimizer_kind");
  if (c.optimizer_kind.empty()) {
    fail<IoError>("{}: it has weights and no state of a training; begin another one with --pretrained", file);
  }
  c.optimizer.numbers = state.reals("optimizer");
  c.scaler = state.reals("scaler");
  // Counts that fit one another: what one bounds, another can't exceed.
  c.batch_size = state.count("batch_size", 1);
  c.samples = state.count("samples", 0);
  // ModelCheckpoint doesn't know the data set.
  const bool known = c.samples > 0;
  const std::int64_t batches =
      known ? c.samples / c.batch_size + (c.samples % c.batch_size != 0 ? 1 : 0) : io::StateReader::kMostCounted;
  const std::int64_t samples = known ? c.samples : io::StateReader::kMostCounted;
  constexpr std::int64_t kMostEpochs = std::numeric_limits<int>::max();
  c.loader = {state.count("epoch", 0, kMostEpochs), state.count("batch", 0, batches)};
  c.loader_seed = state.word("loader_seed");
  const auto yes_or_no = [&](const char* key) -> std::optional<bool> {
    if (!state.has(key)) return std::nullopt;
    const json value = state.at(key);
    if (!value.is_boolean()) io::damaged_checkpoint(file, "true or false", key, value);
    return value.get<bool>();
  };
  c.finite = yes_or_no("finite").value_or(true);
  c.shuffle = yes_or_no("shuffle");
  c.drop_last = yes_or_no("drop_last");
  if (state.has("repeat")) c.repeat = state.count("repeat", 1);
  c.accumulate = state.count("accumulate", 1, kMostEpochs);
  c.random = {state.word("random_seed"), state.word("random_offset")};
  c.step = state.count("step", 0);
  // A step takes a batch at least.
  const std::int64_t begun = c.loader.epoch + 1;
  if (c.step / begun > batches || (c.step / begun == batches && c.step % begun != 0)) {
    fail<IoError>("{}: damaged checkpoint: expected at most {} steps in each of {} epochs, got {} in all", file,
                  batches, begun, c.step);
  }
  c.skipped = state.count("skipped", 0, c.step);
  c.loss_sum = state.real("loss_sum");
  c.loss_samples = state.count("loss_samples", 0, samples);
  if (state.has("best_top1")) {  // earlier files: one kind of task, and -1 for none
    c.best_by = "top1";
    const double best = state.real("best_top1");
    if (best != -1) c.best = best;
  } else {
    c.best_by = state.text("best_by");
    if (!state.at("best").is_null()) c.best = state.real("best");
  }
  if (state.has("best_epoch")) c.best_epoch = state.count("best_epoch", 0, c.loader.epoch + 1);
  if (state.has("ema_updates")) c.ema_updates = state.count("ema_updates", 0, c.step);
  c.amp = canonical_amp(state.text("amp"));  // files of before have the name that was given
  // Files of before had none of these.
  if (state.has("top1_hits")) {
    for (const char* name : {"top1", "top5"}) {
      c.parts[name] = static_cast<double>(state.count(fmt::format("{}_hits", name).c_str(), 0, samples));
    }
  }
  if (state.has("parts")) c.parts = state.reals("parts");
  if (state.has("part_samples")) {
    c.part_samples = state.count("part_samples", 0, samples);
  } else if (known) {
    c.part_samples = std::min(c.loader.batch * c.batch_size, c.samples);
  }
  if (state.has("classes")) c.classes = state.list("classes");
  if (state.has("recipe")) c.recipe = state.texts("recipe");
  if (state.has("scale_rules")) c.scale_rules = state.reals("scale_rules");
  if (state.has("data")) c.data_checksums = state.texts("data");
  for (NamedTensor& t : content.tensors) {
    if (t.name.starts_with(kOptimizer)) {
      c.optimizer.tensors.push_back({t.name.substr(std::string_view(kOptimizer).size()), t.tensor});
    } else if (t.name.starts_with(kCommunication)) {
      c.communication.push_back({t.name.substr(std::string_view(kCommunication).size()), t.tensor});
    } else if (t.name.starts_with(kTraining)) {
      c.training_weights.push_back({t.name.substr(std::string_view(kTraining).size()), t.tensor});
    } else {
      c.weights.push_back(std::move(t));
    }
  }
  return c;
}

SavedWeights load_saved_weights(const fs::path& given, const std::string& model) {
  const fs::path path = file_of(given, {kBestCheckpoint, kLastCheckpoint});
  const std::string file = shown_path(path);
  io::WeightsFile loaded = io::load_weights_file(path, io::read_limits(), io::Portion::weights);
  io::Safetensors content{std::move(loaded.tensors), std::move(loaded.metadata)};
  SavedWeights weights;
  weights.file = path;
  if (loaded.format == io::WeightsFormat::safetensors && io::has_checkpoint_state(content)) {
    const io::StateReader state(io::checkpoint_state(content, file), file);
    const std::vector<std::string> prefixes = other_prefixes(state);
    if (state.has(io::kHolds)) {  // from a custom loop, which doesn't name the network
      if (!state.texts(io::kHolds).contains("model")) {
        fail<IoError>("{}: expected a network, got {}", file, parts(state));
      }
    } else {
      weights.model = state.text("model");
      weights.network = network_in(state);
      if (!model.empty() && weights.model != model) {
        fail<IoError>("{}: expected a checkpoint of {}, got one of {}", file, model, weights.model);
      }
      weights.step = state.count("step", 0);
    }
    if (state.has("classes")) weights.classes = state.list("classes");
    if (state.has("amp")) weights.amp = state.text("amp");
    if (state.has("recipe")) weights.recipe = state.texts("recipe");
    if (state.has("data")) weights.data_checksums = state.texts("data");
    std::erase_if(content.tensors, [&](const NamedTensor& t) {
      return std::any_of(prefixes.begin(), prefixes.end(), [&](const std::string& p) { return t.name.starts_with(p); });
    });
  }
  weights.tensors = std::move(content.tensors);
  try {
    if (const auto weight_only = saved_weight_only(weights.recipe)) {
      check_weight_only(weights.tensors, *weight_only);
    } else {
      restore_weights(weights.tensors, weights.recipe);
      widen_weights(weights.tensors);
    }
  } catch (const Error& e) {
    fail<IoError>("{}: {}", file, e.what());
  }
  return weights;
}

NamedTensors load_weights(const fs::path& path, const std::string& model) {
  SavedWeights weights = load_saved_weights(path, model);
  widen_weights(weights.tensors);
  return std::move(weights.tensors);
}

}  // namespace halfstep::training
