// SPDX-License-Identifier: Apache-2.0
// Elementwise work on tensors of any strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernel.h"

namespace sim {

/// The elements of N tensors together; tensor 0 is the result, whose shape the others broadcast to. Dimensions are
/// walked in the order of the result's memory, and are merged where all tensors lie straight across them.
template <int N>
class Walk {
 public:
  explicit Walk(const std::array<const View*, N>& views) {
    const View& result = *views[0];
    empty_ = result.numel == 0;
    int order[HALFSTEP_MAX_DIMS];
    int n = 0;
    for (int d = result.ndim - 1; d >= 0; --d) {
      if (result.sizes[d] != 1) order[n++] = d;
    }
    std::stable_sort(order, order + n, [&](int a, int b) { return result.strides[a] < result.strides[b]; });
    for (int i = 0; i < n; ++i) {
      const int64_t size = result.sizes[order[i]];
      std::array<int64_t, N> stride;
      for (int k = 0; k < N; ++k) {
        const View& v = *views[static_cast<std::size_t>(k)];
        const int d = order[i] - (result.ndim - v.ndim);
        stride[k] = d < 0 || v.sizes[d] == 1 ? 0 : v.strides[d];
      }
      bool straight = dims_ > 0;
      for (int k = 0; straight && k < N; ++k) straight = stride[k] == strides_[dims_ - 1][k] * sizes_[dims_ - 1];
      if (straight) {
        sizes_[dims_ - 1] *= size;
      } else {
        sizes_[dims_] = size;
        strides_[dims_++] = stride;
      }
    }
    if (dims_ == 0) {
      dims_ = 1;
      sizes_[0] = 1;
      strides_[0].fill(1);
    }
  }

  /// f(offsets, n, steps): n elements, that of tensor k with index i at offsets[k] + i * steps[k].
  template <class F>
  void each_run(F&& f) const {
    if (empty_) return;
    std::array<int64_t, N> at = {};
    int64_t index[HALFSTEP_MAX_DIMS] = {};
    while (true) {
      f(at, sizes_[0], strides_[0]);
      int d = 1;
      for (; d < dims_; ++d) {
        if (++index[d] < sizes_[d]) {
          for (int k = 0; k < N; ++k) at[k] += strides_[d][k];
          break;
        }
        for (int k = 0; k < N; ++k) at[k] -= (sizes_[d] - 1) * strides_[d][k];
        index[d] = 0;
      }
      if (d == dims_) return;
    }
  }

 private:
  bool empty_ = false;
  int dims_ = 0;
  int64_t sizes_[HALFSTEP_MAX_DIMS];
  std::array<int64_t, N> strides_[HALFSTEP_MAX_DIMS];
};

/// Loops over neighbours are vector code, which takes long to compile: floats are worth it.
template <class T>
inline constexpr bool kFast = std::is_floating_point_v<Compute<T>>;

/// to = f(from), element by element; f takes and gives what the types compute in.
template <class To, class From, class F>
void map(const View& to, const View& from, F f) {
  Walk<2>({&to, &from}).each_run([&](const auto& at, int64_t n, const auto& step) {
    To* y = to.at<To>(at[0]);
    const From* x = from.at<From>(at[1]);
    if (kFast<To> && step[0] == 1 && step[1] == 1) {
      for (int64_t i = 0; i < n; ++i) y[i] = convert<To>(f(load(x[i])));
    } else {
      for (int64_t i = 0; i < n; ++i) y[i * step[0]] = convert<To>(f(load(x[i * step[1]])));
    }
  });
}

/// to = f(a, b), all of one type.
template <class T, class F>
void map(const View& to, const View& a, const View& b, F f) {
  Walk<3>({&to, &a, &b}).each_run([&](const auto& at, int64_t n, const auto& step) {
    T* z = to.at<T>(at[0]);
    const T *x = a.at<T>(at[1]), *y = b.at<T>(at[2]);
    if (kFast<T> && step[0] == 1 && step[1] == 1 && step[2] == 1) {
      for (int64_t i = 0; i < n; ++i) z[i] = convert<T>(f(load(x[i]), load(y[i])));
    } else {
      for (int64_t i = 0; i < n; ++i) z[i * step[0]] = convert<T>(f(load(x[i * step[1]]), load(y[i * step[2]])));
    }
  });
}

}  // namespace sim
