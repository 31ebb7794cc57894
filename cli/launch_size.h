// SPDX-License-Identifier: Apache-2.0
// How many ranks `halfstep launch` starts and where, and with which of them it goes on after a failure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace halfstep::cli {

/// A machine, and the ranks on it.
struct LaunchHost {
  std::string name;
  std::uint64_t slots = 1;
};

/// A number, or two of them as torchrun's `--nnodes MIN:MAX` has them.
struct LaunchRange {
  std::uint64_t least = 1, most = 1;
  bool elastic = false;  ///< two were given

  /// Throws UsageError, naming the flag.
  static LaunchRange parse(const char* flag, const std::string& text, std::uint64_t most);
};

class LaunchSize {
 public:
  /// On this machine.
  explicit LaunchSize(const LaunchRange& ranks) : ranks_(ranks), per_node_(ranks.most) {}
  /// On these ones; where the number of nodes is a range, those that can't be reached are left out, and no more than
  /// its larger number are used. `agent` starts commands on them, as ssh does.
  LaunchSize(std::vector<LaunchHost> hosts, const LaunchRange& nodes, std::string agent)
      : all_(std::move(hosts)), nodes_(nodes), agent_(std::move(agent)) {}

  /// Before each start: looks who can be reached. With `shards` above 0 the number of ranks is one that divides it.
  /// Throws Error if fewer machines than the smaller number are left, or no such number of ranks.
  void prepare(std::uint64_t shards);
  /// After a failure: one rank fewer where the number of ranks is a range.
  void shrink();

  const std::vector<LaunchHost>& hosts() const { return hosts_; }
  std::uint64_t per_node() const { return per_node_; }
  std::uint64_t ranks() const;
  bool elastic() const { return ranks_.elastic || nodes_.elastic; }

 private:
  std::vector<LaunchHost> all_, hosts_;
  LaunchRange ranks_, nodes_;
  std::string agent_;
  std::uint64_t per_node_ = 1;
};

}  // namespace halfstep::cli
