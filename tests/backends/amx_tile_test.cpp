// SPDX-License-Identifier: Apache-2.0
// Tiles: the model against small cases worked out by hand from Intel's manual, the kernel on the model against sums of
// integers, which are exact, and the kernel's instructions against the model, bit for bit.
#include "halfstep/backends/cpu/amx_tile.h"

#include <gtest/gtest.h>

#if defined(__linux__) && defined(__x86_64__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "halfstep/backends/cpu/amx_model.h"
#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/float16.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "tests/support/amx_emulated.h"
#include "tests/support/isa_child.h"

namespace halfstep::cpu {
namespace {

std::uint32_t half(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  EXPECT_EQ(bits & 0xFFFF, 0u) << x << " is no bfloat16";
  return bits >> 16;
}
std::uint32_t pair(float first, float second) { return half(first) | half(second) << 16; }

TileConfig shapes(std::initializer_list<std::array<int, 3>> tiles) {
  TileConfig config;
  for (const auto& [tile, rows, bytes] : tiles) {
    config.rows[tile] = static_cast<std::uint8_t>(rows);
    config.row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
  return config;
}

TEST(AmxModel, RefusesWhatTheProcessorRefuses) {
  TileModel tiles;
  std::uint32_t memory[256] = {};
  EXPECT_THROW(tiles.zero(0), TileFault);  // nothing is configured
  EXPECT_THROW(tiles.configure(shapes({{0, 17, 64}})), TileFault);
  EXPECT_THROW(tiles.configure(shapes({{0, 16, 65}})), TileFault);
  EXPECT_THROW(tiles.configure(shapes({{0, 16, 0}})), TileFault);
  EXPECT_THROW(tiles.configure(shapes({{0, 0, 64}})), TileFault);
  EXPECT_THROW(tiles.configure(shapes({{8, 16, 64}})), TileFault);
  TileConfig other;
  other.palette = 2;
  EXPECT_THROW(tiles.configure(other), TileFault);
  other.palette = 1, other.reserved[13] = 1;
  EXPECT_THROW(tiles.configure(other), TileFault);
  tiles.configure(shapes({{0, 2, 12}, {1, 2, 8}, {2, 2, 12}, {3, 1, 12}, {4, 2, 16}, {5, 2, 6}}));
  EXPECT_NO_THROW(tiles.multiply(0, 1, 2));
  EXPECT_THROW(tiles.multiply(0, 1, 3), TileFault);  // steps
  EXPECT_THROW(tiles.multiply(3, 1, 2), TileFault);  // rows
  EXPECT_THROW(tiles.multiply(4, 1, 2), TileFault);  // columns
  EXPECT_THROW(tiles.multiply(0, 5, 2), TileFault);  // half an element
  EXPECT_THROW(tiles.multiply(0, 1, 1), TileFault);
  EXPECT_THROW(tiles.multiply(1, 1, 2), TileFault);
  EXPECT_THROW(tiles.load(6, memory, 64), TileFault);  // no shape
  EXPECT_THROW(tiles.load(8, memory, 64), TileFault);
  tiles.release();
  EXPECT_THROW(tiles.load(0, memory, 64), TileFault);
}

TEST(AmxModel, MovesWhatTheShapeHas) {
  TileModel tiles;
  std::uint32_t from[6][20], to[6][20];
  for (std::uint32_t i = 0; i < 120; ++i) from[i / 20][i % 20] = 1000 + i, to[i / 20][i % 20] = i;
  const std::uint32_t corner = to[3][3];
  tiles.configure(shapes({{7, 3, 12}}));
  tiles.load(7, from, sizeof from[0]);
  tiles.store(7, to, sizeof to[0]);
  for (int i = 0; i < 6; ++i) {
    for (int j = 0; j < 20; ++j) EXPECT_EQ(to[i][j], (i < 3 && j < 3 ? 1000u : 0u) + static_cast<unsigned>(20 * i + j));
  }
  EXPECT_EQ(to[3][3], corner);
  tiles.zero(7);
  tiles.store(7, to, sizeof to[0]);
  EXPECT_EQ(to[2][2], 0u);
  EXPECT_EQ(to[2][3], 43u);
  tiles.load(7, from, sizeof from[0]);
  tiles.configure(shapes({{7, 3, 12}}));  // zeroes
  tiles.store(7, to, sizeof to[0]);
  EXPECT_EQ(to[0][0], 0u);
}

// c + the products of one row and one column of pairs.
float product(float c, std::initializer_list<std::uint32_t> a, std::initializer_list<std::uint32_t> b) {
  TileModel tiles;
  const int steps = static_cast<int>(a.size());
  tiles.configure(shapes({{0, 1, 4}, {1, 1, 4 * steps}, {2, steps, 4}}));
  tiles.load(0, &c, 4);
  tiles.load(1, std::data(a), 64);
  tiles.load(2, std::data(b), 4);
  tiles.multiply(0, 1, 2);
  tiles.store(0, &c, 4);
  return c;
}

TEST(AmxModel, MultipliesInTheManualsOrder) {
  EXPECT_EQ(product(1, {pair(2, 3)}, {pair(4, 5)}), 24);
  // First elements have a sum, 2^24, second ones another, 1 + 1: one after the other the ones would be lost.
  EXPECT_EQ(product(0, {pair(0x1p12f, 1), pair(0, 1)}, {pair(0x1p12f, 1), pair(0, 1)}), 0x1p24f + 2);
  // c comes last: 2^24 + 2, and with 1 a tie, which goes to the even 2^24 + 4. First, it would be lost.
  EXPECT_EQ(product(1, {pair(0x1p12f, 1), pair(0, 1)}, {pair(0x1p12f, 1), pair(0, 1)}), 0x1p24f + 4);
  // Steps in order: 2^24, then 1 is lost (a tie goes to 2^24) twice; in the reverse order it would be 2^24 + 2.
  EXPECT_EQ(product(0, {pair(0x1p12f, 0), pair(1, 0), pair(1, 0)}, {pair(0x1p12f, 0), pair(1, 0), pair(1, 0)}),
            0x1p24f);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(product(0, {pair(0x1p100f, 1)}, {pair(0x1p100f, 1)}), infinity);
  // The fused product has no rounding and no infinity of its own.
  EXPECT_EQ(product(0, {pair(0x1p127f, 0), pair(-0x1p126f, 0)}, {pair(1, 0), pair(4, 0)}), -0x1p127f);
  EXPECT_TRUE(std::isnan(product(0, {pair(infinity, 0)}, {pair(0, 0)})));
  EXPECT_TRUE(std::isnan(product(-infinity, {pair(infinity, 0)}, {pair(1, 0)})));
}

TEST(AmxModel, FlushesSubnormals) {
  // Read: of a, b, and c.
  EXPECT_EQ(product(0, {pair(0x1p-130f, 0)}, {pair(0x1p100f, 0)}), 0);
  EXPECT_EQ(product(0, {pair(0, 0x1p100f)}, {pair(0, 0x1p-127f)}), 0);
  EXPECT_EQ(product(0x1p-127f, {pair(0x1p-63f, 0)}, {pair(0x1p-63f, 0)}), 0x1p-126f);
  // Made: by a product, by the sum of both, by adding to c. Signs stay.
  EXPECT_EQ(product(0, {pair(0x1p-64f, 0)}, {pair(0x1p-63f, 0)}), 0);
  EXPECT_TRUE(std::signbit(product(-0.0f, {pair(-0x1p-64f, -0x1p-64f)}, {pair(0x1p-63f, 0x1p-63f)})));
  EXPECT_EQ(product(0, {pair(0x1.8p-63f, -0x1p-63f)}, {pair(0x1p-63f, 0x1p-63f)}), 0);
  EXPECT_EQ(product(0x1.8p-126f, {pair(-0x1p-63f, 0)}, {pair(0x1p-63f, 0)}), 0);
  // A product in the middle isn't: 2^-126 + 2^-140 is a normal number.
  EXPECT_EQ(product(0, {pair(0x1p-63f, 0), pair(0x1p-70f, 0)}, {pair(0x1p-63f, 0), pair(0x1p-70f, 0)}),
            0x1p-126f + 0x1p-140f);
  // Tininess is seen after rounding to 24 digits: 2^-126 - 2^-150 has as many, though a float of so few bits would
  // round to 2^-126; half of that step below becomes 2^-126.
  EXPECT_EQ(product(0, {pair(0x1p-63f, 0), pair(-0x1p-75f, 0)}, {pair(0x1p-63f, 0), pair(0x1p-75f, 0)}), 0);
  EXPECT_EQ(product(0, {pair(0x1p-63f, 0), pair(-0x1p-75f, 0)}, {pair(0x1p-63f, 0), pair(0x1p-76f, 0)}), 0x1p-126f);
}

/// Operands of a product, packed, and room around the result.
struct Operands {
  std::int64_t rows, columns, places;
  std::vector<float> left, right;  // [rows][places], [places][columns]
  std::vector<std::uint32_t> a, b;
  std::vector<float> c;
  TileProduct product = {};

  template <class Draw>
  Operands(std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate, Draw draw)
      : rows(m), columns(n), places(k) {
    const std::int64_t steps = (k + 31) / 32 * 16, ldc = n + 5;
    for (std::int64_t i = 0; i < m * k; ++i) left.push_back(draw());
    for (std::int64_t i = 0; i < k * n; ++i) right.push_back(draw());
    // What is outside of the operands is NaN, but along the sum.
    a.assign(static_cast<std::size_t>((m + 15) / 16 * 16 * steps), 0x7FC07FC0);
    b.assign(static_cast<std::size_t>((n + 31) / 32 * 32 * steps), 0x7FC07FC0);
    const auto of = [&](bool inside, const std::vector<float>& from, std::int64_t i) {
      return inside ? half(from[static_cast<std::size_t>(i)]) : 0u;
    };
    for (std::int64_t s = 0; s < steps; ++s) {
      for (std::int64_t i = 0; i < m; ++i) {
        a[static_cast<std::size_t>((i / 16 * steps + s / 16 * 16) * 16 + i % 16 * 16 + s % 16)] =
            of(2 * s < k, left, i * k + 2 * s) | of(2 * s + 1 < k, left, i * k + 2 * s + 1) << 16;
      }
      for (std::int64_t j = 0; j < n; ++j) {
        b[static_cast<std::size_t>(j / 32 * steps * 32 + s * 32 + j % 32)] =
            of(2 * s < k, right, 2 * s * n + j) | of(2 * s + 1 < k, right, (2 * s + 1) * n + j) << 16;
      }
    }
    for (std::int64_t i = 0; i < m * ldc; ++i) c.push_back(i % ldc < n ? draw() : kAround);
    product.steps = steps, product.rows = m, product.columns = n;
    product.set_packed(a.data());
    product.b = b.data();
    product.ldc = ldc, product.accumulate = accumulate;
  }

  static constexpr float kAround = 12345;

  std::vector<float> by(bool processor) const {
    std::vector<float> result = c;
    TileProduct p = product;
    p.c = result.data();
    const AmxKernels kernels = amx_kernels(processor);
    kernels.multiply(p);
    kernels.release();
    return result;
  }
};

constexpr std::int64_t kSizes[][3] = {{1, 1, 1},    {16, 16, 32},  {17, 16, 33}, {16, 17, 2},  {32, 32, 64},
                                      {33, 31, 95}, {49, 100, 31}, {49, 90, 95}, {70, 65, 256}};

TEST(AmxTiles, AddUpIntegersExactly) {
  std::mt19937 random(1);
  const auto draw = [&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); };
  for (const auto& [m, n, k] : kSizes) {
    for (const bool accumulate : {false, true}) {
      Operands x(m, n, k, accumulate, draw);
      x.product.by_rows = accumulate;
      const std::vector<float> got = x.by(false);
      const std::int64_t ldc = x.product.ldc;
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < ldc; ++j) {
          const auto at = static_cast<std::size_t>(i * ldc + j);
          double sum = j < n ? 0 : static_cast<double>(Operands::kAround);
          if (j < n && accumulate) sum = static_cast<double>(x.c[at]);
          for (std::int64_t p = 0; p < k && j < n; ++p) {
            sum += static_cast<double>(x.left[static_cast<std::size_t>(i * k + p)]) *
                   static_cast<double>(x.right[static_cast<std::size_t>(p * n + j)]);
          }
          ASSERT_EQ(static_cast<double>(got[at]), sum) << m << ' ' << n << ' ' << k << ": " << i << ' ' << j;
        }
      }
    }
  }
}

