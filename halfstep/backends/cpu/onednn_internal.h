// SPDX-License-Identifier: Apache-2.0
// What onednn.cpp and onednn_int8.cpp share. Only they include it: it needs oneDNN's header.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <dnnl.hpp>

#include "halfstep/backends/cpu/onednn.h"

namespace halfstep::cpu::onednn {

using Memory = dnnl::memory;

/// While it lives, oneDNN makes and runs its primitives on the calling thread alone: whoever wants more calls it from
/// the ranges of a parallel_for. (The OpenMP threads of the program's own code are as they were afterwards.)
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  [[maybe_unused]] int before_ = 1;
};

const dnnl::engine& engine();
/// The calling thread's: a stream belongs to one thread at a time.
dnnl::stream& stream();

/// Passes over implementations that must not run. `gemm`: float32 products of AVX-512 (and the products made of them)
/// use the stack pointer for something else, so that a signal's handler writes over the heap (tests/backends/
/// signal_test.cpp). `ref`: plain loops, a hundred times slower than ours. `jit_1x1:avx2` with strides: it packs whole
/// vectors of channels behind the end of its memory where there are fewer (tests/backends/onednn_test.cpp). False: no
/// other is left.
template <class Description>
bool choose_implementation(Description& description, bool strided = false) {
  for (;;) {
    const std::string_view name = description.impl_info_str();
    const bool refused =
        name.starts_with("gemm") || name.starts_with("ref") || (strided && name.starts_with("jit_1x1:avx2"));
    if (!refused) return true;
    if (!description.next_impl()) return false;
  }
}

/// All that a geometry is, to look for primitives by.
using GeometryKey = std::array<std::int64_t, 18>;
inline GeometryKey geometry_key(const ConvGeometry& g) {
  return {g.n,           g.c,           g.h,         g.w,         g.o,         g.oh,
          g.ow,          g.kh,          g.kw,        g.groups,    g.stride[0], g.stride[1],
          g.dilation[0], g.dilation[1], g.before[0], g.before[1], g.after[0],  g.after[1]};
}
/// The same followed by what else distinguishes them.
template <std::size_t N>
std::array<std::int64_t, 18 + N> geometry_key(const ConvGeometry& g, const std::array<std::int64_t, N>& more) {
  std::array<std::int64_t, 18 + N> key;
  const GeometryKey own = geometry_key(g);
  std::copy(more.begin(), more.end(), std::copy(own.begin(), own.end(), key.begin()));
  return key;
}

Memory::dims weight_dims(const ConvGeometry& g);
/// Weights of these strides, with a dimension for the groups where `dims` has one.
Memory::desc weight_desc(const Memory::dims& dims, Memory::data_type type, const std::int64_t* strides);
/// Whether places and distances, whose sums and products oneDNN takes in 32 bits, fit there.
bool small_enough(const ConvGeometry& g);
/// Orders of weights, numbered as they come.
std::int64_t number_of(const Memory::desc& order);

}  // namespace halfstep::cpu::onednn
