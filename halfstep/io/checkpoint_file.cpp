// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/checkpoint_file_internal.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/io/checkpoint_shards_internal.h"

namespace halfstep::io {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;

// Names are short, and stand in messages.
constexpr std::size_t kLongestName = 200;
// Values of flags may be lists of a network's layers.
constexpr std::size_t kLongestText = std::size_t{1} << 16;
bool is_text(const json& value, std::size_t longest) {
  return value.is_string() && value.get_ref<const std::string&>().size() <= longest;
}

double finite(const json& value, const std::string& key, const std::string& file) {
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!std::isfinite(number)) damaged_checkpoint(file, "a finite number", key, value);
  return number;
}

unsigned long add_bytes(unsigned long crc, const void* data, std::size_t bytes) {
  return crc32_z(crc, static_cast<const Bytef*>(data), bytes);
}

}  // namespace

// A bit that fell over in the weights makes no network that looks wrong.
CheckpointChecksum::CheckpointChecksum(const std::string& state) : crc_(add_bytes(0, state.data(), state.size())) {}

void CheckpointChecksum::add(const NamedTensor& t) {
  const Tensor dense = t.tensor.detach().to(Device{}).contiguous();
  const std::string head = fmt::format("\n{} {} {}\n", t.name, name(dense.dtype()), dense.sizes().str());
  crc_ = add_bytes(crc_, head.data(), head.size());
  const std::size_t bytes = static_cast<std::size_t>(dense.numel()) * dense.item_size();
  if (bytes != 0) crc_ = add_bytes(crc_, dense.const_raw_data(), bytes);
}

std::string CheckpointChecksum::text() const { return fmt::format("{:08x}", crc_); }

std::string checkpoint_checksum(const std::string& state, const NamedTensors& tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) { return a->name < b->name; });
  CheckpointChecksum sum(state);
  for (const NamedTensor* t : order) sum.add(*t);
  return sum.text();
}

std::string state_text(const json& state) { return state.dump(-1, ' ', false, json::error_handler_t::replace); }

void write_checkpoint_file(const std::filesystem::path& path, json state, const NamedTensors& tensors,
                           const json& shards) {
  state["version"] = kVersion;
  if (!shards.empty()) state[kShards] = shards;
  const std::string text = state_text(state);
  save_safetensors(path, tensors,
                   {{"format", "pt"}, {kStateKey, text}, {kChecksumKey, checkpoint_checksum(text, tensors)}});
  remove_other_shards(path, shards);
}

bool has_checkpoint_state(const Safetensors& content) { return content.metadata.contains(kStateKey); }

json checkpoint_state(const Safetensors& content, const std::string& file) {
  const std::string& text = content.metadata.at(kStateKey);
  const auto sum = content.metadata.find(kChecksumKey);
  if (sum == content.metadata.end()) fail<IoError>("{}: damaged checkpoint: it has no checksum", file);
  if (const std::string real = checkpoint_checksum(text, content.tensors); real != sum->second) {
    fail<IoError>("{}: damaged checkpoint: its checksum is {}, its contents give {}", file, sum->second, real);
  }
  json state;
  try {
    state = json::parse(text);
  } catch (const json::exception& e) {
    fail<IoError>("{}: damaged checkpoint: {}", file, e.what());
  }
  if (!state.is_object()) {
    fail<IoError>("{}: damaged checkpoint: expected an object as its state, got {}", file, shown_value(state));
  }
  const json version = value_at(state, "version");
  if (!version.is_number_integer() || version != kVersion) {
    fail<IoError>("{}: expected a checkpoint of version {}, got {}", file, kVersion, shown_value(version));
  }
  return state;
}

std::string shown_value(const json& value) {
  constexpr std::size_t kMost = 60;
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

void damaged_checkpoint(const std::string& file, const std::string& expected, const std::string& key,
                        const json& value) {
  fail<IoError>("{}: damaged checkpoint: expected {} for '{}', got {}", file, expected, key,
                value.is_null() ? "nothing" : shown_value(value));
}

json value_at(const json& object, const char* key) {
  return object.is_object() && object.contains(key) ? object[key] : json();
}

std::string StateReader::text(const char* key) const {
  const json value = at(key);
  if (!is_text(value, kLongestName)) damaged_checkpoint(file_, "a text", key, value);
  return value.get<std::string>();
}

double StateReader::real(const char* key) const { return finite(at(key), key, file_); }

std::map<std::string, double> StateReader::reals(const char* key) const {
  const json values = at(key);
  if (!values.is_object()) damaged_checkpoint(file_, "an object of numbers", key, values);
  std::map<std::string, double> result;
  for (const auto& [name, value] : values.items()) result[name] = finite(value, fmt::format("{}.{}", key, name), file_);
  return result;
}

std::map<std::string, std::string> StateReader::texts(const char* key) const {
  const json values = at(key);
  if (!values.is_object()) damaged_checkpoint(file_, "an object of texts", key, values);
  std::map<std::string, std::string> result;
  for (const auto& [name, value] : values.items()) {
    if (!is_text(value, kLongestText)) damaged_checkpoint(file_, "a text", fmt::format("{}.{}", key, name), value);
    result[name] = value.get<std::string>();
  }
  return result;
}

std::vector<std::string> StateReader::list(const char* key) const {
  const json values = at(key);
  if (!values.is_array()) damaged_checkpoint(file_, "a list of texts", key, values);
  std::vector<std::string> result;
  for (const json& value : values) {
    if (!value.is_string()) damaged_checkpoint(file_, "a text", fmt::format("{}[{}]", key, result.size()), value);
    result.push_back(value.get<std::string>());
  }
  return result;
}

std::int64_t StateReader::count(const char* key, std::int64_t least, std::int64_t most) const {
  const json value = at(key);
  const bool whole = value.is_number_integer() &&
                     !(value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(most));
  if (!whole || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
    const std::string range =
        most == kMostCounted ? fmt::format("of at least {}", least) : fmt::format("from {} to {}", least, most);
    damaged_checkpoint(file_, "a whole number " + range, key, value);
  }
  return value.get<std::int64_t>();
}

std::uint64_t StateReader::word(const char* key) const {
  const json value = at(key);
  if (!value.is_number_unsigned()) damaged_checkpoint(file_, "64 bits", key, value);
  return value.get<std::uint64_t>();
}

}  // namespace halfstep::io
