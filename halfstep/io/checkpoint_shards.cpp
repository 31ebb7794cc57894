// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/checkpoint_shards_internal.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/checkpoint_file_internal.h"
#include "halfstep/io/safetensors_internal.h"

namespace halfstep::io {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// In the metadata of a shard: the checksums of its tensors.
constexpr const char* kShardKey = "halfstep_shard";
constexpr int kShardVersion = 1;
// Of names that the checkpoint with that number has already.
constexpr std::string_view kSecond = "-2";
constexpr std::string_view kTemporary = ".tmp";

// Wanted of a file whose texts alone are.
bool none(const std::string& /*name*/) { return false; }

bool take(std::string_view& text, std::string_view start) {
  if (!text.starts_with(start)) return false;
  text.remove_prefix(start.size());
  return true;
}
bool take_number(std::string_view& text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  text.remove_prefix(digits);
  return digits > 0;
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// `120` of `last.120.rank1-of-2.safetensors`; none for a file that isn't named as a shard of that checkpoint.
std::optional<std::string> tag_of(const fs::path& checkpoint, std::string_view name) {
  const std::string stem = checkpoint.stem().native() + ".", extension = checkpoint.extension().native();
  std::string_view rest = name;
  if (!take(rest, stem)) return std::nullopt;
  const std::string_view begin = rest;
  if (!take_number(rest)) return std::nullopt;
  take(rest, kSecond);
  std::string tag(begin.substr(0, begin.size() - rest.size()));
  const bool whole = take(rest, ".rank") && take_number(rest) && take(rest, "-of-") && take_number(rest);
  if (!whole || rest != extension) return std::nullopt;
  return tag;
}

// The list of shards of the checkpoint that is there, unverified: null where there is none, nothing where it can't be
// read, which is for its readers to report.
std::optional<json> shards_there(const fs::path& checkpoint) {
  std::error_code error;
  if (fs::symlink_status(checkpoint, error).type() == fs::file_type::not_found) return json();
  try {
    const Safetensors head = detail::load_some_safetensors(checkpoint, {}, none);
    const auto it = head.metadata.find(kStateKey);
    if (it == head.metadata.end()) return json();
    const json state = json::parse(it->second, nullptr, false);
    if (!state.is_discarded()) return value_at(state, kShards);
  } catch (const IoError&) {
  }
  return std::nullopt;
}

std::set<std::string> names_in(const json& shards) {
  std::set<std::string> names;
  for (const json& shard : shards) {
    if (const json name = value_at(shard, "file"); name.is_string()) names.insert(name.get<std::string>());
  }
  return names;
}

struct Shard {
  std::string file;  // without a folder
  std::uint64_t bytes = 0;
  std::string checksum;
  bool weights = false;
};

std::vector<Shard> shards_in(const json& state, const std::string& file) {
  const json list = value_at(state, kShards);
  if (!list.is_array()) damaged_checkpoint(file, "a list of shards", kShards, list);
  std::vector<Shard> shards;
  for (const json& entry : list) {
    const StateReader reader(entry, file);
    const json weights = reader.at("weights");
    if (!weights.is_boolean()) damaged_checkpoint(file, "true or false", "weights", weights);
    shards.push_back(
        {reader.text("file"), static_cast<std::uint64_t>(reader.count("bytes", 0)), reader.text("crc32"), weights});
    const fs::path name = shards.back().file;
    if (name.empty() || name != name.filename() || name == "." || name == "..") {
      damaged_checkpoint(file, "the name of a file", "file", reader.at("file"));
    }
  }
  return shards;
}

// Beside the checkpoint, or else, where that is a symbolic link, beside the file that it leads to.
fs::path place_of(const fs::path& checkpoint, const std::string& shard) {
  fs::path beside = checkpoint.parent_path() / shard;
  std::error_code error;
  if (fs::exists(beside, error)) return beside;
  if (fs::path real = fs::canonical(checkpoint, error); !error) {
    real.replace_filename(shard);
    if (fs::exists(real, error)) return real;
  }
  return beside;
}

Safetensors load_shard(const fs::path& path, const Shard& shard, const std::string& checkpoint,
                       const ReadLimits& limits, const detail::Wanted& wanted) {
  const std::string file = shown_path(path);
  std::error_code error;
  if (!fs::exists(path, error)) {
    fail<IoError>("{}: its shard {} is missing; a checkpoint of sharded state consists of all its files", checkpoint,
                  file);
  }
  if (const auto bytes = fs::file_size(path, error); !error && bytes != shard.bytes) {
    fail<IoError>("{}: expected {} bytes, as {} says of its shard, got {}: it is {}", file, shard.bytes, checkpoint,
                  bytes, bytes < shard.bytes ? "cut short or of another checkpoint" : "of another checkpoint");
  }
  Safetensors content = detail::load_some_safetensors(path, limits, wanted);
  const auto state = content.metadata.find(kShardKey);
  if (state == content.metadata.end()) {
    fail<IoError>("{}: expected a shard of {}, got another safetensors file", file, checkpoint);
  }
  const std::string& text = state->second;
  const std::string sum = checkpoint_checksum(text, {});
  if (const auto own = content.metadata.find(kChecksumKey); own == content.metadata.end() || own->second != sum) {
    fail<IoError>("{}: damaged shard: its checksum is {}, its contents give {}", file,
                  own == content.metadata.end() ? "missing" : own->second, sum);
  }
  if (sum != shard.checksum) {
    fail<IoError>("{}: expected the shard of {} with the checksum {}, got {}: it is of another checkpoint", file,
                  checkpoint, shard.checksum, sum);
  }
  const StateReader reader(json::parse(text, nullptr, false), file);
  const std::map<std::string, std::string> sums = reader.texts("crc32");
  for (const NamedTensor& t : content.tensors) {
    const auto it = sums.find(t.name);
    if (const std::string real = checkpoint_checksum("", {t}); it == sums.end() || it->second != real) {
      fail<IoError>("{}: damaged shard: expected the checksum {} for '{}', got {}", file,
                    it == sums.end() ? "of a list" : it->second, printable_start(t.name), real);
    }
  }
  if (!wanted && sums.size() != content.tensors.size()) {
    fail<IoError>("{}: damaged shard: expected {} tensors, got {}", file, sums.size(), content.tensors.size());
  }
  return content;
}

// Its checksum is that of all tensors, which are looked at one after the other; then that of those which are wanted.
Safetensors load_wanted(const fs::path& path, const ReadLimits& limits, const detail::Wanted& wanted) {
  Safetensors content = detail::load_some_safetensors(path, limits, none);
  const auto state = content.metadata.find(kStateKey), sum = content.metadata.find(kChecksumKey);
  if (state == content.metadata.end() || sum == content.metadata.end()) return load_safetensors(path, limits);
  CheckpointChecksum real(state->second);
  detail::each_safetensor(path, limits, [&](NamedTensor t) {
    real.add(t);
    if (wanted(t.name)) content.tensors.push_back(std::move(t));
  });
  // Of another one it is the reader's to say so.
  if (real.text() == sum->second) sum->second = checkpoint_checksum(state->second, content.tensors);
  return content;
}

// What the checkpoint would be as one file.
void merge(Safetensors& content, const fs::path& path, const ReadLimits& limits, Portion which,
           const detail::Wanted& wanted) {
  const std::string file = shown_path(path);
  json state = checkpoint_state(content, file);
  std::set<std::string> names;
  for (const NamedTensor& t : content.tensors) names.insert(t.name);
  for (const Shard& shard : shards_in(state, file)) {
    if (which == Portion::weights && !shard.weights) continue;
    const fs::path place = place_of(path, shard.file);
    Safetensors more = load_shard(place, shard, file, limits, wanted);
    for (NamedTensor& t : more.tensors) {
      if (!names.insert(t.name).second) {
        fail<IoError>("{}: damaged checkpoint: '{}' is there twice, in {} too", file, printable_start(t.name),
                      shown_path(place));
      }
      content.tensors.push_back(std::move(t));
    }
  }
  // As the format's writer orders them.
  std::sort(content.tensors.begin(), content.tensors.end(), [](const NamedTensor& a, const NamedTensor& b) {
    const auto x = a.tensor.item_size(), y = b.tensor.item_size();
    return x != y ? x > y : a.name < b.name;
  });
  state.erase(kShards);
  std::string text = state_text(state);
  content.metadata[kChecksumKey] = checkpoint_checksum(text, content.tensors);
  content.metadata[kStateKey] = std::move(text);
}

}  // namespace

fs::path shard_path(const fs::path& checkpoint, const std::string& tag, int rank, int ranks) {
  fs::path name = checkpoint.stem();
  name += fmt::format(".{}.rank{}-of-{}", tag, rank, ranks);
  name += checkpoint.extension();
  return checkpoint.parent_path() / name;
}

std::string next_shard_tag(const fs::path& checkpoint, std::optional<std::int64_t> number) {
  std::string there;
  for (const std::string& name : names_in(shards_there(checkpoint).value_or(json()))) {
    there = tag_of(checkpoint, name).value_or(there);
  }
  if (!number) {
    std::int64_t last = 0;
    std::from_chars(there.data(), there.data() + there.size(), last);
    number = last + 1;
  }
  const std::string tag = fmt::format("{}", *number);
  return tag == there ? tag + std::string(kSecond) : tag;
}

std::vector<json> gather_shards(optim::StateSharding& sharding, const std::function<std::vector<json>()>& written) {
  constexpr char kError = '!';  // no JSON begins so
  std::exception_ptr own;
  std::string text;
  try {
    text = state_text(json(written()));
  } catch (const std::exception& e) {
    own = std::current_exception();
    text = kError + std::string(e.what());
  }
  const std::vector<std::string> texts = sharding.gather_texts(text);
  if (own) std::rethrow_exception(own);
  std::vector<json> lists;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].starts_with(kError)) fail<IoError>("rank {}: {}", rank, texts[rank].substr(1));
    const json shards = json::parse(texts[rank]);
    lists.resize(shards.size(), json::array());
    for (std::size_t i = 0; i < lists.size(); ++i) lists[i].push_back(shards[i]);
  }
  return lists;
}

