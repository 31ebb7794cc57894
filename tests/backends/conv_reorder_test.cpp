// SPDX-License-Identifier: Apache-2.0
// Convolutions of images in any layout against the plain loops in float64.
#include "halfstep/backends/cpu/conv_reorder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/backends/conv_calls.h"

namespace halfstep::cpu {
namespace {

enum class Layout { last, planes, sparse };

/// The same images, laid out so; every second place of a row of a larger tensor, where they are sparse.
Tensor laid_out(const Tensor& images, Layout layout) {
  if (layout != Layout::sparse) {
    return images.contiguous(layout == Layout::last ? MemoryFormat::channels_last : MemoryFormat::contiguous);
  }
  const Shape& s = images.sizes();
  Tensor places = full({s[0], s[1], s[2], 2 * s[3]}, 7, {.dtype = images.dtype()}).slice(3, 0, 2 * s[3], 2);
  places.copy_(images);
  return places;
}

struct Case {
  ConvPart part;
  ConvGeometry g;
  DType dtype;
  bool bias;
};

class Solver {
 public:
  explicit Solver(const Case& c)
      : c_(c),
        x_(randn({c.g.n, c.g.c, c.g.h, c.g.w}).to(c.dtype)),
        w_(randn({c.g.o, c.g.c / c.g.groups, c.g.kh, c.g.kw}).to(c.dtype)),
        y_(randn({c.g.n, c.g.o, c.g.oh, c.g.ow}).to(c.dtype)),
        bias_(randn({c.part == ConvPart::input ? c.g.c : c.g.o}).to(c.dtype)) {}

  std::vector<double> exact(bool magnitudes) const {
    return solve(Layout::last, Layout::last, f64, magnitudes, ConvPath::reference);
  }
  std::vector<double> by_choice(Layout of_x, Layout of_y) const { return solve(of_x, of_y, c_.dtype, false, {}); }

 private:
  std::vector<double> solve(Layout of_x, Layout of_y, DType dtype, bool magnitudes,
                            std::optional<ConvPath> path) const {
    const auto operand = [&](const Tensor& t, ConvPart part) {
      if (part == c_.part) return full(t.sizes(), NAN, {.dtype = dtype});
      return magnitudes ? abs(t.to(dtype)) : t.to(dtype);
    };
    const Tensor x = laid_out(operand(x_, ConvPart::input), of_x), w = operand(w_, ConvPart::weight),
                 y = laid_out(operand(y_, ConvPart::output), of_y),
                 b = magnitudes ? abs(bias_.to(dtype)) : bias_.to(dtype);
    ConvCall call{c_.part, c_.g, view(x), view(w), view(y)};
    const TensorView bias = view(b);
    if (c_.bias) call.bias = &bias;
    Context context;
    EXPECT_EQ(path ? convolve_by(*path, &context, call) : convolve(&context, call), Status::ok) << context.error;
    return (c_.part == ConvPart::input ? x : c_.part == ConvPart::weight ? w : y).to_vector<double>();
  }

  const Case c_;
  const Tensor x_, w_, y_, bias_;
};

double terms_of(const Case& c) {
  const ConvGeometry& g = c.g;
  return static_cast<double>(c.part == ConvPart::output  ? g.c * g.kh * g.kw
                             : c.part == ConvPart::input ? g.o * g.kh * g.kw
                                                         : g.n * g.oh * g.ow);
}

// A bias is added before the one rounding to the result's dtype, on 16-bit units too.
TEST(ConvReorder, ComputesImagesOfAnyLayout) {
  manual_seed(1);
  const int threads = num_threads();
  ConvGeometry depthwise = geometry(2, 32, 9, 32, 3, 1, 1), line = geometry(3, 20, 1, 33, 1, 1, 0);
  depthwise.groups = 32;
  line.w = line.ow = 70;
  for (const ConvGeometry& g : {geometry(3, 24, 10, 40, 3, 1, 1), geometry(2, 33, 9, 17, 3, 2, 1), depthwise, line,
                                geometry(2, 64, 14, 48, 1, 1, 0), geometry(2, 3, 30, 16, 7, 2, 3)}) {
    for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
      for (const DType dtype : {f32, f16, bf16}) {
        const Case c{part, g, dtype, part != ConvPart::weight};
        const Solver solver(c);
        const auto exact = solver.exact(false), sizes = solver.exact(true);
        const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
        std::vector<double> on_one;
        for (const Layout of_x : {Layout::planes, Layout::last, Layout::sparse}) {
          for (const Layout of_y : {Layout::planes, Layout::last, Layout::sparse}) {
            for (const int n : {1, 3}) {
              set_num_threads(n);
              const auto got = solver.by_choice(of_x, of_y);
              const std::string what = std::string(name(dtype)) + " part " + std::to_string(static_cast<int>(part)) +
                                       ", " + std::to_string(g.c) + " to " + std::to_string(g.o) + ", layouts " +
                                       std::to_string(static_cast<int>(of_x)) + std::to_string(static_cast<int>(of_y));
              ASSERT_EQ(got.size(), exact.size());
              for (std::size_t i = 0; i < got.size(); ++i) {
                const double sum = (terms_of(c) + 2) * 0x1p-24 * sizes[i];
                ASSERT_LE(std::abs(got[i] - exact[i]), u * (std::abs(exact[i]) + sum) + sum + 0x1p-25)
                    << what << ' ' << i;
              }
              if (n == 1) {
                on_one = got;
              } else {
                EXPECT_EQ(got, on_one) << what;
              }
            }
          }
        }
      }
    }
  }
  set_num_threads(threads);
}

TEST(ConvReorder, IsForLayoutsThatPathsDoNotServe) {
  const ConvGeometry g = geometry(2, 32, 12, 48, 1, 1, 0);
  const auto needs = [&](ConvPart part, DType dtype, Layout of_x, Layout of_y) {
    const Tensor x = laid_out(zeros({g.n, g.c, g.h, g.w}, {.dtype = dtype}), of_x),
                 w = zeros({g.o, g.c, g.kh, g.kw}, {.dtype = dtype}),
                 y = laid_out(zeros({g.n, g.o, g.oh, g.ow}, {.dtype = dtype}), of_y);
    return needs_reorder({part, g, view(x), view(w), view(y)});
  };
  for (const DType dtype : {f16, bf16}) {
    EXPECT_FALSE(needs(ConvPart::output, dtype, Layout::last, Layout::last));
    EXPECT_TRUE(needs(ConvPart::output, dtype, Layout::planes, Layout::planes));
    EXPECT_TRUE(needs(ConvPart::input, dtype, Layout::planes, Layout::last));
    EXPECT_TRUE(needs(ConvPart::weight, dtype, Layout::last, Layout::sparse));
  }
  const bool by_tiles = compute_isa() == Isa::amx && amx_usable();
  EXPECT_EQ(needs(ConvPart::output, f32, Layout::planes, Layout::planes), by_tiles)
      << "blocks of float32 are reordered";
  EXPECT_FALSE(needs(ConvPart::output, f64, Layout::planes, Layout::planes));
}

}  // namespace
}  // namespace halfstep::cpu
