// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/checkpoint.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/overloaded_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/io/checkpoint_file_internal.h"
#include "halfstep/io/checkpoint_shards_internal.h"

namespace halfstep::io {
namespace {

using halfstep::detail::Overloaded;
using nlohmann::json;
using Numbers = std::map<std::string, double>;

// What the file says of a part; in messages too.
const char* kind_of(const CheckpointPart& part) {
  return std::visit(
      Overloaded{[](const nn::ModuleBase*) { return "network"; }, [](optim::Optimizer*) { return "optimizer"; },
                 [](amp::GradScaler*) { return "gradient scaler"; }, [](amp::LossScaler*) { return "loss scaler"; },
                 [](optim::Schedule*) { return "schedule"; },
                 [](optim::ReduceLROnPlateau*) { return "plateau schedule"; }, [](optim::EMA*) { return "average"; },
                 [](Generator*) { return "generator"; }, [](data::DataLoader*) { return "loader"; },
                 [](std::int64_t*) { return "whole number"; }, [](double*) { return "number"; }},
      part.object());
}

const std::set<std::string>& known_kinds() {
  static const std::set<std::string> all = {"network",  "optimizer",        "gradient scaler", "loss scaler",
                                            "schedule", "generator",        "loader",          "whole number",
                                            "number",   "plateau schedule", "average"};
  return all;
}

// Parts under the names of their kinds stand in a state as those of a run do; others each have an object of their own.
constexpr const char* kOthers = "others";
using Names = std::map<std::string, std::set<std::string>>;
const Names& own_names() {
  static const Names names = {{"model", {"network"}},
                              {"optimizer", {"optimizer"}},
                              {"scaler", {"gradient scaler", "loss scaler"}},
                              {"schedule", {"schedule", "plateau schedule"}},
                              {"average", {"average"}},
                              {"generator", {"generator"}},
                              {"loader", {"loader"}}};
  return names;
}
bool is_standard(const std::string& name, const std::string& kind) {
  const auto it = own_names().find(name);
  return it != own_names().end() && it->second.contains(kind);
}
std::string prefix_of(const std::string& name) { return name == "model" ? "" : name + "."; }

// JSON has no infinities, which the best value of a schedule begins with.
json number_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}
Numbers numbers_of(const StateReader& state, const char* key) {
  const json values = state.at(key);
  if (!values.is_object()) damaged_checkpoint(state.file(), "an object of numbers", key, values);
  Numbers result;
  for (const auto& [name, value] : values.items()) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (value.is_number()) {
      result[name] = value.get<double>();
    } else if (value == "inf" || value == "-inf") {
      result[name] = value == "inf" ? kInfinity : -kInfinity;
    } else if (value == "nan") {
      result[name] = std::nan("");
    } else {
      damaged_checkpoint(state.file(), "a number", fmt::format("{}.{}", key, name), value);
    }
  }
  return result;
}

json numbers_json(const Numbers& numbers) {
  json result = json::object();
  for (const auto& [name, value] : numbers) result[name] = number_json(value);
  return result;
}

