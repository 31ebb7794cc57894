// SPDX-License-Identifier: Apache-2.0
// Which of oneDNN's kernels run: for every convolution of ResNet-50 and YOLOv5n, under every instruction set that the
// processor has. And that they stay within the memory they are given.
#include "halfstep/backends/cpu/onednn.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "halfstep/backends/cpu/conv.h"
#include "halfstep/backends/cpu/conv_weight.h"
#include "halfstep/core/shape.h"
#include "halfstep/core/storage.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"
#include "tests/support/guarded.h"
#include "tests/support/isa_child.h"

namespace halfstep::cpu {
namespace {

struct Layer {
  std::int64_t c, size, o, window, stride, padding;
  bool operator<(const Layer& other) const {
    return std::tie(c, size, o, window, stride, padding) <
           std::tie(other.c, other.size, other.o, other.window, other.stride, other.padding);
  }
};

ConvGeometry geometry(const Layer& l, std::int64_t n) {
  const std::int64_t out = (l.size + 2 * l.padding - l.window) / l.stride + 1;
  return {n,
          l.c,
          l.size,
          l.size,
          l.o,
          out,
          out,
          l.window,
          l.window,
          1,
          {l.stride, l.stride},
          {1, 1},
          {l.padding, l.padding},
          {l.padding, l.padding}};
}

std::set<Layer> resnet50() {
  std::set<Layer> all = {{3, 224, 64, 7, 2, 3}};
  std::int64_t in = 64, size = 56;
  for (const std::int64_t width : {64, 128, 256, 512}) {
    const std::int64_t stride = width == 64 ? 1 : 2, out = size / stride;
    all.insert({{in, size, width, 1, 1, 0},
                {width, size, width, 3, stride, 1},
                {width, out, 4 * width, 1, 1, 0},
                {in, size, 4 * width, 1, stride, 0},
                {4 * width, out, width, 1, 1, 0},
                {width, out, width, 3, 1, 1}});
    in = 4 * width;
    size = out;
  }
  return all;
}

std::set<Layer> yolov5n() {
  std::set<Layer> all = {{3, 640, 16, 6, 2, 2},   {16, 320, 32, 3, 2, 1},  {32, 160, 64, 3, 2, 1},
                         {64, 80, 128, 3, 2, 1},  {128, 40, 256, 3, 2, 1}, {64, 80, 64, 3, 2, 1},
                         {128, 40, 128, 3, 2, 1}, {256, 20, 128, 1, 1, 0}, {512, 20, 256, 1, 1, 0},
                         {128, 40, 64, 1, 1, 0},  {64, 80, 255, 1, 1, 0},  {128, 40, 255, 1, 1, 0},
                         {256, 20, 255, 1, 1, 0}};
  // C3 blocks: input, output channels, side.
  for (const auto& [in, out, size] : {std::array<std::int64_t, 3>{32, 32, 160},
                                      {64, 64, 80},
                                      {128, 128, 40},
                                      {256, 256, 20},
                                      {256, 128, 40},
                                      {128, 64, 80}}) {
    const std::int64_t half = out / 2;
    all.insert({{in, size, half, 1, 1, 0},
                {half, size, half, 1, 1, 0},
                {half, size, half, 3, 1, 1},
                {out, size, out, 1, 1, 0}});
  }
  return all;
}

// Prints a line for each, which is how the lists in benchmarks/results were made.
TEST(OneDnnChild, DISABLED_Implementations) {
  const char* const parts[] = {"forward", "input", "weight"};
  for (const auto& [network, layers] : {std::pair{"resnet50", resnet50()}, {"yolov5n", yolov5n()}}) {
    for (const Layer& l : layers) {
      const ConvGeometry g = geometry(l, 2);
      for (const DType dtype : {f32, bf16, f16}) {
        const bool units =
            (dtype == bf16 && compute_isa() >= Isa::avx512_bf16) || (dtype == f16 && compute_isa() >= Isa::avx512_fp16);
        if (dtype != f32 && !units) continue;
        for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
          const auto conv = OneDnnConv::find(part, g, dtype, part == ConvPart::weight ? f32 : dtype, false);
          const std::string kernel = conv ? conv->implementation() : "none: float32 instead";
          fmt::print("{:<12} {:<9} {:>4} x {:>3}^2 -> {:>4}, {}x{}/{} {:<4} {:<8} {}\n", name(compute_isa()), network,
                     l.c, l.size, l.o, l.window, l.window, l.stride, name(dtype), parts[static_cast<int>(part)],
                     kernel);
          // Float32 always has a kernel but where its window of single places is left to our own products.
          EXPECT_TRUE(conv || dtype != f32 || (part == ConvPart::weight && l.window == 1 && l.stride > 1)) << kernel;
          EXPECT_FALSE(kernel.starts_with("ref") || kernel.starts_with("gemm")) << kernel;
        }
      }
    }
  }
}

using test::Guarded;

struct Context : test::GuardedContext {
  Context() {
    set_error = [](KernelContext*, const char* text) { ADD_FAILURE() << text; };
  }
};

struct Strided {
  Shape sizes, strides;
  DType dtype;
  Guarded memory;
  Strided(const Shape& s, bool last, DType type = f32)
      : sizes(s),
        strides(last ? channels_last_strides(s) : contiguous_strides(s)),
        dtype(type),
        memory(static_cast<std::size_t>(s[0] * s[1] * s[2] * s[3]) * halfstep::item_size(type)) {}
  TensorView view() {
    return {.data = memory.data(),
            .sizes = sizes.data(),
            .strides = strides.data(),
            .numel = sizes[0] * sizes[1] * sizes[2] * sizes[3],
            .ndim = 4,
            .dtype = dtype,
            .defined = true,
            .contiguous = false};
  }
};

// Few channels, single places, strides: where upstream's kernels have written beyond their memory (1x1/2 of 4 channels
// under AVX2, uxlfoundation/oneDNN#6035 by its own report).
TEST(OneDnnChild, DISABLED_StaysInItsMemory) {
  for (const Layer& l : {Layer{4, 32, 8, 1, 2, 0},
                         {3, 32, 8, 1, 2, 0},
                         {8, 31, 4, 1, 2, 0},
                         {4, 32, 8, 1, 1, 0},
                         {12, 17, 20, 1, 3, 0},
                         {4, 32, 8, 3, 2, 1},
                         {3, 17, 5, 3, 1, 1},
                         {1, 9, 1, 3, 1, 1},
                         {16, 32, 24, 1, 2, 0},
                         {3, 40, 16, 6, 2, 2}}) {
    for (const std::int64_t n : {1, 32}) {
      for (const bool last : {true, false}) {
        for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
          const ConvGeometry g = geometry(l, n);
          Strided x({g.n, g.c, g.h, g.w}, last), w({g.o, g.c, g.kh, g.kw}, false), y({g.n, g.o, g.oh, g.ow}, last);
          for (const ConvPath path : {ConvPath::blocks, ConvPath::products}) {
            if (path == ConvPath::products && (part != ConvPart::weight || !last)) continue;
            ConvCall call{part, g, x.view(), w.view(), y.view()};
            Context context;
            EXPECT_EQ(convolve_by(path, &context, call), Status::ok);
          }
        }
      }
    }
  }
}

