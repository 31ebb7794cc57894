// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/fetch.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/data/data_sets_internal.h"
#include "halfstep/data/download_internal.h"
#include "halfstep/data/image_source.h"
#include "halfstep/data/mnist.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;
using detail::DataSet;
using detail::Download;
using detail::RemoteFile;

#ifndef HALFSTEP_HAS_DOWNLOADS
[[noreturn]] void no_downloads() {
  fail<Error>("fetch: this library was built without downloads, which need libcurl and OpenSSL");
}
#endif

void download_file(const Download& what) {
#ifdef HALFSTEP_HAS_DOWNLOADS
  detail::download(what);
#else
  (void)what;
  no_downloads();
#endif
}

std::string sum_of(const fs::path& file) {
#ifdef HALFSTEP_HAS_DOWNLOADS
  return detail::sha256_of(file);
#else
  (void)file;
  no_downloads();
#endif
}

std::string size_text(std::uint64_t bytes) {
  const auto size = static_cast<double>(bytes);
  return bytes < 1000000 ? fmt::format("{:.1f} kB", size / 1e3) : fmt::format("{:.1f} MB", size / 1e6);
}

bool is_sum(std::string_view text) {
  constexpr std::size_t kDigits = 64;
  return text.size() == kDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Sums by file, as sha256sum writes them. Other lines are given to `other`.
template <class F>
std::map<std::string, std::string> read_sums(const fs::path& file, F&& other) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 26;  // an archive may hold very many files
  std::istringstream lines(read_whole_file(file, kMostBytes));
  std::map<std::string, std::string> sums;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::size_t space = line.find(' ');
    const std::string_view sum = std::string_view(line).substr(0, std::min(space, line.size()));
    // Two spaces, or a space and a star for binary files.
    if (is_sum(sum) && line.size() > space + 2 && (line[space + 1] == ' ' || line[space + 1] == '*')) {
      sums[line.substr(space + 2)] = sum;
    } else {
      other(number, line);
    }
  }
  return sums;
}

constexpr const char* kRecordName = "fetched.sha256";

// What was fetched into a folder: the sums of the downloads and of the files made from them.
class Record {
 public:
  Record(const fs::path& folder, std::string name) : folder_(folder), file_(folder / kRecordName), name_(name) {
    if (!fs::exists(file_)) return;
    made_ = read_sums(file_, [this](int, const std::string& line) {
      std::istringstream words(line);
      std::string hash, source, sum;
      if (words >> hash >> source >> sum && hash == "#" && is_sum(sum)) sources_[source] = sum;
    });
  }

  /// Whether this download and all of its results are there, unchanged. An empty sum is that of any download.
  bool holds(const std::string& source, const std::string& sum, const std::vector<std::string>& names) const {
    const auto found = sources_.find(source);
    if (found == sources_.end() || (!sum.empty() && found->second != sum)) return false;
    return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
      const auto made = made_.find(name);
      return made != made_.end() && fs::is_regular_file(folder_ / name) && sum_of(folder_ / name) == made->second;
    });
  }
  /// Whether a result of it was made here, if only in part.
  bool began(const std::string& source) const { return sources_.contains(source); }
  /// Files of this folder that were made from downloads.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& [name, sum] : made_) result.push_back(name);
    return result;
  }

  void begin(const std::string& source, const std::string& sum, const std::vector<std::string>& names) {
    sources_[source] = sum;
    for (const std::string& name : names) made_.erase(name);
    write();
  }
  void end(const std::vector<std::string>& names) {
    for (const std::string& name : names) made_[name] = sum_of(folder_ / name);
    write();
  }

 private:
  void write() const {
    std::string text = fmt::format("# Written by `halfstep data fetch {}`; `sha256sum -c {}` checks the files.\n",
                                   name_, file_.filename().string());
    for (const auto& [name, sum] : sources_) text += fmt::format("# {} {}\n", name, sum);
    for (const auto& [name, sum] : made_) text += fmt::format("{}  {}\n", sum, name);
    AtomicFile file(file_);
    file.write(text.data(), text.size());
    file.commit();
  }

  fs::path folder_, file_;
  std::string name_;
  std::map<std::string, std::string> sources_, made_;
};

void say(const FetchOptions& options, const std::string& line) {
  if (options.on_message) options.on_message(line);
}

