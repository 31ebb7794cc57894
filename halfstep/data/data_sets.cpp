// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/data_sets_internal.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <span>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/fetch.h"

namespace halfstep::data::detail {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

constexpr std::uint64_t kMostUnpacked = std::uint64_t{1} << 30;

void check_stop(const std::atomic<bool>* stop) {
  if (stop != nullptr && *stop) throw Interrupted();
}

void gunzip(const fs::path& from, const fs::path& to, const std::atomic<bool>* stop) {
  const std::string name = shown_path(from);
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(from.c_str(), "rb"), gzclose);
  if (!file) throw IoError(fmt::format("{}: can't be read: {}", name, std::strerror(errno)));
  AtomicFile out(to);
  std::vector<char> buffer(1 << 20);
  std::uint64_t all = 0;
  while (true) {
    check_stop(stop);
    const int n = gzread(file.get(), buffer.data(), static_cast<unsigned>(buffer.size()));
    // zlib hands out what is no gzip file as it is.
    if (n >= 0 && gzdirect(file.get())) throw IoError(name + ": expected a gzip file, got something else");
    int error = Z_OK;
    const char* reason = gzerror(file.get(), &error);
    if (n < 0 || (n == 0 && error != Z_OK && error != Z_STREAM_END)) {
      throw IoError(
          fmt::format("{}: expected a gzip file: {}", name, error == Z_BUF_ERROR ? "it is cut short" : reason));
    }
    if (n == 0) break;
    all += static_cast<std::uint64_t>(n);
    if (all > kMostUnpacked) throw IoError(fmt::format("{}: expected at most {} bytes in it", name, kMostUnpacked));
    out.write(buffer.data(), static_cast<std::size_t>(n));
  }
  out.commit();
}

// --- CIFAR-10: records of a label and 32 x 32 pixels, all red ones first, then green, then blue.

constexpr std::size_t kSide = 32, kPlane = kSide * kSide, kRecord = 1 + 3 * kPlane;
constexpr std::array<const char*, 10> kCifarClasses = {"airplane", "automobile", "bird",  "cat",  "deer",
                                                       "dog",      "frog",       "horse", "ship", "truck"};
constexpr std::array<const char*, 6> kCifarFiles = {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                                                    "data_batch_4.bin", "data_batch_5.bin", "test_batch.bin"};

struct ReadClose {
  void operator()(archive* a) const { archive_read_free(a); }
};
struct WriteClose {
  void operator()(archive* a) const { archive_write_free(a); }
};
struct EntryClose {
  void operator()(archive_entry* e) const { archive_entry_free(e); }
};

std::string problem_of(archive* a) {
  const char* text = archive_error_string(a);
  return text != nullptr ? text : "damaged";
}

