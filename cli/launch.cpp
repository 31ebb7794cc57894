// SPDX-License-Identifier: Apache-2.0
// `halfstep launch`: MPI's launcher with the options that a job needs, and again after a failure.
#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>

#include "cli/launch_job.h"
#include "cli/launch_nodes.h"
#include "cli/launch_rank.h"
#include "cli/launch_size.h"
#include "cli/launch_train.h"
#include "cli/options.h"
#include "cli/suggest.h"
#include "halfstep/core/text.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/parallel.h"

extern char** environ;

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMostRanks = 65'536;
constexpr int kMostRestarts = 1'000'000;
constexpr int kMasterPort = 29'500;  // torchrun's

struct LaunchOptions {
  std::string ranks = {}, nodes = "1", mpi = {}, master = {};
  fs::path hosts;
  std::uint64_t node_rank = 0, port = kMasterPort;
  std::uint64_t restarts = 0;
  bool as_rank = false, nothing = false;
};

using Host = LaunchHost;

struct Mpi {
  const char* key;
  const char* name;
  std::vector<const char*> launchers;  // the first found in PATH is taken
};
const Mpi kMpis[] = {{"openmpi", "Open MPI", {"mpirun.openmpi", "orterun"}},
                     {"mpich", "MPICH", {"mpirun.mpich", "mpiexec.hydra"}}};

std::string find_in_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::stringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path file = fs::path(folder.empty() ? "." : folder) / name;
    std::error_code error;
    if (fs::is_regular_file(file, error) && ::access(file.c_str(), X_OK) == 0) return file.string();
  }
  return {};
}

std::string launcher_of(const Mpi& mpi) {
  for (const char* name : mpi.launchers) {
    if (std::string found = find_in_path(name); !found.empty()) return found;
  }
  return {};
}

// Where the library opens its part for an implementation of MPI.
fs::path module_of(const Mpi& mpi) {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&set_num_threads), &info) || !info.dli_fname) return {};
  std::error_code error;
  const fs::path library = fs::canonical(info.dli_fname, error);
  return library.parent_path() / "halfstep" / "mpi" / fmt::format("libhalfstep_mpi_{}.so", mpi.key);
}

// The implementation to use, and why another one is not. `of_halfstep`: the program is this one.
const Mpi& choose_mpi(const std::string& asked, bool of_halfstep) {
  std::vector<std::string> reasons;
  for (const Mpi& mpi : kMpis) {
    if (!asked.empty() && asked != mpi.key) continue;
    std::error_code error;
    if (launcher_of(mpi).empty()) {
      reasons.push_back(fmt::format("{}: there is no {} in PATH", mpi.name, fmt::join(mpi.launchers, " or ")));
    } else if (of_halfstep && !fs::exists(module_of(mpi), error)) {
      reasons.push_back(
          fmt::format("{}: this build of Halfstep has no module for it ({})", mpi.name, shown_path(module_of(mpi))));
    } else {
      return mpi;
    }
  }
  if (reasons.empty()) throw UsageError(fmt::format("--mpi: expected openmpi or mpich, got '{}'", asked));
  throw UsageError(fmt::format("launch: no MPI can be used: {}", fmt::join(reasons, "; ")));
}

std::vector<Host> read_hosts(const fs::path& path) {
  std::ifstream file(path);
  if (!file) throw UsageError(fmt::format("--hosts: {} can't be read", shown_path(path)));
  std::vector<Host> hosts;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    std::istringstream words(line.substr(0, line.find('#')));
    Host host;
    std::string word;
    if (!(words >> host.name)) continue;
    const auto slots = [&](const std::string& text) {
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), host.slots);
      return error == std::errc() && end == text.data() + text.size() && host.slots >= 1 && host.slots <= kMostRanks;
    };
    bool good = true;
    if (const std::size_t colon = host.name.find(':'); colon != std::string::npos) {
      good = slots(host.name.substr(colon + 1));
      host.name.resize(colon);
    }
    while (good && words >> word) good = word.starts_with("slots=") && slots(word.substr(6));
    good = good && !host.name.empty() &&
           host.name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_") ==
               std::string::npos &&
           host.name[0] != '-';
    if (!good) {
      throw UsageError(fmt::format("--hosts: {} line {}: expected HOST, HOST slots=N or HOST:N, got '{}'",
                                   shown_path(path), number, printable_start(line)));
    }
    hosts.push_back(host);
  }
  if (hosts.empty()) throw UsageError(fmt::format("--hosts: {} names no host", shown_path(path)));
  return hosts;
}

std::uint64_t count_accelerators() {
  std::uint64_t count = 0;
  for (const DeviceInfo& d : devices()) count += d.device.is_cpu() ? 0 : 1;
  return count;
}