Download request(const FetchOptions& options, const std::string& name, const fs::path& part) {
  Download d{.urls = {}, .file = part, .sha256 = {}, .size = std::nullopt};
  d.timeout_s = options.timeout_s;
  d.tries = options.tries;
  d.stop = options.stop;
  if (options.progress) {
    d.progress = [&options, name](std::uint64_t done, std::uint64_t total) {
      options.progress({.file = name, .done = done, .total = total});
    };
  }
  d.retrying = [&options](const std::string& what) { say(options, what); };
  return d;
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error && !fs::is_directory(folder)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) fail<IoError>("{}: can't be made: {}", shown_path(folder), error.message());
}

void refuse_to_replace(const fs::path& path) {
  fail<IoError>("{}: is there, and was not fetched by this program; --force replaces it", shown_path(path));
}

void put_away(const fs::path& part, const fs::path& archive, bool keep) {
  if (keep) {
    fs::rename(part, archive);
  } else {
    fs::remove(part);
  }
}

// A data set known by name.
class Fetcher {
 public:
  Fetcher(const FetchOptions& options, DataSet set, fs::path folder)
      : options_(options), set_(std::move(set)), folder_(std::move(folder)) {}

  FetchReport run() {
    if (!options_.mirror.empty()) set_.bases = {options_.mirror};
    if (!options_.checksums.empty()) other_checksums();
    make_folder(folder_);
    Record record(folder_, set_.name);
    FetchReport report{.folder = folder_, .files = {}};
    for (const RemoteFile& file : set_.files) {
      fetch(file, record);
      for (const fs::path& path : paths(file)) report.files.push_back(path);
    }
    check(report);
    return report;
  }

 private:
  // Files of a mirror that are not the published ones.
  void other_checksums() {
    const auto sums = read_sums(options_.checksums, [&](int number, const std::string& line) {
      if (line.empty() || line.starts_with('#')) return;
      fail<IoError>("{}:{}: expected a SHA-256 sum, two spaces and a file, as sha256sum prints them",
                    shown_path(options_.checksums), number);
    });
    for (RemoteFile& file : set_.files) {
      const auto it = sums.find(file.name);
      if (it == sums.end()) {
        fail<IoError>("{}: expected the sum of {}, found none", shown_path(options_.checksums), file.name);
      }
      if (it->second != file.sha256) file.size = 0;
      file.sha256 = it->second;
    }
  }

  void fetch(const RemoteFile& file, Record& record) {
    const std::vector<std::string> names = unpacked_names(file);
    if (!options_.force) {
      if (record.holds(file.name, file.sha256, names)) {
        std::vector<std::string> shown;
        for (const fs::path& path : paths(file)) shown.push_back(shown_path(path));
        say(options_, fmt::format("{}: is there, unchanged", fmt::join(shown, ", ")));
        return;
      }
      for (const fs::path& path : paths(file)) {
        if (!record.began(file.name) && fs::exists(path)) refuse_to_replace(path);
      }
    }
    const fs::path part = folder_ / (file.name + ".part");
    Download d = request(options_, file.name, part);
    d.sha256 = file.sha256;
    for (const std::string& base : set_.bases) d.urls.push_back(base + (base.ends_with('/') ? "" : "/") + file.name);
    if (file.size > 0) d.size = file.size;
    download_file(d);
    say(options_, fmt::format("{}: {}, the sum is right", file.name, size_text(fs::file_size(part))));
    record.begin(file.name, file.sha256, names);
    const auto progress = [&](std::int64_t done, std::int64_t total) {
      if (!options_.progress) return;
      options_.progress({.file = file.name,
                         .unpacking = true,
                         .done = static_cast<std::uint64_t>(done),
                         .total = static_cast<std::uint64_t>(total)});
    };
    unpack(file, part, folder_, progress, options_.stop);
    record.end(names);
    put_away(part, folder_ / file.name, options_.keep);
  }

  std::vector<fs::path> paths(const RemoteFile& file) const {
    std::vector<fs::path> result;
    for (const std::string& name : unpacked_names(file)) result.push_back(folder_ / name);
    return result;
  }

  // What was fetched must be readable by training.
  void check(FetchReport& report) const {
    const auto count = [&](Split split) {
      return set_.files[0].unpack == detail::Unpack::gunzip ? load_mnist(folder_, split).count
                                                            : open_images(folder_, split)->size();
    };
    report.training = count(Split::kTrain);
    report.test = count(Split::kTest);
  }

