// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <sstream>

#include "cli/data_sets.h"
#include "cli/download.h"
#include "cli/options.h"
#include "cli/suggest.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image_source.h"
#include "halfstep/data/mnist.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

struct FetchOptions {
  std::string action, name;
  std::string mirror;
  fs::path out, checksums;
  int timeout = 30;
  int tries = 5;
  bool force = false, keep = false, quiet = false;
};

double megabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e6; }

std::string size_text(std::uint64_t bytes) {
  return bytes < 1000000 ? fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3)
                         : fmt::format("{:.1f} MB", megabytes(bytes));
}

bool is_sum(std::string_view text) {
  constexpr std::size_t kDigits = 64;
  return text.size() == kDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Sums by file, as sha256sum writes them. Lines that are none are given to `other`.
template <class F>
std::map<std::string, std::string> read_sums(const fs::path& file, F&& other) {
  constexpr std::uintmax_t kMostBytes = 1 << 20;
  std::istringstream lines(io::read_file(file, kMostBytes));
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

// What was fetched into a folder: the sums of what it was made of, and of what was made.
class Record {
 public:
  Record(const fs::path& folder, std::string name) : file_(folder / "fetched.sha256"), name_(std::move(name)) {
    if (!fs::exists(file_)) return;
    made_ = read_sums(file_, [this](int, const std::string& line) {
      std::istringstream words(line);
      std::string hash, source, sum;
      if (words >> hash >> source >> sum && hash == "#" && is_sum(sum)) sources_[source] = sum;
    });
  }

  /// Whether all results of this file are there, unchanged.
  bool holds(const RemoteFile& file, const fs::path& folder) const {
    const auto source = sources_.find(file.name);
    if (source == sources_.end() || source->second != file.sha256) return false;
    const auto names = unpacked_names(file);
    return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
      const auto sum = made_.find(name);
      return sum != made_.end() && fs::is_regular_file(folder / name) && sha256_of(folder / name) == sum->second;
    });
  }
  /// Whether a result was made here, if only in part.
  bool began(const RemoteFile& file) const { return sources_.contains(file.name); }

  void begin(const RemoteFile& file) {
    sources_[file.name] = file.sha256;
    for (const std::string& name : unpacked_names(file)) made_.erase(name);
    write();
  }
  void end(const RemoteFile& file, const fs::path& folder) {
    for (const std::string& name : unpacked_names(file)) made_[name] = sha256_of(folder / name);
    write();
  }

 private:
  void write() const {
    std::string text = fmt::format("# Written by `halfstep data fetch {}`; `sha256sum -c {}` checks the files.\n",
                                   name_, file_.filename().string());
    for (const auto& [name, sum] : sources_) text += fmt::format("# {} {}\n", name, sum);
    for (const auto& [name, sum] : made_) text += fmt::format("{}  {}\n", sum, name);
    io::AtomicFile file(file_);
    file.write(text.data(), text.size());
    file.commit();
  }

  fs::path file_;
  std::string name_;
  std::map<std::string, std::string> sources_, made_;
};

class Fetcher {
 public:
  Fetcher(const FetchOptions& o, DataSet set)
      : options_(o),
        set_(std::move(set)),
        folder_(o.out.empty() ? fs::path("data") / set_.name : o.out),
        bar_(is_terminal(STDOUT_FILENO) && !o.quiet) {}

  void run() {
    if (!options_.mirror.empty()) set_.bases = {options_.mirror};
    if (!options_.checksums.empty()) other_checksums();
    make_folder(folder_);
    Record record(folder_, set_.name);
    for (const RemoteFile& file : set_.files) fetch(file, record);
    check();
  }

 private:
  void say(const std::string& text) {
    bar_.clear();
    if (options_.quiet) return;
    fmt::print("{}\n", printable_lines(text));
    std::fflush(stdout);
  }

  // Files of a mirror that are not the published ones.
  void other_checksums() {
    const auto sums = read_sums(options_.checksums, [&](int number, const std::string& line) {
      if (line.empty() || line.starts_with('#')) return;
      throw IoError(fmt::format("{}:{}: expected a SHA-256 sum, two spaces and a file, as sha256sum prints them",
                                shown_path(options_.checksums), number));
    });
    for (RemoteFile& file : set_.files) {
      const auto it = sums.find(file.name);
      if (it == sums.end()) {
        throw IoError(fmt::format("{}: expected the sum of {}, found none", shown_path(options_.checksums), file.name));
      }
      if (it->second != file.sha256) file.size = 0;
      file.sha256 = it->second;
    }
  }

