// SPDX-License-Identifier: Apache-2.0
#include "halfstep/core/text.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace halfstep {
namespace {

using namespace std::string_literals;

TEST(Text, MakesAnyBytesPrintable) {
  EXPECT_EQ(printable("plain, größer €𝄞 a\\b"), "plain, größer €𝄞 a\\b");
  EXPECT_EQ(printable("caf\xe9"), "caf\\xe9");
  EXPECT_EQ(printable("\x1b[31mred\x1b[0m\n\r\t\b\x7f\0end"s), "\\e[31mred\\e[0m\\n\\r\\t\\x08\\x7f\\x00end");
  // Terminals take the controls of two bytes too: U+009B begins what ESC [ begins.
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b31m");
  EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");
  // Text that is turned round.
  EXPECT_EQ(printable("gpj.\xe2\x80\xaetxt"), "gpj.\\xe2\\x80\\xaetxt");
  EXPECT_EQ(printable("\xed\xa0\x80\xc0\x80\xf4\x90\x80\x80\xe2\x82"),
            "\\xed\\xa0\\x80\\xc0\\x80\\xf4\\x90\\x80\\x80\\xe2\\x82");
  EXPECT_EQ(printable_lines("a\n\tb\x1b"), "a\n\tb\\e");
}

TEST(Text, LongTextsAreCutBetweenCharacters) {
  EXPECT_EQ(printable_start("abcdef", 6), "abcdef");
  EXPECT_EQ(printable_start("abcdef", 5), "abcde...");
  EXPECT_EQ(printable_start("ab€", 3), "ab...");
  EXPECT_EQ(printable_start("ab€c", 5), "ab€...");
  const std::string path = "/" + std::string(5000, 'x') + "/end";
  EXPECT_LT(shown_path(path).size(), 400u);
  EXPECT_TRUE(shown_path(path).ends_with("/end"));
  EXPECT_EQ(shown_path("a\nb"), "a\\nb");
}

TEST(Text, KeptNamesAreNamesAgain) {
  EXPECT_EQ(kept_name("cat"), "cat");
  EXPECT_EQ(kept_name("caf\xe9"), "caf\\xe9");
  EXPECT_EQ(kept_name("caf\\xe9"), "caf\\\\xe9");  // a folder that is really called so
  std::mt19937 random(1);
  std::set<std::string> raw, kept;
  // Short ones of few bytes, which meet each other often.
  const std::string bytes = "\\xe9n\n\t\x1b\xc3\xa9\xff"s + '\0';
  for (int i = 0; i < 100'000; ++i) {
    std::string name;
    for (auto n = random() % 6; n > 0; --n) name += bytes[random() % bytes.size()];
    const std::string k = kept_name(name);
    EXPECT_EQ(raw_name(k), name);
    EXPECT_TRUE(is_utf8(k));
    EXPECT_EQ(printable(k), k);
    raw.insert(name);
    kept.insert(k);
  }
  EXPECT_EQ(raw.size(), kept.size());
}

}  // namespace
}  // namespace halfstep
