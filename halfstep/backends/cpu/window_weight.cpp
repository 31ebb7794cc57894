// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/window_weight.h"

#include <algorithm>
#include <vector>

#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/pair_tile.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/split_block.h"
#include "halfstep/runtime/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kPackedTogether = 4;  // panels

// [channels, taps] as [taps, channels], from channel `first` on.
template <class Element>
void turn_plainly(const Element* from, std::int64_t channels, std::int64_t taps, std::int64_t first, Element* to) {
  for (std::int64_t t = 0; t < taps; ++t) {
    for (std::int64_t c = first; c < channels; ++c) to[t * channels + c] = from[c * taps + t];
  }
}

#if defined(__x86_64__)
// The same in vectors. 32 channels fill as many vectors as there are taps; tap t of a channel lies in lane[t] of one of
// them, which in[t] says.
class TapTurner {
 public:
  static constexpr std::int64_t kMostTaps = 25;

  explicit TapTurner(std::int64_t taps) : taps_(taps) {
    for (std::int64_t t = 0; t < taps; ++t) {
      for (std::int64_t c = 0; c < 32; ++c) {
        lane_[t][c] = static_cast<std::uint16_t>((c * taps + t) % 32);
        in_[t][(c * taps + t) / 32] |= __mmask32{1} << c;
      }
    }
  }
  __attribute__((target("avx512f,avx512bw"))) void turn(const std::uint16_t* from, std::int64_t channels,
                                                        std::uint16_t* to) const {
    std::int64_t first = 0;
    for (; first + 32 <= channels; first += 32) {
      for (std::int64_t t = 0; t < taps_; ++t) {
        const __m512i lane = _mm512_load_si512(lane_[t]);
        __m512i line = _mm512_setzero_si512();
        for (std::int64_t i = 0; i < taps_; ++i) {
          const __m512i v = _mm512_loadu_si512(from + first * taps_ + 32 * i);
          line = _mm512_mask_permutexvar_epi16(line, in_[t][i], lane, v);
        }
        _mm512_storeu_si512(to + t * channels + first, line);
      }
    }
    turn_plainly(from, channels, taps_, first, to);
  }

 private:
  std::int64_t taps_;
  alignas(64) std::uint16_t lane_[kMostTaps][32] = {};
  __mmask32 in_[kMostTaps][kMostTaps] = {};
};
#endif

template <class Element>
void put_channels_last_of(const TensorView& w, Element* to) {
  const std::int64_t channels = w.sizes[1], taps = w.sizes[2] * w.sizes[3];
  const auto* const from = static_cast<const Element*>(w.data);
  const auto each_filter = [&](auto&& turn) {
    parallel_for(w.sizes[0], row_grain(taps * channels), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) turn(from + o * channels * taps, to + o * channels * taps);
    });
  };
#if defined(__x86_64__)
  if constexpr (sizeof(Element) == 2) {
    if (taps <= TapTurner::kMostTaps && compute_isa() >= Isa::avx512) {
      const TapTurner turner(taps);
      return each_filter([&](const Element* filter, Element* at) { turner.turn(filter, channels, at); });
    }
  }
#endif
  each_filter([&](const Element* filter, Element* at) { turn_plainly(filter, channels, taps, 0, at); });
}

}  // namespace

WindowWeight::WindowWeight(const WindowGeometry& g, const TensorView& w, std::int64_t steps)
    : g_(g), data_(static_cast<const char*>(w.data)), steps_(steps) {
  std::copy_n(w.strides, 4, strides_);
}

std::size_t WindowWeight::bytes() const {
  return static_cast<std::size_t>(panels() * kWindowPanel * steps_ * g_.parts) * sizeof(std::uint32_t);
}

void WindowWeight::pack(std::uint32_t* to) const {
  const std::int64_t pieces = divide_up(panels(), kPackedTogether);
  parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i * kPackedTogether * kWindowPanel;
      const std::int64_t n = std::min(g_.o - first, kPackedTogether * kWindowPanel);
      std::uint32_t* const at = to + first * steps_ * g_.parts;
      with_split_number(g_.tile_parts, [&]<class Number>(Number) {
        if constexpr (Number::kParts > 1) {
          pack_parts<Number>(first, n, at);
        } else {
          pack_pairs(first, n, at);
        }
      });
    }
  });
}

void WindowWeight::pack_pairs(std::int64_t first, std::int64_t n, std::uint32_t* to) const {
  std::vector<const void*> rows(static_cast<std::size_t>(g_.turned ? g_.c : 0));
  for (std::int64_t k = 0; k < g_.kh; ++k) {
    for (std::int64_t l = 0; l < g_.kw; ++l) {
      std::uint32_t* const at = to + (k * g_.kw + l) * g_.c / 2 * kWindowPanel;
      if (g_.turned) {
        const auto* const tap = at_tap<std::uint16_t>(k, l);
        for (std::int64_t o = 0; o < g_.c; ++o) rows[static_cast<std::size_t>(o)] = tap + o * strides_[0];
        gather_pairs(rows.data(), g_.c / 2, first, n, kWindowPanel, kWindowPanel * steps_, reinterpret_cast<float*>(at),
                     kWindowPanel);
        continue;
      }
      const auto* const tap = at_tap<std::uint16_t>(k, l) + first * strides_[0];
      for (std::int64_t j = 0; j < n; j += kWindowPanel) {
        // A pair is 32 bits that are moved, whatever they mean.
        gemm_kernels().pack(DType::f32, tap + j * strides_[0], strides_[0] / 2, 1, std::min(kWindowPanel, n - j),
                            g_.c / 2, kWindowPanel, reinterpret_cast<float*>(at + j * steps_));
      }
    }
  }
}

template <class Number>
void WindowWeight::pack_parts(std::int64_t first, std::int64_t n, std::uint32_t* to) const {
  using Element = typename Number::Element;
  constexpr std::int64_t kPart = kTileLanes * kWindowPanel, kGroup = Number::kParts * kPart;
  const std::int64_t panel = kWindowPanel * steps_ * Number::kParts;
  for (std::int64_t k = 0; k < g_.kh; ++k) {
    for (std::int64_t l = 0; l < g_.kw; ++l) {
      const auto* const tap = at_tap<Element>(k, l) + first * (g_.turned ? 1 : strides_[0]);
      std::uint32_t* at = to + (k * g_.kw + l) * g_.c / kSplitGroup * kGroup;
      for (std::int64_t c = 0; c < g_.c; c += kSplitGroup, at += kGroup) {
        if (!g_.turned) {
          for (std::int64_t j = 0; j < n; j += kTileLanes) {
            split_columns<Number>(tap + j * strides_[0] + c, strides_[0], n - j, kSplitGroup,
                                  {at + j / kWindowPanel * panel + j % kWindowPanel, kPart});
          }
          continue;
        }
        for (std::int64_t i = 0; i < kTileLanes; ++i) {
          const Element* const line = tap + (c + i) * strides_[0];
          split_across<Number>(line, line + kTileLanes * strides_[0], n, {at + i * kWindowPanel, kPart}, panel, 0);
        }
      }
    }
  }
}

void put_channels_last(const TensorView& weight, void* to) {
  if (item_size(weight.dtype) == sizeof(std::uint32_t)) {
    put_channels_last_of(weight, static_cast<std::uint32_t*>(to));
  } else {
    put_channels_last_of(weight, static_cast<std::uint16_t*>(to));
  }
}

}  // namespace halfstep::cpu
