// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/download_internal.h"

#include <curl/curl.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/sha256_internal.h"

namespace halfstep::data::detail {
namespace {

namespace fs = std::filesystem;

// What is wrong with a server, not with this machine: another one may do.
class ServerError : public IoError {
 public:
  using IoError::IoError;
};

std::string sum_of(int file, const std::string& name, const std::atomic<bool>* stop) {
  Sha256 sum;
  std::vector<char> buffer(1 << 20);
  for (std::uint64_t at = 0;;) {
    if (stop != nullptr && *stop) throw Interrupted();
    const ssize_t n = ::pread(file, buffer.data(), buffer.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw IoError(fmt::format("{}: can't be read: {}", name, std::strerror(errno)));
    if (n == 0) return sum.finish();
    sum.add(buffer.data(), static_cast<std::size_t>(n));
    at += static_cast<std::uint64_t>(n);
  }
}

// The file while it grows. Nobody else writes it.
class PartFile {
 public:
  explicit PartFile(const fs::path& path) : path_(shown_path(path)) {
    file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) fail("can't be written", errno);
    struct stat info {};
    if (::fstat(file_, &info) != 0 || !S_ISREG(info.st_mode)) {
      close();
      throw IoError(path_ + ": expected a file, got something else");
    }
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
      close();
      throw IoError(path_ + ": another process is downloading it");
    }
    size_ = static_cast<std::uint64_t>(info.st_size);
  }
  ~PartFile() { close(); }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  std::uint64_t size() const { return size_; }

  void clear() {
    if (::ftruncate(file_, 0) != 0) fail("can't be emptied", errno);
    size_ = 0;
  }
  void append(const char* data, std::size_t bytes) {
    while (bytes > 0) {
      const ssize_t n = ::pwrite(file_, data, bytes, static_cast<off_t>(size_));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("can't be written", errno);
      data += n;
      bytes -= static_cast<std::size_t>(n);
      size_ += static_cast<std::uint64_t>(n);
    }
  }
  void sync() {
    if (::fsync(file_) != 0) fail("can't be written", errno);
  }
  std::string sum(const std::atomic<bool>* stop) const { return sum_of(file_, path_, stop); }

 private:
  [[noreturn]] void fail(const char* what, int error) const {
    throw IoError(fmt::format("{}: {}: {}", path_, what, std::strerror(error)));
  }
  void close() {
    if (file_ >= 0) ::close(std::exchange(file_, -1));
  }

  std::string path_;  // as it is shown
  int file_ = -1;
  std::uint64_t size_ = 0;
};

// How a try ended, when it did not end well.
enum class Outcome {
  done,       // all that the server has for us came
  again,      // worth another try, from where this one stopped
  no_ranges,  // what the server says of ranges is wrong: from the beginning
  no_use,     // this URL has nothing for us
};

// A URL as it may be shown: without a password.
std::string shown(const std::string& url) {
  const std::size_t begin = url.find("://");
  if (begin == std::string::npos) return url;
  const std::size_t host = begin + 3, end = std::min(url.find_first_of("/?#", host), url.size());
  const std::size_t at = url.substr(0, end).rfind('@');
  return at == std::string::npos || at < host ? url : url.substr(0, host) + url.substr(at + 1);
}

// `bytes FIRST-LAST/TOTAL`, TOTAL may be *; none when it is anything else.
struct ContentRange {
  std::uint64_t first = 0, last = 0;
  std::optional<std::uint64_t> total;
};
std::optional<ContentRange> parse_content_range(std::string_view text) {
  ContentRange r;
  const auto take = [&text](std::uint64_t& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{}) return false;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return true;
  };
  const auto skip = [&text](std::string_view word) {
    if (!text.starts_with(word)) return false;
    text.remove_prefix(word.size());
    return true;
  };
  if (!skip("bytes ") || !take(r.first) || !skip("-") || !take(r.last) || !skip("/") || r.last < r.first) return {};
  std::uint64_t total = 0;
  if (text == "*") return r;
  if (!take(total) || !text.empty() || total <= r.last) return {};
  r.total = total;
  return r;
}

// One request.
class Attempt {
 public:
  Attempt(const Download& what, const std::string& url, PartFile& file, bool ranges)
      : what_(what), url_(url), file_(file), begin_(file.size()) {
    if (begin_ > 0 && !ranges) {
      file_.clear();
      begin_ = 0;
    }
  }

