// SPDX-License-Identifier: Apache-2.0
#include "cli/terminal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include "halfstep/data/digits.h"

namespace halfstep::cli {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

constexpr TerminalStyle kPlain{};
constexpr TerminalStyle kAscii{.terminal = true};
constexpr TerminalStyle kBlocks{.terminal = true, .utf8 = true};
constexpr TerminalStyle kColours{.terminal = true, .colour = true, .utf8 = true};

TEST(TerminalStyle, FollowsTheEnvironment) {
  const TerminalStyle full = style_of(true, 120, {.term = "xterm-256color", .lang = "en_GB.UTF-8"});
  EXPECT_TRUE(full.terminal);
  EXPECT_TRUE(full.colour);
  EXPECT_TRUE(full.utf8);
  EXPECT_EQ(full.width, 120);
  EXPECT_FALSE(style_of(true, 80, {.term = "xterm", .no_color = "1"}).colour);
  EXPECT_TRUE(style_of(true, 80, {.term = "xterm", .no_color = ""}).colour);
  EXPECT_FALSE(style_of(true, 80, {.term = "dumb"}).terminal);
  EXPECT_FALSE(style_of(true, 80, {}).terminal);
  const TerminalStyle pipe = style_of(false, 0, {.term = "xterm", .lang = "C.utf8"});
  EXPECT_FALSE(pipe.terminal);
  EXPECT_FALSE(pipe.colour);
  EXPECT_TRUE(pipe.utf8);
}

TEST(TerminalStyle, TheFirstLocaleThatIsSetDecides) {
  EXPECT_FALSE(style_of(true, 80, {.lc_all = "C", .lang = "en_GB.UTF-8"}).utf8);
  EXPECT_TRUE(style_of(true, 80, {.lc_all = "", .lc_ctype = "de_DE.UTF-8", .lang = "C"}).utf8);
  EXPECT_FALSE(style_of(true, 80, {}).utf8);
}

TEST(TerminalStyle, WidthComesFromTheTerminalThenFromColumns) {
  EXPECT_EQ(style_of(true, 100, {.columns = "60"}).width, 100);
  EXPECT_EQ(style_of(false, 0, {.columns = "60"}).width, 60);
  EXPECT_EQ(style_of(false, 0, {.columns = "many"}).width, 80);
  EXPECT_EQ(style_of(false, 0, {}).width, 80);
  EXPECT_EQ(style_of(true, 3, {}).width, 20);
}

TEST(TerminalText, WidthCountsCodePointsOnly) {
  EXPECT_EQ(display_width(""), 0);
  EXPECT_EQ(display_width("abc"), 3);
  EXPECT_EQ(display_width("━━é"), 3);
  EXPECT_EQ(display_width("\x1b[38;5;12mab\x1b[0m"), 2);
  EXPECT_EQ(display_width("\x1b["), 0);
  EXPECT_EQ(cut_to_width("aéb", 2), "aé");
  EXPECT_EQ(cut_to_width("ab", 5), "ab");
}

TEST(TerminalText, Clock) {
  EXPECT_EQ(clock_text(0), "0:00");
  EXPECT_EQ(clock_text(7.4), "0:07");
  EXPECT_EQ(clock_text(59.6), "1:00");
  EXPECT_EQ(clock_text(723), "12:03");
  EXPECT_EQ(clock_text(3723), "1:02:03");
  EXPECT_EQ(clock_text(1e12), "99:59:59");
}

TEST(ProgressLine, ShowsEverythingWhereThereIsRoom) {
  EXPECT_EQ(progress_line({.terminal = true, .width = 100}, "epoch 1/3", 1, 2, "loss 0.31  900/s", 3),
            "epoch 1/3  [===============>              ]   50%  loss 0.31  900/s  eta 0:03");
  EXPECT_EQ(progress_line({.terminal = true, .utf8 = true, .width = 41}, "e", 3, 16, "", -1),
            "e  ━━━━━╸─────────────────────────   18%");
}

TEST(ProgressLine, FillsUpExactlyAtTheEnd) {
  EXPECT_EQ(progress_line({.width = 24}, "e", 0, 10, "", -1), "e  [>           ]    0%");
  EXPECT_EQ(progress_line({.width = 24}, "e", 10, 10, "", -1), "e  [============]  100%");
  EXPECT_EQ(progress_line({.width = 200}, "e", 999, 1000, "", -1).find("100%"), std::string::npos);
  EXPECT_EQ(progress_line({.width = 24}, "e", 20, 10, "", -1), "e  [============]  100%");
  EXPECT_EQ(progress_line({.width = 24}, "e", 0, 0, "", -1), "e  [>           ]    0%");
}

TEST(ProgressLine, FitsEveryWidth) {
  for (const TerminalStyle& base : {kAscii, kBlocks, kColours}) {
    for (int width = 20; width <= 120; ++width) {
      TerminalStyle style = base;
      style.width = width;
      for (const std::int64_t done : {0, 37, 100}) {
        const std::string line =
            progress_line(style, "epoch 10/10", done, 100, "loss 0.1234  12345/s  scale 65536", 61);
        EXPECT_LT(display_width(line), width);
        EXPECT_NE(line.find("epoch 10/10"), std::string::npos);
      }
    }
  }
}

TEST(ProgressLine, DropsTheLastFieldsFirst) {
  const std::string line = progress_line({.width = 50}, "epoch 1/3", 1, 2, "loss 0.3120  900/s  scale 65536", 3);
  EXPECT_NE(line.find("loss 0.3120"), std::string::npos);
  EXPECT_EQ(line.find("eta"), std::string::npos);
  EXPECT_EQ(line.find("scale"), std::string::npos);
}

TEST(ProgressLine, ColoursAddNoColumns) {
  TerminalStyle style = kBlocks;
  const std::string plain = progress_line(style, "e", 1, 3, "x", 2);
  style.colour = true;
  const std::string coloured = progress_line(style, "e", 1, 3, "x", 2);
  EXPECT_NE(plain, coloured);
  EXPECT_EQ(display_width(plain), display_width(coloured));
  EXPECT_EQ(plain.find('\x1b'), std::string::npos);
}

// A picture with a square of 4 by 4 whose upper left pixel is (10, 10).
std::array<std::uint8_t, 784> square() {
  std::array<std::uint8_t, 784> pixels{};
  for (int y = 10; y < 14; ++y) {
    for (int x = 10; x < 14; ++x) pixels[static_cast<std::size_t>(y * 28 + x)] = 255;
  }
  return pixels;
}

TEST(DrawDigits, WithLetters) {
  const auto pixels = square();
  // Rows 8 to 16 in four lines, columns 9 to 15: a margin around 4 by 4 pixels.
  EXPECT_EQ(draw_digits({{pixels, "4"}}, kAscii), "\n @@@@\n @@@@\n\n  4\n");
}

TEST(DrawDigits, WithHalfBlocks) {
  auto pixels = square();
  pixels[10 * 28 + 10] = 0;
  pixels[13 * 28 + 13] = 0;
  EXPECT_EQ(draw_digits({{pixels, "a square"}}, kBlocks), "\n  ▄███\n  ███▀\n\na square\n");
}

TEST(DrawDigits, InColours) {
  const auto pixels = square();
  const auto lines = lines_of(draw_digits({{pixels, "4"}}, kColours));
  ASSERT_EQ(lines.size(), 5U);
  // Codes only where the shade changes: black, white, black again, reset.
  EXPECT_EQ(lines[1],
            "\x1b[38;5;232m\x1b[48;5;232m▀\x1b[38;5;255m\x1b[48;5;255m▀▀▀▀\x1b[38;5;232m\x1b[48;5;232m▀\x1b[0m");
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(display_width(lines[i]), 6);
}

TEST(DrawDigits, FitTheWidth) {
  const data::MnistData data = data::make_digits(data::Split::kTest, {.count = 12});
  std::vector<DigitPicture> pictures;
  for (std::int64_t i = 0; i < data.count; ++i) {
    pictures.push_back({data.image(i), std::to_string(data.labels[static_cast<std::size_t>(i)]) + " (99.9%)"});
  }
  for (const TerminalStyle& base : {kAscii, kBlocks, kColours}) {
    for (const int width : {20, 40, 80, 200}) {
      TerminalStyle style = base;
      style.width = width;
      std::size_t captions = 0;
      for (const std::string& line : lines_of(draw_digits(pictures, style))) {
        EXPECT_LE(display_width(line), std::max(width, 28)) << line;  // one picture takes up to 28
        for (std::size_t at = line.find("(99"); at != std::string::npos; at = line.find("(99", at + 1)) ++captions;
      }
      EXPECT_EQ(captions, 12U);
    }
  }
}

TEST(DrawDigits, HandlesAnEmptyPictureAndNone) {
  const std::array<std::uint8_t, 784> pixels{};
  EXPECT_EQ(draw_digits({{pixels, "nothing"}}, kAscii), "\n\n\n\nnothing\n");
  EXPECT_EQ(draw_digits({}, kAscii), "");
}

TEST(Table, CellsAreShown) {
  EXPECT_EQ(table({"", "a\x1b[31m"}, {{"x\xff\n", "1"}}, {}),
            "         a\\e[31m\n-------  -------\nx\\xff\\n        1\n");
}

TEST(Table, AlignsColumns) {
  EXPECT_EQ(table({"", "f16", "float32"}, {{"accuracy", "98.1%", "98.2%"}, {"é", "1", "12345678"}}, kPlain),
            "            f16   float32\n"
            "--------  -----  --------\n"
            "accuracy  98.1%     98.2%\n"
            "é             1  12345678\n");
  EXPECT_EQ(table({"a"}, {{"b"}}, kBlocks), "a\n─\nb\n");
}

TEST(Table, TakesShortRowsAndNoHeader) {
  EXPECT_EQ(table({}, {{"a", "1"}, {"bb"}}, kPlain), "a   1\nbb\n");
  EXPECT_EQ(table({"x", "y"}, {}, kPlain), "x  y\n-  -\n");
}

class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = std::make_unique<std::string>(before);
    setenv(name, value, 1);
  }
  ~EnvironmentVariable() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  const char* name_;
  std::unique_ptr<std::string> before_;
};

