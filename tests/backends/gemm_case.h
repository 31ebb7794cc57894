// SPDX-License-Identifier: Apache-2.0
// Products against sums in float64. A result must be within gamma_k * sum |a||b| (bias and former c included) of the
// exact value, from any order of k float32 additions, plus half a unit of the last place of its dtype. Elements that
// are split into sums of bfloat16 have two roundings more: the products that are left out, and the sum of the others;
// with Float32Precision::high they lose kLostByHigh.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/core/error.h"
#include "tests/backends/kernel_context.h"

namespace halfstep::cpu {

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

/// Bytes that begin at a multiple of 64, as tensors do, and end where the address sanitizer sees it.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  AlignedBytes(const AlignedBytes& other) : AlignedBytes() { *this = other; }
  AlignedBytes& operator=(const AlignedBytes& other) {
    assign(other.size_, 0);
    if (size_ > 0) std::memcpy(data(), other.data(), size_);
    return *this;
  }
  void assign(std::size_t n, unsigned char value) {
    void* room = nullptr;
    if (posix_memalign(&room, 64, n) != 0) throw std::bad_alloc();
    memory_.reset(static_cast<unsigned char*>(room));
    size_ = n;
    std::fill_n(data(), n, value);
  }
  unsigned char* data() { return memory_.get(); }
  const unsigned char* data() const { return memory_.get(); }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<unsigned char, Free> memory_;
  std::size_t size_ = 0;
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
    } else if (layout == "heads") {  // items side by side, as the heads of attention
      row_stride = batch * cols, col_stride = 1;
    } else {  // strided
      row_stride = 2 * cols + 1, col_stride = 2;
    }
    const std::int64_t size = std::max(rows * row_stride, cols * col_stride);
    batch_stride = layout == "heads" ? cols : size;
    const auto count = static_cast<std::size_t>(std::max<std::int64_t>(layout == "heads" ? size : batch * size, 1));
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
  AlignedBytes bytes;
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
  bool high = false;  ///< Float32Precision::high

  std::string text() const {
    return std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) + " " + name(a) + " " + layout_a +
           " * " + name(b) + " " + layout_b + " -> " + name(c) +
           (bias ? std::string(" bias ") + name(bias_dtype) : "") + (add ? " add" : "") + (relu ? " relu" : "") +
           " batch " + std::to_string(batch) + (high ? " high" : "");
  }
};

/// What Float32Precision::high may lose of a product on AMX: each factor is rounded to within 2^-17, and the product of
/// the second parts, which are at most 2^-8 of the factors, is left out.
inline constexpr double kLostByHigh = 0x1.0004p-15;

struct Product {
  double sum = 0;
  double size = 0;  ///< the sum of the terms' sizes
};
/// Of k numbers in a row and k that lie `step` apart. Nearly all time of these tests is spent here: without the checks
/// of sanitizers, which are meant for the kernels, they take a tenth of it.
__attribute__((no_sanitize("address", "undefined", "thread"))) inline Product product(const double* a, const double* b,
                                                                                      std::int64_t k,
                                                                                      std::int64_t step) {
  Product result;
  for (const double* end = a + k; a != end; ++a, b += step) {
    const double term = *a * *b;
    result.sum += term;
    result.size += __builtin_fabs(term);
  }
  return result;
}

enum class By { choice, blocked, narrow, onednn, tiles, split, reference };

/// Whether the path took the case; expectations are checked if it did.
inline bool check(const Case& t, By by = By::choice, std::vector<unsigned char>* bytes = nullptr) {
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
  g.precision = t.high ? Float32Precision::high : Float32Precision::highest;
  g.a_batch_stride = a.batch_stride, g.b_batch_stride = t.share_b ? 0 : b.batch_stride,
  g.c_batch_stride = c.batch_stride;
  Context context;
  const Status status = by == By::choice    ? gemm(&context, g)
                        : by == By::blocked ? gemm_by(GemmPath::blocked, &context, g)
                        : by == By::narrow  ? gemm_by(GemmPath::narrow, &context, g)
                        : by == By::onednn  ? gemm_by(GemmPath::onednn, &context, g)
                        : by == By::tiles   ? gemm_by(GemmPath::tiles, &context, g)
                        : by == By::split   ? gemm_by(GemmPath::split, &context, g)
                                            : gemm_by(GemmPath::reference, &context, g);
  if (status == Status::unsupported && by != By::choice) return false;
  EXPECT_EQ(status, Status::ok) << context.error;
  const bool integers = is_integral(t.c);
  const double unit = t.c == f64 ? 0x1p-53 : 0x1p-24;
  const bool split = by == By::split || (by == By::choice && choose_gemm_path(g, compute_isa()) == GemmPath::split);
  const auto roundings = static_cast<double>(t.k + (split ? 4 : 2));
  const double lost = split && t.high && t.a == f32 ? kLostByHigh : 0;
  const double gamma = integers ? 0 : roundings * unit / (1 - roundings * unit) + lost;
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
  if (bytes != nullptr) bytes->assign(c.bytes.data(), c.bytes.data() + c.bytes.size());
  return true;
}

/// For tests that run with several instruction sets.
class ByIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_)
      GTEST_SKIP() << name(GetParam()) << " is above what this processor, or HALFSTEP_ISA, allows";
    set_isa_for_test(GetParam());
  }
  void TearDown() override { set_isa_for_test(best_); }

 private:
  const Isa best_ = compute_isa();
};

}  // namespace halfstep::cpu