  Outcome run() {
    const std::unique_ptr<CURL, void (*)(CURL*)> curl(curl_easy_init(), curl_easy_cleanup);
    if (curl == nullptr) throw IoError("libcurl can't be used");
    curl_ = curl.get();
    set(CURLOPT_URL, url_.c_str());
#if LIBCURL_VERSION_NUM >= 0x075500
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
#else
    set(CURLOPT_PROTOCOLS, long{CURLPROTO_HTTP | CURLPROTO_HTTPS});
    set(CURLOPT_REDIR_PROTOCOLS, long{CURLPROTO_HTTP | CURLPROTO_HTTPS});
#endif
    set(CURLOPT_FOLLOWLOCATION, 1L);
    set(CURLOPT_MAXREDIRS, 5L);
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_USERAGENT, "halfstep/" HALFSTEP_VERSION);
    set(CURLOPT_CONNECTTIMEOUT, static_cast<long>(what_.timeout_s));
    set(CURLOPT_LOW_SPEED_LIMIT, 1000L);
    set(CURLOPT_LOW_SPEED_TIME, static_cast<long>(what_.timeout_s));
    char reason[CURL_ERROR_SIZE] = "";
    set(CURLOPT_ERRORBUFFER, static_cast<char*>(reason));
    set(CURLOPT_HEADERFUNCTION, &header_callback);
    set(CURLOPT_HEADERDATA, this);
    set(CURLOPT_WRITEFUNCTION, &write_callback);
    set(CURLOPT_WRITEDATA, this);
    set(CURLOPT_NOPROGRESS, 0L);
    set(CURLOPT_XFERINFOFUNCTION, &progress_callback);
    set(CURLOPT_XFERINFODATA, this);
    const std::string range = fmt::format("{}-", begin_);
    // Not CURLOPT_RESUME_FROM: with it a server that sends the whole file is an error, and here it is welcome.
    if (begin_ > 0) set(CURLOPT_RANGE, range.c_str());
    const CURLcode code = curl_easy_perform(curl_);
    if (error_) std::rethrow_exception(error_);
    if (what_.stop != nullptr && *what_.stop) throw Interrupted();
    return judge(code, reason);
  }

  /// What went wrong.
  const std::string& problem() const { return problem_; }

 private:
  template <class T>
  void set(CURLoption option, T value) {
    if (const CURLcode code = curl_easy_setopt(curl_, option, value); code != CURLE_OK) {
      throw IoError(fmt::format("{}: {}", shown(url_), curl_easy_strerror(code)));
    }
  }

  long status() const {
    long status = 0;
    curl_easy_getinfo(curl_, CURLINFO_RESPONSE_CODE, &status);
    return status;
  }

  static std::size_t header_callback(char* data, std::size_t, std::size_t bytes, void* self) {
    static_cast<Attempt*>(self)->header({data, bytes});
    return bytes;
  }
  void header(std::string_view line) {
    if (line.starts_with("HTTP/")) {  // of a redirection's answer everything is forgotten
      range_.reset();
      return;
    }
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) return;
    std::string name(line.substr(0, colon));
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    if (name != "content-range") return;
    line.remove_prefix(colon + 1);
    while (!line.empty() && line.front() == ' ') line.remove_prefix(1);
    while (!line.empty() && (line.back() == '\r' || line.back() == '\n' || line.back() == ' ')) line.remove_suffix(1);
    range_ = std::string(line);
  }

  // Whether the bytes to come are those that were asked for, before the first of them is written.
  bool begin_body() {
    const long code = status();
    if (code != 200 && code != 206) {
      ignore_ = true;  // a page about the error
      return true;
    }
    if (code == 200) {
      if (begin_ > 0) file_.clear();  // it has no ranges
      begin_ = 0;
      return true;
    }
    if (begin_ == 0) {
      refusal_ = {Outcome::again, "expected the whole file, got a part of it (status 206)"};
      return false;
    }
    const auto range = range_ ? parse_content_range(*range_) : std::nullopt;
    if (!range || range->first != begin_ || (what_.size && range->total && *range->total != *what_.size)) {
      refusal_ = {Outcome::no_ranges, fmt::format("expected the range from byte {}, got {}", begin_,
                                                  range_ ? "'" + *range_ + "'" : std::string("none"))};
      return false;
    }
    return true;
  }

  static std::size_t write_callback(char* data, std::size_t, std::size_t bytes, void* self) {
    auto* a = static_cast<Attempt*>(self);
    try {
      return a->write(data, bytes) ? bytes : 0;
    } catch (...) {  // must not fly through C
      a->error_ = std::current_exception();
      return 0;
    }
  }
  bool write(const char* data, std::size_t bytes) {
    if (!std::exchange(begun_, true) && !begin_body()) return false;
    if (ignore_) return true;
    const std::uint64_t most = what_.size.value_or(what_.most_bytes);
    if (bytes > most - std::min(most, file_.size())) {
      // Behind a part of something else, or of the file? From the beginning it shows.
      refusal_ = {begin_ > 0 ? Outcome::no_ranges : Outcome::no_use,
                  fmt::format("expected {}{} bytes, got more", what_.size ? "" : "at most ", most)};
      return false;
    }
    file_.append(data, bytes);
    return true;
  }

  static int progress_callback(void* self, curl_off_t total, curl_off_t, curl_off_t, curl_off_t) {
    auto* a = static_cast<Attempt*>(self);
    if (a->what_.stop != nullptr && *a->what_.stop) return 1;
    if (a->what_.progress && a->begun_ && !a->ignore_) {
      const std::uint64_t all = total > 0 ? a->begin_ + static_cast<std::uint64_t>(total) : 0;
      a->what_.progress(a->file_.size(), a->what_.size.value_or(all));
    }
    return 0;
  }

  Outcome judge(CURLcode code, const char* reason) {
    if (refusal_) {
      problem_ = refusal_->second;
      return refusal_->first;
    }
    const long http = status();
    if (code == CURLE_OK && (http == 200 || http == 206)) {
      if (!begun_) begin_body();  // an empty body
      if (!what_.size || file_.size() == *what_.size) return Outcome::done;
      problem_ = fmt::format("expected {} bytes, got {}", *what_.size, file_.size());
      return Outcome::again;
    }
    if (code == CURLE_OK) {
      problem_ = fmt::format("the server answers with status {}", http);
      if (http == 416 && begin_ > 0) {
        // Nothing behind what is here: it is whole, or not what it should be.
        return what_.size ? Outcome::no_ranges : Outcome::done;
      }
      return http >= 500 || http == 408 || http == 429 ? Outcome::again : Outcome::no_use;
    }
    problem_ = *reason != '\0' ? reason : curl_easy_strerror(code);
    switch (code) {
      case CURLE_OPERATION_TIMEDOUT:
        problem_ = fmt::format("nothing or almost nothing arrived for {} s", what_.timeout_s);
        return Outcome::again;
      case CURLE_PARTIAL_FILE:
      case CURLE_RECV_ERROR:
      case CURLE_GOT_NOTHING:
      case CURLE_HTTP2:
      case CURLE_HTTP2_STREAM:
        problem_ = fmt::format("the connection was cut off after {} bytes{}", file_.size(),
                               what_.size ? fmt::format(" of {}", *what_.size) : "");
        return Outcome::again;
      case CURLE_SEND_ERROR:
      case CURLE_COULDNT_CONNECT:
      case CURLE_COULDNT_RESOLVE_HOST:
        return Outcome::again;
      default:
        return Outcome::no_use;
    }
  }

  const Download& what_;
  const std::string& url_;
  PartFile& file_;
  CURL* curl_ = nullptr;
  std::uint64_t begin_;               // bytes that were there before
  std::optional<std::string> range_;  // of the answer
  bool begun_ = false;
  bool ignore_ = false;
  std::optional<std::pair<Outcome, std::string>> refusal_;
  std::exception_ptr error_;
  std::string problem_;
};

