// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/transpose_tile.h"

#include <gtest/gtest.h>

#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/view.h"

namespace halfstep::cpu {
namespace {

template <class U>
void expect_turned() {
  constexpr std::int64_t kSide = tile_side(sizeof(U));
  alignas(64) U from[kSide * kSide], to[kSide * kSide];
  for (std::int64_t i = 0; i < kSide * kSide; ++i) from[i] = static_cast<U>(i * 7 + i / 251);
  transpose_tile(from, to);
  for (std::int64_t i = 0; i < kSide; ++i) {
    for (std::int64_t j = 0; j < kSide; ++j) ASSERT_EQ(to[i * kSide + j], from[j * kSide + i]) << i << ' ' << j;
  }
}

TEST(TransposeTile, TurnsElementsOfEverySize) {
  expect_turned<std::uint8_t>();
  expect_turned<std::uint16_t>();
  expect_turned<std::uint32_t>();
  expect_turned<std::uint64_t>();
  expect_turned<float>();
}

// Whole tiles, pieces of tiles at both ends, rows and columns too short for them.
TEST(TransposeTile, CopiesOfTurnedTensorsKeepTheirElements) {
  for (const DType dtype : {u8, f16, f32, i64}) {
    for (const auto& [rows, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {64, 64}, {128, 32}, {67, 45}, {8, 130}, {200, 9}, {7, 64}, {64, 5}, {1, 70}}) {
      // Small numbers, which every dtype has: element k is (k + k / 100) mod 100.
      const std::int64_t count = 3 * rows * columns;
      std::vector<std::int64_t> values(static_cast<std::size_t>(count));
      for (std::int64_t k = 0; k < count; ++k) values[static_cast<std::size_t>(k)] = (k + k / 100) % 100;
      const Tensor x = tensor_from_integers(values, {3, rows, columns}).to(dtype);
      const auto got = x.transpose(1, 2).contiguous().to_vector<std::int64_t>();
      for (std::int64_t n = 0; n < 3; ++n) {
        for (std::int64_t j = 0; j < columns; ++j) {
          for (std::int64_t i = 0; i < rows; ++i) {
            ASSERT_EQ(got[static_cast<std::size_t>((n * columns + j) * rows + i)],
                      values[static_cast<std::size_t>((n * rows + i) * columns + j)])
                << name(dtype) << ' ' << rows << " x " << columns;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace halfstep::cpu
