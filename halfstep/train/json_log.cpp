// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/json_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/runtime/log.h"
#include "halfstep/train/run_folder.h"

namespace halfstep::training {

namespace fs = std::filesystem;

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

bool is_set(const std::atomic<bool>* stop) { return stop != nullptr && stop->load(); }

bool is_pipe(const fs::path& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode);
}

}  // namespace

JsonLog::JsonLog(const fs::path& path, bool append, const std::atomic<bool>* stop)
    : path_(path), stop_(stop), anew_(!append) {
  // Opening a pipe that nobody reads would wait where no signal handler's flag is looked at.
  constexpr int kFlags = O_WRONLY | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
  file_ = ::open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
  made_ = file_ >= 0;
  // Also where a link leads to nothing yet.
  if (file_ < 0 && errno == EEXIST) file_ = ::open(path.c_str(), kFlags | O_CREAT, 0666);
  for (bool said = false; file_ < 0 && errno == ENXIO && is_pipe(path); said = true) {
    if (!said) log(LogLevel::warning, fmt::format("{}: waiting for a reader of this pipe", shown_path(path)));
    if (is_set(stop)) return;
    std::this_thread::sleep_for(milliseconds(20));
    file_ = ::open(path.c_str(), kFlags);
  }
  if (file_ < 0) {
    const int error = errno;
    fail<IoError>("{}: can't be written: {}", shown_path(path), std::strerror(error));
  }
  if (const int flags = ::fcntl(file_, F_GETFL); flags >= 0) ::fcntl(file_, F_SETFL, flags & ~O_NONBLOCK);
}

JsonLog::~JsonLog() { close(); }

JsonLog::JsonLog(JsonLog&& other) noexcept
    : path_(std::move(other.path_)),
      stop_(other.stop_),
      file_(std::exchange(other.file_, -1)),
      anew_(other.anew_),
      made_(std::exchange(other.made_, false)) {}

JsonLog& JsonLog::operator=(JsonLog&& other) noexcept {
  if (this == &other) return *this;
  close();
  path_ = std::move(other.path_);
  stop_ = other.stop_;
  file_ = std::exchange(other.file_, -1);
  anew_ = other.anew_;
  made_ = std::exchange(other.made_, false);
  return *this;
}

void JsonLog::close() {
  if (file_ < 0) return;
  ::close(std::exchange(file_, -1));
  if (std::exchange(made_, false)) ::unlink(path_.c_str());
}

bool JsonLog::can_write_line() const {
  constexpr milliseconds kGrace{1000}, kBetween{50};
  std::optional<Clock::time_point> stopped;
  for (;;) {
    pollfd waiting{.fd = file_, .events = POLLOUT, .revents = 0};
    // What can't be asked, or has an error to tell, tells it when it is written to.
    const int ready = ::poll(&waiting, 1, static_cast<int>(kBetween.count()));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (!is_set(stop_)) continue;
    if (!stopped) stopped = Clock::now();
    if (Clock::now() - *stopped > kGrace) return false;
  }
}

void JsonLog::write(const char* event, const Fields& fields) {
  if (file_ < 0) return;
  nlohmann::ordered_json line = {{"event", event}};
  for (const auto& field : fields) {
    nlohmann::ordered_json& slot = line[field.first];
    std::visit(
        [&slot](const auto& v) {
          using T = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<T, double>) {
            slot = std::isfinite(v) ? nlohmann::ordered_json(v) : nlohmann::ordered_json(nullptr);
          } else {
            slot = v;
          }
        },
        field.second);
  }
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
  struct stat info {};
  const bool regular = ::fstat(file_, &info) == 0 && S_ISREG(info.st_mode);
  const auto failed = [&](int error, off_t whole) {
    if (regular && ::ftruncate(file_, whole) != 0) { /* the half line stays; who goes on cuts it off */
    }
    if (error == EPIPE) fail<IoError>("{}: writing failed: the reader of this pipe has gone", shown_path(path_));
    fail<IoError>("{}: writing failed; is the disk full? ({})", shown_path(path_), std::strerror(error));
  };
  if (!regular && !can_write_line()) {
    log(LogLevel::warning,
        fmt::format("{}: its reader takes nothing more; the log ends before the line of {}", shown_path(path_), event));
    return close();
  }
  if (std::exchange(anew_, false) && regular) {
    if (::ftruncate(file_, 0) != 0) failed(errno, info.st_size);
    info.st_size = 0;
  }
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(file_, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) failed(n < 0 ? errno : ENOSPC, info.st_size);
    at += static_cast<std::size_t>(n);
  }
  made_ = false;
}

