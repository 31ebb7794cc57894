// SPDX-License-Identifier: Apache-2.0
// Collectives of parts of unlike lengths, against what each rank knows that the others give.
#include <algorithm>
#include <vector>

#include "halfstep/ops/create.h"
#include "tests/ranks/ranks.h"
#include "tests/support/errors.h"

namespace halfstep::dist::test {
namespace {

TEST(Parts, OfUnlikeLengthsAreGatheredAndReduced) {
  const int size = world().size(), rank = world().rank();
  // Some have nothing; some take several segments of the communication thread's memory (HALFSTEP_MPI_PIECE_BYTES).
  for (const std::int64_t scale : {1, 3000, 700001}) {
    std::vector<std::int64_t> counts;
    std::int64_t total = 0, begin = 0;
    for (int r = 0; r < size; ++r) {
      if (r == rank) begin = total;
      counts.push_back(r == 1 ? 0 : scale * (r + 1));
      total += counts.back();
    }
    const std::int64_t own = counts[static_cast<std::size_t>(rank)];
    const Tensor whole = values<float>(rank, total);
    const std::vector<float> before = whole.to_vector<float>();
    world().reduce_scatter_parts(whole, counts, ReduceOp::mean).wait();
    std::vector<float> expected = before;
    for (std::int64_t i = begin; i < begin + own; ++i) {
      expected[static_cast<std::size_t>(i)] = reduced<float>(ReduceOp::mean, size, i);
    }
    expect_bits(whole, expected, "reduce_scatter_parts");
    world().all_gather_parts(whole, counts).wait();
    for (std::int64_t i = 0; i < total; ++i) {
      expected[static_cast<std::size_t>(i)] = reduced<float>(ReduceOp::mean, size, i);
    }
    expect_bits(whole, expected, "all_gather_parts");
  }
  const Tensor t = zeros({4}, {.device = Device{}});
  EXPECT_NE(halfstep::test::error_of<ShapeError>([&] {
              world().all_gather_parts(t, std::vector<std::int64_t>(static_cast<std::size_t>(size), 3));
            }).find("add up to"),
            std::string::npos);
  if (size == 1) return;
  std::vector<std::int64_t> unlike(static_cast<std::size_t>(size));
  unlike[rank == 0 ? 0 : 1] = 4;
  EXPECT_NE(error_of([&] { world().all_gather_parts(t, unlike).wait(); }).find("all ranks to do the same"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep::dist::test
