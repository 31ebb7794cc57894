// SPDX-License-Identifier: Apache-2.0
// The container of all checkpoints, those of `halfstep train` and of custom loops: one safetensors file with tensors,
// and the rest as JSON in its metadata, with a checksum of both. What ranks divide lies in further files, its shards
// (checkpoint_shards_internal.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "halfstep/io/safetensors.h"

namespace halfstep::io {

/// Before the names of an optimizer's tensors.
inline constexpr const char* kOptimizerPrefix = "optimizer.";
/// Before the names of what communication between ranks keeps.
inline constexpr const char* kCommunicationPrefix = "communication.";
/// Before the names of weights in training, where an average of them is saved under their own.
inline constexpr const char* kTrainingPrefix = "training.";
/// Names the parts of a custom loop's checkpoint and their kinds; checkpoints of runs have no such entry.
inline constexpr const char* kHolds = "holds";
/// Lists the shards of a checkpoint; one that is whole by itself has no such entry.
inline constexpr const char* kShards = "shards";
/// The key of a state in a file's metadata, and that of its checksum.
inline constexpr const char* kStateKey = "halfstep_checkpoint";
inline constexpr const char* kChecksumKey = "halfstep_crc32";

/// Writes the file atomically; adds the version to the state. `shards`: the list of those, if there are any, which are
/// there already. Then removes shards of the same name that aren't in it: those of the checkpoint that stood there
/// before. Throws IoError.
void write_checkpoint_file(const std::filesystem::path& path, nlohmann::json state, const NamedTensors& tensors,
                           const nlohmann::json& shards = {});
/// Of a state's text, and of every tensor's name, dtype, sizes and data, whatever the order of the tensors.
std::string checkpoint_checksum(const std::string& state, const NamedTensors& tensors);
/// The same, of tensors that come one after the other, in the order of their names.
class CheckpointChecksum {
 public:
  explicit CheckpointChecksum(const std::string& state);
  void add(const NamedTensor& tensor);
  std::string text() const;

 private:
  unsigned long crc_;
};
/// A state as it stands in a file.
std::string state_text(const nlohmann::json& state);
/// Whether a file that was read has a state.
bool has_checkpoint_state(const Safetensors& content);
/// The state, its checksum and its version compared. Throws IoError, naming the file.
nlohmann::json checkpoint_state(const Safetensors& content, const std::string& file);

/// A value of a state for messages: not a page of it.
std::string shown_value(const nlohmann::json& value);
/// Throws IoError: what was expected for a key, and what came.
[[noreturn]] void damaged_checkpoint(const std::string& file, const std::string& expected, const std::string& key,
                                     const nlohmann::json& value);
/// The value of a key; null where there is none.
nlohmann::json value_at(const nlohmann::json& object, const char* key);

/// A state, or an object of it, whose values throw IoError where they are not what is asked for. Numbers are exact:
/// doubles are written with as many digits as they need, 64-bit words as integers.
class StateReader {
 public:
  StateReader(nlohmann::json object, std::string file) : object_(std::move(object)), file_(std::move(file)) {}

  bool has(const char* key) const { return object_.contains(key); }
  nlohmann::json at(const char* key) const { return value_at(object_, key); }
  const std::string& file() const { return file_; }

  /// A short text.
  std::string text(const char* key) const;
  /// A finite number.
  double real(const char* key) const;
  std::map<std::string, double> reals(const char* key) const;
  std::map<std::string, std::string> texts(const char* key) const;
  std::vector<std::string> list(const char* key) const;
  /// More of anything is counted by no run: a step of a nanosecond would take three years to come here.
  static constexpr std::int64_t kMostCounted = 100'000'000'000'000'000;
  std::int64_t count(const char* key, std::int64_t least, std::int64_t most = kMostCounted) const;
  /// Any 64 bits.
  std::uint64_t word(const char* key) const;

 private:
  nlohmann::json object_;
  std::string file_;
};

}  // namespace halfstep::io
