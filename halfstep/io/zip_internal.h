// SPDX-License-Identifier: Apache-2.0
// Internal: the zip archives inside .pth files. libarchive reads them, whoever wrote them; what is written here is as
// simple as the format allows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/io/atomic_file.h"

struct archive;  // libarchive's

namespace halfstep::io {

/// What an archive is read from: a file, or bytes in memory.
struct ZipSource {
  std::string name;  ///< for messages
  std::filesystem::path path = {};
  std::optional<std::span<const unsigned char>> bytes = {};
  bool check_sums = true;  ///< off: fuzzers get past damaged checksums
};

/// One file of an archive while it is passed by.
class HS_API ZipEntry {
 public:
  ZipEntry(::archive* reader, const ZipSource& source, std::string name, std::uint64_t size)
      : reader_(reader), source_(source), name_(std::move(name)), size_(size) {}
  const std::string& name() const { return name_; }
  /// Bytes, as the archive's directory says. They come from outside: don't take memory for them unseen.
  std::uint64_t size() const { return size_; }
  /// Reads all of it, which must be size() bytes; the checksum is compared. Throws IoError.
  void read(void* to);
  /// The same for a small one, of at most `limit` bytes.
  std::string text(std::uint64_t limit);

 private:
  ::archive* reader_;
  const ZipSource& source_;
  std::string name_;
  std::uint64_t size_;
};

/// Calls `visit` for every file in the archive, in the order in which they lie there, until it returns false. Throws
/// IoError for an archive that is damaged, cut short or encrypted.
HS_API void visit_zip(const ZipSource& source, const std::function<bool(ZipEntry& entry)>& visit);

/// Writes an archive of stored files whose data begin at multiples of 64 bytes, as PyTorch does, so that they can be
/// mapped. Nothing in it depends on time or machine.
class HS_API ZipWriter {
 public:
  /// Sizes and places from `limit` on are written in the 64-bit form (ZIP64); others than the format's for tests.
  explicit ZipWriter(AtomicFile& file, std::uint64_t limit = 0xffffffff) : file_(file), limit_(limit) {}
  void add(const std::string& name, const void* data, std::uint64_t bytes);
  /// Writes the directory; nothing may follow.
  void finish();

 private:
  struct Entry {
    std::string name;
    std::uint32_t crc;
    std::uint64_t bytes;
    std::uint64_t at;
  };
  void write(const std::string& text);

  AtomicFile& file_;
  std::uint64_t limit_;
  std::uint64_t at_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace halfstep::io