LaunchRange ranks_per_node(const std::string& text) {
  constexpr const char* kFlag = "--nproc-per-node";
  if (text == "auto" || text == "gpu") {
    if (const std::uint64_t count = count_accelerators(); count > 0) return {.least = count, .most = count};
    if (text == "gpu") throw UsageError(fmt::format("{}: gpu: there is no device here but the CPU", kFlag));
  }
  if (text == "auto" || text == "cpu") {
    const auto count = static_cast<std::uint64_t>(num_threads());
    return {.least = count, .most = count};
  }
  if (text.empty() || text.find_first_not_of("0123456789:") != std::string::npos) {
    throw UsageError(fmt::format("{}: expected a whole number from 1, auto, cpu or gpu, got '{}'", kFlag, text));
  }
  return LaunchRange::parse(kFlag, text, kMostRanks);
}

// Starts commands on other machines.
std::string agent_of(const Mpi& mpi) {
  const char* given =
      std::getenv(std::string_view(mpi.key) == "openmpi" ? "OMPI_MCA_plm_rsh_agent" : "HYDRA_LAUNCHER_EXEC");
  return given && *given != '\0' ? given : "ssh";
}

// The number of machines, each of which runs this command.
int number_of_nodes(const LaunchOptions& o) {
  if (o.nodes.find(':') != std::string::npos) {
    const std::string least = o.nodes.substr(0, o.nodes.find(':')), most = o.nodes.substr(least.size() + 1);
    if (parse_whole("--nnodes", least, 1, kMostRanks) != parse_whole("--nnodes", most, 1, kMostRanks)) {
      throw UsageError(
          fmt::format("--nnodes: expected one number of machines, got {}; MIN:MAX is for --hosts FILE", o.nodes));
    }
    return static_cast<int>(parse_whole("--nnodes", least, 1, kMostRanks));
  }
  return static_cast<int>(parse_whole("--nnodes", o.nodes, 1, kMostRanks));
}

NodeTask node_task(const LaunchOptions& o, const std::string& own, std::uint64_t per_node,
                   std::vector<std::string> words) {
  NodeTask task{.nodes = o.hosts.empty() ? number_of_nodes(o) : 1,
                .rank = static_cast<int>(o.node_rank),
                .address = o.master,
                .port = static_cast<int>(o.port),
                .program = own,
                .mpi = o.mpi,
                .ranks = per_node,
                .words = std::move(words)};
  if (o.hosts.empty() && task.rank >= task.nodes) {
    throw UsageError(fmt::format("--node-rank: expected a number from 0 to {} (--nnodes {}), got {}", task.nodes - 1,
                                 o.nodes, task.rank));
  }
  if (task.nodes > 1 && task.address.empty()) {
    throw UsageError(
        fmt::format("--nnodes: got {}; expected --master-addr too, the name of the machine of node 0, or "
                    "--hosts FILE in place of both",
                    o.nodes));
  }
  return task;
}

// Several of these in a job would each start all ranks.
void refuse_inside_a_job() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* value = std::getenv(name);
    if (value && std::atoi(value) > 1) {
      throw UsageError(
          fmt::format("launch: {}={} says that a launcher has started {} processes already: no launch is "
                      "needed then, give it the program itself",
                      name, value, value));
    }
  }
}

int numa_nodes() {
  int count = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("node") && name.find_first_not_of("0123456789", 4) == std::string::npos) ++count;
  }
  return std::max(1, count);
}

std::vector<std::string> launcher_arguments(const Mpi& mpi, std::uint64_t ranks, std::uint64_t per_node,
                                            const std::vector<Host>& hosts, const Nodes* nodes,
                                            const std::string& master) {
  std::vector<std::string> all{launcher_of(mpi)};
  const auto add = [&](std::initializer_list<std::string> more) { all.insert(all.end(), more); };
  const bool open_mpi = std::string_view(mpi.key) == "openmpi";
  std::vector<std::string> list;
  for (const Host& h : hosts) list.push_back(fmt::format("{}:{}", h.name, h.slots));
  // Ranks share the processors by their numbers of threads, and the kernel places these better than a fixed division.
  // Where memory is in several parts, a rank stays beside its own.
  const bool by_memory = hosts.empty() && numa_nodes() > 1 && per_node % static_cast<std::uint64_t>(numa_nodes()) == 0;
  if (open_mpi) {
    // It counts cores, where two processors may be one, and otherwise refuses to start more ranks than those.
    add({"--oversubscribe"});
    if (::geteuid() == 0) add({"--allow-run-as-root"});
    if (by_memory) add({"--map-by", "numa"});
    add({"--bind-to", by_memory ? "numa" : "none"});
    if (!hosts.empty()) {
      add({"--host", fmt::format("{}", fmt::join(list, ","))});
      // Unlike MPICH's it takes no variables to other machines but those that it is told.
      for (char** v = environ; *v; ++v) {
        const std::string name = std::string(*v).substr(0, std::string(*v).find('='));
        if (name.starts_with("HALFSTEP_") || name == "OMP_NUM_THREADS" || name == "LD_LIBRARY_PATH") add({"-x", name});
      }
      add({"-x", "HALFSTEP_LAUNCH"});
      // Its process on a machine that is cut off ends with the ranks there, not after the default of 8 minutes.
      add({"--mca", "oob_tcp_keepalive_time", "5", "--mca", "oob_tcp_keepalive_intvl", "2"});
      add({"--mca", "oob_tcp_keepalive_probes", "4"});
    }
    if (nodes) {
      // The agent is on this machine only, and ends with the process that it starts.
      add({"--mca", "plm", "rsh", "--mca", "plm_rsh_agent", nodes->agent(), "--mca", "plm_rsh_no_tree_spawn", "1"});
      add({"--leave-session-attached"});
    }
    add({"-n", std::to_string(ranks)});
  } else {
    if (by_memory) add({"-bind-to", "numa", "-map-by", "numa"});
    if (!hosts.empty()) add({"-hosts", fmt::format("{}", fmt::join(list, ","))});
    if (nodes) add({"-launcher", "ssh", "-launcher-exec", nodes->agent(), "-localhost", master});
    add({"-n", std::to_string(ranks)});
  }
  return all;
}