void check_names(const char* who, std::initializer_list<CheckpointPart> parts) {
  if (parts.size() == 0) fail<Error>("{}: expected at least one part, got none", who);
  std::set<std::string> names;
  for (const CheckpointPart& part : parts) {
    const std::string& name = part.name();
    const bool plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
      return c < 0x80 && (std::isalnum(c) || c == '_' || c == '-');
    });
    if (name.empty() || !plain) {
      fail<Error>("{}: expected a part's name of letters, digits, _ and -, got '{}'", who, name);
    }
    if (!names.insert(name).second) {
      fail<Error>(
          "{}: expected one part called '{}', got two; {{\"another_name\", object}} gives one a name of its own", who,
          name);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- saving

// How ranks divide the states of these objects: that of each optimizer whose state no rank has whole.
std::vector<optim::StateSharding*> shardings_of(std::initializer_list<CheckpointPart> parts) {
  std::vector<optim::StateSharding*> found;
  for (const CheckpointPart& part : parts) {
    const auto* optimizer = std::get_if<optim::Optimizer*>(&part.object());
    if (!optimizer || !(*optimizer)->sharding() || (*optimizer)->sharding()->is_whole()) continue;
    found.push_back((*optimizer)->sharding().get());
    if (found[0]->ranks() != found.back()->ranks() || found[0]->rank() != found.back()->rank()) {
      fail<Error>("save_checkpoint: expected optimizers whose states the same ranks divide, got {} and {} of them",
                  found[0]->ranks(), found.back()->ranks());
    }
  }
  return found;
}

struct Writer {
  json& state;  // the part's own object
  NamedTensors& tensors;
  NamedTensors& shard;  // what only this rank has
  bool& has_weights;    // the shard
  const std::vector<optim::StateSharding*>& shardings;
  const std::string& name;

  void add(const NamedTensors& all) const { add(all, tensors); }
  void add(const NamedTensors& all, NamedTensors& to) const {
    for (const NamedTensor& t : all) to.push_back({prefix_of(name) + t.name, t.tensor});
  }
  void operator()(const nn::ModuleBase* model) const {
    NamedTensors weights = model->state_dict();
    for (const optim::StateSharding* sharding : shardings) {
      const NamedTensors owned = take_owned(weights, *sharding);
      has_weights |= !owned.empty();
      add(owned, shard);
    }
    add(weights);
  }
  void operator()(const optim::Optimizer* optimizer) const {
    const auto& sharding = optimizer->sharding();
    const bool divided = sharding && !sharding->is_whole();
    const optim::OptimizerState s = divided ? sharding->whole_state_of_groups(*optimizer) : optimizer->state_dict();
    state["optimizer_kind"] = optimizer->kind();
    state["optimizer"] = s.numbers;
    add(s.tensors);
    if (divided) add(own_state(*optimizer), shard);
  }
  void operator()(const amp::GradScaler* scaler) const { state["scaler"] = scaler->state_dict(); }
  void operator()(const amp::LossScaler* scaler) const { state["scaler"] = scaler->state().state_dict(); }
  void operator()(const optim::Schedule* schedule) const {
    state["schedule_kind"] = schedule->kind();
    state["schedule"] = schedule->state_dict();
  }
  void operator()(const optim::ReduceLROnPlateau* schedule) const {
    state["schedule"] = numbers_json(schedule->state_dict());
  }
  void operator()(const optim::EMA* average) const {
    const optim::OptimizerState s = average->state_dict();
    state["average"] = s.numbers;
    add(s.tensors);
  }
  void operator()(const Generator* generator) const {
    state["random_seed"] = generator->state().seed;
    state["random_offset"] = generator->state().offset;
  }
  void operator()(const data::DataLoader* loader) const {
    const data::LoaderOptions& o = loader->options();
    state["epoch"] = loader->state().epoch;
    state["batch"] = loader->state().batch;
    state["loader_seed"] = o.seed;
    state["batch_size"] = o.batch_size;
    state["samples"] = loader->dataset().size();
    state["shuffle"] = o.shuffle;
    state["drop_last"] = o.drop_last;
    state["repeat"] = o.repeat;
  }
  void operator()(const std::int64_t* number) const { state["value"] = *number; }
  void operator()(const double* number) const { state["value"] = number_json(*number); }
};

// ------------------------------------------------------------------------------------------------------------ loading

// What was read, in parts.
struct Content {
  std::string file;
  json state;
  std::map<std::string, std::string> kinds;     // of the parts, by name
  std::map<std::string, NamedTensors> tensors;  // without their prefixes
};

// A run's checkpoint says by its keys what it holds.
std::map<std::string, std::string> kinds_of_a_run(const json& state) {
  std::map<std::string, std::string> kinds = {{"model", "network"}, {"generator", "generator"}, {"loader", "loader"}};
  if (value_at(state, "optimizer_kind").is_string() && value_at(state, "optimizer_kind") != "") {
    kinds["optimizer"] = "optimizer";
  }
  const json scaler = value_at(state, "scaler");
  if (scaler.is_object() && !scaler.empty()) kinds["scaler"] = "gradient scaler";
  return kinds;
}

Content read(const std::filesystem::path& path) {
  Content content{.file = shown_path(path), .state = {}, .kinds = {}, .tensors = {}};
  Safetensors read = load_checkpoint_file(path, read_limits(), Portion::all);
  if (!has_checkpoint_state(read)) {
    fail<IoError>(
        "{}: expected a checkpoint, got a safetensors file without training state; load_weights_file() reads "
        "its weights",
        content.file);
  }
  content.state = checkpoint_state(read, content.file);
  const StateReader state(content.state, content.file);
  content.kinds = state.has(kHolds) ? state.texts(kHolds) : kinds_of_a_run(content.state);
  for (const auto& [name, kind] : content.kinds) {
    if (known_kinds().contains(kind)) continue;
    fail<IoError>("{}: its part '{}' is a '{}', which this version of Halfstep doesn't know", content.file, name, kind);
  }
  for (NamedTensor& t : read.tensors) {
    std::string owner = "model";
    for (const auto& [name, kind] : content.kinds) {
      const bool has_tensors = kind == "network" || kind == "optimizer" || kind == "average";
      if (has_tensors && name != "model" && t.name.starts_with(prefix_of(name))) owner = name;
    }
    content.tensors[owner].push_back({t.name.substr(prefix_of(owner).size()), std::move(t.tensor)});
  }
  return content;
}

// Earlier files have parts under the name of another kind among the standard ones.
bool is_among_others(const Content& content, const std::string& name) {
  const json others = value_at(content.state, kOthers);
  return !own_names().contains(name) || !value_at(others, name.c_str()).is_null();
}

// There two may have been written into one place, of which the file has the last.
void check_place(const Content& content, const std::string& name) {
  const auto place = [&](const std::string& part) -> std::string {
    const std::string& kind = content.kinds.at(part);
    if (kind == "network" || is_among_others(content, part)) return {};
    if (kind.ends_with("number")) return "value";
    if (kind.ends_with("scaler")) return "scaler";
    return kind.ends_with("schedule") ? "schedule" : kind;
  };
  const std::string own = place(name);
  for (const auto& [other, kind] : content.kinds) {
    if (own.empty() || other == name || place(other) != own) continue;
    fail<IoError>(
        "{}: its parts '{}' and '{}' were written over one another by an earlier version, since they had "
        "names of other kinds of parts",
        content.file, name, other);
  }
}

// Restores one part, or throws without having changed it; `undo` puts it back as it was.
struct Reader {
  const StateReader& state;  // the part's own object
  const NamedTensors& tensors;
  std::vector<std::function<void()>>& undo;
  std::vector<std::function<void()>>& last;  // what can't fail any more

  template <class T, class State>
  void replace(T* object, const State& now) const {
    undo.push_back([object, before = object->state_dict()] { object->load_state_dict(before); });
    object->load_state_dict(now);
  }

  // Weights are overwritten, and there may be many: what doesn't fit is found before any of them is.
  void operator()(const nn::ModuleBase* model) const {
    std::map<std::string_view, const Tensor*> given;
    for (const NamedTensor& t : tensors) given[t.name] = &t.tensor;
    const NamedTensors own = model->state_dict();
    std::vector<std::string> missing;
    for (const NamedTensor& t : own) {
      const auto it = given.find(t.name);
      if (it == given.end()) {
        missing.push_back(t.name);
        continue;
      }
      if (it->second->sizes() != t.tensor.sizes()) {
        fail<ShapeError>("expected {} {}, got {}", t.name, t.tensor.sizes().str(), it->second->sizes().str());
      }
      if (is_floating(t.tensor.dtype()) != is_floating(it->second->dtype())) {
        fail<DTypeError>("expected {} as {}, got {}", t.name, halfstep::name(t.tensor.dtype()),
                         halfstep::name(it->second->dtype()));
      }
      given.erase(it);
    }
    if (!missing.empty() || !given.empty()) {
      std::vector<std::string_view> more;
      for (const auto& [name, tensor] : given) more.push_back(name);
      fail<Error>("it is of another network: missing [{}], unexpected [{}]", fmt::join(missing, ", "),
                  fmt::join(more, ", "));
    }
    last.push_back([model, this_tensors = &tensors] { model->load_state_dict(*this_tensors); });
  }
  void operator()(optim::Optimizer* optimizer) const {
    const std::string kind = state.text("optimizer_kind");
    if (kind != optimizer->kind()) fail<Error>("expected the state of {}, got that of {}", optimizer->kind(), kind);
    for (const NamedTensor& t : tensors) {
      if (t.name.ends_with("steps") || is_floating(t.tensor.dtype())) continue;
      fail<DTypeError>("expected {} of floating point, got {}", t.name, halfstep::name(t.tensor.dtype()));
    }
    replace(optimizer, optim::OptimizerState{tensors, state.reals("optimizer")});
  }
  void operator()(amp::GradScaler* scaler) const {
    const Numbers now = state.reals("scaler");
    if (now.empty() != !scaler->is_enabled()) {
      fail<Error>("expected the state of {} scaler, got that of {} one",
                  scaler->is_enabled() ? "an enabled" : "a disabled", now.empty() ? "a disabled" : "an enabled");
    }
    replace(scaler, now);
  }
  void operator()(amp::LossScaler* scaler) const { replace(&scaler->state(), state.reals("scaler")); }
  void operator()(optim::Schedule* schedule) const {
    // Earlier files don't say it.
    if (state.has("schedule_kind")) {
      const std::string kind = state.text("schedule_kind");
      if (kind != schedule->kind()) fail<Error>("expected the state of {}, got that of {}", schedule->kind(), kind);
    }
    replace(schedule, state.reals("schedule"));
  }
  void operator()(optim::ReduceLROnPlateau* schedule) const { replace(schedule, numbers_of(state, "schedule")); }
  void operator()(optim::EMA* average) const {
    for (const NamedTensor& t : tensors) {
      if (is_floating(t.tensor.dtype())) continue;
      fail<DTypeError>("expected {} of floating point, got {}", t.name, halfstep::name(t.tensor.dtype()));
    }
    // Its state is the averages themselves, which what is loaded is written into.
    optim::OptimizerState before = average->state_dict();
    for (NamedTensor& t : before.tensors) t.tensor = t.tensor.clone();
    undo.push_back([average, before] { average->load_state_dict(before); });
    average->load_state_dict({tensors, state.reals("average")});
  }
  void operator()(Generator* generator) const {
    const PhiloxState now{state.word("random_seed"), state.word("random_offset")};
    undo.push_back([generator, before = generator->state()] { generator->set_state(before); });
    generator->set_state(now);
  }
  void operator()(data::DataLoader* loader) const {
    const data::LoaderOptions& o = loader->options();
    const std::int64_t samples = state.count("samples", 0), size = state.count("batch_size", 1);
    // Of data that it didn't know a file has 0; earlier ones of runs have no switches.
    const auto check = [](const char* what, auto own, auto saved) {
      if (own != saved) fail<Error>("expected a loader of {} {}, got one of {}", what, saved, own);
    };
    if (samples > 0) {
      check("samples", loader->dataset().size(), samples);
      check("seed", o.seed, state.word("loader_seed"));
      check("batch size", o.batch_size, size);
    }
    const auto check_switch = [&](const char* key, bool own) {
      if (!state.has(key)) return;
      const json saved = state.at(key);
      if (!saved.is_boolean()) damaged_checkpoint(state.file(), "true or false", key, saved);
      check(key, own, saved.get<bool>());
    };
    check_switch("shuffle", o.shuffle);
    check_switch("drop_last", o.drop_last);
    if (state.has("repeat")) check("repeat", o.repeat, state.count("repeat", 1));
    const data::LoaderState now{state.count("epoch", 0), state.count("batch", 0)};
    undo.push_back([loader, before = loader->state()] { loader->seek(before); });
    loader->seek(now);
  }
  void operator()(std::int64_t* number) const {
    const json value = state.at("value");
    if (!value.is_number_integer()) damaged_checkpoint(state.file(), "a whole number", "value", value);
    last.push_back([number, now = value.get<std::int64_t>()] { *number = now; });
  }
  void operator()(double* number) const {
    const json value = state.at("value");
    const double now = value.is_number() ? value.get<double>()
                       : value == "inf"  ? std::numeric_limits<double>::infinity()
                       : value == "-inf" ? -std::numeric_limits<double>::infinity()
                                         : std::nan("");
    if (!value.is_number() && !value.is_string()) damaged_checkpoint(state.file(), "a number", "value", value);
    last.push_back([number, now] { *number = now; });
  }
};

// All ranks: their shards first, and then on rank 0 what lists them.
void save_sharded(const std::filesystem::path& path, json state, const NamedTensors& tensors, const NamedTensors& shard,
                  bool has_weights, optim::StateSharding& sharding) {
  const bool first = sharding.rank() == 0;
  const std::string tag = sharding.gather_texts(first ? next_shard_tag(path, std::nullopt) : "").at(0);
  const std::vector<json> lists = gather_shards(sharding, [&] {
    const auto own = shard_path(path, tag, sharding.rank(), sharding.ranks());
    return std::vector{write_shard(own, shard, has_weights)};
  });
  gather_shards(sharding, [&] {
    if (first) {
      check_shards(path, lists.at(0));
      write_checkpoint_file(path, std::move(state), tensors, lists.at(0));
    }
    return std::vector<json>();
  });
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, std::initializer_list<CheckpointPart> parts) {
  check_names("save_checkpoint", parts);
  json state = json::object(), holds = json::object();
  NamedTensors tensors, shard;
  bool has_weights = false;
  const std::vector<optim::StateSharding*> shardings = shardings_of(parts);
  std::map<std::string, std::string> owners;  // of tensors
  for (const CheckpointPart& part : parts) {
    holds[part.name()] = kind_of(part);
    json own = json::object();
    const std::size_t before[] = {tensors.size(), shard.size()};
    std::visit(Writer{own, tensors, shard, has_weights, shardings, part.name()}, part.object());
    const auto check_new = [&](const NamedTensors& all, std::size_t from) {
      for (std::size_t i = from; i < all.size(); ++i) {
        const auto [it, fresh] = owners.emplace(all[i].name, part.name());
        if (!fresh) {
          fail<Error>("save_checkpoint: expected different names, got '{}' of the part '{}' and of '{}'", all[i].name,
                      it->second, part.name());
        }
      }
    };
    check_new(tensors, before[0]);
    check_new(shard, before[1]);
    if (is_standard(part.name(), kind_of(part))) {
      state.update(own);
    } else {
      state[kOthers][part.name()] = own;
    }
  }
  // A tensor of the network that begins as another part's would be read as that part's.
  for (const auto& [name, owner] : owners) {
    for (const CheckpointPart& part : parts) {
      if (owner == part.name() || part.name() == "model" || !name.starts_with(prefix_of(part.name()))) continue;
      fail<Error>(
          "save_checkpoint: the tensor '{}' of the part '{}' begins with the name of the part '{}'; give that "
          "another one",
          name, owner, part.name());
    }
  }
  state[kHolds] = holds;
  if (!shardings.empty()) return save_sharded(path, std::move(state), tensors, shard, has_weights, *shardings[0]);
  write_checkpoint_file(path, std::move(state), tensors);
}

void load_checkpoint(const std::filesystem::path& path, std::initializer_list<CheckpointPart> parts) {
  check_names("load_checkpoint", parts);
  const Content content = read(path);
  for (const CheckpointPart& part : parts) {
    const auto it = content.kinds.find(part.name());
    if (it == content.kinds.end()) {
      std::vector<std::string> names;
      for (const auto& [name, kind] : content.kinds) names.push_back(name);
      fail<IoError>("{}: expected a part '{}' ({}), got a checkpoint of {}", content.file, part.name(), kind_of(part),
                    fmt::join(names, ", "));
    }
    if (it->second != kind_of(part)) {
      fail<IoError>("{}: expected its part '{}' to be a {}, got a {}", content.file, part.name(), kind_of(part),
                    it->second);
    }
    check_place(content, part.name());
  }
  std::vector<std::function<void()>> undo, last;
  static const NamedTensors kNoTensors;
  const json others = value_at(content.state, kOthers);
  const auto restore = [&](const CheckpointPart& part) {
    const StateReader state(
        is_among_others(content, part.name()) ? value_at(others, part.name().c_str()) : content.state, content.file);
    const auto tensors = content.tensors.find(part.name());
    try {
      std::visit(Reader{state, tensors == content.tensors.end() ? kNoTensors : tensors->second, undo, last},
                 part.object());
    } catch (const Error& e) {
      for (auto it = undo.rbegin(); it != undo.rend(); ++it) (*it)();
      const std::string_view text = e.what();
      if (text.starts_with(content.file)) throw;
      fail<IoError>("{}: its part '{}' doesn't fit: {}", content.file, part.name(), text);
    }
  };
  // Loaders last: one that was left in the middle of an epoch can't be put back into the same state.
  for (const bool loaders : {false, true}) {
    for (const CheckpointPart& part : parts) {
      if (std::holds_alternative<data::DataLoader*>(part.object()) == loaders) restore(part);
    }
  }
  for (const auto& finish : last) finish();
}

}  // namespace halfstep::io
