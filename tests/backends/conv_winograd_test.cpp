// SPDX-License-Identifier: Apache-2.0
// Winograd's convolutions: their bound, element by element, against the plain loops in float64; equal bits for any
// number of threads; what isn't finite.
#include "halfstep/backends/cpu/conv_winograd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/parallel.h"
#include "tests/backends/conv_calls.h"

namespace halfstep::cpu {
namespace {

/// The transforms of F(m x m, 3x3) by magnitudes: t x t of the input, t x 3 of the weights, m x t of the output.
struct WinogradMagnitudes {
  int m, t = m + 2;
  std::vector<std::vector<double>> input, weight, output;
  double roundings;  // of a path from operands to result, but those of the sum over channels and of a bias

  explicit WinogradMagnitudes(int tile) : m(tile) {
    const double root = std::sqrt(2.0), half = root / 2;
    if (m == 2) {
      input = {{1, 0, 1, 0}, {0, 1, 1, 0}, {0, 1, 1, 0}, {0, 1, 0, 1}};
      weight = {{1, 0, 0}, {.5, .5, .5}, {.5, .5, .5}, {0, 0, 1}};
      output = {{1, 1, 1, 0}, {0, 1, 1, 1}};
      // Twice, for two dimensions: one addition, two, and two (halving is exact).
      roundings = 2 * (1 + 2 + 2);
    } else {
      const std::vector<double> small{0, root, 2, half, 1, 0}, large{0, half, .5, root, 1, 0};
      input = {{1, 0, 2.5, 0, 1, 0}, small, small, large, large, {0, 1, 0, 2.5, 0, 1}};
      weight = {{1, 0, 0},
                {2. / 3, root / 3, 1. / 3},
                {2. / 3, root / 3, 1. / 3},
                {1. / 6, root / 6, 1. / 3},
                {1. / 6, root / 6, 1. / 3},
                {0, 0, 1}};
      output = {{1, 1, 1, 1, 1, 0},
                {0, half, half, root, root, 0},
                {0, .5, .5, 2, 2, 0},
                {0, half / 2, half / 2, 2 * root, 2 * root, 1}};
      // Constants are rounded too, and products before a multiply-add.
      roundings = 2 * (4 + 4 + 5);
    }
  }
  /// What the errors of a weight's gradient follow, of magnitudes of the input and of the output's gradient.
  std::vector<double> weight_gradient(const ConvGeometry& g, const std::vector<double>& x,
                                      const std::vector<double>& y) const {
    const auto turned = [](const std::vector<std::vector<double>>& a) {
      std::vector<std::vector<double>> b(a[0].size(), std::vector<double>(a.size()));
      for (std::size_t i = 0; i < a.size(); ++i) {
        for (std::size_t j = 0; j < a[0].size(); ++j) b[j][i] = a[i][j];
      }
      return b;
    };
    const auto tile = [](const std::vector<double>& of, std::int64_t plane, std::int64_t h, std::int64_t w,
                         std::int64_t r0, std::int64_t s0, std::int64_t size) {
      std::vector<double> some(static_cast<std::size_t>(size * size));
      for (std::int64_t i = 0; i < size * size; ++i) {
        const std::int64_t r = r0 + i / size, s = s0 + i % size;
        if (r < 0 || r >= h || s < 0 || s >= w) continue;
        some[static_cast<std::size_t>(i)] = of[static_cast<std::size_t>((plane * h + r) * w + s)];
      }
      return some;
    };
    const auto gradient = turned(output), back = turned(weight);
    std::vector<double> all;
    for (std::int64_t o = 0; o < g.o; ++o) {
      for (std::int64_t c = 0; c < g.c; ++c) {
        std::vector<double> sums(static_cast<std::size_t>(t * t));
        for (std::int64_t n = 0; n < g.n; ++n) {
          for (std::int64_t r = 0; r < g.oh; r += m) {
            for (std::int64_t s = 0; s < g.ow; s += m) {
              const auto v = both(input, tile(x, n * g.c + c, g.h, g.w, r - g.before[0], s - g.before[1], t));
              const auto q = both(gradient, tile(y, n * g.o + o, g.oh, g.ow, r, s, m));
              for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += v[i] * q[i];
            }
          }
        }
        for (const double each : both(back, sums)) all.push_back(each);
      }
    }
    return all;
  }
  /// a b a' of a square or oblong b.
  static std::vector<double> both(const std::vector<std::vector<double>>& a, const std::vector<double>& b) {
    const std::size_t rows = a.size(), inner = a[0].size();
    std::vector<double> half(rows * inner), all(rows * rows);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < inner; ++j) {
        for (std::size_t k = 0; k < inner; ++k) half[i * inner + j] += a[i][k] * b[k * inner + j];
      }
    }
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < rows; ++j) {
        for (std::size_t k = 0; k < inner; ++k) all[i * rows + j] += half[i * inner + k] * a[j][k];
      }
    }
    return all;
  }
};

