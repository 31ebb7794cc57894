// SPDX-License-Identifier: Apache-2.0
// What tests of several ranks share. Every rank runs every test, and knows what the others give.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist::test {

/// All ranks. A rank that fails alone makes the others wait no longer than this.
inline ProcessGroup& world() {
  static ProcessGroup group = ProcessGroup::init({.timeout = std::chrono::seconds(30)});
  return group;
}

inline constexpr DType kNumbers[] = {f32, f64, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u8};
inline constexpr DType kEverything[] = {f32, f64, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u8, boolean};
inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max, ReduceOp::product};

/// Element i of what rank `rank` gives: of either sign, of many exponents, with all bits in use.
template <class T>
T value(int rank, std::int64_t i, int salt = 0) {
  std::uint64_t h = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ULL +
                    static_cast<std::uint64_t>(rank) * 0x632be5abULL +
                    static_cast<std::uint64_t>(salt) * 0x2545f491ULL + 1;
  h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9ULL;
  h ^= h >> 29;
  if constexpr (std::is_same_v<T, bool>) {
    return (h & 1) != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(h);
  } else {
    const double unit = static_cast<double>(h >> 11) * 0x1p-53 - 0.5;
    return convert<T>(unit * (h & 7 ? 4.0 : 0x1p-6));
  }
}

template <class T>
Tensor values(int rank, std::int64_t n, int salt = 0) {
  Tensor t = empty({n}, {.dtype = dtype_of<T>, .device = Device()});
  T* data = t.data<T>();
  for (std::int64_t i = 0; i < n; ++i) data[i] = value<T>(rank, i, salt);
  return t;
}

/// The reduction of element i of the ranks' values, as it is promised: in the order of ranks, in float32 (float64,
/// integers in their own size), rounded once.
template <class T>
T reduced(ReduceOp op, int size, std::int64_t i, int salt = 0) {
  using C = std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, double>, T, float>;
  const auto wide = [&](int rank) { return convert<C>(value<T>(rank, i, salt)); };
  C sum = wide(0);
  for (int r = 1; r < size; ++r) {
    const C next = wide(r);
    if (op == ReduceOp::min) {
      sum = next < sum ? next : sum;
    } else if (op == ReduceOp::max) {
      sum = next > sum ? next : sum;
    } else if constexpr (std::is_integral_v<T>) {
      const auto a = static_cast<std::uint64_t>(sum), b = static_cast<std::uint64_t>(next);
      sum = static_cast<C>(op == ReduceOp::product ? a * b : a + b);
    } else {
      sum = op == ReduceOp::product ? sum * next : sum + next;
    }
  }
  if (op == ReduceOp::mean) sum = sum / static_cast<C>(size);
  return convert<T>(sum);
}

/// Compares bits, and says where the first ones differ.
template <class T>
void expect_bits(const Tensor& got, const std::vector<T>& expected, const std::string& what) {
  ASSERT_EQ(got.numel(), static_cast<std::int64_t>(expected.size())) << what;
  const T* data = got.data<const T>();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&data[i], &expected[i], sizeof(T)) == 0) continue;
    FAIL() << what << ": element " << i << " is " << static_cast<double>(convert<double>(data[i])) << ", expected "
           << static_cast<double>(convert<double>(expected[i]));
  }
}
// (vector<bool> has no elements in memory.)
inline void expect_bools(const Tensor& got, const std::vector<std::uint8_t>& expected, const std::string& what) {
  ASSERT_EQ(got.numel(), static_cast<std::int64_t>(expected.size())) << what;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(got.data<const bool>()[i], expected[i] != 0) << what << ": element " << i;
  }
}
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>;
template <class T>
void expect_same(const Tensor& got, const std::vector<Stored<T>>& expected, const std::string& what) {
  if constexpr (std::is_same_v<T, bool>) {
    expect_bools(got, expected, what);
  } else {
    expect_bits(got, expected, what);
  }
}

/// The text of the DistError that `f` throws; empty if it throws none.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const DistError& e) {
    return e.what();
  }
  return {};
}

}  // namespace halfstep::dist::test
