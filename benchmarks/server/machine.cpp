// SPDX-License-Identifier: Apache-2.0
// What the machine can do at most, by loops that do nothing else: float32 multiply-adds in registers, and a stream that
// reads two arrays and writes one, once in the caches and once in memory.
#include "halfstep/runtime/machine_limits.h"

#include <fmt/format.h>

#include "benchmarks/server/server.h"
#include "halfstep/ops/create.h"

namespace halfstep::bench {
namespace {

constexpr std::int64_t kRounds = 200'000;

Prepared prepare_stream(std::int64_t bytes) {
  const std::int64_t n = bytes / 2 / 4;
  const Tensor a = full({n}, 1), b = full({n}, 1);
  return {[a, b, n] { run_stream(a.data<float>(), b.data<float>(), n); }};
}

}  // namespace

void add_machine_cases(std::vector<Case>& cases) {
  const double operations = run_multiply_adds(f32, kRounds);
  cases.push_back(
      {"machine/multiply_add/f32", [] { return Prepared{[] { run_multiply_adds(f32, kRounds); }}; }, operations});
  for (const std::int64_t megabytes : {8, 512}) {
    // Two arrays of half the size each are read, one of them is written: three halves.
    cases.push_back({fmt::format("machine/stream/{}MB", megabytes),
                     [megabytes] { return prepare_stream(megabytes * 1'000'000); }, 0,
                     1.5 * static_cast<double>(megabytes) * 1e6});
  }
}

}  // namespace halfstep::bench
