// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/text.h"

#include <cstdint>

namespace halfstep {
namespace {

struct Character {
  std::size_t bytes = 0;  // 0: the first byte begins no valid one
  std::uint32_t point = 0;
};

Character next_character(std::string_view text) {
  const auto c = static_cast<unsigned char>(text[0]);
  if (c < 0x80) return {1, c};
  const std::size_t more = c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : 0;
  if (more == 0 || more >= text.size()) return {};
  std::uint32_t point = c & (0x3fu >> more);
  for (std::size_t k = 1; k <= more; ++k) {
    const auto next = static_cast<unsigned char>(text[k]);
    if ((next & 0xc0) != 0x80) return {};
    point = point << 6 | (next & 0x3f);
  }
  // Longer forms than needed, what is beyond Unicode, and halves of surrogate pairs.
  if ((more == 2 && point < 0x800) || (more == 3 && (point < 0x10000 || point > 0x10ffff))) return {};
  if (point >= 0xd800 && point < 0xe000) return {};
  return {more + 1, point};
}

bool shows(std::uint32_t point) {
  if (point < 0x20 || (point >= 0x7f && point < 0xa0)) return false;
  // Ends of lines and paragraphs, and what turns the direction of the text that follows.
  return !(point >= 0x2028 && point <= 0x202e) && !(point >= 0x2066 && point <= 0x2069);
}

void append_byte(std::string& to, unsigned char byte) {
  static constexpr char kDigits[] = "0123456789abcdef";
  to += '\\';
  switch (byte) {
    case '\n':
      to += 'n';
      return;
    case '\r':
      to += 'r';
      return;
    case '\t':
      to += 't';
      return;
    case 0x1b:
      to += 'e';
      return;
    default:
      to += 'x';
      to += kDigits[byte >> 4];
      to += kDigits[byte & 15];
  }
}

struct Escaping {
  bool lines = false;        // line ends and tabs stay
  bool backslashes = false;  // are doubled
};

std::string escaped(std::string_view text, const Escaping& how) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const Character c = next_character(text);
    const std::size_t bytes = c.bytes == 0 ? 1 : c.bytes;
    if (c.bytes != 0 && (shows(c.point) || (how.lines && (c.point == '\n' || c.point == '\t')))) {
      if (c.point == '\\' && how.backslashes) result += '\\';
      result += text.substr(0, bytes);
    } else {
      for (const char byte : text.substr(0, bytes)) append_byte(result, static_cast<unsigned char>(byte));
    }
    text.remove_prefix(bytes);
  }
  return result;
}

int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t bytes = next_character(text).bytes;
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string printable(std::string_view text) { return escaped(text, {}); }

std::string shown_path(const std::filesystem::path& path) {
  constexpr std::size_t kMost = 400, kStart = 200, kEnd = 150;
  const std::string_view text = path.native();
  if (text.size() <= kMost) return printable(text);
  return printable(text.substr(0, kStart)) + "..." + printable(text.substr(text.size() - kEnd));
}

std::string printable_lines(std::string_view text) { return escaped(text, {.lines = true}); }

std::string printable_start(std::string_view text, std::size_t most) {
  if (text.size() <= most) return printable(text);
  // Not in the middle of a character.
  std::size_t end = most;
  while (end > 0 && end + 3 > most && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return printable(text.substr(0, end)) + "...";
}

std::string kept_name(std::string_view name) { return escaped(name, {.backslashes = true}); }

std::string raw_name(std::string_view kept) {
  std::string result;
  result.reserve(kept.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const char after = kept[i] == '\\' && i + 1 < kept.size() ? kept[i + 1] : '\0';
    const int high = after == 'x' && i + 3 < kept.size() ? digit(kept[i + 2]) : -1;
    const int low = high >= 0 ? digit(kept[i + 3]) : -1;
    if (low >= 0) {
      result += static_cast<char>(high << 4 | low);
      i += 3;
    } else if (after == '\\' || after == 'n' || after == 'r' || after == 't' || after == 'e') {
      result += after == 'n' ? '\n' : after == 'r' ? '\r' : after == 't' ? '\t' : after == 'e' ? '\x1b' : '\\';
      ++i;
    } else {
      result += kept[i];
    }
  }
  return result;
}

}  // namespace halfstep
