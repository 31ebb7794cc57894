// SPDX-License-Identifier: Apache-2.0
// What kernel calls take on this machine: measured once and kept in a file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "halfstep/debug/call_timer.h"
#include "halfstep/runtime/machine_limits.h"

namespace halfstep::training {

/// How CallTimes measures; tests put other functions there.
struct CallMeasurement {
  std::function<double(const debug::TracedCall&, debug::OperandPlace)> call = debug::time_call;
  std::function<double()> calling = debug::time_of_calling;
  std::function<MachineLimits()> limits = measure_machine_limits;
};

/// Options of CallTimes.
struct CallTimesOptions {
  std::filesystem::path file = {};  ///< empty: CallTimes::default_file()
  bool again = false;               ///< measure everything that is asked for again
  CallMeasurement measure = {};
};

/// Times of kernel calls on the CPU, by debug::signature(): what isn't known is measured when it is asked for. The file
/// belongs to one processor model, instruction set, number of threads, setting of Winograd's tiles, precision of
/// float32, setting of tuning and build of the library, as they are when this is made; what it says of another is
/// ignored, and so is a damaged one, with a warning. Several programs may use one file: each adds what it has measured,
/// and the file is replaced as a whole. One thread at a time.
class HS_API CallTimes {
 public:
  /// Reads the file, if there is one.
  explicit CallTimes(CallTimesOptions options = {});

  /// `halfstep/calls/PROCESSOR-ISA-THREADS.json` in $XDG_CACHE_HOME, or in ~/.cache; empty where there is neither.
  static std::filesystem::path default_file();

  /// Seconds of the call's kernel. Throws as debug::time_call() does.
  double seconds(const debug::TracedCall& call, debug::OperandPlace place);
  /// What a call costs beside its kernel where steps aren't replayed, in seconds.
  double calling();
  const MachineLimits& limits();

  /// Measurements since this was made.
  std::int64_t measured() const { return measured_; }
  /// Writes what was measured into the file, beside what others have written there meanwhile; without measurements it
  /// does nothing. A file that can't be written is warned of. Returns whether the file has all of it.
  bool save();
  const std::filesystem::path& file() const { return options_.file; }

 private:
  struct Entry {
    std::optional<double> inner = {}, cache = {}, memory = {};
  };
  struct Content {
    std::map<std::string, Entry> calls = {};
    std::optional<double> calling = {};
    std::optional<MachineLimits> limits = {};
  };
  /// Nothing where there is no file, or one of another machine; a damaged one is warned of.
  Content read(bool warn) const;

  CallTimesOptions options_;
  const std::string owner_;  // the settings when this was made, as JSON
  Content known_, fresh_;    // of the file, and measured here
  std::int64_t measured_ = 0;
};

}  // namespace halfstep::training
