// SPDX-License-Identifier: Apache-2.0
// Products against sums in float64. A result must be within gamma_k * sum |a||b| (bias and former c included) of the
// exact value, from any order of k float32 additions, plus half a unit of the last place of its dtype.
#include "halfstep/backends/cpu/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/threads.h"

namespace halfstep::cpu {
namespace {

/// Workspace from the heap; what lies outside the asked size is watched by the address sanitizer.
struct Context : KernelContext {
  Context() : KernelContext{} {
    workspace = [](KernelContext* self, std::size_t bytes) -> void* {
      auto& piece = static_cast<Context*>(self)->pieces.emplace_back(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      std::memset(piece.get(), 0xFF, bytes);  // NaN: nothing may be read before it is written.
      return piece.get();
    };
    set_error = [](KernelContext* self, const char* text) { static_cast<Context*>(self)->error = text; };
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::vector<std::unique_ptr<void, Free>> pieces;
  std::string error;
};

class IsaGuard {
 public:
  explicit IsaGuard(Isa isa) { set_isa_for_test(isa); }
  ~IsaGuard() { set_isa_for_test(detected_isa()); }
};

/// Numbers that repeat from run to run, between -1 and 1, a few of them exactly 0.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  double next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const double u = static_cast<double>(state_ >> 11) * 0x1p-53;
    return u < 0.02 ? 0.0 : 2 * u - 1;
  }

 private:
  std::uint64_t state_;
};

/// A matrix of any dtype with its values as doubles; the memory between rows is NaN.
struct Matrix {
  Matrix(std::int64_t rows, std::int64_t cols, DType dtype, std::string layout, std::uint64_t seed,
         std::int64_t batch = 1)
      : rows(rows), cols(cols), batch(batch), dtype(dtype) {
    if (layout == "rows") {
      row_stride = cols, col_stride = 1;
    } else if (layout == "padded") {
      row_stride = cols + 5, col_stride = 1;
    } else if (layout == "cols") {
      row_stride = 1, col_stride = rows;
    } else if (layout == "cols padded") {
      row_stride = 1, col_stride = rows + 3;
    } else {  // strided
      row_stride = 2 * cols + 1, col_stride = 2;
    }
    batch_stride = std::max(rows * row_stride, cols * col_stride);
    const std::size_t count = static_cast<std::size_t>(std::max<std::int64_t>(batch * batch_stride, 1));
    bytes.assign(count * item_size(dtype), 0xFF);
    values.resize(static_cast<std::size_t>(batch * rows * cols));
    Numbers numbers(seed);
    visit_all(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::int64_t z = 0; z < batch; ++z) {
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < cols; ++j) {
            const T v = convert<T>(is_floating(dtype) ? numbers.next() : std::floor(numbers.next() * 100));
            std::memcpy(
                bytes.data() + static_cast<std::size_t>(z * batch_stride + i * row_stride + j * col_stride) * sizeof(T),
                &v, sizeof(T));
            value(z, i, j) = convert<double>(v);
          }
        }
      }
    });
  }
  double& value(std::int64_t z, std::int64_t i, std::int64_t j) {
    return values[static_cast<std::size_t>((z * rows + i) * cols + j)];
  }
  double stored(std::int64_t z, std::int64_t i, std::int64_t j) const {
    double result = 0;
    visit_all(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      T v;
      std::memcpy(
          &v, bytes.data() + static_cast<std::size_t>(z * batch_stride + i * row_stride + j * col_stride) * sizeof(T),
          sizeof(T));
      result = convert<double>(v);
    });
    return result;
  }
  GemmOperand operand() const { return {bytes.data(), dtype, row_stride, col_stride}; }

  std::int64_t rows, cols, batch, row_stride = 0, col_stride = 0, batch_stride = 0;
  DType dtype;
  std::vector<unsigned char> bytes;
  std::vector<double> values;
};

struct Case {
  std::int64_t m, n, k;
  DType a = f32, b = f32, c = f32;
  std::string layout_a = "rows", layout_b = "rows";
  bool bias = false;
  DType bias_dtype = f32;
  bool add = false, relu = false;
  std::int64_t batch = 1;
  std::int64_t padding = 0;
  bool share_b = false;

