// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/json_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::training {

namespace fs = std::filesystem;

JsonLog::JsonLog(const fs::path& path, bool append) : path_(path), anew_(!append) {
  constexpr int kFlags = O_WRONLY | O_APPEND | O_CLOEXEC;
  file_ = ::open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
  made_ = file_ >= 0;
  // Also where a link leads to nothing yet.
  if (file_ < 0 && errno == EEXIST) file_ = ::open(path.c_str(), kFlags | O_CREAT, 0666);
  if (file_ < 0) {
    const int error = errno;
    fail<IoError>("{}: can't be written: {}", path.string(), std::strerror(error));
  }
}

JsonLog::~JsonLog() { close(); }

JsonLog::JsonLog(JsonLog&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      anew_(other.anew_),
      made_(std::exchange(other.made_, false)) {}

JsonLog& JsonLog::operator=(JsonLog&& other) noexcept {
  if (this == &other) return *this;
  close();
  path_ = std::move(other.path_);
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

void JsonLog::write(const char* event, std::initializer_list<std::pair<const char*, Value>> fields) {
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
    fail<IoError>("{}: writing failed; is the disk full? ({})", path_.string(), std::strerror(error));
  };
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

// What becomes of a log: `keep` is told the lines that stay.
LogRepair look_through(const fs::path& path, std::int64_t step, std::int64_t epochs,
                       const std::function<void(std::string_view line, std::uintmax_t offset)>& keep) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail<IoError>("{}: can't be read: {}", path.string(), std::strerror(errno));
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
  if (file.bad()) fail<IoError>("{}: can't be read: {}", path.string(), std::strerror(errno));
  return repair;
}

}  // namespace

void check_log(const std::filesystem::path& log, const std::filesystem::path& out) {
  if (log.empty()) return;
  std::error_code error;
  for (const char* own : {"last.safetensors", "best.safetensors", "config.yaml", "run.lock"}) {
    const std::filesystem::path file = out / own;
    if (!out.empty() && (log == file || std::filesystem::equivalent(log, file, error))) {
      fail<IoError>("--log-json {}: the run writes that file itself; name another", log.string());
    }
  }
  if (!std::filesystem::is_regular_file(log, error)) return;
  std::ifstream file(log, std::ios::binary);
  const int first = file.get();
  if (first != std::ifstream::traits_type::eof() && first != '{') {
    fail<IoError>("--log-json {}: expected a log or a new file, got a file that holds something else", log.string());
  }
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
    if (error) fail<IoError>("{}: can't be repaired: {}", path.string(), error.message());
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