void wait(const Download& what, int number) {
  using namespace std::chrono_literals;
  const auto until = std::chrono::steady_clock::now() + 100ms * (1 << std::min(number, 5));
  while (std::chrono::steady_clock::now() < until) {
    if (what.stop != nullptr && *what.stop) throw Interrupted();
    std::this_thread::sleep_for(20ms);
  }
}

void fetch(const Download& what, const std::string& url, PartFile& file) {
  constexpr std::uint64_t kProgress = 1 << 16;
  bool ranges = true;
  // Whether bytes are here that did not come in one piece from this URL.
  bool pieces = file.size() > 0;
  for (int tries = 0;;) {
    if (what.size && file.size() > *what.size) file.clear();
    const std::uint64_t before = file.size();
    Outcome outcome = Outcome::done;
    std::string problem;
    if (!what.size || before < *what.size || *what.size == 0) {
      Attempt attempt(what, url, file, ranges);
      outcome = attempt.run();
      problem = attempt.problem();
    }
    if (outcome == Outcome::done) {
      file.sync();
      const std::string sum = file.sum(what.stop);
      if (what.sha256.empty() || sum == what.sha256) return;
      const std::uint64_t size = file.size();
      file.clear();
      problem = fmt::format("expected the SHA-256 sum {}, got {} of {} bytes", what.sha256, sum, size);
      // Pieces may not belong together. What came in one piece is what the server has.
      outcome = std::exchange(pieces, false) ? Outcome::no_ranges : Outcome::no_use;
    }
    pieces = pieces || file.size() > 0;
    if (outcome == Outcome::no_use) throw ServerError(fmt::format("{}: {}", shown(url), problem));
    if (outcome == Outcome::no_ranges) {
      ranges = false;
      file.clear();
      pieces = false;
    }
    tries = file.size() >= before + kProgress ? 1 : tries + 1;
    if (tries >= what.tries) {
      throw ServerError(fmt::format("{}: {}; given up after {} tr{}{}", shown(url), problem, what.tries,
                                    what.tries == 1 ? "y" : "ies",
                                    file.size() > 0 ? ", what was downloaded is kept for the next run" : ""));
    }
    if (what.retrying) what.retrying(fmt::format("{}: {}; trying again", shown(url), problem));
    wait(what, tries);
  }
}

}  // namespace

void download(const Download& what) {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  PartFile file(what.file);
  std::string problems;
  for (const std::string& url : what.urls) {
    try {
      fetch(what, url, file);
      return;
    } catch (const ServerError& e) {
      problems += (problems.empty() ? "" : "; ") + std::string(e.what());
    }
  }
  if (file.size() == 0) ::unlink(what.file.c_str());
  throw IoError(problems);
}

std::string sha256_of(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw IoError(fmt::format("{}: can't be read: {}", shown_path(path), std::strerror(errno)));
  try {
    std::string sum = sum_of(file, shown_path(path), nullptr);
    ::close(file);
    return sum;
  } catch (...) {
    ::close(file);
    throw;
  }
}

}  // namespace halfstep::data::detail
