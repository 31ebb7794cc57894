// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/row_block.h"

namespace halfstep::cpu {
namespace {

template <class C>
void read_as(const TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, C* to) {
  visit_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(x.data) + at;
    for (std::int64_t i = 0; i < n; ++i) to[i] = convert<C>(from[i * stride]);
  });
}
template <class C>
void write_as(TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, const C* from) {
  visit_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(x.data) + at;
    for (std::int64_t i = 0; i < n; ++i) to[i * stride] = convert<T>(from[i]);
  });
}

}  // namespace

void read_strided(const TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, float* to) {
  read_as(x, at, stride, n, to);
}
void read_strided(const TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, double* to) {
  read_as(x, at, stride, n, to);
}
void write_strided(TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, const float* from) {
  write_as(x, at, stride, n, from);
}
void write_strided(TensorView& x, std::int64_t at, std::int64_t stride, std::int64_t n, const double* from) {
  write_as(x, at, stride, n, from);
}

}  // namespace halfstep::cpu