/// One convolution's operands and the two that give each result: which tensor is read, and how.
struct WinogradCase {
  ConvGeometry g;
  ConvPart part;
  Tensor from, weight, bias;
  bool back() const { return part == ConvPart::input; }
  Shape result() const { return back() ? Shape{g.n, g.c, g.h, g.w} : Shape{g.n, g.o, g.oh, g.ow}; }

  Tensor solve(ConvPath path, Tensor a, const Tensor& w, const Tensor& b) const {
    Tensor out = full(result(), NAN).to(a.dtype()).contiguous(MemoryFormat::channels_last);
    const TensorView bias_view = b.defined() ? view(b) : TensorView{};
    ConvCall call{part, g, back() ? view(out) : view(a), view(w), back() ? view(a) : view(out)};
    if (b.defined()) call.bias = &bias_view;
    Context context;
    EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
    return out;
  }
  Tensor solve(ConvPath path) const { return solve(path, from, weight, bias); }

  /// What the errors of F(m x m, 3x3) follow: its sums with all terms' magnitudes.
  std::vector<double> magnitudes(int m) const {
    const WinogradMagnitudes by(m);
    const std::int64_t t = by.t, inner = back() ? g.o : g.c, outer = back() ? g.c : g.o;
    const std::int64_t in_h = back() ? g.oh : g.h, in_w = back() ? g.ow : g.w, h = back() ? g.h : g.oh,
                       w = back() ? g.w : g.ow;
    const auto d = abs(from.to(DType::f64)).contiguous().to_vector<double>();
    const auto k = abs(weight.to(DType::f64)).contiguous().to_vector<double>();
    std::vector<double> all(static_cast<std::size_t>(g.n * outer * h * w));
    std::vector<std::vector<double>> u;
    for (std::int64_t i = 0; i < outer * inner; ++i) {
      const std::int64_t o = i / inner, c = i % inner;
      std::vector<double> window(9);
      for (int e = 0; e < 9; ++e) {
        window[static_cast<std::size_t>(back() ? 8 - e : e)] =
            k[static_cast<std::size_t>((back() ? c * outer + o : i) * 9 + e)];
      }
      u.push_back(WinogradMagnitudes::both(by.weight, window));
    }
    for (std::int64_t n = 0; n < g.n; ++n) {
      for (std::int64_t y = 0; y < h; y += m) {
        for (std::int64_t x = 0; x < w; x += m) {
          std::vector<std::vector<double>> v;
          for (std::int64_t c = 0; c < inner; ++c) {
            std::vector<double> tile(static_cast<std::size_t>(t * t));
            for (std::int64_t i = 0; i < t * t; ++i) {
              const std::int64_t r = y + i / t - (back() ? 2 - g.before[0] : g.before[0]),
                                 s = x + i % t - (back() ? 2 - g.before[1] : g.before[1]);
              if (r < 0 || r >= in_h || s < 0 || s >= in_w) continue;
              tile[static_cast<std::size_t>(i)] = d[static_cast<std::size_t>(((n * inner + c) * in_h + r) * in_w + s)];
            }
            v.push_back(WinogradMagnitudes::both(by.input, tile));
          }
          for (std::int64_t o = 0; o < outer; ++o) {
            std::vector<double> sums(static_cast<std::size_t>(t * t));
            for (std::int64_t c = 0; c < inner; ++c) {
              for (std::size_t i = 0; i < sums.size(); ++i) {
                sums[i] += v[static_cast<std::size_t>(c)][i] * u[static_cast<std::size_t>(o * inner + c)][i];
              }
            }
            const auto results = WinogradMagnitudes::both(by.output, sums);
            for (std::int64_t i = 0; i < m * m; ++i) {
              if (y + i / m >= h || x + i % m >= w) continue;
              all[static_cast<std::size_t>(((n * outer + o) * h + y + i / m) * w + x + i % m)] =
                  results[static_cast<std::size_t>(i)];
            }
          }
        }
      }
    }
    return all;
  }
};