// The batches in the archive, by the last part of their paths.
std::map<std::string, Bytes> read_batches(const fs::path& path, const std::atomic<bool>* stop) {
  const std::string name = shown_path(path);
  const std::unique_ptr<archive, ReadClose> a(archive_read_new());
  archive_read_support_format_tar(a.get());
  archive_read_support_filter_gzip(a.get());
  if (archive_read_open_filename(a.get(), path.c_str(), 1 << 16) != ARCHIVE_OK) {
    throw IoError(fmt::format("{}: expected a tar.gz archive: {}", name, problem_of(a.get())));
  }
  std::map<std::string, Bytes> batches;
  archive_entry* entry = nullptr;
  for (int code; (code = archive_read_next_header(a.get(), &entry)) != ARCHIVE_EOF;) {
    check_stop(stop);
    if (code != ARCHIVE_OK && code != ARCHIVE_WARN) {
      throw IoError(fmt::format("{}: expected a tar.gz archive: {}", name, problem_of(a.get())));
    }
    const char* full = archive_entry_pathname(entry);
    const std::string file = full == nullptr ? std::string() : fs::path(full).filename().string();
    if (std::find(kCifarFiles.begin(), kCifarFiles.end(), file) == kCifarFiles.end()) continue;
    if (archive_entry_filetype(entry) != AE_IFREG || batches.contains(file)) {
      throw IoError(fmt::format("{}: expected one file {}, got {}", name, file,
                                batches.contains(file) ? "two" : "something else"));
    }
    constexpr std::int64_t kMostRecords = 20000;
    const std::int64_t size = archive_entry_size(entry);
    const auto record = static_cast<std::int64_t>(kRecord);
    if (size <= 0 || size % record != 0 || size > kMostRecords * record) {
      throw IoError(fmt::format("{}: {}: expected 1 to {} records of {} bytes, got {} bytes", name, file, kMostRecords,
                                kRecord, size));
    }
    Bytes bytes(static_cast<std::size_t>(size));
    for (std::size_t have = 0; have < bytes.size();) {
      const la_ssize_t n = archive_read_data(a.get(), bytes.data() + have, bytes.size() - have);
      if (n <= 0) throw IoError(fmt::format("{}: {}: {}", name, file, n < 0 ? problem_of(a.get()) : "it is cut short"));
      have += static_cast<std::size_t>(n);
    }
    for (std::size_t at = 0; at < bytes.size(); at += kRecord) {
      if (bytes[at] >= kCifarClasses.size()) {
        throw IoError(
            fmt::format("{}: {}: expected labels 0 to 9, got {} in record {}", name, file, bytes[at], at / kRecord));
      }
    }
    batches[file] = std::move(bytes);
  }
  for (const char* file : kCifarFiles) {
    if (!batches.contains(file)) throw IoError(fmt::format("{}: expected the file {} in it, found none", name, file));
  }
  return batches;
}

void put_u32(Bytes& to, std::uint32_t value) {
  for (const int shift : {24, 16, 8, 0}) to.push_back(static_cast<std::uint8_t>(value >> shift));
}

void put_chunk(Bytes& png, const char* kind, std::span<const std::uint8_t> content) {
  put_u32(png, static_cast<std::uint32_t>(content.size()));
  const std::size_t begin = png.size();
  png.insert(png.end(), kind, kind + 4);
  png.insert(png.end(), content.begin(), content.end());
  put_u32(png, static_cast<std::uint32_t>(crc32(0, png.data() + begin, static_cast<uInt>(png.size() - begin))));
}

// A record's picture as PNG, 8 bits RGB, without filters.
Bytes png_of(std::span<const std::uint8_t> record) {
  Bytes rows;
  rows.reserve(kSide * (1 + 3 * kSide));
  for (std::size_t y = 0; y < kSide; ++y) {
    rows.push_back(0);
    for (std::size_t x = 0; x < kSide; ++x) {
      for (std::size_t c = 0; c < 3; ++c) rows.push_back(record[1 + c * kPlane + y * kSide + x]);
    }
  }
  uLongf size = compressBound(static_cast<uLong>(rows.size()));
  Bytes packed(size);
  constexpr int kQuick = 1;  // slower ones save little on pictures that small
  if (compress2(packed.data(), &size, rows.data(), static_cast<uLong>(rows.size()), kQuick) != Z_OK) {
    throw InternalError("png_of: zlib failed");
  }
  packed.resize(size);
  Bytes png = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};
  Bytes header;
  put_u32(header, kSide);
  put_u32(header, kSide);
  header.insert(header.end(), {8, 2, 0, 0, 0});
  put_chunk(png, "IHDR", header);
  put_chunk(png, "IDAT", packed);
  put_chunk(png, "IEND", {});
  return png;
}

la_ssize_t write_callback(archive* a, void* file, const void* data, std::size_t bytes) {
  try {
    static_cast<AtomicFile*>(file)->write(data, bytes);
    return static_cast<la_ssize_t>(bytes);
  } catch (const std::exception& e) {  // must not fly through C
    archive_set_error(a, EIO, "%s", e.what());
    return -1;
  }
}