  std::string text() const {
    return std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " " + name(a) + " " + layout_a +
           " * " + name(b) + " " + layout_b + " -> " + name(c) +
           (bias ? std::string(" bias ") + name(bias_dtype) : "") + (add ? " add" : "") + (relu ? " relu" : "") +
           " batch " + std::to_string(batch);
  }
};

struct Product {
  double sum = 0;
  double size = 0;  ///< the sum of the terms' sizes
};
/// Of k numbers in a row and k that lie `step` apart. Nearly all time of these tests is spent here: without the checks
/// of sanitizers, which are meant for the kernels, they take a tenth of it.
__attribute__((no_sanitize("address", "undefined", "thread"))) Product product(const double* a, const double* b,
                                                                               std::int64_t k, std::int64_t step) {
  Product result;
  for (const double* end = a + k; a != end; ++a, b += step) {
    const double term = *a * *b;
    result.sum += term;
    result.size += __builtin_fabs(term);
  }
  return result;
}

enum class By { choice, blocked, narrow, onednn, reference };

/// Whether the path took the case; expectations are checked if it did.
bool check(const Case& t, By by = By::choice, std::vector<unsigned char>* bytes = nullptr) {
  SCOPED_TRACE(t.text());
  Matrix a(t.m, t.k, t.a, t.layout_a, 1, t.batch), b(t.k, t.n, t.b, t.layout_b, 2, t.share_b ? 1 : t.batch),
      c(t.m, t.n + t.padding, t.c, "rows", 3, t.batch), bias(1, t.n, t.bias_dtype, "rows", 4);
  const Matrix before = c;
  GemmArgs g;
  g.m = t.m, g.n = t.n, g.k = t.k;
  g.a = a.operand(), g.b = b.operand();
  g.c = c.bytes.data(), g.c_dtype = t.c, g.ldc = t.n + t.padding;
  if (t.bias) g.bias = bias.bytes.data(), g.bias_dtype = t.bias_dtype;
  g.beta = t.add ? 1 : 0;
  g.activation = t.relu ? GemmActivation::relu : GemmActivation::none;
  g.batch = t.batch;
  g.a_batch_stride = a.batch_stride, g.b_batch_stride = t.share_b ? 0 : b.batch_stride,
  g.c_batch_stride = c.batch_stride;
  Context context;
  const Status status = by == By::choice    ? gemm(&context, g)
                        : by == By::blocked ? gemm_by(GemmPath::blocked, &context, g)
                        : by == By::narrow  ? gemm_by(GemmPath::narrow, &context, g)
                        : by == By::onednn  ? gemm_by(GemmPath::onednn, &context, g)
                                            : gemm_by(GemmPath::reference, &context, g);
  if (status == Status::unsupported && by != By::choice) return false;
  EXPECT_EQ(status, Status::ok) << context.error;
  const bool integers = is_integral(t.c);
  const double unit = t.c == f64 ? 0x1p-53 : 0x1p-24;
  const double gamma = integers ? 0 : static_cast<double>(t.k + 2) * unit / (1 - static_cast<double>(t.k + 2) * unit);
  int wrong = 0;
  for (std::int64_t z = 0; z < t.batch; ++z) {
    for (std::int64_t i = 0; i < t.m; ++i) {
      for (std::int64_t j = 0; j < t.n + t.padding; ++j) {
        const double got = c.stored(z, i, j), old = before.stored(z, i, j);
        if (j >= t.n) {
          wrong += got != old;
          continue;
        }
        auto [exact, size] =
            t.k == 0 ? Product{} : product(&a.value(z, i, 0), &b.value(t.share_b ? 0 : z, 0, j), t.k, t.n);
        if (t.add) exact += old, size += std::abs(old);
        if (t.bias) exact += bias.value(0, 0, j), size += std::abs(bias.value(0, 0, j));
        if (t.relu && exact < 0) exact = 0;
        double half_unit = 0;
        if (is_low_precision(t.c)) {
          const FloatInfo& info = finfo(t.c);
          half_unit = std::max(std::abs(exact) * info.eps / 2, info.smallest_subnormal / 2) * (1 + gamma);
        }
        if (integers) {
          visit_all(t.c, [&](auto tag) {
            using T = typename decltype(tag)::type;
            if constexpr (std::is_integral_v<T>)
              exact = static_cast<double>(static_cast<T>(static_cast<std::int64_t>(exact)));
          });
        }
        const double bound = gamma * size + half_unit;
        if (!(std::abs(got - exact) <= bound) && wrong++ < 3) {
          ADD_FAILURE() << "at " << z << ", " << i << ", " << j << ": " << got << " instead of " << exact << " +- "
                        << bound;
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
  if (bytes != nullptr) *bytes = c.bytes;
  return true;
}

const std::vector<std::string> kLayouts = {"rows", "padded", "cols", "cols padded", "strided"};

/// Every test of float32 sums runs with both kernels of the library.
class GemmIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > detected_isa()) GTEST_SKIP() << "this processor has no " << name(GetParam());
    set_isa_for_test(GetParam());
  }
  void TearDown() override { set_isa_for_test(detected_isa()); }
};

TEST_P(GemmIsa, SmallShapesInEveryLayout) {
  for (std::int64_t m : {1, 2, 3, 5, 7, 13, 17, 33}) {
    for (std::int64_t n : {1, 2, 4, 6, 8, 15, 16, 31, 33}) {
      for (std::int64_t k : {1, 2, 3, 5, 16, 19, 33}) {
        for (const std::string& a : kLayouts) {
          const std::string& b =
              kLayouts[static_cast<std::size_t>(m + n + k + static_cast<std::int64_t>(a.size())) % 5];
          for (const By by : {By::choice, By::blocked, By::narrow}) {
            check({.m = m, .n = n, .k = k, .layout_a = a, .layout_b = b, .padding = n % 3}, by);
          }
        }
      }
    }
  }
}

TEST_P(GemmIsa, EverySize) {
  for (std::int64_t size = 1; size <= 33; ++size) {
    check({.m = size, .n = 29, .k = 31}, By::blocked);
    check({.m = 29, .n = size, .k = 31, .layout_b = "cols"}, By::blocked);
    check({.m = 29, .n = 31, .k = size, .layout_a = "cols"}, By::blocked);
  }
}

TEST_P(GemmIsa, EveryDTypeAndEpilogue) {
  for (const DType a : {f32, f16, bf16}) {
    for (const DType b : {f32, f16, bf16}) {
      for (const DType c : {f32, f16, bf16}) {
        for (const By by : {By::blocked, By::narrow}) {
          for (const std::string layout : {"rows", "cols"}) {
            const std::int64_t m = by == By::narrow ? 3 : 37;
            Case t{
                .m = m, .n = 45, .k = 53, .a = a, .b = b, .c = c, .layout_a = layout, .layout_b = layout, .padding = 2};
            EXPECT_TRUE(check(t, by));
            t.bias = true, t.bias_dtype = b;
            EXPECT_TRUE(check(t, by));
            t.relu = true;
            EXPECT_TRUE(check(t, by));
            if (c == f32) {
              t.add = true;
              EXPECT_TRUE(check(t, by));
            }
            t.layout_b = layout == "rows" ? "cols" : "rows", t.n = 3, t.m = 70;  // Turned.
            EXPECT_TRUE(check(t, by));
            t.n = 70, t.m = 50, t.k = 3;
            EXPECT_TRUE(check(t, by));
          }
        }
      }
    }
  }
}

TEST_P(GemmIsa, LargerThanEveryBlock) {
  // Several blocks of rows, panels and steps, with what is left over of each.
  for (const DType dtype : {f32, bf16}) {
    for (const std::string a : {"rows", "cols"}) {
      for (const std::string b : {"rows", "cols"}) {
        check({.m = 131, .n = 70, .k = 530, .a = dtype, .b = dtype, .layout_a = a, .layout_b = b}, By::blocked);
        // Sums of more steps in one go than in a half of it, of tiles packed side by side.
        check({.m = 70, .n = 140, .k = 384, .a = dtype, .b = dtype, .layout_a = a, .layout_b = b}, By::blocked);
        check({.m = 20, .n = 1037, .k = 77, .a = dtype, .b = dtype, .c = bf16, .layout_a = a, .layout_b = b},
              By::blocked);
        check(
            {.m = 259, .n = 33, .k = 70, .a = dtype, .b = dtype, .c = f16, .layout_a = a, .layout_b = b, .bias = true},
            By::blocked);
      }
    }
  }
  check({.m = 129, .n = 64, .k = 1024, .add = true}, By::blocked);
  check({.m = 64, .n = 2050, .k = 40}, By::blocked);
  check({.m = 2, .n = 2050, .k = 1040, .layout_b = "cols"}, By::narrow);
  check({.m = 1, .n = 2050, .k = 1040}, By::narrow);
}

TEST_P(GemmIsa, ShapesOfASmallNetwork) {
  for (const DType dtype : {f32, f16, bf16}) {
    for (const std::int64_t batch : {64, 1}) {
      check({.m = batch,
             .n = 512,
             .k = 784,
             .a = dtype,
             .b = dtype,
             .c = dtype,
             .layout_b = "cols",
             .bias = true,
             .bias_dtype = dtype,
             .relu = true});
      check({.m = batch, .n = 784, .k = 512, .a = dtype, .b = dtype, .c = dtype});
      check({.m = 512, .n = 784, .k = batch, .a = dtype, .b = dtype, .c = f32, .layout_a = "cols"});
      check({.m = 10, .n = 512, .k = batch, .a = dtype, .b = dtype, .c = f32, .layout_a = "cols", .add = true});
    }
  }
}

TEST_P(GemmIsa, Batches) {
  for (const DType dtype : {f32, bf16}) {
    for (const std::int64_t batch : {2, 3, 9}) {
      check({.m = 17, .n = 19, .k = 23, .a = dtype, .b = dtype, .c = dtype, .layout_b = "cols", .batch = batch});
      check({.m = 17,
             .n = 19,
             .k = 23,
             .a = dtype,
             .b = dtype,
             .c = dtype,
             .bias = true,
             .batch = batch,
             .share_b = true});
      check({.m = 1, .n = 19, .k = 23, .a = dtype, .b = dtype, .c = f32, .add = true, .batch = batch, .padding = 1});
      check({.m = 64, .n = 64, .k = 64, .a = dtype, .b = dtype, .c = dtype, .layout_a = "cols padded", .batch = batch});
    }
  }
  check({.m = 200, .n = 210, .k = 64, .batch = 2});
}

TEST_P(GemmIsa, ThreadsShareTheWork) {
  for (const int threads : {1, 2, 3, 4}) {
    const test::ThreadsGuard guard(threads);
    check({.m = 150, .n = 170, .k = 90});
    check({.m = 64, .n = 512, .k = 100, .c = bf16, .layout_b = "cols", .bias = true});
    check({.m = 40, .n = 600, .k = 200});
    check({.m = 1, .n = 700, .k = 600, .layout_b = "cols"});
    check({.m = 600, .n = 700, .k = 1});
    check({.m = 70, .n = 70, .k = 70, .batch = 5});
  }
}

TEST_P(GemmIsa, NotANumberAndInfinityComeThrough) {
  for (const bool relu : {false, true}) {
    for (const By by : {By::blocked, By::narrow}) {
      for (const std::string layout : {"rows", "cols"}) {
        const std::int64_t m = by == By::narrow ? 2 : 20, n = 35, k = 40;
        std::vector<float> a(static_cast<std::size_t>(m * k), 1.0f), b(static_cast<std::size_t>(k * n), 1.0f);
        std::vector<BFloat16> c(static_cast<std::size_t>(m * n));
        const bool rows = layout == "rows";
        const auto at_b = [&](std::int64_t p, std::int64_t j) -> float& {
          return b[static_cast<std::size_t>(rows ? p * n + j : j * k + p)];
        };
        at_b(3, 34) = std::numeric_limits<float>::quiet_NaN();
        at_b(4, 2) = std::numeric_limits<float>::infinity();
        at_b(5, 3) = std::numeric_limits<float>::infinity();
        at_b(6, 3) = -std::numeric_limits<float>::infinity();
        a[static_cast<std::size_t>(1 * k + 7)] = std::numeric_limits<float>::quiet_NaN();
        GemmArgs g;
        g.m = m, g.n = n, g.k = k;
        g.a = {a.data(), f32, k, 1};
        g.b = {b.data(), f32, rows ? n : 1, rows ? 1 : k};
        g.c = c.data(), g.c_dtype = bf16, g.ldc = n;
        g.activation = relu ? GemmActivation::relu : GemmActivation::none;
        Context context;
        ASSERT_EQ(gemm_by(by == By::narrow ? GemmPath::narrow : GemmPath::blocked, &context, g), Status::ok);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            const float v = static_cast<float>(c[static_cast<std::size_t>(i * n + j)]);
            if (i == 1 || j == 34 || j == 3) {
              EXPECT_TRUE(std::isnan(v)) << i << ", " << j;
            } else if (j == 2) {
              EXPECT_TRUE(std::isinf(v) && v > 0) << i << ", " << j;
            } else {
              EXPECT_EQ(v, 40.0f) << i << ", " << j;
            }
          }
        }
      }
    }
  }
}

