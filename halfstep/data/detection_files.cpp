// SPDX-License-Identifier: Apache-2.0
// Reads the many small files of a data set for detection.
#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_description_internal.h"

namespace halfstep::data {

namespace fs = std::filesystem;

std::vector<std::string> read_lines(const fs::path& file) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 30;
  const std::string all = read_whole_file(file, kMostBytes);
  std::string_view text = all;
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF", kAround = " \t\r";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::vector<std::string> lines;
  for (std::int64_t number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::size_t begin = line.find_first_not_of(kAround);
    if (begin == std::string_view::npos) continue;
    line = line.substr(begin, line.find_last_not_of(kAround) + 1 - begin);
    if (line.find('\0') != std::string_view::npos) {
      fail<IoError>("{}:{}: expected text, got a zero byte", shown_path(file), number);
    }
    lines.emplace_back(line);
  }
  return lines;
}

std::vector<std::string> read_classes(const fs::path& file) {
  std::vector<std::string> names = read_lines(file);
  if (names.empty()) fail<IoError>("{}: expected names of classes, one a line, got none", shown_path(file));
  if (std::ssize(names) > kMostDetectionClasses) {
    fail<IoError>("{}: expected at most {} names of classes, got {}", shown_path(file), kMostDetectionClasses,
                  names.size());
  }
  for (std::string& name : names) name = printable(name);
  return names;
}

void for_each_file(std::size_t n, const std::function<void(std::size_t)>& run) {
  // Disks answer several questions at a time, and decoding takes longer than most answers.
  constexpr std::size_t kMostThreads = 8, kFilesWorthAThread = 64;
  const std::size_t threads =
      std::min({kMostThreads, std::size_t{std::max(std::thread::hardware_concurrency(), 1U)}, n / kFilesWorthAThread});
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < n; i = next++) run(i);
  };
  std::vector<std::jthread> helpers;
  try {
    for (std::size_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // This thread does what they would have done.
  }
  work();
}

std::string picture_sizes(const fs::path& file, const ImageLimits& limits, std::int64_t& width, std::int64_t& height) {
  // The header is at the beginning, behind what cameras write about themselves.
  constexpr std::uint64_t kHeader = 1 << 16;
  try {
    const InputFile input(file);
    if (input.size() > limits.max_bytes) {
      return fmt::format("{}: expected a picture of at most {} bytes, got {}", input.name(), limits.max_bytes,
                         input.size());
    }
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(std::min(kHeader, input.size())));
    input.read(0, bytes.data(), bytes.size());
    const auto look = [&] {
      const ImageDecoder picture(bytes, input.name(), limits);
      width = picture.info().width;
      height = picture.info().height;
    };
    if (bytes.size() < input.size()) {
      try {
        look();
        return {};
      } catch (const IoError&) {
        bytes.resize(static_cast<std::size_t>(input.size()));
        input.read(0, bytes.data(), bytes.size());
      }
    }
    look();
    return {};
  } catch (const IoError& error) {
    return error.what();
  }
}

}  // namespace halfstep::data
