// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/checkpoint.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/io/weights.h"

namespace halfstep::training {
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
  fail<IoError>("{}: expected {} in this folder", shown_path(path), fmt::join(names, " or "));
}

// What a message says of a value: not a page of it.
std::string shown(const json& value) {
  constexpr std::size_t kMost = 60;
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

[[noreturn]] void damaged(const std::string& file, const std::string& expected, const std::string& key,
                          const json& value) {
  fail<IoError>("{}: damaged checkpoint: expected {} for '{}', got {}", file, expected, key,
                value.is_null() ? "nothing" : shown(value));
}

json at(const json& object, const char* key) {
  return object.is_object() && object.contains(key) ? object[key] : json();
}

// Names and values of flags are short, and stand in messages.
bool is_word(const json& value) {
  constexpr std::size_t kMost = 200;
  return value.is_string() && value.get_ref<const std::string&>().size() <= kMost;
}

// Numbers of a checkpoint are exact: doubles are written with as many digits as they need, 64-bit words as integers.
std::string get_text(const json& object, const char* key, const std::string& file) {
  const json value = at(object, key);
  if (!is_word(value)) damaged(file, "a text", key, value);
  return value.get<std::string>();
}

double real(const json& value, const std::string& key, const std::string& file) {
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!std::isfinite(number)) damaged(file, "a finite number", key, value);
  return number;
}

double get_real(const json& object, const char* key, const std::string& file) {
  return real(at(object, key), key, file);
}

std::map<std::string, double> get_reals(const json& object, const char* key, const std::string& file) {
  const json values = at(object, key);
  if (!values.is_object()) damaged(file, "an object of numbers", key, values);
  std::map<std::string, double> result;
  for (const auto& [name, value] : values.items()) result[name] = real(value, fmt::format("{}.{}", key, name), file);
  return result;
}

std::map<std::string, std::string> get_texts(const json& object, const char* key, const std::string& file) {
  const json values = at(object, key);
  if (!values.is_object()) damaged(file, "an object of texts", key, values);
  std::map<std::string, std::string> result;
  for (const auto& [name, value] : values.items()) {
    if (!is_word(value)) damaged(file, "a text", fmt::format("{}.{}", key, name), value);
    result[name] = value.get<std::string>();
  }
  return result;
}

std::vector<std::string> get_list(const json& object, const char* key, const std::string& file) {
  const json values = at(object, key);
  if (!values.is_array()) damaged(file, "a list of texts", key, values);
  std::vector<std::string> result;
  for (const json& value : values) {
    if (!value.is_string()) damaged(file, "a text", fmt::format("{}[{}]", key, result.size()), value);
    result.push_back(value.get<std::string>());
  }
  return result;
}

// More of anything is counted by no run: a step of a nanosecond would take three years to come here.
constexpr std::int64_t kMostCounted = 100'000'000'000'000'000;

std::int64_t get_count(const json& object, const char* key, std::int64_t least, const std::string& file,
                       std::int64_t most = kMostCounted) {
  const json value = at(object, key);
  const bool whole = value.is_number_integer() &&
                     !(value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(most));
  if (!whole || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
    const std::string range =
        most == kMostCounted ? fmt::format("of at least {}", least) : fmt::format("from {} to {}", least, most);
    damaged(file, "a whole number " + range, key, value);
  }
  return value.get<std::int64_t>();
}

std::uint64_t get_word(const json& object, const char* key, const std::string& file) {
  const json value = at(object, key);
  if (!value.is_number_unsigned()) damaged(file, "64 bits", key, value);
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
    if (bytes != 0) crc = add(crc, dense.const_raw_data(), bytes);
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
  json state;
  try {
    state = json::parse(text);
  } catch (const json::exception& e) {
    fail<IoError>("{}: damaged checkpoint: {}", file, e.what());
  }
  if (!state.is_object()) {
    fail<IoError>("{}: damaged checkpoint: expected an object as its state, got {}", file, shown(state));
  }
  return state;
}

void check_version(const json& state, const std::string& file) {
  const json version = at(state, "version");
  if (!version.is_number_integer() || version != kVersion) {
    fail<IoError>("{}: expected a checkpoint of version {}, got {}", file, kVersion, shown(version));
  }
}

// JSON has UTF-8 only. Names that data sets give are so already.
std::vector<std::string> printable_all(std::vector<std::string> names) {
  for (std::string& name : names) name = printable(name);
  return names;
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
      {"best", c.best ? json(*c.best) : json(nullptr)},
      {"best_by", c.best_by},
      {"amp", c.amp},
      {"parts", c.parts},
      {"classes", printable_all(c.classes)},
      {"recipe", c.recipe},
      {"scale_rules", c.scale_rules},
      {"data", c.data_checksums},
  };
  NamedTensors tensors = c.weights;
  for (const NamedTensor& t : c.optimizer.tensors) tensors.push_back({kOptimizer + t.name, t.tensor});
  const std::string text = state.dump(-1, ' ', false, json::error_handler_t::replace);
  io::save_safetensors(path, tensors, {{"format", "pt"}, {kKey, text}, {kChecksum, checksum(text, tensors)}});
}

