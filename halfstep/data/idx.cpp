// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/idx.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>
#include <string>

#include "halfstep/core/error.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"

namespace halfstep::data {
namespace {

// Deflate spends at least two bits on a run of 258 bytes, so no stream unpacks to more than 1032 times its length.
constexpr std::uint64_t kLargestDeflateRatio = 1032;
// Memory for what a compressed file announces is taken in steps: only data that are really there make it grow.
constexpr std::size_t kFirstGrowth = std::size_t{64} << 20;
constexpr std::size_t kBufferSize = std::size_t{256} << 10;

/// Where the bytes come from.
class Source {
 public:
  virtual ~Source() = default;
  /// Fills `to` as far as there are bytes; returns how many there were. Fewer than asked for means the end.
  virtual std::size_t read(std::span<std::uint8_t> to) = 0;
  /// The most bytes that can come from the start to the end.
  virtual std::uint64_t bound() const = 0;
};

class SpanSource final : public Source {
 public:
  explicit SpanSource(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  std::size_t read(std::span<std::uint8_t> to) override {
    const std::size_t n = std::min(to.size(), bytes_.size() - position_);
    if (n != 0) std::memcpy(to.data(), bytes_.data() + position_, n);
    position_ += n;
    return n;
  }
  std::uint64_t bound() const override { return bytes_.size(); }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t position_ = 0;
};

class FileSource final : public Source {
 public:
  explicit FileSource(const std::filesystem::path& path) : name_(shown_path(path)) {
    // Without O_NONBLOCK a named pipe would block here for ever, before it can be refused.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) fail<IoError>("read_idx: cannot open {}: {}", name_, std::strerror(errno));
    struct stat info {};
    const bool known = ::fstat(descriptor_, &info) == 0;
    if (!known || !S_ISREG(info.st_mode)) {
      const bool folder = known && S_ISDIR(info.st_mode);
      ::close(descriptor_);
      fail<IoError>("read_idx: expected a file, got {} {}", folder ? "the folder" : "something else at", name_);
    }
    size_ = static_cast<std::uint64_t>(info.st_size);
  }
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;
  ~FileSource() override { ::close(descriptor_); }

  std::size_t read(std::span<std::uint8_t> to) override {
    std::size_t done = 0;
    while (done < to.size()) {
      const ssize_t n = ::read(descriptor_, to.data() + done, to.size() - done);
      if (n == 0) break;
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail<IoError>("read_idx: reading {}: {}", name_, std::strerror(errno));
      done += static_cast<std::size_t>(n);
    }
    return done;
  }
  std::uint64_t bound() const override { return size_; }

 private:
  std::string name_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// Puts bytes that were read to look at them back in front of a source.
class PeekedSource final : public Source {
 public:
  PeekedSource(Source& source, std::span<const std::uint8_t> first) : first_(first), source_(source) {}
  std::size_t read(std::span<std::uint8_t> to) override {
    const std::size_t n = first_.read(to);
    return n + (n < to.size() ? source_.read(to.subspan(n)) : 0);
  }
  std::uint64_t bound() const override { return source_.bound(); }

 private:
  SpanSource first_;
  Source& source_;
};

/// Unpacks gzip, with several members one behind the other as the format allows.
class GzipSource final : public Source {
 public:
  GzipSource(Source& packed, std::string_view name) : packed_(packed), name_(name), buffer_(kBufferSize) {
    constexpr int kGzipWindow = 15 + 16;  // zlib: the largest window, and a gzip header
    if (inflateInit2(&stream_, kGzipWindow) != Z_OK) fail<IoError>("read_idx: {}: no memory to unpack it", name_);
  }
  GzipSource(const GzipSource&) = delete;
  GzipSource& operator=(const GzipSource&) = delete;
  ~GzipSource() override { inflateEnd(&stream_); }