void check_shards(const fs::path& checkpoint, const json& shards) {
  // Network file systems may take some seconds to show what another machine has made.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (const std::string& name : names_in(shards)) {
    std::error_code error;
    while (!fs::exists(folder_of(checkpoint) / name, error)) {
      if (std::chrono::steady_clock::now() > until) {
        fail<IoError>("{}: its shard {} was written by another rank, but isn't here; all ranks write into one folder",
                      shown_path(checkpoint), printable(name));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
}

NamedTensors own_state(const optim::Optimizer& optimizer) {
  const optim::StateSharding& sharding = *optimizer.sharding();
  const NamedTensors& all = optimizer.named_parameters();
  NamedTensors state;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::max(sharding.owner(all[i].tensor), 0) != sharding.rank()) continue;
    for (NamedTensor& t : optimizer.state_of(i)) state.push_back(std::move(t));
  }
  return state;
}

NamedTensors take_owned(NamedTensors& weights, const optim::StateSharding& sharding) {
  if (!sharding.parameters_too()) return {};
  NamedTensors owned;
  for (const NamedTensor& t : weights) {
    if (sharding.owner(t.tensor) == sharding.rank()) owned.push_back(t);
  }
  std::erase_if(weights, [&](const NamedTensor& t) { return sharding.owner(t.tensor) >= 0; });
  return owned;
}

