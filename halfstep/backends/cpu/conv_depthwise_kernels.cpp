// SPDX-License-Identifier: Apache-2.0
// A place that is read serves all results of the strip whose windows see it, and results stay in registers. Channels
// are the innermost loop, so that memory is read and written in its order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/conv_depthwise_kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/conv_depthwise_kernels.h"
#include "halfstep/backends/cpu/norm_strips-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {
namespace depthwise {

constexpr F32Tag kTag;
constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(kTag));
// Vectors of channels at a time: as many as registers allow.
constexpr int kVectors = kLanes >= 16 ? 2 : 1;

// Fetches what lies `ahead` bytes behind channel `c` of the places that kWidth results are the first to see.
template <int kWidth, int kStep, int kVectorsNow, class T>
HWY_INLINE void fetch(const T* const* places, std::int64_t step, std::int64_t c, std::int64_t ahead) {
  for (int j = 0; j < kWidth * std::max(kStep, 1); ++j) {
    const char* place = reinterpret_cast<const char*>(places[kStep > 0 ? j : j * step] + c) + ahead;
    for (std::size_t k = 0; k < kVectorsNow * kLanes * sizeof(T); k += 64) hwy::Prefetch(place + k);
  }
}

// kVectorsNow vectors from channel `c` on. kStep of 0: that of the strip, with one tap.
template <int kWidth, int kTaps, int kStep, int kVectorsNow, class T>
HWY_INLINE void strip_at(const DepthwiseStrip& s, std::int64_t c) {
  static_assert(kStep > 0 || kTaps == 1);
  F32Vec sums[kWidth][kVectorsNow];
  for (int v = 0; v < kVectorsNow; ++v) {
    const F32Vec start = s.bias != nullptr ? hn::LoadU(kTag, s.bias + c + v * kLanes) : hn::Zero(kTag);
#pragma GCC unroll 8
    for (int t = 0; t < kWidth; ++t) sums[t][v] = start;
  }
  for (std::int64_t r = 0; r < s.rows; ++r) {
    const auto* places = reinterpret_cast<const T* const*>(s.places[r]) + s.first;
    const float* taps = s.taps[r] + c;
    F32Vec tap[kTaps][kVectorsNow];
#pragma GCC unroll 8
    for (int k = 0; k < kTaps; ++k) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsNow; ++v) tap[k][v] = hn::LoadU(kTag, taps + k * s.channels + v * kLanes);
    }
    if constexpr (kStep == 0) {
#pragma GCC unroll 8
      for (int t = 0; t < kWidth; ++t) {
        const T* place = places[t * s.step] + c;
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsNow; ++v) {
          sums[t][v] = hn::MulAdd(load(kTag, place + v * kLanes), tap[0][v], sums[t][v]);
        }
      }
    } else {
#pragma GCC unroll 32
      for (int j = 0; j < (kWidth - 1) * kStep + kTaps; ++j) {
        const T* place = places[j] + c;
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsNow; ++v) {
          const F32Vec x = load(kTag, place + v * kLanes);
#pragma GCC unroll 8
          for (int t = 0; t < kWidth; ++t) {
            const int k = j - t * kStep;
            if (k >= 0 && k < kTaps) sums[t][v] = hn::MulAdd(x, tap[k][v], sums[t][v]);
          }
        }
      }
    }
  }
  for (std::int64_t r = std::max<std::int64_t>(s.rows - s.fetched, 0); r < s.rows; ++r) {
    fetch<kWidth, kStep, kVectorsNow>(reinterpret_cast<const T* const*>(s.places[r]) + s.first, s.step, c, s.ahead);
  }
  T* result = static_cast<T*>(s.result) + c;
#pragma GCC unroll 8
  for (int t = 0; t < kWidth; ++t) {
    if constexpr (kVectorsNow == 2) {
      if (s.stream) {
        write_two<true>(sums[t][0], sums[t][1], kTag, result + t * s.pitch, Unchanged{});
      } else {
        store_two(sums[t][0], sums[t][1], kTag, result + t * s.pitch);
      }
    } else {
      store(sums[t][0], kTag, result + t * s.pitch);
    }
  }
}

// Channels that don't fill the last vector are computed again with those before them.
template <int kWidth, int kTaps, int kStep, class T>
void strip(const DepthwiseStrip& s) {
  constexpr std::int64_t kBlock = kVectors * kLanes;
  std::int64_t c = 0;
  for (; c + kBlock <= s.channels; c += kBlock) strip_at<kWidth, kTaps, kStep, kVectors, T>(s, c);
  for (; c < s.channels; c += kLanes) {
    strip_at<kWidth, kTaps, kStep, 1, T>(s, std::min(c, s.channels - kLanes));
  }
}

