// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "tests/support/test_data.h"

namespace halfstep {
namespace {

std::string printed_by(const std::string& arguments) {
  const std::string command = "'" + test::program_path().string() + "' " + arguments;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "it could not be started";
  std::string printed;
  std::array<char, 4096> block;
  while (const std::size_t n = std::fread(block.data(), 1, block.size(), pipe)) printed.append(block.data(), n);
  EXPECT_EQ(pclose(pipe), 0);
  return printed;
}

// The page from the first place of `begin` on.
std::string page_from(const char* page, const char* begin) {
  std::ifstream file(test::goldens_dir() / "../../docs" / page);
  std::stringstream text;
  text << file.rdbuf();
  const std::size_t at = text.str().find(begin);
  return at == std::string::npos ? "" : text.str().substr(at);
}

TEST(OpsDocs, AreWhatTheProgramPrints) {
  EXPECT_EQ(page_from("reference/ops.md", "| op |"), printed_by("ops --markdown"))
      << "docs/reference/ops.md is stale: write what `halfstep ops --markdown` prints below its heading";
}

TEST(FlagsDocs, AreWhatTheProgramPrints) {
  EXPECT_EQ(page_from("reference/train-flags.md", "## "), printed_by("train --markdown"))
      << "docs/reference/train-flags.md is stale: write what `halfstep train --markdown` prints below its introduction";
}

}  // namespace
}  // namespace halfstep
