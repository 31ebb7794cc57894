// SPDX-License-Identifier: Apache-2.0
// Internal: what PowerSGD needs of linear algebra, as loops that give the same bits on every processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

namespace halfstep::dist::detail {

/// Makes the columns of `matrix` [rows, columns], row-major, orthonormal, from the first to the last: Gram and
/// Schmidt's method with float64, each column projected twice ("twice is enough": Giraud, Langou and Rozloznik, 2005).
/// A column that depends on those before it but for T's rounding becomes what `replace` draws, or zeros without one.
template <class T>
void orthonormalize(std::span<T> matrix, std::int64_t rows, std::int64_t columns,
                    const std::function<double()>& replace = {}) {
  constexpr double kRounding = 4 * static_cast<double>(std::numeric_limits<T>::epsilon());
  std::vector<std::vector<double>> done;
  const auto norm = [](const std::vector<double>& v) {
    double largest = 0, sum = 0;
    for (const double x : v) largest = std::fmax(largest, std::fabs(x));
    if (largest == 0) return 0.0;
    for (const double x : v) sum += x / largest * (x / largest);
    return largest * std::sqrt(sum);
  };
  const auto project = [&](std::vector<double>& v) {
    for (int round = 0; round < 2; ++round) {
      for (const std::vector<double>& unit : done) {
        double along = 0;
        for (std::size_t i = 0; i < v.size(); ++i) along += unit[i] * v[i];
        for (std::size_t i = 0; i < v.size(); ++i) v[i] -= along * unit[i];
      }
    }
  };
  for (std::int64_t c = 0; c < columns; ++c) {
    std::vector<double> v(static_cast<std::size_t>(rows));
    for (std::int64_t i = 0; i < rows; ++i) {
      v[static_cast<std::size_t>(i)] = static_cast<double>(matrix[static_cast<std::size_t>(i * columns + c)]);
    }
    double before = norm(v);
    project(v);
    double after = norm(v);
    // Drawn columns are independent with probability 1; the bound is for `columns` above `rows`, which nobody asks for.
    for (int tries = 0; replace && !(after > kRounding * before) && tries < 8; ++tries) {
      for (double& x : v) x = replace();
      before = norm(v);
      project(v);
      after = norm(v);
    }
    const bool independent = after > kRounding * before;
    for (double& x : v) x = independent ? x / after : 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      matrix[static_cast<std::size_t>(i * columns + c)] = static_cast<T>(v[static_cast<std::size_t>(i)]);
    }
    if (independent) done.push_back(std::move(v));
  }
}

/// Row `i` of p q^T, where `p` is row i of p [n, rank] and `qt` is q^T [rank, m].
template <class T>
void product_row(const T* p, const T* qt, std::int64_t rank, std::int64_t m, T* row) {
  for (std::int64_t j = 0; j < m; ++j) row[j] = p[0] * qt[j];
  for (std::int64_t k = 1; k < rank; ++k) {
    for (std::int64_t j = 0; j < m; ++j) row[j] += p[k] * qt[k * m + j];
  }
}

}  // namespace halfstep::dist::detail
