// SPDX-License-Identifier: Apache-2.0
// Short forms in which the tables of op cases are written.
#pragma once

#include <type_traits>

#include "tests/support/op_cases.h"

namespace halfstep::test {

using In = const std::vector<Tensor>&;
using Args = std::vector<OpArg>;

inline OpArg x(const Shape& sizes, double low = -2, double high = 2) { return {OpArg::real, sizes, low, high}; }
inline OpArg fixed(const Shape& sizes, double low = -2, double high = 2) { return {OpArg::constant, sizes, low, high}; }
inline OpArg index_of(const Shape& sizes, double high) { return {OpArg::index, sizes, 0, high}; }
inline OpArg mask_of(const Shape& sizes) { return {OpArg::mask, sizes}; }

struct Extra {
  double roundings = 1;
  bool sixteen_bits = true;
  bool differences = true;
};

template <class F>
OpCase op(const char* name, Args args, F f, Extra extra = {}) {
  OpCase c{.op = name,
           .args = std::move(args),
           .call = {},
           .roundings = extra.roundings,
           .sixteen_bits = extra.sixteen_bits,
           .differences = extra.differences};
  if constexpr (std::is_same_v<std::invoke_result_t<F, In>, Tensor>) {
    c.call = [f](In in) { return std::vector<Tensor>{f(in)}; };
  } else {
    c.call = f;
  }
  return c;
}

inline OpCase unary(const char* name, Tensor (*f)(const Tensor&), double low = -2, double high = 2) {
  OpCase c = op(name, {x({N, 3}, low, high)}, [f](In in) { return f(in[0]); });
  c.function = f;
  return c;
}

}  // namespace halfstep::test