/// What a real (pseudo-)terminal of so many columns receives from `write`.
template <class Write>
std::string on_terminal(unsigned short columns, Write&& write) {
  winsize size{};
  size.ws_row = 24;
  size.ws_col = columns;
  int master = -1;
  int slave = -1;
  if (openpty(&master, &slave, nullptr, nullptr, &size) != 0) throw std::runtime_error("no pseudo-terminal");
  std::FILE* out = fdopen(slave, "w");
  write(out);
  std::fflush(out);
  fcntl(master, F_SETFL, O_NONBLOCK);
  std::string text;
  std::array<char, 4096> buffer{};
  for (ssize_t n = 0; (n = read(master, buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(n));
  }
  std::fclose(out);
  close(master);
  return text;
}

TEST(ProgressBarOnATerminal, DrawsOverItsLineAndGoes) {
  const EnvironmentVariable term("TERM", "xterm");
  const EnvironmentVariable no_color("NO_COLOR", "1");
  const EnvironmentVariable locale("LC_ALL", "C");
  const std::string text = on_terminal(42, [](std::FILE* out) {
    ASSERT_TRUE(is_terminal(fileno(out)));
    ProgressBar bar(is_terminal(fileno(out)), out);
    bar.update("epoch 1/2", 0, 10, "loss 2.3");
    bar.update("epoch 1/2", 1, 10, "too soon to be drawn");
    bar.update("epoch 1/2", 10, 10, "loss 0.1");
    bar.clear();
    std::fputs("done\n", out);
  });
  EXPECT_EQ(text,
            "\repoch 1/2  [>           ]    0%  loss 2.3\x1b[K"
            "\repoch 1/2  [============]  100%  loss 0.1\x1b[K"
            "\r\x1b[Kdone\r\n");
}

TEST(ProgressBarOnATerminal, IsSilentElsewhere) {
  std::FILE* out = std::tmpfile();
  ASSERT_NE(out, nullptr);
  {
    ProgressBar bar(is_terminal(fileno(out)), out);
    bar.update("epoch 1/2", 1, 10, "");
  }
  EXPECT_EQ(std::ftell(out), 0);
  std::fclose(out);
}

}  // namespace
}  // namespace halfstep::cli
