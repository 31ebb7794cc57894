// SPDX-License-Identifier: Apache-2.0
#include "cli/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>

#include "cli/mpi_output.h"
#include "halfstep/core/text.h"

namespace halfstep::cli {
namespace {

constexpr int kSize = 28;

bool given(const char* text) { return text != nullptr && *text != '\0'; }

bool names_utf8(std::string_view locale) {
  std::string lower;
  for (const char c : locale) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower.find("utf-8") != std::string::npos || lower.find("utf8") != std::string::npos;
}

bool starts_code_point(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

std::string repeat(std::string_view text, int n) {
  std::string all;
  for (int i = 0; i < n; ++i) all += text;
  return all;
}

std::string bar(const TerminalStyle& style, double fraction, int width) {
  if (!style.utf8) {
    const int inside = width - 2;
    const int full = static_cast<int>(fraction * inside);
    std::string text = "[" + std::string(static_cast<std::size_t>(full), '=');
    if (full < inside) text += ">" + std::string(static_cast<std::size_t>(inside - full - 1), ' ');
    return text + "]";
  }
  const int halves = static_cast<int>(fraction * 2 * width);
  const std::string full = repeat("━", halves / 2) + (halves % 2 != 0 ? "╸" : "");
  const std::string rest = repeat("─", width - halves / 2 - halves % 2);
  if (!style.colour) return full + rest;
  constexpr std::string_view kGreen = "\x1b[32m";
  constexpr std::string_view kDim = "\x1b[2m";
  constexpr std::string_view kReset = "\x1b[0m";
  return fmt::format("{}{}{}{}{}{}", kGreen, full, kReset, kDim, rest, kReset);
}

std::vector<std::string> fields_of(std::string_view details) {
  std::vector<std::string> fields;
  while (!details.empty()) {
    const std::size_t end = std::min(details.find("  "), details.size());
    if (end != 0) fields.emplace_back(details.substr(0, end));
    details.remove_prefix(std::min(end + 2, details.size()));
  }
  return fields;
}

/// The part of a picture that is drawn: columns [left, right), rows [top, bottom).
struct Box {
  int left;
  int right;
  int top;
  int bottom;
};

/// Where there is ink, with a pixel of margin; the height is even, since a line shows two rows.
Box ink_box(std::span<const std::uint8_t> pixels) {
  constexpr std::uint8_t kInk = 48;
  Box box{kSize, 0, kSize, 0};
  for (int y = 0; y < kSize; ++y) {
    for (int x = 0; x < kSize; ++x) {
      const int at = y * kSize + x;
      if (pixels[static_cast<std::size_t>(at)] < kInk) continue;
      box = {std::min(box.left, x), std::max(box.right, x + 1), std::min(box.top, y), std::max(box.bottom, y + 1)};
    }
  }
  if (box.left >= box.right) return {kSize / 2 - 4, kSize / 2 + 4, kSize / 2 - 4, kSize / 2 + 4};  // an empty picture
  return {std::max(0, box.left - 1), std::min(kSize, box.right + 1), std::max(0, box.top - 1) / 2 * 2,
          std::min(kSize, (box.bottom + 2) / 2 * 2)};
}

/// The upper and lower pixel of a cell as shades, with the codes that differ from the cell before.
class Shades {
 public:
  std::string cell(std::uint8_t upper, std::uint8_t lower) {
    std::string text;
    const int front = shade(upper);
    const int back = shade(lower);
    if (front != front_) text += fmt::format("\x1b[38;5;{}m", front);
    if (back != back_) text += fmt::format("\x1b[48;5;{}m", back);
    front_ = front;
    back_ = back;
    return text + "▀";
  }

 private:
  // Colours 232 to 255 of the 256 are greys from nearly black to nearly white.
  static int shade(std::uint8_t pixel) { return 232 + pixel * 23 / 255; }
  int front_ = -1;
  int back_ = -1;
};

std::string picture_line(const DigitPicture& picture, const Box& box, int y, const TerminalStyle& style) {
  const auto at = [&](int row, int x) { return picture.pixels[static_cast<std::size_t>(row * kSize + x)]; };
  std::string line;
  Shades shades;
  for (int x = box.left; x < box.right; ++x) {
    const std::uint8_t upper = at(y, x);
    const std::uint8_t lower = at(y + 1, x);
    if (style.utf8 && style.colour) {
      line += shades.cell(upper, lower);
    } else if (style.utf8) {
      constexpr std::uint8_t kDark = 96;
      constexpr std::array<const char*, 4> kBlocks{" ", "▀", "▄", "█"};
      line += kBlocks[static_cast<std::size_t>((upper >= kDark ? 1 : 0) + (lower >= kDark ? 2 : 0))];
    } else {
      constexpr std::string_view kRamp = " .:-=+*#%@";
      line += kRamp[static_cast<std::size_t>((upper + lower) * (static_cast<int>(kRamp.size()) - 1) / (2 * 255))];
    }
  }
  if (style.utf8 && style.colour) line += "\x1b[0m";
  return line;
}

std::string centred(const std::string& text, int text_width, int width) {
  const int before = std::max(0, width - text_width) / 2;
  const int after = std::max(0, width - text_width - before);
  return std::string(static_cast<std::size_t>(before), ' ') + text + std::string(static_cast<std::size_t>(after), ' ');
}

void end_line(std::string& text) {
  while (!text.empty() && text.back() == ' ') text.pop_back();
  text += '\n';
}

std::string draw_row(std::span<const DigitPicture> pictures, std::span<const Box> boxes, std::span<const int> widths,
                     std::string_view gap, const TerminalStyle& style) {
  int top = kSize;
  int bottom = 0;
  for (const Box& box : boxes) {
    top = std::min(top, box.top);
    bottom = std::max(bottom, box.bottom);
  }
  std::string text;
  for (int y = top; y < bottom; y += 2) {
    for (std::size_t i = 0; i < pictures.size(); ++i) {
      text += i == 0 ? "" : gap;
      text += centred(picture_line(pictures[i], boxes[i], y, style), boxes[i].right - boxes[i].left, widths[i]);
    }
    end_line(text);
  }
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    text += i == 0 ? "" : gap;
    text += centred(pictures[i].caption, display_width(pictures[i].caption), widths[i]);
  }
  end_line(text);
  return text;
}

}  // namespace

TerminalStyle style_of(bool is_terminal, int columns, const TerminalEnvironment& environment) {
  TerminalStyle style;
  const std::string_view term = given(environment.term) ? environment.term : "";
  style.terminal = is_terminal && term != "dumb" && !term.empty();
  style.colour = style.terminal && !given(environment.no_color);
  for (const char* locale : {environment.lc_all, environment.lc_ctype, environment.lang}) {
    if (!given(locale)) continue;  // the first one that is set decides
    style.utf8 = names_utf8(locale);
    break;
  }
  if (columns <= 0 && given(environment.columns)) columns = std::atoi(environment.columns);
  constexpr int kNarrowest = 20;
  constexpr int kWidest = 1000;
  if (columns > 0) style.width = std::clamp(columns, kNarrowest, kWidest);
  return style;
}

TerminalStyle style_of(int descriptor) {
  const bool terminal = ::isatty(descriptor) == 1 && mpi_shows_output();
  winsize size{};
  const int columns = terminal && ::ioctl(descriptor, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
  return style_of(terminal, columns,
                  {.term = std::getenv("TERM"),
                   .no_color = std::getenv("NO_COLOR"),
                   .columns = std::getenv("COLUMNS"),
                   .lc_all = std::getenv("LC_ALL"),
                   .lc_ctype = std::getenv("LC_CTYPE"),
                   .lang = std::getenv("LANG")});
}

bool is_terminal(int descriptor) { return style_of(descriptor).terminal; }

int display_width(std::string_view text) {
  int width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b' && i + 1 < text.size() && text[i + 1] == '[') {
      i += 2;
      while (i < text.size() && (text[i] < '@' || text[i] > '~')) ++i;
    } else if (starts_code_point(text[i])) {
      ++width;
    }
  }
  return width;
}

std::string cut_to_width(std::string_view text, int columns) {
  int width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (starts_code_point(text[i]) && ++width > columns) return std::string(text.substr(0, i));
  }
  return std::string(text);
}

