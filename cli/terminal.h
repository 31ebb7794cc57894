// SPDX-License-Identifier: Apache-2.0
// What the program draws in a terminal: progress, digits, tables. All but ProgressBar only make text.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::cli {

/// What the receiver of the output can show.
struct TerminalStyle {
  bool terminal = false;  ///< lines can be drawn over
  bool colour = false;    ///< 256 colours
  bool utf8 = false;      ///< line and block characters; otherwise ASCII
  int width = 80;         ///< columns
};

/// The variables that say so; null where unset.
struct TerminalEnvironment {
  const char* term = nullptr;
  const char* no_color = nullptr;  ///< https://no-color.org: any value but an empty one turns colours off
  const char* columns = nullptr;
  const char* lc_all = nullptr;
  const char* lc_ctype = nullptr;
  const char* lang = nullptr;
};

/// The style of a file descriptor that is a terminal (or not) of so many columns (0: unknown).
TerminalStyle style_of(bool is_terminal, int columns, const TerminalEnvironment& environment);
/// The style of an open file of this process.
TerminalStyle style_of(int descriptor);
/// Whether lines written there can be drawn over: a terminal, and not a dumb one.
bool is_terminal(int descriptor);

/// Columns that a text takes: code points without escape sequences.
int display_width(std::string_view text);
/// The first `columns` columns of a text without escape sequences.
std::string cut_to_width(std::string_view text, int columns);

/// One line, at most style.width - 1 columns wide:
/// `epoch 1/3  ━━━━━━━━╸────────   45%  loss 0.312  9000/s  eta 0:03`.
/// Where the width doesn't allow all, the time left goes first, then the fields of `details` (separated by two spaces)
/// from the right. `seconds_left` under 0: unknown.
std::string progress_line(const TerminalStyle& style, std::string_view label, std::int64_t done, std::int64_t total,
                          std::string_view details, double seconds_left);

/// `0:07`, `12:03`, `1:02:03`.
std::string clock_text(double seconds);

/// Draws progress over the same line of a terminal, some 20 times a second at most; does nothing elsewhere.
class ProgressBar {
 public:
  explicit ProgressBar(bool terminal, std::FILE* out = stdout) : terminal_(terminal), out_(out) {}
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar() { clear(); }

  /// Shows that `done` of `total` are done. Another label starts the estimate of the time left anew.
  void update(std::string_view label, std::int64_t done, std::int64_t total, std::string_view details);
  /// Takes the bar away, so that a line can be printed in its place.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  bool terminal_;
  std::FILE* out_;
  bool shown_ = false;
  std::string label_;
  std::int64_t first_done_ = 0;
  Clock::time_point start_;
  Clock::time_point drawn_;
};

/// A grey picture of 28 by 28 and the text below it.
struct DigitPicture {
  std::span<const std::uint8_t> pixels;
  std::string caption;
};

/// Draws pictures side by side, as many in a row as the width allows: in shades of grey where there are colours, with
/// half blocks where there is UTF-8 only, else with letters. Empty margins are left out.
std::string draw_digits(const std::vector<DigitPicture>& pictures, const TerminalStyle& style = style_of(1));

/// A table of aligned columns: the first to the left, the others to the right, the header underlined. A header without
/// any text is left out. Rows may be shorter than the header. Names in cells may be any bytes.
std::string table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows,
                  const TerminalStyle& style = style_of(1));

}  // namespace halfstep::cli