// A tar archive with CLASS/NNNNN.png in the order of the records, always the same bytes.
class PictureArchive {
 public:
  PictureArchive(const fs::path& path, std::string part)
      : file_(path), part_(std::move(part)), tar_(archive_write_new()) {
    archive_write_set_format_ustar(tar_.get());
    archive_write_set_bytes_per_block(tar_.get(), 1 << 16);
    check(archive_write_open(tar_.get(), &file_, nullptr, write_callback, nullptr));
  }
  void add(std::span<const std::uint8_t> record) {
    const Bytes png = png_of(record);
    const std::unique_ptr<archive_entry, EntryClose> entry(archive_entry_new());
    archive_entry_set_pathname(entry.get(),
                               fmt::format("{}/{}/{:05}.png", part_, kCifarClasses[record[0]], number_++).c_str());
    archive_entry_set_filetype(entry.get(), AE_IFREG);
    archive_entry_set_perm(entry.get(), 0644);
    archive_entry_set_mtime(entry.get(), 0, 0);
    archive_entry_set_size(entry.get(), static_cast<la_int64_t>(png.size()));
    check(archive_write_header(tar_.get(), entry.get()));
    if (archive_write_data(tar_.get(), png.data(), png.size()) != static_cast<la_ssize_t>(png.size()))
      check(ARCHIVE_FATAL);
  }
  void commit() {
    check(archive_write_close(tar_.get()));
    file_.commit();
  }

 private:
  void check(int code) {
    if (code != ARCHIVE_OK) throw IoError(problem_of(tar_.get()));
  }

  AtomicFile file_;
  std::string part_;
  std::unique_ptr<archive, WriteClose> tar_;
  int number_ = 0;
};

void unpack_cifar10(const fs::path& from, const fs::path& folder,
                    const std::function<void(std::int64_t, std::int64_t)>& progress, const std::atomic<bool>* stop) {
  const auto batches = read_batches(from, stop);
  std::int64_t done = 0, all = 0;
  for (const auto& [name, bytes] : batches) all += static_cast<std::int64_t>(bytes.size() / kRecord);
  for (const char* part : {"train", "test"}) {
    PictureArchive pictures(folder / fmt::format("{}.tar", part), part);
    for (const char* file : kCifarFiles) {
      if (std::string_view(file).starts_with("test") != (std::string_view(part) == "test")) continue;
      const Bytes& bytes = batches.at(file);
      for (std::size_t at = 0; at < bytes.size(); at += kRecord) {
        if (done % 100 == 0) {
          check_stop(stop);
          if (progress) progress(done, all);
        }
        pictures.add(std::span(bytes).subspan(at, kRecord));
        ++done;
      }
    }
    pictures.commit();
  }
}

// A path inside the folder, or nothing for names that lead out of it.
std::string path_inside(const std::string& name) {
  const fs::path path = fs::path(name).lexically_normal();
  if (name.find('\0') != std::string::npos || path.is_absolute() || path.empty()) return {};
  for (const fs::path& part : path) {
    if (part == "..") return {};
  }
  return path.generic_string();
}

// One file's contents. Returns its bytes.
std::uint64_t unpack_entry(archive* a, const std::string& name, const fs::path& to, std::uint64_t most,
                           std::uint64_t max_bytes, const std::atomic<bool>* stop) {
  AtomicFile out(to);
  std::vector<char> buffer(1 << 16);
  std::uint64_t bytes = 0;
  while (true) {
    check_stop(stop);
    const la_ssize_t n = archive_read_data(a, buffer.data(), buffer.size());
    if (n < 0) throw IoError(fmt::format("{}: {}: {}", name, shown_path(to), printable(problem_of(a))));
    if (n == 0) break;
    bytes += static_cast<std::uint64_t>(n);
    if (bytes > most) throw IoError(fmt::format("{}: expected at most {} bytes in it, got more", name, max_bytes));
    out.write(buffer.data(), static_cast<std::size_t>(n));
  }
  out.commit();
  return bytes;
}

}  // namespace