std::string clock_text(double seconds) {
  if (!(seconds >= 0)) return "?";
  constexpr double kLongest = 359999;  // 99:59:59
  const auto whole = static_cast<std::int64_t>(std::llround(std::min(seconds, kLongest)));
  const std::int64_t hours = whole / 3600;
  const std::int64_t minutes = whole / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60);
  return fmt::format("{}:{:02}", minutes, whole % 60);
}

std::string progress_line(const TerminalStyle& style, std::string_view label, std::int64_t done, std::int64_t total,
                          std::string_view details, double seconds_left) {
  const double fraction =
      total > 0 ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0) : 0.0;
  std::vector<std::string> fields = fields_of(details);
  if (seconds_left >= 0) fields.push_back("eta " + clock_text(seconds_left));
  // The last column stays free: many terminals go to the next line once it is written to.
  const int room = style.width - 1;
  constexpr int kShortest = 8;
  constexpr int kLongest = 32;
  constexpr int kPercent = 4;
  const int fixed = display_width(label) + 2 + 2 + kPercent;
  const auto fields_width = [&] {
    int width = 0;
    for (const std::string& field : fields) width += 2 + display_width(field);
    return width;
  };
  while (!fields.empty() && fixed + fields_width() + kShortest > room) fields.pop_back();
  const int bar_width = std::min(room - fixed - fields_width(), kLongest);
  // Rounded down: 100% means done.
  const std::string percent = fmt::format("{:3}%", static_cast<int>(fraction * 100));
  if (bar_width < kShortest) return cut_to_width(fmt::format("{}  {}", label, percent), room);
  std::string line = fmt::format("{}  {}  {}", label, bar(style, fraction, bar_width), percent);
  for (const std::string& field : fields) line += "  " + field;
  return line;
}

