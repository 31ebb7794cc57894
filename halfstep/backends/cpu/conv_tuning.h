// SPDX-License-Identifier: Apache-2.0
// Convolutions whose path is chosen by timing, once for a machine: see halfstep/runtime/tuning.h.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "halfstep/backends/cpu/conv.h"

namespace halfstep::cpu {

HS_API const char* name(ConvPath path) noexcept;

/// What tells convolutions apart: part, sizes, strides, dtypes, layouts, bias, the tiles of Winograd's that are
/// allowed, and the precision of float32.
HS_API std::string conv_signature(const ConvCall& call, Winograd allowed);

/// Paths by signature, kept in a file of one machine and build.
class HS_API ConvChoices {
 public:
  /// Seconds of one call by a path; none where it fails.
  using Time = std::function<std::optional<double>(ConvPath path)>;

  /// Reads the file if it is there and of this machine and build. A damaged one is warned of and replaced. Empty:
  /// nothing is kept.
  explicit ConvChoices(std::filesystem::path file);

  /// What is known of it.
  std::optional<ConvPath> find(const std::string& signature) const;
  /// The fastest of the paths, the first of which is taken unless another one needs less than 0.97 of its time. All are
  /// timed in turns, after a call each that doesn't count, and the least time counts. The choice goes into the file,
  /// beside what other programs have written there meanwhile.
  ConvPath choose(const std::string& signature, std::span<const ConvPath> paths, const Time& time);

 private:
  std::map<std::string, ConvPath> read(bool warn) const;
  void write();

  std::filesystem::path file_;
  std::map<std::string, ConvPath> known_;
  mutable std::mutex mutex_;  // of what is known
  std::mutex measuring_;      // two at once would time each other
};

/// The path for the call: `model` with tuning() off, where no other path serves the call, or where something fails;
/// else the one that was chosen for this machine. What isn't known is timed on the call's operands, which overwrites
/// its result, unless `measure` is false.
ConvPath tuned_conv_path(ConvCall& call, ConvPath model, bool measure) noexcept;

}  // namespace halfstep::cpu
