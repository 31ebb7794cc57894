// SPDX-License-Identifier: Apache-2.0
// What the ranks of a group exchange, through memory that their processes share.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace sim {

/// Bytes for or from another rank.
struct Transfer {
  int peer;
  char* data;  ///< which a send only reads
  uint64_t bytes;
  bool receive;
};

/// A file in memory with a ring of bytes from each rank to each other one. It has no name: rank 0 makes it, and the
/// others open it through rank 0's entry in /proc, so that it is gone when the last process is. Each rank holds a lock
/// on its byte of the file, which the system takes back when the process ends, however it ends: that is how the others
/// know.
class Exchange {
 public:
  static constexpr int kMostRanks = 64;
  /// Where the others find the file that this makes. It is kept until a rank 0 takes it.
  struct Id {
    uint64_t nonce;  ///< tells it from other files
    int32_t process;
    int32_t file;
  };
  static Id make_id();

  /// Waits for all ranks, up to a minute. Throws std::runtime_error where one doesn't come.
  Exchange(const Id& id, int ranks, int rank);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Does all of them, which begin together. `number` is that of the call, the same on all ranks that take part.
  /// Returns what went wrong, or an empty text. `given_up` is asked every now and then.
  std::string run(std::span<const Transfer> transfers, uint64_t number, const std::function<bool()>& given_up);
  /// This rank takes part in nothing any more; the others learn it.
  void abort();

 private:
  struct Shared;
  struct Ring;
  struct Progress;
  Ring& ring(int from, int to) const;
  bool move(const Transfer& t, Progress& p, uint64_t number, std::string* wrong);
  bool is_there(int rank) const;
  std::string missing(std::span<const Transfer> transfers, std::span<const Progress> progress) const;

  const int ranks_, rank_;
  int file_ = -1;
  uint64_t bytes_ = 0;
  char* memory_ = nullptr;
  Shared* shared_ = nullptr;
};

}  // namespace sim
