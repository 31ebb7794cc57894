// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_list.h"

#include <charconv>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"

namespace halfstep::data {
namespace {

constexpr std::string_view kSpace = " \t\r";

/// Bytes of a line that a message shows.
constexpr std::size_t kShown = 60;

}  // namespace

std::vector<ImageListEntry> parse_image_list(std::string_view text, std::string_view name) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::vector<ImageListEntry> entries;
  for (std::int64_t number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    const std::size_t begin = line.find_first_not_of(kSpace);
    if (begin == std::string_view::npos || line[begin] == '#') continue;
    line = line.substr(begin, line.find_last_not_of(kSpace) + 1 - begin);
    const std::size_t gap = line.find_last_of(kSpace);
    const std::size_t path_end = gap == std::string_view::npos ? gap : line.find_last_not_of(kSpace, gap);
    std::int64_t label = -1;
    if (path_end != std::string_view::npos) {
      const char* const end = line.data() + line.size();
      const auto [stop, error] = std::from_chars(line.data() + gap + 1, end, label);
      if (error != std::errc() || stop != end) label = -1;
    }
    if (label < 0 || label >= kMostClasses || line.find('\0') != std::string_view::npos) {
      fail<IoError>("{}:{}: expected a path and a label from 0 to {}, got '{}'", printable(name), number,
                    kMostClasses - 1, printable_start(line, kShown));
    }
    entries.push_back({.path = std::string(line.substr(0, path_end + 1)), .label = label});
  }
  if (entries.empty()) fail<IoError>("{}: expected lines with a path and a label, got none", printable(name));
  return entries;
}

}  // namespace halfstep::data