  void fetch(const RemoteFile& file, Record& record) {
    if (!options_.force) {
      if (record.holds(file, folder_)) {
        std::vector<std::string> names;
        for (const fs::path& path : paths(file)) names.push_back(shown_path(path));
        say(fmt::format("{}: is there, unchanged", fmt::join(names, ", ")));
        return;
      }
      for (const fs::path& path : paths(file)) {
        if (!record.began(file) && fs::exists(path)) {
          throw IoError(
              fmt::format("{}: is there, and was not fetched by this program; --force replaces it", shown_path(path)));
        }
      }
    }
    const fs::path part = folder_ / (file.name + ".part");
    Download d{.urls = {}, .file = part, .sha256 = file.sha256, .size = std::nullopt};
    for (const std::string& base : set_.bases) d.urls.push_back(base + (base.ends_with('/') ? "" : "/") + file.name);
    if (file.size > 0) d.size = file.size;
    d.timeout_s = options_.timeout;
    d.tries = options_.tries;
    d.stop = &g_stop;
    std::optional<std::uint64_t> first;
    auto start = std::chrono::steady_clock::now();
    d.progress = [&](std::uint64_t done, std::uint64_t total) {
      const auto now = std::chrono::steady_clock::now();
      if (!first || done < *first) {
        first = done;
        start = now;
      }
      const double seconds = std::chrono::duration<double>(now - start).count();
      const std::string rate =
          seconds > 0.5 ? fmt::format("  {:.1f} MB/s", megabytes(done - *first) / seconds) : std::string();
      bar_.update(file.name, static_cast<std::int64_t>(done), static_cast<std::int64_t>(std::max(total, done)),
                  fmt::format("{:.1f}/{:.1f} MB{}", megabytes(done), megabytes(total), rate));
    };
    d.retrying = [this](const std::string& what) { say(what); };
    download(d);
    say(fmt::format("{}: {}, the sum is right", file.name, size_text(fs::file_size(part))));
    record.begin(file);
    const std::string label = "unpacking " + file.name;
    unpack(
        file, part, folder_, [&](std::int64_t done, std::int64_t total) { bar_.update(label, done, total, ""); },
        &g_stop);
    bar_.clear();
    record.end(file, folder_);
    if (options_.keep) {
      fs::rename(part, folder_ / file.name);
    } else {
      fs::remove(part);
    }
  }

  std::vector<fs::path> paths(const RemoteFile& file) const {
    std::vector<fs::path> result;
    for (const std::string& name : unpacked_names(file)) result.push_back(folder_ / name);
    return result;
  }

  // What was fetched must be readable by training.
  void check() {
    std::int64_t counts[2];
    for (const data::Split split : {data::Split::kTrain, data::Split::kTest}) {
      counts[split == data::Split::kTest] = set_.files[0].unpack == Unpack::gunzip
                                                ? data::load_mnist(folder_, split).count
                                                : data::open_images(folder_, split)->size();
    }
    say(fmt::format("{}: {} pictures for training, {} for the test; try: {}", shown_path(folder_), counts[0], counts[1],
                    fmt::format(fmt::runtime(set_.train), shown_path(folder_))));
  }

  const FetchOptions& options_;
  DataSet set_;
  fs::path folder_;
  ProgressBar bar_;
};

void print_list() {
  for (const DataSet& set : data_sets()) {
    std::uint64_t bytes = 0;
    for (const RemoteFile& file : set.files) bytes += file.size;
    fmt::print("{:<14} {:>7}  {}; {}\n", set.name, size_text(bytes), set.what, set.terms);
  }
}

int run(const FetchOptions& o) {
  std::vector<std::string> names;
  for (const DataSet& set : data_sets()) names.push_back(set.name);
  const std::string choices = fmt::format("{} or list", fmt::join(names, ", "));
  if (o.action != "fetch") {
    throw UsageError(fmt::format("data: expected `halfstep data fetch NAME`, got '{}'{}", o.action,
                                 did_you_mean(o.action, {"fetch"})));
  }
  if (o.name.empty()) throw UsageError(fmt::format("data fetch: expected the name of a data set: {}", choices));
  if (o.name == "list") {
    print_list();
    return kDone;
  }
  const auto set = std::find(names.begin(), names.end(), o.name);
  if (set == names.end()) {
    throw UsageError(fmt::format("data fetch: expected {}, got '{}'{}", choices, o.name, did_you_mean(o.name, names)));
  }
  const auto with_host = [&](std::string_view scheme) {
    return o.mirror.starts_with(scheme) && o.mirror.size() > scheme.size() &&
           std::string_view("/?#").find(o.mirror[scheme.size()]) == std::string_view::npos;
  };
  if (!o.mirror.empty() && !with_host("http://") && !with_host("https://")) {
    throw UsageError(
        fmt::format("--mirror: expected the URL of a folder, http://... or https://..., got '{}'", o.mirror));
  }
  refuse_many_processes("data fetch");
  catch_signals();
  try {
    Fetcher(o, data_sets()[static_cast<std::size_t>(set - names.begin())]).run();
  } catch (const Interrupted&) {
    complain("interrupted; what came is kept, and the same command goes on");
    return 128 + g_signal.load();
  } catch (const fs::filesystem_error& e) {
    throw IoError(fmt::format("{}: {}", shown_path(e.path1()), e.code().message()));
  }
  return kDone;
}

}  // namespace

void add_data(CLI::App& program, int& status) {
  auto* verb = program.add_subcommand("data", "Fetch a public data set: halfstep data fetch NAME");
  auto o = std::make_shared<FetchOptions>();
  verb->add_option("ACTION", o->action, "fetch")->required()->type_name("");
  std::vector<std::string> names;
  for (const DataSet& set : data_sets()) names.push_back(set.name);
  verb->add_option("NAME", o->name, fmt::format("Data set: {}; or list", fmt::join(names, ", ")))->type_name("");
  add_path(*verb, "--out", o->out, "Folder for it (default: data/NAME)");
  add_word(*verb, "--mirror", o->mirror, "URL of a folder that has the same files")->type_name("URL");
  add_path(*verb, "--checksums", o->checksums,
           "SHA-256 sums of a mirror's own files, as sha256sum prints them, in place of the published ones");
  add_whole(*verb, "--timeout", o->timeout, 1, 3600, "Seconds without data until a server is given up");
  add_whole(*verb, "--tries", o->tries, 1, 100, "Tries without progress");
  verb->add_flag("--keep", o->keep, "Keep the files as they were fetched beside what they are unpacked to");
  verb->add_flag("--force", o->force, "Fetch and replace what is there");
  verb->add_flag("--quiet,-q", o->quiet, "Print errors only");
  verb->callback([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