  const FetchOptions& options_;
  DataSet set_;
  fs::path folder_;
};

bool is_archive(const std::string& name) {
  const auto ends = {".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz", ".tbz2", ".tar.zst"};
  return std::any_of(ends.begin(), ends.end(), [&](const char* end) { return name.ends_with(end); });
}

FetchReport fetch_url(const std::string& url, const fs::path& folder, const std::string& name,
                      const FetchOptions& options) {
  if (!options.mirror.empty() || !options.checksums.empty()) {
    fail<Error>("fetch: expected no mirror and no file of checksums with the URL of a file; .sha256 verifies it");
  }
  make_folder(folder);
  Record record(folder, url);
  const bool one_file = !is_archive(name);
  const bool packed = one_file && name.ends_with(".gz");
  const std::string stored = packed ? fs::path(name).stem().string() : name;
  const auto report = [&](const std::vector<std::string>& names) {
    FetchReport r{.folder = folder, .files = {}};
    for (const std::string& file : names) r.files.push_back(folder / file);
    return r;
  };
  const auto there = one_file ? std::vector<std::string>{stored} : record.names();
  if (!options.force && !there.empty() && record.holds(name, options.sha256, there)) {
    say(options, fmt::format("{}: is there, unchanged", shown_path(folder / name)));
    return report(there);
  }
  const bool replace = options.force || record.began(name);
  if (one_file && !replace && fs::exists(folder / stored)) refuse_to_replace(folder / stored);
  const fs::path part = folder / (name + ".part");
  Download d = request(options, name, part);
  d.urls = {url};
  d.sha256 = options.sha256;
  download_file(d);
  const std::string sum = sum_of(part);
  say(options, fmt::format("{}: {}, {}", name, size_text(fs::file_size(part)),
                           options.sha256.empty() ? "the sum is " + sum : "the sum is right"));
  record.begin(name, sum, there);
  std::vector<std::string> names = {stored};
  if (packed) {
    detail::unpack({.name = name, .size = 0, .sha256 = sum, .unpack = detail::Unpack::gunzip}, part, folder, {},
                   options.stop);
  } else if (!one_file) {
    names = detail::unpack_archive(part, folder, options.max_unpacked, options.stop, [&](const fs::path& path) {
      if (!replace && fs::exists(path)) refuse_to_replace(path);
    });
  } else {
    fs::rename(part, folder / name);
  }
  record.end(names);
  if (packed || !one_file) put_away(part, folder / name, options.keep);
  return report(names);
}

}  // namespace

std::vector<DataSetInfo> data_sets() {
  std::vector<DataSetInfo> result;
  for (const DataSet& set : detail::known_data_sets()) {
    std::uint64_t bytes = 0;
    for (const RemoteFile& file : set.files) bytes += file.size;
    result.push_back(
        {.name = set.name, .description = set.what, .terms = set.terms, .command = set.train, .bytes = bytes});
  }
  return result;
}

FetchReport fetch(std::string_view what, const fs::path& folder, const FetchOptions& options) try {
  if (!options.sha256.empty() && !is_sum(options.sha256)) {
    fail<Error>("fetch: expected .sha256 to be 64 hexadecimal digits in lower case, got '{}'", options.sha256);
  }
  if (what.starts_with("http://") || what.starts_with("https://")) {
    const std::string_view path = what.substr(0, what.find_first_of("?#"));
    const std::string name(path.substr(path.rfind('/') + 1));
    const bool has_path = path.find('/', what.find("://") + 3) != std::string_view::npos;
    if (!has_path || name.empty() || name == "." || name == ".." || name == kRecordName) {
      fail<Error>("fetch: expected a URL that ends in a file's name, got '{}'", what);
    }
    return fetch_url(std::string(what), folder.empty() ? fs::path("data") / fs::path(name).stem() : folder, name,
                     options);
  }
  std::vector<std::string> names;
  for (const DataSet& set : detail::known_data_sets()) {
    if (set.name == what) return Fetcher(options, set, folder.empty() ? fs::path("data") / set.name : folder).run();
    names.push_back(set.name);
  }
  fail<Error>("fetch: expected {} or the URL of a file, got '{}'", fmt::join(names, ", "), what);
} catch (const fs::filesystem_error& e) {
  fail<IoError>("{}: {}", shown_path(e.path1()), e.code().message());
}

}  // namespace halfstep::data