std::vector<std::string> unpack_archive(const fs::path& path, const fs::path& folder, std::uint64_t max_bytes,
                                        const std::atomic<bool>* stop,
                                        const std::function<void(const fs::path& file)>& before) {
  const std::string name = shown_path(path);
  const std::unique_ptr<archive, ReadClose> a(archive_read_new());
  archive_read_support_format_zip_seekable(a.get());
  archive_read_support_format_tar(a.get());
  archive_read_support_filter_gzip(a.get());
  archive_read_support_filter_bzip2(a.get());
  archive_read_support_filter_xz(a.get());
  archive_read_support_filter_zstd(a.get());
  const auto refuse = [&] {
    throw IoError(fmt::format("{}: expected a zip or tar archive: {}", name, printable(problem_of(a.get()))));
  };
  if (archive_read_open_filename(a.get(), path.c_str(), 1 << 16) != ARCHIVE_OK) refuse();
  std::vector<std::string> files;
  std::set<std::string> known;
  std::uint64_t all = 0;
  archive_entry* entry = nullptr;
  for (int code; (code = archive_read_next_header(a.get(), &entry)) != ARCHIVE_EOF;) {
    check_stop(stop);
    if (code != ARCHIVE_OK && code != ARCHIVE_WARN) refuse();
    if (archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry) != nullptr) continue;
    const char* given = archive_entry_pathname(entry);
    const std::string inside = given == nullptr ? std::string() : path_inside(given);
    if (inside.empty()) {
      throw IoError(fmt::format("{}: expected names inside the folder, got '{}'", name,
                                printable(given == nullptr ? "" : given)));
    }
    const fs::path to = folder / inside;
    // A link that was there before must not lead a file elsewhere.
    for (fs::path at = to.parent_path(); at != folder && !at.empty(); at = at.parent_path()) {
      if (fs::is_symlink(at)) throw IoError(fmt::format("{}: expected a folder, got a link", shown_path(at)));
    }
    fs::create_directories(to.parent_path());
    if (before) before(to);
    all += unpack_entry(a.get(), name, to, max_bytes - all, max_bytes, stop);
    if (known.insert(inside).second) files.push_back(inside);
  }
  return files;
}

const std::vector<DataSet>& known_data_sets() {
  // Sizes and sums of the files as their makers published them.
  static const std::vector<DataSet> kAll = {
      {.name = "mnist",
       .what = "handwritten digits, 28x28, 60,000 + 10,000",
       .terms = "by Y. LeCun, C. Cortes and C. Burges",
       .train = "halfstep train mlp --data {}",
       .bases = {"https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"},
       .files = {{"train-images-idx3-ubyte.gz", 9912422,
                  "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", Unpack::gunzip},
                 {"train-labels-idx1-ubyte.gz", 28881,
                  "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", Unpack::gunzip},
                 {"t10k-images-idx3-ubyte.gz", 1648877,
                  "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", Unpack::gunzip},
                 {"t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                  Unpack::gunzip}}},
      {.name = "fashion-mnist",
       .what = "clothing, 28x28, 60,000 + 10,000",
       .terms = "MIT, by Zalando SE",
       .train = "halfstep train mlp --data {}",
       .bases = {"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                 "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"},
       .files = {{"train-images-idx3-ubyte.gz", 26421880,
                  "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", Unpack::gunzip},
                 {"train-labels-idx1-ubyte.gz", 29515,
                  "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", Unpack::gunzip},
                 {"t10k-images-idx3-ubyte.gz", 4422102,
                  "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", Unpack::gunzip},
                 {"t10k-labels-idx1-ubyte.gz", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                  Unpack::gunzip}}},
      {.name = "cifar10",
       .what = "colour pictures of 10 classes, 32x32, 50,000 + 10,000",
       .terms = "by A. Krizhevsky, V. Nair and G. Hinton",
       .train = "halfstep train resnet20 --data {}",
       .bases = {"https://www.cs.toronto.edu/~kriz"},
       .files = {{"cifar-10-binary.tar.gz", 170052171,
                  "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", Unpack::cifar10}}}};
  return kAll;
}

std::vector<std::string> unpacked_names(const RemoteFile& file) {
  if (file.unpack == Unpack::cifar10) return {"train.tar", "test.tar"};
  return {fs::path(file.name).stem().string()};
}

void unpack(const RemoteFile& file, const fs::path& fetched, const fs::path& folder,
            const std::function<void(std::int64_t done, std::int64_t total)>& progress, const std::atomic<bool>* stop) {
  if (file.unpack == Unpack::cifar10) {
    unpack_cifar10(fetched, folder, progress, stop);
  } else {
    gunzip(fetched, folder / unpacked_names(file)[0], stop);
  }
}

}  // namespace halfstep::data::detail