  std::size_t read(std::span<std::uint8_t> to) override {
    std::size_t done = 0;
    while (done < to.size() && !finished_) {
      if (stream_.avail_in == 0) refill();
      if (between_members_ && !next_member()) break;
      const std::size_t room = std::min<std::size_t>(to.size() - done, std::size_t{1} << 30);
      stream_.next_out = to.data() + done;
      stream_.avail_out = static_cast<uInt>(room);
      const int status = inflate(&stream_, Z_NO_FLUSH);
      done += room - stream_.avail_out;
      if (status == Z_STREAM_END) {
        between_members_ = true;
      } else if (status == Z_BUF_ERROR && ended_) {
        fail<IoError>("read_idx: {}: expected more gzip data, got the end of the file; it is cut short", name_);
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        fail<IoError>("read_idx: {}: expected sound gzip data, got damaged ones ({})", name_,
                      stream_.msg != nullptr ? stream_.msg : "unknown error");
      }
    }
    return done;
  }
  std::uint64_t bound() const override {
    const std::uint64_t packed = packed_.bound();
    return packed > UINT64_MAX / kLargestDeflateRatio ? UINT64_MAX : packed * kLargestDeflateRatio;
  }

 private:
  void refill() {
    const std::size_t n = packed_.read(buffer_);
    stream_.next_in = buffer_.data();
    stream_.avail_in = static_cast<uInt>(n);
    ended_ = n == 0;
  }
  /// After the end of a member: true when another one follows, false at the end of the file.
  bool next_member() {
    if (stream_.avail_in == 0 && ended_) {
      finished_ = true;
      return false;
    }
    if (stream_.next_in[0] != 0x1F)
      fail<IoError>("read_idx: {}: expected the end of the file after the gzip data, got more bytes", name_);
    inflateReset(&stream_);
    between_members_ = false;
    return true;
  }

