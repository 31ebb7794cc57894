// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/checkpoint.h"

#include <nlohmann/json.hpp>

#include "halfstep/core/fail.h"
#include "halfstep/io/safetensors.h"

namespace halfstep::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kKey = "halfstep_checkpoint";
constexpr const char* kOptimizer = "optimizer.";
constexpr int kVersion = 1;

fs::path file_of(const fs::path& path, std::initializer_list<const char*> names) {
  if (!fs::is_directory(path)) return path;
  for (const char* name : names) {
    if (fs::exists(path / name)) return path / name;
  }
  fail<IoError>("{}: expected {} in this folder", path.string(), fmt::join(names, " or "));
}

// Numbers of a checkpoint are exact: doubles are written with as many digits as they need, 64-bit words as integers.
template <class T>
T get(const json& object, const char* key, const std::string& file) {
  try {
    return object.at(key).get<T>();
  } catch (const json::exception&) {
    fail<IoError>("{}: damaged checkpoint: '{}' is missing or of another type", file, key);
  }
}

}  // namespace

void save_checkpoint(const fs::path& path, const Checkpoint& c) {
  json state = {
      {"version", kVersion},
      {"model", c.model},
      {"optimizer_kind", c.optimizer_kind},
      {"optimizer", c.optimizer.numbers},
      {"scaler", c.scaler},
      {"epoch", c.loader.epoch},
      {"batch", c.loader.batch},
      {"loader_seed", c.loader_seed},
      {"batch_size", c.batch_size},
      {"random_seed", c.random.seed},
      {"random_offset", c.random.offset},
      {"step", c.step},
      {"skipped", c.skipped},
      {"loss_sum", c.loss_sum},
      {"loss_samples", c.loss_samples},
      {"best_top1", c.best_top1},
      {"amp", c.amp},
  };
  NamedTensors tensors = c.weights;
  for (const NamedTensor& t : c.optimizer.tensors) tensors.push_back({kOptimizer + t.name, t.tensor});
  io::save_safetensors(path, tensors, {{"format", "pt"}, {kKey, state.dump()}});
}

Checkpoint load_checkpoint(const fs::path& given) {
  const fs::path path = file_of(given, {"last.safetensors"});
  const std::string file = path.string();
  io::Safetensors content = io::load_safetensors(path);
  const auto it = content.metadata.find(kKey);
  if (it == content.metadata.end()) {
    fail<IoError>("{}: expected a checkpoint, got a safetensors file without training state; use it as --weights",
                  file);
  }
  json state;
  try {
    state = json::parse(it->second);
  } catch (const json::exception& e) {
    fail<IoError>("{}: damaged checkpoint: {}", file, e.what());
  }
  if (const int version = get<int>(state, "version", file); version != kVersion) {
    fail<IoError>("{}: expected a checkpoint of version {}, got {}", file, kVersion, version);
  }
  Checkpoint c;
  c.model = get<std::string>(state, "model", file);
  c.optimizer_kind = get<std::string>(state, "optimizer_kind", file);
  c.optimizer.numbers = get<std::map<std::string, double>>(state, "optimizer", file);
  c.scaler = get<std::map<std::string, double>>(state, "scaler", file);
  c.loader = {get<std::int64_t>(state, "epoch", file), get<std::int64_t>(state, "batch", file)};
  c.loader_seed = get<std::uint64_t>(state, "loader_seed", file);
  c.batch_size = get<std::int64_t>(state, "batch_size", file);
  c.random = {get<std::uint64_t>(state, "random_seed", file), get<std::uint64_t>(state, "random_offset", file)};
  c.step = get<std::int64_t>(state, "step", file);
  c.skipped = get<std::int64_t>(state, "skipped", file);
  c.loss_sum = get<double>(state, "loss_sum", file);
  c.loss_samples = get<std::int64_t>(state, "loss_samples", file);
  c.best_top1 = get<double>(state, "best_top1", file);
  c.amp = get<std::string>(state, "amp", file);
  for (NamedTensor& t : content.tensors) {
    if (t.name.starts_with(kOptimizer)) {
      c.optimizer.tensors.push_back({t.name.substr(std::string_view(kOptimizer).size()), t.tensor});
    } else {
      c.weights.push_back(std::move(t));
    }
  }
  return c;
}

NamedTensors load_weights(const fs::path& given) {
  io::Safetensors content = io::load_safetensors(file_of(given, {"best.safetensors", "last.safetensors"}));
  if (content.metadata.contains(kKey)) {
    std::erase_if(content.tensors, [](const NamedTensor& t) { return t.name.starts_with(kOptimizer); });
  }
  return std::move(content.tensors);
}

}  // namespace halfstep::train
