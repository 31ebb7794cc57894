// SPDX-License-Identifier: Apache-2.0
// `halfstep launch --nnodes N --node-rank R --master-addr A --master-port P`: the same command on each machine, as
// torchrun has it. MPI starts the ranks of all machines from one, node 0, by an agent like ssh. Here the agent is this
// program: it asks the `launch` that waits on the other machine to start the process of MPI there. Whoever can reach
// the port can take part in the job, as with torchrun: it is for networks whose machines trust each other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace halfstep::cli {

/// What one machine contributes, and how it finds the others.
struct NodeTask {
  int nodes = 1, rank = 0;         ///< machines of the job, and the number of this one
  std::string address;             ///< of node 0
  int port = 0;                    ///< on which it waits for the others
  std::string program;             ///< path of this program
  std::string mpi = {};            ///< implementation of MPI that is asked for; empty: any
  std::uint64_t ranks = 1;         ///< processes on this machine
  std::vector<std::string> words;  ///< what the ranks run; the same on all
};

/// Node 0's side: the other machines, from when all have come until the job is over.
class Nodes {
 public:
  /// Waits for the others, ten minutes at most. Throws UsageError for who stays away, or was started with another
  /// command, version or path of the program.
  explicit Nodes(const NodeTask& task);
  /// Tells them how it ended.
  ~Nodes();
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  struct Machine {
    std::string name;  ///< by which MPI's launcher, and the agent, know it
    std::uint64_t ranks;
  };
  const std::vector<Machine>& machines() const;
  /// The command that MPI's launcher starts processes on them with, in place of ssh; it has no blanks.
  const std::string& agent() const;
  /// Puts into the environment what the agent reads.
  void prepare_environment() const;
  /// The exit status of the job, for all machines.
  void set_status(int status);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The side of the others: starts what the agent asks for, until node 0 says that the job is over. Returns the job's
/// exit status, the same on all machines; 1 if node 0 is lost. A signal to it is one to the job.
int follow_node(const NodeTask& task);

/// What the link that Nodes::agent() names is called, and the program if it is started by it: OPTION... HOST COMMAND...
inline constexpr const char* kAgentName = "halfstep-launch-agent";
int run_as_agent(int argc, char** argv);

/// The variable that holds the folder for the ranks of a machine other than node 0: that of its own `launch`.
inline constexpr const char* kFolderVariable = "HALFSTEP_LAUNCH_FOLDER";

}  // namespace halfstep::cli