namespace {

// The number behind `"key":` in a line that this file wrote.
std::optional<std::int64_t> number_of(std::string_view line, std::string_view key) {
  const std::size_t at = line.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  std::int64_t value = 0;
  const char* begin = line.data() + at + key.size();
  const auto [end, error] = std::from_chars(begin, line.data() + line.size(), value);
  return error == std::errc{} && end != begin ? std::optional(value) : std::nullopt;
}

bool is_event(std::string_view line) {
  const auto event = nlohmann::json::parse(line, nullptr, false);
  return event.is_object() && event.contains("event");
}

bool comes_again(std::string_view line, std::int64_t step, std::int64_t epochs) {
  const bool eval = line.starts_with(R"({"event":"eval")");
  if (!eval && !line.starts_with(R"({"event":"step")") && !line.starts_with(R"({"event":"checkpoint")")) return false;
  if (number_of(line, R"("step":)").value_or(0) > step) return true;
  // The last evaluation before the checkpoint may not be part of it.
  return eval && number_of(line, R"("epoch":)").value_or(0) > epochs;
}

// Goes through a log; `keep` is called with each line that stays.
LogRepair look_through(const fs::path& path, std::int64_t step, std::int64_t epochs,
                       const std::function<void(std::string_view line, std::uintmax_t offset)>& keep) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail<IoError>("{}: can't be read: {}", shown_path(path), std::strerror(errno));
  LogRepair repair;
  std::int64_t number = 0;
  std::uintmax_t offset = 0;
  for (std::string text; std::getline(file, text);) {
    ++number;
    const bool ended = !file.eof();
    std::uintmax_t begin = offset;
    offset += text.size() + (ended ? 1 : 0);
    const auto changed = [&] {
      if (repair.first == 0) repair.first = number;
    };
    std::string_view line = text;
    // Whatever looks like a line of a log is one, but for the last, which may have been cut anywhere.
    const bool looks = line.starts_with(R"({"event":)") && line.ends_with("}") &&
                       line.find(R"({"event":)", 1) == std::string_view::npos;
    if (!line.empty() && ((!looks || !ended) && !is_event(line))) {
      changed();
      ++repair.torn;
      // Programs of before went on behind half a line.
      const std::size_t start = line.rfind(R"({"event":)");
      if (start == std::string_view::npos || start == 0 || !is_event(line.substr(start))) continue;
      line = line.substr(start);
      begin += start;
    } else if (!ended) {
      changed();
    }
    if (comes_again(line, step, epochs)) {
      changed();
      ++repair.repeated;
      continue;
    }
    if (keep) keep(line, begin);
  }
  if (file.bad()) fail<IoError>("{}: can't be read: {}", shown_path(path), std::strerror(errno));
  return repair;
}

}  // namespace

