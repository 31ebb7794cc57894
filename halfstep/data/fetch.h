// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::data {

/// A public data set that fetch() knows by name.
struct DataSetInfo {
  std::string name;         ///< such as `mnist`
  std::string description;  ///< one line
  std::string terms;        ///< by whom, or its licence
  std::string command;      ///< that trains with it; `{}` stands for the folder
  std::uint64_t bytes = 0;  ///< of the download
};
/// All of them.
HS_API std::vector<DataSetInfo> data_sets();

/// How far fetch() has come with one file.
struct FetchProgress {
  std::string file;        ///< its name on the server
  bool unpacking = false;  ///< false: `done` and `total` are bytes of the download; true: parts of what is unpacked
  std::uint64_t done = 0;
  std::uint64_t total = 0;  ///< 0: unknown
};

/// Options of fetch().
struct FetchOptions {
  std::string mirror = {};               ///< URL of a folder that has the same files, instead of the public servers
  std::filesystem::path checksums = {};  ///< SHA-256 sums of a mirror's own files, in the format of sha256sum
  std::string sha256 = {};  ///< of the file that a URL names, 64 hexadecimal digits in lower case; empty: not verified
  int timeout_s = 30;       ///< a server that sends less than 1 kB/s for this long is abandoned
  int tries = 5;            ///< without progress, per URL
  bool force = false;       ///< downloads and replaces what is there
  bool keep = false;        ///< keeps the archives beside what they contain
  std::uint64_t max_unpacked = std::uint64_t{1} << 34;           ///< largest number of bytes in a URL's archive
  std::function<void(const FetchProgress&)> progress = {};       ///< called many times a second
  std::function<void(const std::string& line)> on_message = {};  ///< what was done, and why something is tried again
  const std::atomic<bool>* stop = nullptr;                       ///< when true, fetch() throws Interrupted
};

/// What fetch() left in the folder.
struct FetchReport {
  std::filesystem::path folder;
  std::vector<std::filesystem::path> files;  ///< that were unpacked, or were there unchanged
  std::int64_t training = 0;                 ///< images of a data set known by name
  std::int64_t test = 0;
};

/// FetchOptions::stop became true.
class HS_API Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted") {}
};

/// Downloads a data set into a folder (empty: `data/NAME`), verifies and unpacks it: `fetch("mnist", "data/mnist")`,
/// then `load_mnist("data/mnist", Split::kTrain)`.
///
/// `what` is the name of a set of data_sets(), or the URL (http or https) of a file: an archive (`.zip`, `.tar`,
/// `.tar.gz`, ...) or a `.gz` file is unpacked, any other file is stored. What is there unchanged is not downloaded
/// again; an interrupted download is resumed by the next call. Files are written atomically, and their SHA-256 sums are
/// kept in `fetched.sha256`. Throws Error for an unknown name, IoError naming URL or file and what is wrong,
/// Interrupted, and Error if the library was built without libcurl and OpenSSL.
HS_API FetchReport fetch(std::string_view what, const std::filesystem::path& folder = {},
                         const FetchOptions& options = {});

}  // namespace halfstep::data
