// SPDX-License-Identifier: Apache-2.0
// Internal: the public data sets that fetch() knows, and what becomes of their files.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::data::detail {

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
const std::vector<DataSet>& known_data_sets();

/// What unpacking a file makes, as paths in the data set's folder.
std::vector<std::string> unpacked_names(const RemoteFile& file);

/// Unpacks a fetched file into the folder, each result whole or not at all. `progress` gets parts done and all parts.
/// Throws IoError, naming the file, when it isn't what it should be; Interrupted.
void unpack(const RemoteFile& file, const std::filesystem::path& fetched, const std::filesystem::path& folder,
            const std::function<void(std::int64_t done, std::int64_t total)>& progress, const std::atomic<bool>* stop);

/// Unpacks an archive (zip, tar, or tar compressed by gzip, bzip2, xz or zstd) into the folder and returns its files as
/// paths in it. Each file is written whole or not at all. Folders are made; links and special files are left out.
/// Throws IoError, naming the archive, for a damaged one, for names that lead out of the folder, and where the files
/// have more than `max_bytes` bytes together; Interrupted. `before` is called with each file's path before it is
/// written.
HS_API std::vector<std::string> unpack_archive(const std::filesystem::path& archive,
                                               const std::filesystem::path& folder, std::uint64_t max_bytes,
                                               const std::atomic<bool>* stop,
                                               const std::function<void(const std::filesystem::path& file)>& before);

}  // namespace halfstep::data::detail
