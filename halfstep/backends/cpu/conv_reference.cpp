// SPDX-License-Identifier: Apache-2.0
// Convolutions by plain loops: float64, and whatever the fast paths refuse.
#include "halfstep/backends/cpu/conv.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

std::int64_t at(const TensorView& t, std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) {
  return i * t.strides[0] + j * t.strides[1] + k * t.strides[2] + l * t.strides[3];
}

void store(TensorView& t, std::int64_t place, double value) { write_row(t, place, 1, 1, &value); }

// Work worth a thread, in multiplications.
constexpr std::int64_t kConvReferenceGrain = 1 << 14;
std::int64_t grain(std::int64_t each) {
  return each >= kConvReferenceGrain ? 1 : kConvReferenceGrain / (each < 1 ? 1 : each);
}

// Where the window's element `k` of output place `p` lies in the input, or -1 outside.
std::int64_t place(const ConvGeometry& g, int d, std::int64_t p, std::int64_t k, std::int64_t size) {
  const std::int64_t i = p * g.stride[d] - g.before[d] + k * g.dilation[d];
  return i >= 0 && i < size ? i : -1;
}
// The output place whose window's element `k` lies on input place `i`, or -1.
std::int64_t place_back(const ConvGeometry& g, int d, std::int64_t i, std::int64_t k, std::int64_t size) {
  const std::int64_t p = i + g.before[d] - k * g.dilation[d];
  return p >= 0 && p % g.stride[d] == 0 && p / g.stride[d] < size ? p / g.stride[d] : -1;
}

template <class T>
void output(const ConvGeometry& g, const TensorView& x, const TensorView& w, TensorView& y, const double* bias) {
  const T *xs = static_cast<const T*>(x.data), *ws = static_cast<const T*>(w.data);
  const std::int64_t inner = g.c / g.groups, filters = g.o / g.groups;
  parallel_for(g.n * g.o, grain(g.oh * g.ow * inner * g.kh * g.kw), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t job = begin; job < end; ++job) {
      const std::int64_t n = job / g.o, o = job % g.o, c0 = o / filters * inner;
      for (std::int64_t p = 0; p < g.oh; ++p) {
        for (std::int64_t q = 0; q < g.ow; ++q) {
          double sum = bias ? bias[o] : 0;
          for (std::int64_t k = 0; k < g.kh; ++k) {
            const std::int64_t i = place(g, 0, p, k, g.h);
            if (i < 0) continue;
            for (std::int64_t l = 0; l < g.kw; ++l) {
              const std::int64_t j = place(g, 1, q, l, g.w);
              if (j < 0) continue;
              for (std::int64_t c = 0; c < inner; ++c) {
                sum += convert<double>(xs[at(x, n, c0 + c, i, j)]) * convert<double>(ws[at(w, o, c, k, l)]);
              }
            }
          }
          store(y, at(y, n, o, p, q), sum);
        }
      }
    }
  });
}

template <class T>
void input(const ConvGeometry& g, TensorView& x, const TensorView& w, const TensorView& y, const double* bias) {
  const T *ys = static_cast<const T*>(y.data), *ws = static_cast<const T*>(w.data);
  const std::int64_t inner = g.c / g.groups, filters = g.o / g.groups;
  parallel_for(g.n * g.c, grain(g.h * g.w * filters * g.kh * g.kw), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t job = begin; job < end; ++job) {
      const std::int64_t n = job / g.c, c = job % g.c, o0 = c / inner * filters;
      for (std::int64_t i = 0; i < g.h; ++i) {
        for (std::int64_t j = 0; j < g.w; ++j) {
          double sum = bias ? bias[c] : 0;
          for (std::int64_t k = 0; k < g.kh; ++k) {
            const std::int64_t p = place_back(g, 0, i, k, g.oh);
            if (p < 0) continue;
            for (std::int64_t l = 0; l < g.kw; ++l) {
              const std::int64_t q = place_back(g, 1, j, l, g.ow);
              if (q < 0) continue;
              for (std::int64_t o = 0; o < filters; ++o) {
                sum +=
                    convert<double>(ys[at(y, n, o0 + o, p, q)]) * convert<double>(ws[at(w, o0 + o, c % inner, k, l)]);
              }
            }
          }
          store(x, at(x, n, c, i, j), sum);
        }
      }
    }
  });
}

template <class T>
void weight(const ConvGeometry& g, const TensorView& x, TensorView& w, const TensorView& y) {
  const T *xs = static_cast<const T*>(x.data), *ys = static_cast<const T*>(y.data);
  const std::int64_t inner = g.c / g.groups, filters = g.o / g.groups;
  parallel_for(g.o * inner, grain(g.n * g.oh * g.ow * g.kh * g.kw), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t job = begin; job < end; ++job) {
      const std::int64_t o = job / inner, c = job % inner, from = o / filters * inner + c;
      for (std::int64_t k = 0; k < g.kh; ++k) {
        for (std::int64_t l = 0; l < g.kw; ++l) {
          double sum = 0;
          for (std::int64_t n = 0; n < g.n; ++n) {
            for (std::int64_t p = 0; p < g.oh; ++p) {
              const std::int64_t i = place(g, 0, p, k, g.h);
              if (i < 0) continue;
              for (std::int64_t q = 0; q < g.ow; ++q) {
                const std::int64_t j = place(g, 1, q, l, g.w);
                if (j < 0) continue;
                sum += convert<double>(ys[at(y, n, o, p, q)]) * convert<double>(xs[at(x, n, from, i, j)]);
              }
            }
          }
          store(w, at(w, o, c, k, l), sum);
        }
      }
    }
  });
}

}  // namespace

void convolve_reference(ConvCall& call, const double* bias) {
  const ConvGeometry& g = call.geometry;
  const TensorView& operand = call.part == ConvPart::output ? call.input : call.output;
  visit_floating(operand.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.part == ConvPart::output) output<T>(g, call.input, call.weight, call.output, bias);
    if (call.part == ConvPart::input) input<T>(g, call.input, call.weight, call.output, bias);
    if (call.part == ConvPart::weight) weight<T>(g, call.input, call.weight, call.output);
  });
}

}  // namespace halfstep::cpu