  Source& packed_;
  std::string_view name_;
  std::vector<std::uint8_t> buffer_;
  z_stream stream_{};
  bool ended_ = false;
  bool between_members_ = false;
  bool finished_ = false;
};

std::uint32_t big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 | bytes[3];
}

std::optional<IdxType> type_of_code(std::uint8_t code) {
  switch (code) {
    case 0x08:
      return IdxType::kUint8;
    case 0x09:
      return IdxType::kInt8;
    case 0x0B:
      return IdxType::kInt16;
    case 0x0C:
      return IdxType::kInt32;
    case 0x0D:
      return IdxType::kFloat32;
    case 0x0E:
      return IdxType::kFloat64;
    default:
      return std::nullopt;
  }
}

void to_host_order(std::vector<std::uint8_t>& data, int item_size) {
  if constexpr (std::endian::native == std::endian::big) return;
  if (item_size == 1) return;
  for (std::size_t i = 0; i < data.size(); i += static_cast<std::size_t>(item_size)) {
    std::reverse(data.data() + i, data.data() + i + item_size);
  }
}

/// Reads the elements; memory grows only as far as the data are really there.
std::vector<std::uint8_t> read_elements(Source& source, std::uint64_t size, const std::vector<std::int64_t>& shape,
                                        std::string_view name) {
  std::vector<std::uint8_t> data;
  while (data.size() < size) {
    const std::size_t before = data.size();
    const std::size_t after =
        static_cast<std::size_t>(std::min<std::uint64_t>(size, std::max(2 * before, kFirstGrowth)));
    try {
      data.resize(after);
    } catch (const std::bad_alloc&) {
      fail<IoError>("read_idx: {}: no memory for {} bytes of data", name, size);
    }
    const std::size_t n = source.read(std::span(data).subspan(before));
    if (n < after - before) {
      fail<IoError>("read_idx: {}: expected {} bytes of data for the shape [{}], got {}; the file is cut short", name,
                    size, fmt::join(shape, ", "), before + n);
    }
  }
  return data;
}

IdxArray parse_stream(Source& source, std::string_view name, const IdxLimits& limits) {
  std::array<std::uint8_t, 4> magic{};
  const std::size_t got = source.read(magic);
  if (got < magic.size()) {
    fail<IoError>("read_idx: {}: expected an IDX header of at least 4 bytes, got {} bytes", name, got);
  }
  const std::optional<IdxType> type = type_of_code(magic[2]);
  const int dimensions = magic[3];
  constexpr int kMostDimensions = 8;
  if (magic[0] != 0 || magic[1] != 0 || !type || dimensions < 1 || dimensions > kMostDimensions) {
    fail<IoError>(
        "read_idx: {}: expected an IDX magic number (0x00000803 for images, 0x00000801 for labels), got 0x{:08x}; "
        "not an IDX file?",
        name, big_endian(magic.data()));
  }

  IdxArray array;
  array.type = *type;
  const std::uint64_t item_size = static_cast<std::uint64_t>(idx_item_size(*type));
  std::uint64_t size = item_size;
  bool empty = false;
  bool too_large = false;
  for (int d = 0; d < dimensions; ++d) {
    std::array<std::uint8_t, 4> bytes{};
    if (source.read(bytes) < bytes.size()) {
      fail<IoError>("read_idx: {}: expected a header with {} dimensions, got {}; the file is cut short", name,
                    dimensions, d);
    }
    const std::uint32_t n = big_endian(bytes.data());
    array.shape.push_back(n);
    empty = empty || n == 0;
    // The product is only formed where it can't overflow; a zero dimension makes a large one before or behind it
    // harmless.
    if (n != 0 && size > limits.max_bytes / n) too_large = true;
    if (n != 0 && !too_large) size *= n;
  }
  if (empty) {
    size = 0;
  } else if (too_large || size > limits.max_bytes) {
    fail<IoError>(
        "read_idx: {}: expected at most {} bytes of data, got a header with the shape [{}] of {}-byte elements", name,
        limits.max_bytes, fmt::join(array.shape, ", "), item_size);
  }
  const std::uint64_t header = 4 + 4 * static_cast<std::uint64_t>(dimensions);
  if (size != 0 && size + header > source.bound()) {
    fail<IoError>(
        "read_idx: {}: expected {} bytes for the shape [{}] in its header, got a file that holds at most {}; the file "
        "is cut "
        "short",
        name, size + header, fmt::join(array.shape, ", "), source.bound());
  }

  array.data = read_elements(source, size, array.shape, name);
  std::uint8_t more = 0;
  if (source.read({&more, 1}) != 0) {
    fail<IoError>("read_idx: {}: expected the end of the file after {} bytes for the shape [{}], got more bytes", name,
                  size + header, fmt::join(array.shape, ", "));
  }
  to_host_order(array.data, idx_item_size(array.type));
  return array;
}

IdxArray parse_source(Source& source, std::string_view name, const IdxLimits& limits) {
  std::array<std::uint8_t, 2> first{};
  const std::size_t n = source.read(first);
  PeekedSource whole(source, std::span(first).first(n));
  // An IDX file begins with two zero bytes, so the gzip signature can't be one.
  if (n == 2 && first[0] == 0x1F && first[1] == 0x8B) {
    GzipSource unpacked(whole, name);
    return parse_stream(unpacked, name, limits);
  }
  return parse_stream(whole, name, limits);
}

}  // namespace

int idx_item_size(IdxType type) {
  switch (type) {
    case IdxType::kInt16:
      return 2;
    case IdxType::kInt32:
    case IdxType::kFloat32:
      return 4;
    case IdxType::kFloat64:
      return 8;
    default:
      return 1;
  }
}

IdxArray read_idx(const std::filesystem::path& path, const IdxLimits& limits) {
  FileSource file(path);
  return parse_source(file, shown_path(path), limits);
}

IdxArray parse_idx(std::span<const std::uint8_t> bytes, std::string_view name, const IdxLimits& limits) {
  SpanSource source(bytes);
  return parse_source(source, printable(name), limits);
}

}  // namespace halfstep::data