// The words that ranks run, and whether it is this program.
std::vector<std::string> program_words(const Verb& verb, std::vector<std::string> rest, const std::string& own,
                                       bool elsewhere, bool& of_halfstep) {
  if (rest.empty()) {
    throw UsageError("launch: expected what to run, such as `halfstep launch --nproc-per-node 2 train mlp DIR`");
  }
  const std::string word = rest[0];
  if (word.starts_with('-')) {
    const std::string flag = word.substr(0, word.find('='));
    // What mpirun and others call the number of processes.
    constexpr const char* kCounts[] = {"-n", "-np", "--np", "--ntasks", "--num-processes"};
    const bool count = std::find(std::begin(kCounts), std::end(kCounts), flag) != std::end(kCounts);
    const std::string meant =
        count ? "; --nproc-per-node N starts N processes on each machine" : did_you_mean(flag, verb.flag_names());
    throw UsageError(
        fmt::format("launch: there is no flag {}{}; `halfstep launch --help` lists the flags", flag, meant));
  }
  const std::vector<std::string> verbs = verb.all_verbs();
  of_halfstep = std::find(verbs.begin(), verbs.end(), word) != verbs.end();
  if (word == "launch") throw UsageError("launch: can't launch itself");
  if (of_halfstep) {
    rest.insert(rest.begin(), own);
    return rest;
  }
  if (elsewhere) return rest;  // it may be on the other machines only
  const bool is_path = word.find('/') != std::string::npos;
  if (is_path ? ::access(word.c_str(), X_OK) != 0 || fs::is_directory(word) : find_in_path(word).empty()) {
    throw UsageError(fmt::format("launch: expected a command of halfstep or a program, got {}, which is {}{}",
                                 shown_path(word), is_path ? "no program" : "neither a command nor in PATH",
                                 is_path ? "" : did_you_mean(word, verbs)));
  }
  return rest;
}