WinogradCase winograd_case(const ConvGeometry& g, ConvPart part, DType dtype, bool bias) {
  const bool back = part == ConvPart::input;
  return {g, part,
          randn(back ? Shape{g.n, g.o, g.oh, g.ow} : Shape{g.n, g.c, g.h, g.w})
              .to(dtype)
              .contiguous(MemoryFormat::channels_last),
          randn({g.o, g.c, 3, 3}).to(dtype), bias ? randn({back ? g.c : g.o}).to(dtype) : Tensor()};
}

ConvPath winograd_path(int m) { return m == 2 ? ConvPath::winograd2 : ConvPath::winograd4; }

// Sizes that tiles don't divide, one channel and many, every padding, a bias, weights of either layout.
TEST(ConvWinograd, KeepsItsBound) {
  manual_seed(3);
  const Isa best = compute_isa();
  ConvGeometry uneven = geometry(2, 18, 9, 35, 3, 1, 1);
  uneven.before[0] = 0, uneven.after[0] = 2, uneven.before[1] = 2, uneven.w = 6, uneven.ow = 7;
  for (const Isa isa : {Isa::avx2, best}) {
    if (isa > best) continue;
    set_isa_for_test(isa);
    for (const ConvGeometry& g : {geometry(3, 24, 10, 32, 3, 1, 1), geometry(1, 16, 5, 20, 3, 1, 0),
                                  geometry(2, 1, 7, 1, 3, 1, 2), geometry(1, 130, 3, 66, 3, 1, 0),
                                  geometry(1, 300, 6, 40, 3, 1, 1), geometry(2, 33, 1, 17, 3, 1, 1), uneven}) {
      for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
          WinogradCase c = winograd_case(g, part, dtype, g.n == 2);
          const auto wide = [](const Tensor& t) { return t.defined() ? t.to(DType::f64) : t; };
          const auto exact =
              c.solve(ConvPath::reference, wide(c.from), wide(c.weight), wide(c.bias)).to_vector<double>();
          const auto biases = c.bias.defined() ? wide(c.bias).to_vector<double>() : std::vector<double>();
          const auto places = static_cast<std::size_t>(c.result()[2] * c.result()[3]);
          const double u = dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
          const auto inner = static_cast<double>(c.back() ? g.o : g.c);
          for (const int m : {2, 4}) {
            const auto sizes = c.magnitudes(m);
            const double rounded = (inner + WinogradMagnitudes(m).roundings + 1) * 0x1p-24 * 1.001;
            for (const bool last : {false, true}) {
              if (last) c.weight = c.weight.contiguous(MemoryFormat::channels_last);
              const auto got = c.solve(winograd_path(m)).to_vector<double>();
              ASSERT_EQ(got.size(), exact.size());
              for (std::size_t i = 0; i < got.size(); ++i) {
                const double bias = biases.empty() ? 0 : std::abs(biases[i / places % biases.size()]);
                const double error = rounded * sizes[i] + 0x1p-24 * bias;
                ASSERT_LE(std::abs(got[i] - exact[i]), error + u * (std::abs(exact[i]) + error) + 0x1p-25)
                    << "tiles of " << m << " part " << static_cast<int>(part) << ' ' << name(dtype) << " channels "
                    << g.c << " element " << i;
              }
            }
          }
        }
      }
    }
  }
  set_isa_for_test(best);
}