// The number of an order is the same whenever it is asked for: pieces of a convolution compare theirs.
TEST(OneDnn, NumbersOfWeightOrdersStay) {
  for (std::int64_t c = 8; c < 8 + 40; ++c) {
    for (const ConvPart part : {ConvPart::output, ConvPart::weight}) {
      std::vector<std::shared_ptr<OneDnnConv>> convs;
      for (const std::int64_t n : {2, 3, 4}) {
        convs.push_back(OneDnnConv::find(part, geometry({c, 12, 8, 3, 1, 1}, n), f32, f32, false));
      }
      for (const auto& conv : convs) {
        ASSERT_TRUE(conv);
        EXPECT_EQ(conv->weight_order(), convs[0]->weight_order()) << c << " channels";
        EXPECT_LT(conv->weight_order(), 1000);
      }
    }
  }
}

// Images that are converted on the way are cut into pieces.
TEST(OneDnnChild, DISABLED_LeavesNothingToTheReference) {
  for (const Layer& l : {Layer{3, 32, 16, 3, 1, 1},
                         {16, 32, 16, 3, 1, 1},
                         {16, 32, 32, 3, 2, 1},
                         {16, 32, 32, 1, 2, 0},
                         {32, 16, 32, 3, 1, 1},
                         {64, 8, 64, 3, 1, 1},
                         {64, 56, 64, 3, 1, 1},
                         {8, 40, 8, 3, 1, 1}}) {
    for (const std::int64_t n : {1, 2, 7, 20, 25, 33, 50}) {
      for (const DType dtype : {f32, bf16, f16}) {
        for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
          const ConvGeometry g = geometry(l, n);
          Strided x({g.n, g.c, g.h, g.w}, true, dtype), w({g.o, g.c, g.kh, g.kw}, true, dtype),
              y({g.n, g.o, g.oh, g.ow}, true, dtype);
          ConvCall call{part, g, x.view(), w.view(), y.view()};
          const ConvPath path = choose_conv_path(call, compute_isa());
          EXPECT_NE(path, ConvPath::reference);
          Context context;
          if (path == ConvPath::native && convolve_onednn(&context, call, dtype) == Status::ok) continue;
          if (part == ConvPart::weight && products_suit(g)) continue;  // not oneDNN's
          EXPECT_EQ(convolve_onednn(&context, call, f32), Status::ok)
              << name(dtype) << ", part " << static_cast<int>(part) << ", " << n << " images of " << l.c << " x "
              << l.size << "^2 -> " << l.o << ", " << l.window << "/" << l.stride;
        }
      }
    }
  }
}