Checkpoint load_checkpoint(const fs::path& given) {
  const fs::path path = file_of(given, {"last.safetensors", "best.safetensors"});
  const std::string file = shown_path(path);
  io::Safetensors content = io::load_safetensors(path);
  if (!content.metadata.contains(kKey)) {
    fail<IoError>("{}: expected a checkpoint, got a safetensors file without training state; use it as --weights",
                  file);
  }
  const json state = checked_state(content, file);
  check_version(state, file);
  Checkpoint c;
  c.model = get_text(state, "model", file);
  c.optimizer_kind = get_text(state, "optimizer_kind", file);
  c.optimizer.numbers = get_reals(state, "optimizer", file);
  c.scaler = get_reals(state, "scaler", file);
  // Counts that fit one another: what one bounds, another can't exceed.
  c.batch_size = get_count(state, "batch_size", 1, file);
  c.samples = get_count(state, "samples", 0, file);
  // ModelCheckpoint doesn't know the data set.
  const bool known = c.samples > 0;
  const std::int64_t batches =
      known ? c.samples / c.batch_size + (c.samples % c.batch_size != 0 ? 1 : 0) : kMostCounted;
  const std::int64_t samples = known ? c.samples : kMostCounted;
  constexpr std::int64_t kMostEpochs = std::numeric_limits<int>::max();
  c.loader = {get_count(state, "epoch", 0, file, kMostEpochs), get_count(state, "batch", 0, file, batches)};
  c.loader_seed = get_word(state, "loader_seed", file);
  c.accumulate = get_count(state, "accumulate", 1, file, kMostEpochs);
  c.random = {get_word(state, "random_seed", file), get_word(state, "random_offset", file)};
  c.step = get_count(state, "step", 0, file);
  // A step takes a batch at least.
  const std::int64_t begun = c.loader.epoch + 1;
  if (c.step / begun > batches || (c.step / begun == batches && c.step % begun != 0)) {
    fail<IoError>("{}: damaged checkpoint: expected at most {} steps in each of {} epochs, got {} in all", file,
                  batches, begun, c.step);
  }
  c.skipped = get_count(state, "skipped", 0, file, c.step);
  c.loss_sum = get_real(state, "loss_sum", file);
  c.loss_samples = get_count(state, "loss_samples", 0, file, samples);
  if (state.contains("best_top1")) {  // earlier files: one kind of task, and -1 for none
    c.best_by = "top1";
    const double best = get_real(state, "best_top1", file);
    if (best != -1) c.best = best;
  } else {
    c.best_by = get_text(state, "best_by", file);
    if (!at(state, "best").is_null()) c.best = get_real(state, "best", file);
  }
  c.amp = get_text(state, "amp", file);
  // Files of before had none of these.
  if (state.contains("top1_hits")) {
    for (const char* name : {"top1", "top5"}) {
      c.parts[name] = static_cast<double>(get_count(state, fmt::format("{}_hits", name).c_str(), 0, file, samples));
    }
  }
  if (state.contains("parts")) c.parts = get_reals(state, "parts", file);
  if (state.contains("classes")) c.classes = get_list(state, "classes", file);
  if (state.contains("recipe")) c.recipe = get_texts(state, "recipe", file);
  if (state.contains("scale_rules")) c.scale_rules = get_reals(state, "scale_rules", file);
  if (state.contains("data")) c.data_checksums = get_texts(state, "data", file);
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
  const std::string file = shown_path(path);
  io::WeightsFile loaded = io::load_weights_file(path);
  io::Safetensors content{std::move(loaded.tensors), std::move(loaded.metadata)};
  SavedWeights weights;
  weights.file = path;
  if (loaded.format == io::WeightsFormat::safetensors && content.metadata.contains(kKey)) {
    const json state = checked_state(content, file);
    check_version(state, file);
    weights.model = get_text(state, "model", file);
    if (!model.empty() && weights.model != model) {
      fail<IoError>("{}: expected a checkpoint of {}, got one of {}", file, model, weights.model);
    }
    weights.step = get_count(state, "step", 0, file);
    if (state.contains("classes")) weights.classes = get_list(state, "classes", file);
    if (state.contains("amp")) weights.amp = get_text(state, "amp", file);
    if (state.contains("recipe")) weights.recipe = get_texts(state, "recipe", file);
    if (state.contains("data")) weights.data_checksums = get_texts(state, "data", file);
    std::erase_if(content.tensors, [](const NamedTensor& t) { return t.name.starts_with(kOptimizer); });
  }
  weights.tensors = std::move(content.tensors);
  return weights;
}

NamedTensors load_weights(const fs::path& path, const std::string& model) {
  return load_saved_weights(path, model).tensors;
}

}  // namespace halfstep::training