namespace {

// Where a path leads, through links to nothing yet too.
fs::path resolved(fs::path path) {
  constexpr int kMostLinks = 40;  // as many as the system follows
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(fs::symlink_status(path, error)); ++i) {
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  const fs::path whole = fs::weakly_canonical(fs::absolute(path, error), error);
  return error ? path : whole;
}

bool same_place(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return a == b || fs::equivalent(a, b, error) || resolved(a) == resolved(b);
}

// Whether a file begins as a log does. Half a line is one too: a run that was killed goes on behind it.
bool begins_as_log(const fs::path& path) {
  constexpr std::size_t kMost = std::size_t{1} << 20;
  std::ifstream file(path, std::ios::binary);
  if (!file) fail<IoError>("--log-json {}: can't be read: {}", shown_path(path), std::strerror(errno));
  std::string text(kMost, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.empty()) return true;
  const std::string_view line = std::string_view(text).substr(0, text.find('\n'));
  const auto event = nlohmann::json::parse(line, nullptr, false);
  const bool named = event.is_object() && event.contains("event") && event["event"].is_string();
  const auto begins = [&](const char* name) {
    const std::string begin = fmt::format(R"({{"event":"{}")", name);
    if (named) return event["event"] == name;
    return begin.starts_with(text) || (line.starts_with(R"({"event":")") && line.find(begin) != std::string_view::npos);
  };
  const auto events = {"start", "step", "eval", "checkpoint", "fallback", "end"};
  return std::any_of(events.begin(), events.end(), begins);
}

}  // namespace

void add_metrics(JsonLog::Fields& fields, const MetricResults& metrics) {
  for (const auto& [name, value] : metrics) {
    if (value.is_number()) fields.emplace_back(name, static_cast<double>(value));
  }
}

void check_log(const fs::path& log, const fs::path& out, const std::vector<fs::path>& reads) {
  if (log.empty()) return;
  const auto files_of = [](const fs::path& folder) {
    return std::vector{folder / kLastCheckpoint, folder / kBestCheckpoint, folder / "config.yaml"};
  };
  std::error_code error;
  if (!out.empty()) {
    std::vector<fs::path> own = {out / "run.lock"};
    for (const std::string_view name : run_file_names()) {
      if (name != "log.jsonl") own.push_back(out / name);
    }
    for (const fs::path& file : own) {
      if (!same_place(log, file)) continue;
      fail<IoError>("--log-json {}: the run writes that file itself; name another", shown_path(log));
    }
  }
  for (const fs::path& read : reads) {
    if (read.empty()) continue;
    std::vector<fs::path> files = {read, read.parent_path() / "config.yaml"};
    if (fs::is_directory(read, error)) files = files_of(read);
    for (const fs::path& file : files) {
      if (!same_place(log, file)) continue;
      fail<IoError>("--log-json {}: the same command reads {}; name another file", shown_path(log), shown_path(file));
    }
  }
  const fs::path target = resolved(log), folder = target.parent_path();
  const bool of_a_run = target.filename() == "log.jsonl" &&
                        (fs::exists(folder / kLastCheckpoint, error) || fs::exists(folder / kBestCheckpoint, error));
  if (of_a_run && (out.empty() || !same_place(folder, out))) {
    fail<IoError>("--log-json {}: it is the log of the run in {}; name another file", shown_path(log),
                  shown_path(folder));
  }
  if (!fs::is_regular_file(log, error) || begins_as_log(log)) return;
  fail<IoError>("--log-json {}: expected a log or a new file, got a file that holds something else", shown_path(log));
}

LogRepair prepare_log(const fs::path& path, std::int64_t step, std::int64_t epochs) {
  std::error_code error;
  if (!fs::is_regular_file(path, error) || fs::file_size(path, error) == 0) return {};
  // Mostly the end goes, and cutting it off needs no room on a disk that may be full.
  std::uintmax_t end = 0;
  bool only_the_end = true;
  std::uintmax_t kept = 0;
  const LogRepair repair = look_through(path, step, epochs, [&](std::string_view line, std::uintmax_t offset) {
    only_the_end = only_the_end && offset == kept;
    kept += line.size() + 1;
    end = offset + line.size() + 1;
  });
  if (repair.first == 0) return repair;
  if (only_the_end && end == kept && kept <= fs::file_size(path, error)) {
    fs::resize_file(path, kept, error);
    if (error) fail<IoError>("{}: can't be repaired: {}", shown_path(path), error.message());
    return repair;
  }
  io::AtomicFile file(path);
  look_through(path, step, epochs, [&](std::string_view line, std::uintmax_t) {
    file.write(line.data(), line.size());
    file.write("\n", 1);
  });
  file.commit();
  return repair;
}

}  // namespace halfstep::training