// Of kRows rows from `r` on, a vector of channels from `c` on, of which the first `done` don't count.
template <int kWidth, int kTaps, int kStep, int kRows, class T>
HWY_INLINE void terms_at(const DepthwiseTerms& s, std::int64_t r, std::int64_t c, std::size_t done) {
  F32Vec sums[kRows][kTaps];
#pragma GCC unroll 3
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int k = 0; k < kTaps; ++k) sums[i][k] = hn::Zero(kTag);
  }
  const std::int64_t at = s.offset + c;
  for (std::int64_t q = 0; q < s.strips; ++q) {
    const auto* gradients = reinterpret_cast<const T* const*>(s.gradients[q]);
    F32Vec g[kWidth];
#pragma GCC unroll 8
    for (int t = 0; t < kWidth; ++t) g[t] = load(kTag, gradients[t] + at);
    if (s.fetched > 0 && r == 0) fetch<kWidth, 1, 1>(gradients, 1, at, s.ahead_of_gradients);
#pragma GCC unroll 3
    for (int i = 0; i < kRows; ++i) {
      const auto* places = reinterpret_cast<const T* const*>(s.places[q * s.rows + r + i]);
      if (r + i >= s.rows - s.fetched) fetch<kWidth, kStep, 1>(places, s.step, at, s.ahead);
      if constexpr (kStep == 0) {
#pragma GCC unroll 8
        for (int t = 0; t < kWidth; ++t) {
          sums[i][0] = hn::MulAdd(load(kTag, places[t * s.step] + at), g[t], sums[i][0]);
        }
      } else {
#pragma GCC unroll 32
        for (int j = 0; j < (kWidth - 1) * kStep + kTaps; ++j) {
          const F32Vec x = load(kTag, places[j] + at);
#pragma GCC unroll 8
          for (int t = 0; t < kWidth; ++t) {
            const int k = j - t * kStep;
            if (k >= 0 && k < kTaps) sums[i][k] = hn::MulAdd(x, g[t], sums[i][k]);
          }
        }
      }
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int k = 0; k < kTaps; ++k) {
      float* to = s.sums + ((r + i) * kTaps + k) * s.all + at;
      const F32Vec before = hn::LoadU(kTag, to);
      hn::StoreU(hn::IfThenElse(hn::FirstN(kTag, done), before, hn::Add(before, sums[i][k])), kTag, to);
    }
  }
}

template <int kWidth, int kTaps, int kStep, int kRows, class T>
void terms(const DepthwiseTerms& s) {
  HWY_DASSERT(s.channels >= kLanes);  // or a vector would reach into the channels of another thread
  for (std::int64_t c = 0; c < s.channels; c += kLanes) {
    const std::int64_t from = std::min(c, s.channels - kLanes);
    for (std::int64_t r = 0; r < s.rows; r += kRows) {
      terms_at<kWidth, kTaps, kStep, kRows, T>(s, r, from, static_cast<std::size_t>(c - from));
    }
  }
}

template <int kWidth, class T>
DepthwiseStripKernel strip_of(std::int64_t taps, std::int64_t step) {
  if (taps == 1) return strip<kWidth, 1, 0, T>;
  if (taps == 2 && step == 1) return strip<kWidth, 2, 1, T>;
  if (taps == 3 && step == 1) return strip<kWidth, 3, 1, T>;
  if (taps == 3 && step == 2) return strip<kWidth, 3, 2, T>;
  if (taps == 5 && step == 1) return strip<kWidth, 5, 1, T>;
  if (taps == 5 && step == 2) return strip<kWidth, 5, 2, T>;
  if (taps == 7 && step == 1) return strip<kWidth, 7, 1, T>;
  return nullptr;
}
template <class T>
DepthwiseStripKernel strip_of(std::int64_t taps, std::int64_t step, int width) {
  return width == 7 ? strip_of<7, T>(taps, step) : width == 4 ? strip_of<4, T>(taps, step) : strip_of<1, T>(taps, step);
}

template <int kWidth, class T>
DepthwiseTermsKernel terms_of(std::int64_t taps, std::int64_t step, std::int64_t rows) {
  if (taps == 1) return terms<kWidth, 1, 0, 1, T>;
  if (taps == 3 && step == 1 && rows == 3) return terms<kWidth, 3, 1, 3, T>;
  if (taps == 3 && step == 2 && rows == 3) return terms<kWidth, 3, 2, 3, T>;
  if (taps == 3 && step == 1) return terms<kWidth, 3, 1, 1, T>;
  if (taps == 5 && step == 1) return terms<kWidth, 5, 1, 1, T>;
  if (taps == 5 && step == 2) return terms<kWidth, 5, 2, 1, T>;
  if (taps == 7 && step == 1) return terms<kWidth, 7, 1, 1, T>;
  return nullptr;
}
template <class T>
DepthwiseTermsKernel terms_of(std::int64_t taps, std::int64_t step, int width, std::int64_t rows) {
  return width == 7 ? terms_of<7, T>(taps, step, rows) : terms_of<4, T>(taps, step, rows);
}

}  // namespace depthwise

DepthwiseStripKernel depthwise_strip_of_target(DType images, std::int64_t taps, std::int64_t step, int width) {
  if (images == DType::f16) return depthwise::strip_of<Half>(taps, step, width);
  if (images == DType::bf16) return depthwise::strip_of<BFloat16>(taps, step, width);
  return depthwise::strip_of<float>(taps, step, width);
}
DepthwiseTermsKernel depthwise_terms_of_target(DType images, std::int64_t taps, std::int64_t step, int width,
                                               std::int64_t rows) {
  if (images == DType::f16) return depthwise::terms_of<Half>(taps, step, width, rows);
  if (images == DType::bf16) return depthwise::terms_of<BFloat16>(taps, step, width, rows);
  return depthwise::terms_of<float>(taps, step, width, rows);
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(depthwise_strip_of_target);
HWY_EXPORT(depthwise_terms_of_target);
DepthwiseStripKernel depthwise_strip_kernel(DType images, std::int64_t taps, std::int64_t step, int width) {
  return HWY_DYNAMIC_DISPATCH(depthwise_strip_of_target)(images, taps, step, width);
}
DepthwiseTermsKernel depthwise_terms_kernel(DType images, std::int64_t taps, std::int64_t step, int width,
                                            std::int64_t rows) {
  return HWY_DYNAMIC_DISPATCH(depthwise_terms_of_target)(images, taps, step, width, rows);
}
}  // namespace halfstep::cpu
#endif