TEST(ConvWinograd, KeepsItsBoundForWeightGradients) {
  manual_seed(7);
  const Isa best = compute_isa();
  const int threads = num_threads();
  ConvGeometry uneven = geometry(2, 18, 9, 35, 3, 1, 1);
  uneven.before[0] = 0, uneven.after[0] = 2, uneven.before[1] = 2, uneven.w = 6, uneven.ow = 7;
  for (const Isa isa : {Isa::avx2, best}) {
    if (isa > best) continue;
    set_isa_for_test(isa);
    // The second one has several blocks of tiles.
    for (const ConvGeometry& g : {geometry(3, 24, 10, 32, 3, 1, 1), geometry(5, 3, 33, 5, 3, 1, 2),
                                  geometry(2, 1, 7, 1, 3, 1, 2), geometry(1, 66, 3, 43, 3, 1, 0), uneven}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        const auto last = MemoryFormat::channels_last;
        const Tensor x = randn({g.n, g.c, g.h, g.w}).to(dtype).contiguous(last),
                     y = randn({g.n, g.o, g.oh, g.ow}).to(dtype).contiguous(last);
        const auto solve = [&](ConvPath path, const Tensor& a, const Tensor& b, MemoryFormat format) {
          const Tensor w = full({g.o, g.c, 3, 3}, NAN).to(a.dtype()).contiguous(format);
          ConvCall call{ConvPart::weight, g, view(a), view(w), view(b)};
          Context context;
          EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
          return w.to_vector<double>();
        };
        const auto exact = solve(ConvPath::reference, x.to(DType::f64), y.to(DType::f64), MemoryFormat::contiguous);
        const double u = dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
        for (const int m : {2, 4}) {
          const WinogradMagnitudes by(m);
          const auto sizes = by.weight_gradient(g, abs(x.to(DType::f64)).contiguous().to_vector<double>(),
                                                abs(y.to(DType::f64)).contiguous().to_vector<double>());
          const auto tiles = static_cast<double>(g.n * ((g.oh + m - 1) / m) * ((g.ow + m - 1) / m));
          // Sums of blocks are added to those before them.
          const double rounded = (tiles * (1 + 1. / 48) + 4 + by.roundings) * 0x1p-24 * 1.001;
          std::vector<double> one;
          for (const int n : {1, 2, 3, 8}) {
            set_num_threads(n);
            const auto got = solve(winograd_path(m), x, y, n == 2 ? last : MemoryFormat::contiguous);
            if (one.empty()) one = got;
            EXPECT_EQ(got, one) << n << " threads";
            for (std::size_t i = 0; i < got.size(); ++i) {
              const double error = rounded * sizes[i];
              ASSERT_LE(std::abs(got[i] - exact[i]), error + u * (std::abs(exact[i]) + error) + 0x1p-25)
                  << "tiles of " << m << ' ' << name(dtype) << " channels " << g.c << " element " << i;
            }
            EXPECT_EQ(solve(winograd_path(m), x, y, n == 2 ? last : MemoryFormat::contiguous), got);
          }
        }
      }
    }
  }
  set_isa_for_test(best);
  set_num_threads(threads);
}

TEST(ConvWinograd, HasTheSameBitsOnAnyNumberOfThreadsAndForEachImageAlone) {
  manual_seed(4);
  const int threads = num_threads();
  const ConvGeometry g = geometry(5, 70, 13, 45, 3, 1, 1);
  for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
    for (const int m : {2, 4}) {
      WinogradCase c = winograd_case(g, part, DType::f32, false);
      set_num_threads(1);
      const auto one = c.solve(winograd_path(m)).to_vector<float>();
      for (const int n : {2, 3, 7}) {
        set_num_threads(n);
        EXPECT_EQ(c.solve(winograd_path(m)).to_vector<float>(), one) << n;
      }
      c.g.n = 1;
      c.from = c.from.slice(0, 2, 3).contiguous(MemoryFormat::channels_last);
      const auto alone = c.solve(winograd_path(m)).to_vector<float>();
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), one.begin() + static_cast<std::ptrdiff_t>(2 * alone.size())));
    }
  }
  set_num_threads(threads);
}

