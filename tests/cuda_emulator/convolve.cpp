// SPDX-License-Identifier: Apache-2.0
#include "convolve.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "halfstep/runtime/plugin_numbers.h"

namespace hscuda::emulator {
namespace {

using namespace halfstep_plugin_numbers;

double read(const View& v, const void* data, int64_t at) {
  switch (v.dtype) {
    case CUDNN_DATA_HALF:
      return load(static_cast<const Half*>(data)[at]);
    case CUDNN_DATA_BFLOAT16:
      return load(static_cast<const BFloat16*>(data)[at]);
    case CUDNN_DATA_DOUBLE:
      return static_cast<const double*>(data)[at];
    default:
      return static_cast<const float*>(data)[at];
  }
}
void write(const View& v, void* data, int64_t at, double value) {
  switch (v.dtype) {
    case CUDNN_DATA_HALF:
      static_cast<Half*>(data)[at] = convert<Half>(value);
      return;
    case CUDNN_DATA_BFLOAT16:
      static_cast<BFloat16*>(data)[at] = convert<BFloat16>(value);
      return;
    case CUDNN_DATA_DOUBLE:
      static_cast<double*>(data)[at] = value;
      return;
    default:
      static_cast<float*>(data)[at] = static_cast<float>(value);
  }
}

/// To TF32: 10 bits of mantissa.
double to_tf32(double value) {
  uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  bits = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
  return std::bit_cast<float>(bits);
}

double operand(const Convolution& k, const View& v, const void* data, int64_t at) {
  const double value = read(v, data, at);
  return k.engine == kRounding ? to_tf32(value) : value;
}

/// A tensor's values, row-major.
std::vector<double> values(const Convolution& k, const View& v, const void* data) {
  std::vector<double> all(static_cast<std::size_t>(v.sizes[0] * v.sizes[1] * v.sizes[2] * v.sizes[3]));
  if (data == nullptr) return all;
  double* to = all.data();
  for (int64_t a = 0; a < v.sizes[0]; ++a) {
    for (int64_t b = 0; b < v.sizes[1]; ++b) {
      for (int64_t c = 0; c < v.sizes[2]; ++c) {
        for (int64_t d = 0; d < v.sizes[3]; ++d) *to++ = operand(k, v, data, v.at(a, b, c, d));
      }
    }
  }
  return all;
}

}  // namespace

void convolve(Convolution k, const void* x_data, const void* w_data, const void* y_data, const void* bias,
              void* result) {
  std::vector<double> x = values(k, k.x, x_data), w = values(k, k.w, w_data), y = values(k, k.y, y_data);
  const int64_t inner = k.w.sizes[1], filters = k.w.sizes[0] / (k.x.sizes[1] / inner);
  const int64_t h = k.x.sizes[2], width = k.x.sizes[3], oh = k.y.sizes[2], ow = k.y.sizes[3];
  const int64_t kh = k.w.sizes[2], kw = k.w.sizes[3];
  // Every pair of an input and an output place meets in one element of the window: all three sums are over these.
  for (int64_t n = 0; n < k.y.sizes[0]; ++n) {
    for (int64_t job = 0; job < k.w.sizes[0] * inner; ++job) {
      const int64_t o = job / inner, c = job % inner;
      double* const image = x.data() + (n * k.x.sizes[1] + o / filters * inner + c) * h * width;
      double* const out = y.data() + (n * k.y.sizes[1] + o) * oh * ow;
      for (int64_t r = 0; r < kh; ++r) {
        for (int64_t s = 0; s < kw; ++s) {
          double& weight =
              w[static_cast<std::size_t>(job * kh * kw + (k.flipped ? (kh - 1 - r) * kw + kw - 1 - s : r * kw + s))];
          // The places whose window's element lies inside.
          const int64_t start = s * k.dilation[1] - k.padding[1];
          const int64_t first = start >= 0 ? 0 : (-start + k.stride[1] - 1) / k.stride[1];
          const int64_t last = start >= width ? 0 : std::min(ow, (width - 1 - start) / k.stride[1] + 1);
          for (int64_t p = 0; p < oh; ++p) {
            const int64_t i = p * k.stride[0] - k.padding[0] + r * k.dilation[0];
            if (i < 0 || i >= h) continue;
            double *const line = image + i * width + start, *const places = out + p * ow;
            if (k.sought == 0) {
              for (int64_t q = first; q < last; ++q) line[q * k.stride[1]] += places[q] * weight;
            } else if (k.sought == 1) {
              double sum = 0;
              for (int64_t q = first; q < last; ++q) sum += places[q] * line[q * k.stride[1]];
              weight += sum;
            } else {
              for (int64_t q = first; q < last; ++q) places[q] += line[q * k.stride[1]] * weight;
            }
          }
        }
      }
    }
  }
  // An engine that isn't the same in every run: nobody may take it for right.
  const double factor = k.engine == kUnsteady ? 0.5 : 1;
  const bool wide = k.x.dtype == CUDNN_DATA_DOUBLE;
  const auto& s = k.result.sizes;
  const double* from = (k.sought == 0 ? x : k.sought == 1 ? w : y).data();
  for (int64_t a = 0; a < s[0]; ++a) {
    for (int64_t b = 0; b < s[1]; ++b) {
      const double add = bias == nullptr ? 0 : read(k.bias, bias, k.bias.at(0, b, 0, 0));
      for (int64_t c = 0; c < s[2]; ++c) {
        for (int64_t d = 0; d < s[3]; ++d) {
          double sum = *from++ * factor;
          if (!wide) sum = static_cast<float>(sum);
          sum += add;
          write(k.result, result, k.result.at(a, b, c, d), wide ? sum : static_cast<float>(sum));
        }
      }
    }
  }
}

}  // namespace hscuda::emulator