int launch(const Verb& verb, const LaunchOptions& o) {
  if (o.as_rank) return run_as_rank(verb.rest());
  refuse_inside_a_job();
  std::vector<Host> hosts = o.hosts.empty() ? std::vector<Host>() : read_hosts(o.hosts);
  const LaunchRange nodes_of_file = hosts.empty() ? LaunchRange() : LaunchRange::parse("--nnodes", o.nodes, kMostRanks);
  if (!hosts.empty() && verb.count("--nnodes") > 0 && !nodes_of_file.elastic && nodes_of_file.most != hosts.size()) {
    throw UsageError(
        fmt::format("--nnodes: got {0}, and {1} names {2} machine{3}; expected {2}, or MIN:MAX for those "
                    "that can be reached",
                    o.nodes, shown_path(o.hosts), hosts.size(), hosts.size() == 1 ? "" : "s"));
  }
  const LaunchRange per_node = o.ranks.empty() ? LaunchRange() : ranks_per_node(o.ranks);
  for (Host& h : hosts) {
    if (!o.ranks.empty()) h.slots = per_node.most;
  }
  std::error_code error;
  const std::string own = fs::read_symlink("/proc/self/exe", error).string();
  bool of_halfstep = false;
  const std::vector<std::string> words = program_words(verb, verb.rest(), own, !hosts.empty(), of_halfstep);
  const NodeTask task = node_task(o, own, per_node.most, words);
  if (per_node.elastic && (!hosts.empty() || task.nodes > 1)) {
    throw UsageError(
        "--nproc-per-node: MIN:MAX is for one machine; with --hosts, --nnodes MIN:MAX says how many of them are "
        "needed");
  }
  if (task.nodes > 1 && task.rank > 0) return follow_node(task);
  const Mpi& mpi = choose_mpi(o.mpi, of_halfstep);
  const std::unique_ptr<Nodes> nodes = task.nodes > 1 ? std::make_unique<Nodes>(task) : nullptr;
  if (nodes) {
    for (const Nodes::Machine& m : nodes->machines()) hosts.push_back({m.name, m.ranks});
  }
  std::uint64_t ranks = hosts.empty() ? per_node.most : 0;
  for (const Host& h : hosts) ranks += h.slots;
  if (ranks > kMostRanks)
    throw UsageError(fmt::format("launch: expected at most {} processes, got {}", kMostRanks, ranks));

  std::optional<TrainCommand> train;
  if (of_halfstep && words[1] == "train") train.emplace(std::vector(words.begin() + 2, words.end()), o.restarts > 0);
  LaunchSize size = hosts.empty() ? LaunchSize(per_node) : LaunchSize(hosts, nodes_of_file, agent_of(mpi));
  const std::uint64_t shards = train && size.elastic() ? train->shards() : 0;
  LaunchJob job;
  job.other_machines = !hosts.empty();
  const auto set_program = [&](const std::vector<std::string>& arguments) {
    job.program = {own, "launch", "--as-rank", own, "train"};
    job.program.insert(job.program.end(), arguments.begin(), arguments.end());
  };
  if (train) {
    set_program(train->first());
  } else {
    job.program = {own, "launch", "--as-rank"};
    job.program.insert(job.program.end(), words.begin(), words.end());
  }
  if (nodes) nodes->prepare_environment();
  for (std::uint64_t restart = 0;; ++restart) {
    size.prepare(shards);
    job.ranks = static_cast<int>(size.ranks());
    job.launcher = launcher_arguments(mpi, size.ranks(), size.per_node(), size.hosts(), nodes.get(), o.master);
    if (restart > 0) {
      const fs::path checkpoint = train ? train->checkpoint() : fs::path();
      if (train) set_program(train->again());
      complain(fmt::format(
          "launch: restart {} of {}{}, from {}", restart, o.restarts,
          size.elastic() ? fmt::format(" on {} rank{}", size.ranks(), size.ranks() == 1 ? "" : "s") : std::string(),
          checkpoint.empty() ? "the beginning" : shown_path(checkpoint)));
    }
    const LaunchResult result = run_job(job);
    if (nodes) nodes->set_status(result.status);
    // Wrong arguments stay wrong.
    const bool hopeless = (of_halfstep && result.status == kUsage) || (train && train->is_refused());
    if (result.status == kDone || result.interrupted || hopeless || restart >= o.restarts) return result.status;
    size.shrink();
  }
}

}  // namespace

void add_launch(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "launch", "Start a command on several processes with MPI");
  const auto o = std::make_shared<LaunchOptions>();
  add_word(verb, "--nproc-per-node,--nproc_per_node", o->ranks,
           "Processes on each machine: a number, auto (one per accelerator, or without any, one per processor), "
           "cpu or gpu (default: 1, or as --hosts says); MIN:MAX continues with one fewer after each failure");
  add_path(verb, "--hosts", o->hosts, "File with the machines, one per line: HOST, or HOST slots=N for N processes");
  add_whole(verb, "--max-restarts,--max_restarts", o->restarts, 0, kMostRestarts,
            "Maximum number of restarts after a failure; train resumes from its last checkpoint");
  add_word(verb, "--mpi", o->mpi, "openmpi or mpich (default: the first that can be used)");
  constexpr const char* kTorch = "Several machines, with this command run on each, as with torchrun";
  add_word(verb, "--nnodes", o->nodes,
           "Number of machines (default: 1, or as --hosts says); with --hosts MIN:MAX leaves out those that can't be "
           "reached")
      .group(kTorch);
  add_whole(verb, "--node-rank,--node_rank", o->node_rank, 0, kMostRanks, "Number of this machine, from 0")
      .group(kTorch);
  add_word(verb, "--master-addr,--master_addr", o->master, "Name or address of the machine of node 0").group(kTorch);
  add_whole(verb, "--master-port,--master_port", o->port, 1, 65'535, "Port on which node 0 waits for the others")
      .group(kTorch);
  verb.add_switch("--standalone", o->nothing, "Not needed: one machine").group(kTorch);
  verb.add_switch("--use-env,--use_env", o->nothing, "Not needed").group(kTorch);
  verb.add_switch("--as-rank", o->as_rank, "Run as one of the processes").group("");
  verb.leave_rest();
  verb.run([verb, o, &status] { status = launch(verb, *o); });
}

}  // namespace halfstep::cli