// Infinities stay where they are seen, and numbers that only the transforms would make too large stay finite: the bits
// are those of the direct kernels.
TEST(ConvWinograd, ComputesAgainWithoutItWhatIsNotFinite) {
  manual_seed(5);
  for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
    for (const float value : {INFINITY, -INFINITY, NAN, 3e38f}) {
      WinogradCase c = winograd_case(geometry(2, 32, 9, 32, 3, 1, 1), part, DType::f32, false);
      if (std::isfinite(value)) {
        c.from = full(c.from.sizes(), value).contiguous(MemoryFormat::channels_last);
        // Alternating signs: no sum of several of them is large, differences are.
        auto* const data = static_cast<float*>(c.from.raw_data());
        for (std::int64_t i = 0; i < c.from.numel(); ++i) data[i] = i / 32 % 3 == 1 ? -value : value;
        c.weight = full(c.weight.sizes(), 0x1p-12f);
      } else {
        static_cast<float*>(c.from.raw_data())[4321] = value;
      }
      const auto text = [](const Tensor& t) {
        std::string all;
        for (const float v : t.to_vector<float>())
          all += std::isnan(v) ? "n" : v == INFINITY ? "+" : v == -INFINITY ? "-" : ".";
        return all;
      };
      const Tensor direct = c.solve(ConvPath::blocks);
      EXPECT_EQ(text(direct).find_first_not_of('.') == std::string::npos, std::isfinite(value));
      for (const int m : {2, 4}) EXPECT_EQ(text(c.solve(winograd_path(m))), text(direct)) << value << ' ' << m;
    }
  }
}

TEST(ConvWinograd, ComputesWeightGradientsAgainThatAreNotFinite) {
  manual_seed(8);
  const ConvGeometry g = geometry(2, 32, 9, 32, 3, 1, 1);
  const auto last = MemoryFormat::channels_last;
  const Tensor x = randn({2, 32, 9, 9}).contiguous(last), y = randn({2, 32, 9, 9}).contiguous(last);
  static_cast<float*>(x.raw_data())[4321] = INFINITY;
  static_cast<float*>(y.raw_data())[123] = NAN;
  const auto kinds = [&](ConvPath path) {
    const Tensor w = empty({32, 32, 3, 3});
    ConvCall call{ConvPart::weight, g, view(x), view(w), view(y)};
    Context context;
    EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
    std::string all;
    for (const float v : w.to_vector<float>()) all += std::isnan(v) ? 'n' : std::isinf(v) ? 'i' : '.';
    return all;
  };
  const std::string direct = kinds(ConvPath::blocks);
  EXPECT_NE(direct.find('.'), std::string::npos);
  EXPECT_NE(direct.find('i'), std::string::npos);
  for (const int m : {2, 4}) EXPECT_EQ(kinds(winograd_path(m)), direct);
}

// Why it has to be asked for: a result whose own terms are all 0 has the error of its tile.
TEST(ConvWinograd, HasTheErrorsOfItsTile) {
  manual_seed(6);
  WinogradCase c = winograd_case(geometry(1, 8, 8, 8, 3, 1, 1), ConvPart::output, DType::f32, false);
  c.from = zeros(c.from.sizes()).contiguous(MemoryFormat::channels_last);
  auto* const data = static_cast<float*>(c.from.raw_data());
  for (int i = 0; i < 8; ++i) data[(3 * 8 + 3) * 8 + i] = 1.1f * static_cast<float>(i + 1);
  // The windows of row 1 end in row 2.
  EXPECT_EQ(c.solve(ConvPath::blocks).select(2, 1).contiguous().to_vector<float>(), std::vector<float>(64, 0.0f));
  EXPECT_NE(c.solve(ConvPath::winograd4).select(2, 1).contiguous().to_vector<float>(), std::vector<float>(64, 0.0f));
}

}  // namespace
}  // namespace halfstep::cpu
