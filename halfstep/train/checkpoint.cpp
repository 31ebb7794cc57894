// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/checkpoint.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "halfstep/core/fail.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/io/weights.h"

namespace halfstep::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kKey = "halfstep_checkpoint";
constexpr const char* kChecksum = "halfstep_crc32";
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

std::int64_t get_count(const json& object, const char* key, std::int64_t least, const std::string& file) {
  constexpr auto kMost = std::int64_t{1} << 62;
  const json value = object.contains(key) ? object[key] : json();
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > kMost) ||
      value.get<std::int64_t>() < least) {
    fail<IoError>("{}: damaged checkpoint: expected a whole number of at least {} for '{}', got {}", file, least, key,
                  value.dump());
  }
  return value.get<std::int64_t>();
}

std::uint64_t get_word(const json& object, const char* key, const std::string& file) {
  const json value = object.contains(key) ? object[key] : json();
  if (!value.is_number_unsigned()) {
    fail<IoError>("{}: damaged checkpoint: expected 64 bits for '{}', got {}", file, key, value.dump());
  }
  return value.get<std::uint64_t>();
}

// Of the state and of every tensor's name, dtype, sizes and data, whatever the order of the tensors: a bit that fell
// over in the weights makes no network that looks wrong.
std::string checksum(const std::string& state, const NamedTensors& tensors) {
  const auto add = [](uLong crc, const void* data, std::size_t bytes) {
    return crc32_z(crc, static_cast<const Bytef*>(data), bytes);
  };
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) { return a->name < b->name; });
  uLong crc = add(0, state.data(), state.size());
  for (const NamedTensor* t : order) {
    const Tensor dense = t->tensor.detach().to(Device{}).contiguous();
    const std::string head = fmt::format("\n{} {} {}\n", t->name, name(dense.dtype()), dense.sizes().str());
    crc = add(crc, head.data(), head.size());
    const std::size_t bytes = static_cast<std::size_t>(dense.numel()) * dense.item_size();
    if (bytes != 0) crc = add(crc, dense.raw_data(), bytes);
  }
  return fmt::format("{:08x}", crc);
}

// The state of a checkpoint, its checksum compared.
json checked_state(const io::Safetensors& content, const std::string& file) {
  const std::string& text = content.metadata.at(kKey);
  const auto sum = content.metadata.find(kChecksum);
  if (sum == content.metadata.end()) fail<IoError>("{}: damaged checkpoint: it has no checksum", file);
  if (const std::string real = checksum(text, content.tensors); real != sum->second) {
    fail<IoError>("{}: damaged checkpoint: its checksum is {}, its contents give {}", file, sum->second, real);
  }
  try {
    return json::parse(text);
  } catch (const json::exception& e) {
    fail<IoError>("{}: damaged checkpoint: {}", file, e.what());
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
      {"samples", c.samples},
      {"accumulate", c.accumulate},
      {"random_seed", c.random.seed},
      {"random_offset", c.random.offset},
      {"step", c.step},
      {"skipped", c.skipped},
      {"loss_sum", c.loss_sum},
      {"loss_samples", c.loss_samples},
      {"best_top1", c.best_top1},
      {"amp", c.amp},
      {"top1_hits", c.hits.top1},
      {"top5_hits", c.hits.top5},
      {"classes", c.classes},
      {"recipe", c.recipe},
  };
  NamedTensors tensors = c.weights;
  for (const NamedTensor& t : c.optimizer.tensors) tensors.push_back({kOptimizer + t.name, t.tensor});
  const std::string text = state.dump();
  io::save_safetensors(path, tensors, {{"format", "pt"}, {kKey, text}, {kChecksum, checksum(text, tensors)}});
}

Checkpoint load_checkpoint(const fs::path& given) {
  const fs::path path = file_of(given, {"last.safetensors"});
  const std::string file = path.string();
  io::Safetensors content = io::load_safetensors(path);
  if (!content.metadata.contains(kKey)) {
    fail<IoError>("{}: expected a checkpoint, got a safetensors file without training state; use it as --weights",
                  file);
  }
  const json state = checked_state(content, file);
  if (const int version = get<int>(state, "version", file); version != kVersion) {
    fail<IoError>("{}: expected a checkpoint of version {}, got {}", file, kVersion, version);
  }
  Checkpoint c;
  c.model = get<std::string>(state, "model", file);
  c.optimizer_kind = get<std::string>(state, "optimizer_kind", file);
  c.optimizer.numbers = get<std::map<std::string, double>>(state, "optimizer", file);
  c.scaler = get<std::map<std::string, double>>(state, "scaler", file);
  c.loader = {get_count(state, "epoch", 0, file), get_count(state, "batch", 0, file)};
  c.loader_seed = get_word(state, "loader_seed", file);
  c.batch_size = get_count(state, "batch_size", 1, file);
  c.samples = get_count(state, "samples", 0, file);
  c.accumulate = get_count(state, "accumulate", 1, file);
  c.random = {get_word(state, "random_seed", file), get_word(state, "random_offset", file)};
  c.step = get_count(state, "step", 0, file);
  c.skipped = get_count(state, "skipped", 0, file);
  c.loss_sum = get<double>(state, "loss_sum", file);
  c.loss_samples = get_count(state, "loss_samples", 0, file);
  c.best_top1 = get<double>(state, "best_top1", file);
  c.amp = get<std::string>(state, "amp", file);
  // Files of before had none of these.
  if (state.contains("top1_hits"))
    c.hits = {get_count(state, "top1_hits", 0, file), get_count(state, "top5_hits", 0, file)};
  if (state.contains("classes")) c.classes = get<std::vector<std::string>>(state, "classes", file);
  if (state.contains("recipe")) c.recipe = get<std::map<std::string, std::string>>(state, "recipe", file);
  for (NamedTensor& t : content.tensors) {
    if (t.name.starts_with(kOptimizer)) {
      c.optimizer.tensors.push_back({t.name.substr(std::string_view(kOptimizer).size()), t.tensor});
    } else {
      c.weights.push_back(std::move(t));
    }
  }
  return c;
}

SavedWeights load_saved_weights(const fs::path& given, const std::string& model) {
  const fs::path path = file_of(given, {"best.safetensors", "last.safetensors"});
  const std::string file = path.string();
  io::WeightsFile loaded = io::load_weights_file(path);
  io::Safetensors content{std::move(loaded.tensors), std::move(loaded.metadata)};
  SavedWeights weights;
  if (loaded.format == io::WeightsFormat::safetensors && content.metadata.contains(kKey)) {
    const json state = checked_state(content, file);
    weights.model = get<std::string>(state, "model", file);
    if (!model.empty() && weights.model != model) {
      fail<IoError>("{}: expected a checkpoint of {}, got one of {}", file, model, weights.model);
    }
    if (state.contains("classes")) weights.classes = get<std::vector<std::string>>(state, "classes", file);
    if (state.contains("recipe")) weights.recipe = get<std::map<std::string, std::string>>(state, "recipe", file);
    std::erase_if(content.tensors, [](const NamedTensor& t) { return t.name.starts_with(kOptimizer); });
  }
  weights.tensors = std::move(content.tensors);
  return weights;
}

NamedTensors load_weights(const fs::path& path, const std::string& model) {
  return load_saved_weights(path, model).tensors;
}

}  // namespace halfstep::train