// Numbers of all sizes: orders and roundings show.
void expect_instructions_compute_as_the_model() {
  std::mt19937 random(2);
  const auto draw = [&] {
    const auto exponent = static_cast<std::uint32_t>(random() % 20 == 0 ? random() % 40 : 97 + random() % 50);
    return std::bit_cast<float>(static_cast<std::uint32_t>(random() % 2) << 31 | exponent << 23 |
                                static_cast<std::uint32_t>(random() % 128) << 16);
  };
  for (const auto& [m, n, k] : kSizes) {
    for (const bool accumulate : {false, true}) {
      Operands x(m, n, k, accumulate, draw);
      x.product.rows_once = !accumulate, x.product.by_rows = accumulate;  // other instructions
      const std::vector<float> by_model = x.by(false), by_processor = x.by(true);
      for (std::size_t i = 0; i < by_model.size(); ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(by_model[i]), std::bit_cast<std::uint32_t>(by_processor[i]))
            << m << ' ' << n << ' ' << k << ": " << i;
      }
    }
  }
}

TEST(AmxTiles, InstructionsComputeAsTheModel) {
  if (!amx_usable()) GTEST_SKIP() << "no AMX that this process may use";
  expect_instructions_compute_as_the_model();
}

// Rounded sums are those of multiply(), with the bias added, activated and rounded afterwards, by any way to memory.
void expect_rounds_what_multiply_sums(bool processor) {
  std::mt19937 random(3);
  const auto draw = [&] {
    return static_cast<float>(static_cast<int>(random() % 255) - 127) / static_cast<float>(1 << random() % 6);
  };
  for (const auto& [m, n, k] : kSizes) {
    const Operands x(m, n, k, false, draw);
    const std::vector<float> sums = x.by(processor);
    std::vector<float> bias;
    for (std::int64_t j = 0; j < n; ++j) bias.push_back(j % 7 == 5 ? std::numeric_limits<float>::quiet_NaN() : draw());
    // In reverse order, without every third one.
    std::vector<std::int32_t> places;
    for (std::int64_t i = 0; i < m; ++i) places.push_back(i % 3 == 1 ? -1 : static_cast<std::int32_t>(m - 1 - i));
    // Rows of whole lines, at an address that is one or isn't; and others.
    for (const auto& [stride, offset] :
         {std::pair{(n + 31) / 32 * 32, std::int64_t{0}}, {(n + 31) / 32 * 32, 2}, {n + 3, std::int64_t{0}}}) {
      for (int options = 0; options < 64; ++options) {
        constexpr std::uint16_t kUntouched = 0x4321;
        std::vector<std::uint16_t> room(static_cast<std::size_t>(m * stride + offset + 32), kUntouched);
        std::uint16_t* to = room.data();
        while (reinterpret_cast<std::uintptr_t>(to) % 64 != 0) ++to;
        to += offset;
        const TileResults results = {.to = to,
                                     .stride = stride,
                                     .bias = (options & 1) != 0 ? bias.data() : nullptr,
                                     .relu = (options & 2) != 0,
                                     .rows = (options & 32) != 0 ? places.data() : nullptr,
                                     .stream = (options & 4) != 0};
        TileProduct p = x.product;
        p.accumulate = false;
        p.by_rows = (options & 8) != 0, p.rows_once = (options & 16) != 0;
        p.next = sums.data(), p.next_bytes = static_cast<std::int64_t>(sums.size() * sizeof(float));
        const AmxKernels kernels = amx_kernels(processor);
        kernels.multiply_rounded(p, results);
        kernels.fence();
        kernels.release();
        std::size_t written = 0;
        for (std::int64_t i = 0; i < m; ++i) {
          const std::int64_t place = results.rows != nullptr ? results.rows[i] : i;
          for (std::int64_t j = 0; j < n && place >= 0; ++j, ++written) {
            float sum = sums[static_cast<std::size_t>(i * x.product.ldc + j)];
            if (results.bias != nullptr) sum += results.bias[j];
            if (results.relu && sum < 0) sum = 0;
            const std::uint16_t got = to[place * stride + j];
            ASSERT_TRUE(std::isnan(sum) ? (got & 0x7FFF) > 0x7F80 : got == BFloat16(sum).bits)
                << m << ' ' << n << ' ' << k << ": " << i << ' ' << j << " options " << options;
          }
        }
        const auto untouched = static_cast<std::size_t>(std::count(room.begin(), room.end(), kUntouched));
        ASSERT_GE(untouched, room.size() - written);
      }
    }
  }
}