json write_shard(const fs::path& path, const NamedTensors& tensors, bool weights) {
  json sums = json::object();
  for (const NamedTensor& t : tensors) sums[t.name] = checkpoint_checksum("", {t});
  const std::string text = state_text({{"version", kShardVersion}, {"crc32", std::move(sums)}});
  const std::string sum = checkpoint_checksum(text, {});
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {kShardKey, text}, {kChecksumKey, sum}};
  save_safetensors(path, tensors, metadata);
  return {{"file", path.filename().native()},
          {"bytes", safetensors_bytes(tensors, metadata)},
          {"crc32", sum},
          {"weights", weights}};
}

Safetensors load_checkpoint_file(const fs::path& path, const ReadLimits& limits, Portion which,
                                 const detail::Wanted& wanted) {
  constexpr int kMostTries = 10;
  for (int tries = 1;; ++tries) {
    Safetensors content = wanted ? load_wanted(path, limits, wanted) : load_safetensors(path, limits);
    if (content.metadata.contains(kShardKey)) {
      fail<IoError>("{}: it is one shard of a checkpoint; read the checkpoint itself, which lists its shards",
                    shown_path(path));
    }
    const auto it = content.metadata.find(kStateKey);
    if (it == content.metadata.end()) return content;
    const std::string text = it->second;
    const json state = json::parse(text, nullptr, false);
    if (!state.is_object() || !state.contains(kShards)) return content;
    try {
      merge(content, path, limits, which, wanted);
      return content;
    } catch (const IoError&) {
      // A run that replaces its checkpoint removes the shards of the one before.
      const Safetensors now = detail::load_some_safetensors(path, limits, none);
      const auto again = now.metadata.find(kStateKey);
      if (tries == kMostTries || again == now.metadata.end() || again->second == text) throw;
    }
  }
}

std::vector<fs::path> shards_beside(const fs::path& checkpoint) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_of(checkpoint), error)) {
    std::string name = entry.path().filename().native();
    // Of a part that was being written, the name that it would have got.
    if (const std::size_t at = name.rfind(kTemporary); at != std::string::npos) name.resize(at);
    if (tag_of(checkpoint, name)) found.push_back(checkpoint.parent_path() / name);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void remove_other_shards(const fs::path& checkpoint, const json& shards) {
  const std::set<std::string> own = names_in(shards);
  for (const fs::path& file : shards_beside(checkpoint)) {
    std::error_code ignored;  // it is in nobody's way
    if (!own.contains(file.filename().native())) fs::remove(file, ignored);
    AtomicFile::remove_leftovers(file);
  }
}

void remove_stale_shards(const fs::path& checkpoint) {
  // Of a checkpoint that can't be read at the moment, the shards may be whole.
  if (const auto shards = shards_there(checkpoint)) remove_other_shards(checkpoint, *shards);
}

}  // namespace halfstep::io
