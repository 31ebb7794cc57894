// SPDX-License-Identifier: Apache-2.0
// Files from the web, checked by their sums.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/data/fetch.h"

namespace halfstep::data::detail {

/// What to fetch.
struct Download {
  std::vector<std::string> urls;      ///< tried one after the other; http and https
  std::filesystem::path file;         ///< where it goes; what stands there from an earlier try is gone on from
  std::string sha256;                 ///< 64 hexadecimal digits in lower case; empty: any sum is right
  std::optional<std::uint64_t> size;  ///< where it is known
  /// Where it isn't, more is refused.
  std::uint64_t most_bytes = std::uint64_t{1} << 32;
  /// A server that sends less than 1,000 bytes a second for so long is given up.
  int timeout_s = 30;
  /// Tries of a URL without progress (64 KiB, or the end).
  int tries = 5;
  /// Bytes so far and all of them (0: unknown), many times a second.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress = {};
  /// Something went wrong and it is tried again.
  std::function<void(const std::string& what)> retrying = {};
  const std::atomic<bool>* stop = nullptr;  ///< ends it with Interrupted
};

/// Fetches a file. When it returns, the file is whole, has that sum and is on the disk. An unfinished one stays, for
/// the next call to go on from: by a range, if the server has ranges. Bytes whose sum is wrong don't stay. Throws
/// IoError, naming the URL and what was wrong, and Interrupted.
void download(const Download& what);

/// SHA-256 of a file. Throws IoError.
std::string sha256_of(const std::filesystem::path& file);

}  // namespace halfstep::data::detail
