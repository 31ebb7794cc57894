// SPDX-License-Identifier: Apache-2.0
// The instruction set of oneDNN is fixed at its first use: tests that ask each have a process for each.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "halfstep/backends/cpu/isa.h"

namespace halfstep::test {

inline const auto kIsas = testing::Values(cpu::Isa::avx2, cpu::Isa::avx512, cpu::Isa::avx512_vnni,
                                          cpu::Isa::avx512_bf16, cpu::Isa::avx512_fp16, cpu::Isa::amx);
inline std::string isa_name(const testing::TestParamInfo<cpu::Isa>& info) { return cpu::name(info.param); }

/// Runs the disabled test `name` of this program under HALFSTEP_ISA=isa, and expects it to pass.
inline void pass_in_child(cpu::Isa isa, const char* name) {
  const std::string filter = std::string("--gtest_filter=") + name;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    setenv("HALFSTEP_ISA", cpu::name(isa), 1);
    setenv("MALLOC_CHECK_", "3", 1);
    execl("/proc/self/exe", "test", "--gtest_also_run_disabled_tests", "--gtest_brief=1", filter.c_str(),
          static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << cpu::name(isa) << ": status " << status;
}

}  // namespace halfstep::test