// A child of fork() has none of its parent's threads: its first product and convolution must not wait for them.
TEST(Fork, AChildComputesProductsAndConvolutions) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer doesn't follow threads of a child";
#endif
  const auto compute = [] {
    double total = 0;
    for (const DType dtype : {f32, bf16, f16}) {
      const Tensor a = ones({300, 300}).to(dtype), images = ones({4, 32, 20, 20}).to(dtype);
      total += sum(matmul(a, a).to(f32)).item<double>();
      total += sum(conv2d(images, ones({32, 32, 3, 3}).to(dtype)).to(f32)).item<double>();
    }
    return total;
  };
  const double expected = 3 * (300.0 * 300 * 300 + 4.0 * 32 * 18 * 18 * 288);
  EXPECT_EQ(compute(), expected);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // a hang ends as a failure
    _exit(compute() == expected ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

class OneDnnIsas : public testing::TestWithParam<Isa> {};

TEST_P(OneDnnIsas, RunsNoPlainLoopsForKnownNetworks) {
  if (GetParam() > detected_isa()) GTEST_SKIP() << "this processor has no " << name(GetParam());
  test::pass_in_child(GetParam(), "OneDnnChild.DISABLED_Implementations");
}

TEST_P(OneDnnIsas, LeavesNothingToTheReference) {
  if (GetParam() > detected_isa()) GTEST_SKIP() << "this processor has no " << name(GetParam());
  test::pass_in_child(GetParam(), "OneDnnChild.DISABLED_LeavesNothingToTheReference");
}

TEST_P(OneDnnIsas, StaysInItsMemory) {
  if (GetParam() > detected_isa()) GTEST_SKIP() << "this processor has no " << name(GetParam());
  test::pass_in_child(GetParam(), "OneDnnChild.DISABLED_StaysInItsMemory");
}

INSTANTIATE_TEST_SUITE_P(Isas, OneDnnIsas, test::kIsas, test::isa_name);

}  // namespace
}  // namespace halfstep::cpu