TEST(AmxTiles, RoundWhatTheySumUp) { expect_rounds_what_multiply_sums(false); }

TEST(AmxTiles, InstructionsRoundWhatTheySumUp) {
  if (!amx_usable()) GTEST_SKIP() << "no AMX that this process may use";
  expect_rounds_what_multiply_sums(true);
}

#if defined(__x86_64__)
TEST(AmxTiles, InstructionsAreTheModels) {
  if (detected_isa() == Isa::amx) GTEST_SKIP() << "the processor has AMX, see InstructionsComputeAsTheModel";
  const test::AmxEmulated emulated;
  expect_instructions_compute_as_the_model();
  EXPECT_GT(test::AmxEmulated::count(), 1000);
  EXPECT_FALSE(test::AmxEmulated::configured());
}
#endif

#if defined(__linux__) && defined(__x86_64__)
// As a container does that lets no process have the tiles: arch_prctl(ARCH_REQ_XCOMP_PERM) fails.
bool refuse_tiles() {
  constexpr std::uint32_t kRequest = 0x1023;
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
                           BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kRequest, 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter = {static_cast<unsigned short>(std::size(program)), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(AmxChild, DISABLED_Refused) {
  if (!refuse_tiles()) GTEST_SKIP() << "no filter of system calls can be set";
  EXPECT_FALSE(amx_usable());
  // Those that are Intel's multiply bf16 in float32 then.
  GemmArgs g;
  g.m = g.n = g.k = g.a.row_stride = g.b.row_stride = g.ldc = 512;
  g.a.dtype = g.b.dtype = g.c_dtype = DType::bf16;
  EXPECT_EQ(choose_gemm_path(g, compute_isa()),
            has_bf16_units(Isa::avx512_fp16) ? GemmPath::onednn : GemmPath::blocked);
  EXPECT_EQ(compute_isa(DType::bf16) > Isa::avx512, has_bf16_units(Isa::avx512_fp16));
  const Tensor a = randn({64, 96}).to(DType::bf16), b = randn({96, 128}).to(DType::bf16);
  const std::vector<double> got = matmul(a, b).to_vector<double>(),
                            exact = matmul(a.to(DType::f64), b.to(DType::f64)).to_vector<double>(),
                            sizes = matmul(abs(a.to(DType::f64)), abs(b.to(DType::f64))).to_vector<double>();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double sum = 98 * 0x1p-24 * sizes[i];
    ASSERT_LE(std::abs(got[i] - exact[i]), 0x1p-8 * (std::abs(exact[i]) + sum) + sum) << i;
  }
}

TEST(AmxTiles, AreNotMissedWhereTheSystemRefusesThem) {
  if (detected_isa() != Isa::amx) GTEST_SKIP() << "the processor has no AMX";
  test::pass_in_child(Isa::amx, "AmxChild.DISABLED_Refused");
}
#endif

TEST(AmxTiles, AreNotUsedWithoutTheProcessor) {
  const Isa before = compute_isa();
  set_isa_for_test(Isa::avx512_fp16);
  EXPECT_FALSE(amx_usable());
  set_isa_for_test(before);
  EXPECT_LE(amx_usable(), detected_isa() == Isa::amx);
}

TEST(AmxTiles, TurnPlaces) {
  constexpr std::int64_t kChannels = 300, kSteps = 48;
  std::vector<std::uint16_t> from(32 * kChannels);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint16_t>(i * 2654435761u >> 8);
  std::vector<const void*> places;
  for (std::int64_t i = 31; i >= 0; --i) places.push_back(from.data() + i * kChannels);  // in any order
  for (const std::int64_t n : {1, 8, 16, 17, 31, 32, 33, 64, 255, 256}) {
    for (const std::int64_t first : {0, 3, 44}) {
      constexpr std::uint32_t kUntouched = 0xABCDEF01;
      const std::int64_t rows = (n + 15) / 16 * 16;
      std::vector<std::uint32_t> to(static_cast<std::size_t>(rows * kSteps), kUntouched), plain = to;
      PlacesToTurn p{places.data(), first, n, kSteps, to.data() + 16 * 16, 0};
      turn_places(p);
      p.to = plain.data() + 16 * 16;
      turn_places_plainly(p);
      EXPECT_EQ(to, plain) << n << " from " << first;
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < kSteps; ++j) {
          const auto channel = static_cast<std::size_t>(first + i);
          const auto of = [&](std::int64_t place) -> std::uint32_t {
            return i < n ? from[static_cast<std::size_t>((31 - place) * kChannels) + channel] : 0;
          };
          // Row by row of 16, 16 steps in a line; these are the second 16 of the steps.
          const std::int64_t step = j - 16;
          const std::uint32_t expected = step < 0 || step >= 16 ? kUntouched : of(2 * step) | of(2 * step + 1) << 16;
          const std::int64_t at = i / 16 * 16 * kSteps + (j / 16 * 16 + i % 16) * 16 + j % 16;
          ASSERT_EQ(plain[static_cast<std::size_t>(at)], expected) << n << ": " << i << ' ' << j;
        }
      }
    }
  }
}

}  // namespace
}  // namespace halfstep::cpu