TEST_P(GemmIsa, SubnormalsAndOverflowOf16Bits) {
  // 3 * 2^-25 lies between the f16 subnormals 2^-24 and 2^-23, at a tie; 65520 is the first that rounds to infinity.
  const float scale[] = {0x1.8p-24f, 0x1p-24f, 0x1p-26f, 65519.0f, 65520.0f, -70000.0f};
  const float expected[] = {0x1p-23f, 0x1p-24f, 0.0f, 65504.0f, INFINITY, -INFINITY};
  for (std::size_t i = 0; i < std::size(scale); ++i) {
    const std::int64_t m = 6, n = 20;
    std::vector<float> a(6 * 5, 0.0f), b(5 * 20, 0.0f);
    std::vector<Half> c(6 * 20);
    for (int r = 0; r < 6; ++r) a[static_cast<std::size_t>(r * 5)] = scale[i];
    for (int j = 0; j < 20; ++j) b[static_cast<std::size_t>(j)] = 1.0f;
    GemmArgs g;
    g.m = m, g.n = n, g.k = 5;
    g.a = {a.data(), f32, 5, 1}, g.b = {b.data(), f32, 20, 1};
    g.c = c.data(), g.c_dtype = f16, g.ldc = n;
    Context context;
    ASSERT_EQ(gemm_by(GemmPath::blocked, &context, g), Status::ok);
    for (const Half h : c) EXPECT_EQ(static_cast<float>(h), expected[i]);
  }
}

