// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a run whose state ranks divide.
#include <unistd.h>

#include <chrono>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/io/checkpoint_file_internal.h"
#include "halfstep/io/checkpoint_shards_internal.h"
#include "halfstep/train/checkpoint_internal.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/run_callbacks_internal.h"
#include "halfstep/train/run_folder.h"

namespace halfstep::training {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Behind names of files in a message; in no name.
constexpr char kEnd = '\0';

std::string content_of(const fs::path& file) {
  constexpr std::uint64_t kMost = 1000;
  try {
    return read_whole_file(file, kMost);
  } catch (const IoError&) {
    return {};
  }
}

// Network file systems may take some seconds to show what another machine has made.
bool sees(const fs::path& folder, const std::string& lock) {
  constexpr auto kPatience = std::chrono::seconds(10), kMoment = std::chrono::seconds(0);
  const auto until = std::chrono::steady_clock::now() + (lock.empty() ? kMoment : kPatience);
  for (;;) {
    std::error_code error;
    if (lock.empty() ? fs::is_directory(folder, error) : content_of(run_lock(folder)) == lock) return true;
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

// Names of parameters, in the network and in the optimizer, that are others' to keep.
struct OfOthers {
  std::set<std::string, std::less<>> weights, states;
};
OfOthers of_others(const nn::ModuleBase& network, const optim::Optimizer& optimizer) {
  OfOthers names;
  const optim::StateSharding* sharding = optimizer.sharding().get();
  if (!sharding) return names;
  for (const NamedTensor& p : optimizer.named_parameters()) {
    if (!sharding->owns(p.tensor)) names.states.insert(p.name);
  }
  if (!sharding->parameters_too()) return names;
  for (const NamedTensor& t : network.state_dict()) {
    if (!sharding->owns(t.tensor)) names.weights.insert(t.name);
  }
  return names;
}

}  // namespace

io::detail::Wanted needed_tensors(const nn::ModuleBase& network, const optim::Optimizer& optimizer) {
  if (!optimizer.sharding()) return {};
  return [others = of_others(network, optimizer)](const std::string& name) {
    if (!name.starts_with(io::kOptimizerPrefix)) return !others.weights.contains(name);
    const std::string_view state = std::string_view(name).substr(std::string_view(io::kOptimizerPrefix).size());
    return !others.states.contains(state.substr(0, state.rfind('.')));
  };
}

void load_needed(const nn::ModuleBase& network, const optim::Optimizer& optimizer, const NamedTensors& weights) {
  const auto others = of_others(network, optimizer).weights;
  if (others.empty()) {
    network.load_state_dict(weights);
    return;
  }
  nn::LoadReport report = network.load_state_dict(weights, false);
  std::erase_if(report.missing, [&](const std::string& name) { return others.contains(name); });
  if (report.missing.empty() && report.unexpected.empty()) return;
  fail<Error>("load_state_dict: the state is of another network: missing [{}], unexpected [{}]",
              fmt::join(report.missing, ", "), fmt::join(report.unexpected, ", "));
}

// The lock names the process that holds it: no other folder has the same one.
void RunSaver::check_folder() const {
  if (!sharded) return;
  dist::ProcessGroup group = config_.group;
  std::string text;
  if (group.rank() == 0) text = fs::absolute(folder()).native() + kEnd + content_of(run_lock(folder()));
  text = group.broadcast_text(text);
  const std::size_t end = text.find(kEnd);
  const fs::path shared = text.substr(0, end);
  dist::ProcessGroup::working("looking for the run's folder");
  std::string problem;
  if (!sees(shared, text.substr(end + 1))) {
    problem = "doesn't see it";
  } else if (::access(shared.c_str(), W_OK | X_OK) != 0) {
    problem = "may not write there";
  }
  const std::vector<std::string> problems = group.all_gather_text(problem);
  for (int rank = 0; rank < group.size(); ++rank) {
    if (const std::string& of = problems[static_cast<std::size_t>(rank)]; !of.empty()) {
      fail<IoError>(
          "{}: with --zero {} each rank writes its shard of a checkpoint there, and rank {} (host {}) {}; use a folder "
          "that all machines share",
          shown_path(shared), config_.zero, rank, printable(group.host(rank)), of);
    }
  }
}

std::vector<fs::path> RunSaver::agree_on(const std::vector<fs::path>& files) {
  files_ = files;
  if (!sharded) return files;
  dist::ProcessGroup group = config_.group;
  std::string text;
  for (const fs::path& file : files) {
    text += fs::absolute(file).native() + kEnd + io::next_shard_tag(file, state_.step) + kEnd;
  }
  text = group.broadcast_text(text);
  std::vector<std::string> names;
  for (std::size_t at = 0, end = 0; (end = text.find(kEnd, at)) != std::string::npos; at = end + 1) {
    names.push_back(text.substr(at, end - at));
  }
  shards_.clear();
  for (std::size_t i = 0; 2 * i + 1 < names.size(); ++i) {
    if (group.rank() != 0) files_.emplace_back(names[2 * i]);
    shards_.push_back(io::shard_path(files_[i], names[2 * i + 1], group.rank(), group.size()));
  }
  return files_;
}

bool RunSaver::save_shards() {
  dist::ProcessGroup group = config_.group;
  optim::Optimizer& optimizer = step_.optimizer();
  optim::StateSharding& sharding = *optimizer.sharding();
  optim::OptimizerState of_groups = sharding.whole_state_of_groups(optimizer);
  NamedTensors weights = step_.network().state_dict();
  NamedTensors shard = io::take_owned(weights, sharding);
  const bool has_weights = !shard.empty();
  for (const NamedTensor& t : io::own_state(optimizer)) shard.push_back({io::kOptimizerPrefix + t.name, t.tensor});
  std::optional<Checkpoint> rest;
  if (group.rank() == 0) rest = checkpoint(std::move(weights), std::move(of_groups));
  shards_pending_ = true;
  const bool beside = writer_.write_shards(shards_, std::move(shard), has_weights, std::move(rest));
  return max_of(group, beside ? 0 : 1) == 0;
}

bool RunSaver::saved() {
  if (shards_pending_) {
    dist::ProcessGroup group = config_.group;
    if (max_of(group, writer_.done() ? 0 : 1) != 0) return false;
    finish_shards();
  }
  return writer_.done();
}

// Each rank's shards are on its disk, or it can't write them; then all know, and rank 0 goes on.
void RunSaver::finish_shards() {
  if (!std::exchange(shards_pending_, false)) return;
  const std::vector<json> lists = io::gather_shards(*step_.optimizer().sharding(), [this] {
    writer_.wait();
    return writer_.shards();
  });
  if (config_.group.rank() == 0) writer_.write_rest(files_, lists);
}

}  // namespace halfstep::training
