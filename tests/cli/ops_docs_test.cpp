// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "tests/support/test_data.h"

namespace halfstep {
namespace {

TEST(OpsDocs, AreWhatTheProgramPrints) {
  const std::string command = test::program_path().string() + " ops --markdown";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string printed;
  std::array<char, 4096> block;
  while (const std::size_t n = std::fread(block.data(), 1, block.size(), pipe)) printed.append(block.data(), n);
  ASSERT_EQ(pclose(pipe), 0);
  std::ifstream file(test::goldens_dir() / "../../docs/reference/ops.md");
  std::stringstream text;
  text << file.rdbuf();
  const std::size_t table = text.str().find("| op |");
  ASSERT_NE(table, std::string::npos);
  EXPECT_EQ(text.str().substr(table), printed)
      << "docs/reference/ops.md is stale: write what `halfstep ops --markdown` prints below its heading";
}

}  // namespace
}  // namespace halfstep