TEST_P(GemmIsa, NothingToSum) {
  for (const DType dtype : {f32, f16, bf16}) {
    check({.m = 5, .n = 7, .k = 0, .a = dtype, .b = dtype, .c = dtype});
    check({.m = 5, .n = 7, .k = 0, .a = dtype, .b = dtype, .c = dtype, .bias = true, .relu = true});
  }
  check({.m = 5, .n = 7, .k = 0, .add = true});
  check({.m = 0, .n = 7, .k = 3});
  check({.m = 5, .n = 0, .k = 3});
  check({.m = 5, .n = 7, .k = 3, .batch = 0});
}

TEST_P(GemmIsa, SameBitsEveryTime) {
  const test::ThreadsGuard guard(2);
  for (const Case& t :
       {Case{.m = 100, .n = 300, .k = 700, .c = bf16, .layout_b = "cols"},
        Case{.m = 1, .n = 900, .k = 700, .layout_b = "cols"}, Case{.m = 300, .n = 200, .k = 64, .layout_a = "cols"}}) {
    std::vector<unsigned char> first, again;
    check(t, By::choice, &first);
    for (int i = 0; i < 3; ++i) {
      check(t, By::choice, &again);
      EXPECT_EQ(first, again);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GemmIsa, testing::Values(Isa::avx2, Isa::avx512),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(Gemm, OneDnnAgrees) {
  // Where the processor has units. Rows of c that are padded, and other processors, may have no kernel but those that
  // must not run (see onednn.cpp): then the choice goes another way, which is checked with the same bounds.
  for (const DType dtype : {f32, bf16, f16}) {
    const bool units = dtype == bf16 ? compute_isa() >= Isa::avx512_bf16 : compute_isa() >= Isa::avx512_fp16;
    for (const DType c : {dtype, f32}) {
      for (const std::string layout : {"rows", "cols", "padded"}) {
        for (const std::int64_t padding : {0, 3}) {
          Case t{.m = 37,
                 .n = 45,
                 .k = 53,
                 .a = dtype,
                 .b = dtype,
                 .c = c,
                 .layout_a = layout,
                 .layout_b = layout,
                 .padding = padding};
          const bool served = check(t, By::onednn);
          EXPECT_TRUE(served || padding > 0 || layout == "padded" || !units || dtype == f32) << t.text();
          const auto both = [&] {
            check(t, By::onednn);
            EXPECT_TRUE(check(t)) << t.text();
          };
          t.bias = true, t.bias_dtype = c, t.relu = true;
          both();
          t.batch = 3;
          both();
          t.share_b = true, t.bias = false, t.add = c == f32;
          both();
        }
      }
    }
  }
}

// Cut into rectangles for threads, and with rows and columns left over of every block.
TEST(Gemm, OneDnnAgreesOnManyThreads) {
  const int before = num_threads();
  for (const int threads : {2, 3, 8}) {
    set_num_threads(threads);
    for (const DType dtype : {bf16, f16}) {
      for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{300, 270, 100}, {33, 1000, 200}, {1000, 65, 131}}) {
        Case t{.m = m,
               .n = n,
               .k = k,
               .a = dtype,
               .b = dtype,
               .c = dtype,
               .bias = true,
               .bias_dtype = dtype,
               .relu = true};
        check(t, By::onednn);
        t.batch = 5;
        check(t, By::onednn);
      }
      // Tall, cut by rows; and a long sum with float32 results, which goes in pieces: of a weight's gradient, and
      // added.
      check({.m = 900, .n = 270, .k = 100, .a = dtype, .b = dtype, .c = dtype, .layout_b = "cols"}, By::onednn);
      for (const bool add : {false, true}) {
        check({.m = 130, .n = 200, .k = 1600, .a = dtype, .b = dtype, .layout_a = "cols", .add = add}, By::onednn);
      }
    }
  }
  set_num_threads(before);
}

TEST(Gemm, DoublesAndIntegers) {
  for (const std::string& a : kLayouts) {
    for (const std::string& b : kLayouts) {
      check({.m = 9,
             .n = 300,
             .k = 17,
             .a = f64,
             .b = f64,
             .c = f64,
             .layout_a = a,
             .layout_b = b,
             .bias = true,
             .bias_dtype = f64,
             .add = true,
             .relu = true,
             .padding = 1});
      for (const DType dtype : {i64, i32, i8, u8}) {
        check({.m = 5, .n = 7, .k = 11, .a = dtype, .b = dtype, .c = dtype, .layout_a = a, .layout_b = b, .batch = 2});
      }
      check({.m = 5, .n = 7, .k = 11, .a = u8, .b = i8, .c = i32, .layout_a = a, .layout_b = b});
    }
  }
}

TEST(Gemm, RefusesDTypesThatDoNotGoTogether) {
  float x[4] = {};
  GemmArgs g;
  g.m = g.n = g.k = 2;
  g.a = {x, f64, 2, 1}, g.b = {x, f32, 2, 1};
  g.c = x, g.ldc = 2;
  Context context;
  EXPECT_EQ(gemm(&context, g), Status::unsupported);
  g.a.dtype = i32, g.b.dtype = i32;
  EXPECT_EQ(gemm(&context, g), Status::unsupported);
  g.a.dtype = g.b.dtype = f32, g.c_dtype = bf16, g.beta = 1;
  EXPECT_EQ(gemm(&context, g), Status::unsupported);
}

TEST(Gemm, SaysWhenThereIsNoWorkspace) {
  std::vector<float> x(64 * 64);
  GemmArgs g;
  g.m = g.n = g.k = 64;
  g.a = g.b = {x.data(), f32, 64, 1};
  g.c = x.data(), g.ldc = 64;
  Context context;
  context.workspace = [](KernelContext*, std::size_t) -> void* { return nullptr; };
  EXPECT_EQ(gemm(&context, g), Status::failed);
  EXPECT_NE(context.error.find("out of memory"), std::string::npos);
}

}  // namespace
}  // namespace halfstep::cpu
