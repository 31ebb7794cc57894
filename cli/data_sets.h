// SPDX-License-Identifier: Apache-2.0
// Public data sets that `halfstep data fetch` knows.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace halfstep::cli {

/// What is made of a file that was fetched.
enum class Unpack {
  gunzip,   ///< the same without .gz
  cifar10,  ///< train.tar and test.tar with the pictures as PNG in class folders
};

/// A file on the servers.
struct RemoteFile {
  std::string name;
  std::uint64_t size;
  std::string sha256;
  Unpack unpack;
};

/// A data set.
struct DataSet {
  std::string name, what, terms;
  std::string train;               ///< a command that trains with it
  std::vector<std::string> bases;  ///< URLs that the files lie under
  std::vector<RemoteFile> files;
};

/// All of them.
const std::vector<DataSet>& data_sets();

/// What unpacking a file makes, as paths in the data set's folder.
std::vector<std::string> unpacked_names(const RemoteFile& file);

/// Unpacks a fetched file into the folder, each result whole or not at all. `progress` gets parts done and all parts.
/// Throws IoError, naming the file, when it isn't what it should be; Interrupted.
void unpack(const RemoteFile& file, const std::filesystem::path& fetched, const std::filesystem::path& folder,
            const std::function<void(std::int64_t done, std::int64_t total)>& progress, const std::atomic<bool>* stop);

}  // namespace halfstep::cli
