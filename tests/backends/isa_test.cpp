// SPDX-License-Identifier: Apache-2.0
// Names and caps of instruction sets, and the paths of products that are chosen by them.
#include "halfstep/backends/cpu/isa.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/core/error.h"

namespace halfstep::cpu {
namespace {

/// Caps the instruction set for one test.
class IsaGuard {
 public:
  explicit IsaGuard(Isa isa) { set_isa_for_test(isa); }
  ~IsaGuard() { set_isa_for_test(before_); }

 private:
  const Isa before_ = compute_isa();
};

TEST(Gemm, PathFollowsShapeDtypeAndInstructionSet) {
  GemmArgs g;
  const auto path = [&](DType a, DType b, DType c, Isa isa) {
    g.a.dtype = a, g.b.dtype = b, g.c_dtype = c;
    return choose_gemm_path(g, isa);
  };
  const std::vector<Isa> all = {Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16, Isa::avx512_fp16, Isa::amx};
  g.m = g.n = g.k = 96;
  g.a.row_stride = g.b.row_stride = g.ldc = 96;
  for (const Isa isa : all) {
    EXPECT_EQ(path(f32, f32, f32, isa), isa == Isa::amx && amx_usable() ? GemmPath::split : GemmPath::blocked);
    EXPECT_EQ(path(f64, f64, f64, isa), GemmPath::reference);
    EXPECT_EQ(path(i32, i32, i32, isa), GemmPath::reference);
    const bool bf16_units = has_bf16_units(isa), f16_units = isa >= Isa::avx512_fp16;
    const bool tiles = isa == Isa::amx && amx_usable();  // whose results are rounded on the way
    EXPECT_EQ(path(bf16, bf16, bf16, isa), tiles        ? GemmPath::tiles
                                           : bf16_units ? GemmPath::onednn
                                                        : GemmPath::blocked)
        << name(isa);
    EXPECT_EQ(path(bf16, bf16, f32, isa), bf16_units ? GemmPath::onednn : GemmPath::blocked) << name(isa);
    const bool split = tiles && !has_f16_units(isa);
    EXPECT_EQ(path(f16, f16, f16, isa), split       ? GemmPath::split
                                        : f16_units ? GemmPath::onednn
                                                    : GemmPath::blocked)
        << name(isa);
    EXPECT_EQ(path(bf16, f32, f32, isa), GemmPath::blocked);
    EXPECT_EQ(path(bf16, bf16, f16, isa), GemmPath::blocked);
  }
  // In two parts float32 takes less than by vector instructions from smaller products on.
  g.m = g.n = g.k = 64;
  EXPECT_EQ(path(f32, f32, f32, Isa::amx), GemmPath::blocked);
  g.precision = Float32Precision::high;
  EXPECT_EQ(path(f32, f32, f32, Isa::amx), amx_usable() ? GemmPath::split : GemmPath::blocked);
  EXPECT_EQ(path(f32, f32, f32, Isa::avx512), GemmPath::blocked);
  g.precision = Float32Precision::highest;
  g.m = g.n = g.k = 16;  // A primitive's call costs more.
  EXPECT_EQ(path(bf16, bf16, bf16, Isa::amx), GemmPath::blocked);
  g.batch = 4096;
  EXPECT_EQ(path(bf16, bf16, bf16, Isa::amx), GemmPath::onednn);
  g.batch = 1, g.m = g.n = g.k = 256;
  EXPECT_EQ(path(f32, f32, f32, Isa::avx512), GemmPath::blocked);
  EXPECT_EQ(path(bf16, f32, f32, Isa::amx), GemmPath::blocked);
  EXPECT_EQ(path(bf16, bf16, bf16, Isa::avx512_vnni), GemmPath::blocked);
  g.m = 64, g.b.row_stride = 1, g.b.col_stride = 256;  // A linear layer's weights.
  EXPECT_EQ(path(f32, f32, f32, Isa::avx512), GemmPath::blocked);
  // AMX: results of bf16, weight gradients, long sums of rows that are read in place, and small batches are ours.
  const GemmPath ours = amx_usable() ? GemmPath::tiles : GemmPath::onednn;
  g.m = 64, g.n = g.k = 512, g.b.col_stride = 512, g.a.row_stride = g.ldc = 512;
  EXPECT_EQ(path(bf16, bf16, bf16, Isa::amx), ours);
  EXPECT_EQ(path(bf16, bf16, bf16, Isa::avx512_bf16), GemmPath::onednn);
  EXPECT_EQ(path(bf16, bf16, f32, Isa::amx), ours);
  g.m = g.n = 384, g.k = 1536, g.a.row_stride = g.b.col_stride = 1536, g.ldc = 384;
  EXPECT_EQ(path(bf16, bf16, bf16, Isa::amx), ours);
  g.k = 384, g.a.row_stride = g.b.col_stride = 384;
  EXPECT_EQ(path(bf16, bf16, bf16, Isa::amx), ours);
  EXPECT_EQ(path(bf16, bf16, f32, Isa::amx), GemmPath::onednn);
  g.k = 300;  // no multiple of 32
  EXPECT_EQ(path(bf16, bf16, f32, Isa::amx), ours);
  g.m = 48;
  EXPECT_EQ(path(bf16, bf16, f32, Isa::amx), GemmPath::onednn);
  g.m = g.k = 384;
  g.a.row_stride = 1, g.a.col_stride = 384, g.b.row_stride = 384, g.b.col_stride = 1;
  EXPECT_EQ(path(bf16, bf16, f32, Isa::amx), ours);
  EXPECT_EQ(path(bf16, f32, f32, Isa::amx), GemmPath::blocked);
  g.a.row_stride = 384, g.a.col_stride = 1;
  g.m = 1, g.n = g.k = 512;
  for (const Isa isa : all) EXPECT_EQ(path(bf16, bf16, bf16, isa), GemmPath::narrow);
}

// By the processor's maker as the system tells it.
TEST(Isa, UnitsOfBf16AreThoseThatAreFaster) {
  std::ifstream file("/proc/cpuinfo");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.find("vendor_id") == std::string::npos) GTEST_SKIP() << "the system doesn't tell the processor's maker";
  const bool intel = text.find("GenuineIntel") != std::string::npos;
  EXPECT_EQ(has_bf16_units(Isa::avx512_fp16), !intel);
  EXPECT_TRUE(has_bf16_units(Isa::avx512_bf16));
  EXPECT_FALSE(has_bf16_units(Isa::avx512_vnni));
  if (amx_usable()) {
    EXPECT_TRUE(has_bf16_units(Isa::amx));
  }
}

TEST(Isa, NamesGoBothWays) {
  for (const Isa isa : {Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16, Isa::avx512_fp16, Isa::amx}) {
    EXPECT_EQ(isa_from_string(name(isa)), isa);
  }
  try {
    isa_from_string("sse9");
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("avx512_bf16"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("sse9"), std::string::npos) << e.what();
  }
}

TEST(Isa, CapHoldsForEveryDtype) {
  const Isa before = compute_isa();
  {
    const IsaGuard guard(Isa::avx2);
    EXPECT_EQ(compute_isa(), Isa::avx2);
    for (const DType dtype : {f32, bf16, f16, i8}) EXPECT_EQ(compute_isa(dtype), Isa::avx2);
  }
  EXPECT_EQ(compute_isa(), before);
  EXPECT_LE(compute_isa(f32), Isa::avx512);
  EXPECT_LE(compute_isa(i8), detected_isa());
}

}  // namespace
}  // namespace halfstep::cpu