void ProgressBar::update(std::string_view label, std::int64_t done, std::int64_t total, std::string_view details) {
  if (!terminal_) return;
  const Clock::time_point now = Clock::now();
  const bool fresh = label != label_ || done < first_done_;
  if (fresh) {
    label_ = label;
    first_done_ = done;
    start_ = now;
  }
  constexpr std::chrono::milliseconds kBetween{50};
  if (shown_ && !fresh && done < total && now - drawn_ < kBetween) return;
  drawn_ = now;
  double left = -1;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  if (done > first_done_ && seconds > 0.5) {
    left = seconds * static_cast<double>(total - done) / static_cast<double>(done - first_done_);
  }
  // The width is asked for each time: windows are resized.
  const std::string line = progress_line(style_of(::fileno(out_)), label, done, total, details, left);
  fmt::print(out_, "\r{}\x1b[K", line);
  std::fflush(out_);
  shown_ = true;
}

void ProgressBar::clear() {
  if (!shown_) return;
  shown_ = false;
  std::fputs("\r\x1b[K", out_);
  std::fflush(out_);
}

std::string draw_digits(const std::vector<DigitPicture>& pictures, const TerminalStyle& style) {
  constexpr std::string_view kGap = "   ";
  std::vector<Box> boxes;
  std::vector<int> widths;
  for (const DigitPicture& picture : pictures) {
    boxes.push_back(ink_box(picture.pixels));
    widths.push_back(std::max(boxes.back().right - boxes.back().left, display_width(picture.caption)));
  }
  std::string text;
  for (std::size_t first = 0; first < pictures.size();) {
    int used = widths[first];
    std::size_t n = 1;
    while (first + n < pictures.size() && used + static_cast<int>(kGap.size()) + widths[first + n] < style.width) {
      used += static_cast<int>(kGap.size()) + widths[first + n];
      ++n;
    }
    if (first != 0) text += '\n';
    text += draw_row(std::span(pictures).subspan(first, n), std::span(boxes).subspan(first, n),
                     std::span(widths).subspan(first, n), kGap, style);
    first += n;
  }
  return text;
}

std::string table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows,
                  const TerminalStyle& style) {
  std::vector<int> widths;
  const auto measure = [&](const std::vector<std::string>& row) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], display_width(printable(row[i])));
  };
  measure(header);
  for (const auto& row : rows) measure(row);

  std::string text;
  const auto add = [&](const std::vector<std::string>& row) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string cell = printable(row[i]);
      const std::string space(static_cast<std::size_t>(widths[i] - display_width(cell)), ' ');
      text += i == 0 ? cell + space : "  " + space + cell;
    }
    end_line(text);
  };
  if (std::ranges::any_of(header, [](const std::string& cell) { return !cell.empty(); })) {
    add(header);
    for (std::size_t i = 0; i < widths.size(); ++i) {
      text += i == 0 ? "" : "  ";
      text += repeat(style.utf8 ? "─" : "-", widths[i]);
    }
    end_line(text);
  }
  for (const auto& row : rows) add(row);
  return text;
}

}  // namespace halfstep::cli
