// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_windows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/gemm_kernels.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/packed_weight.h"
#include "halfstep/backends/cpu/pair_tile.h"
#include "halfstep/backends/cpu/past_caches.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/shared_padding.h"
#include "halfstep/backends/cpu/split_block.h"
#include "halfstep/runtime/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kWindowRows = 2 * kTileLanes, kWindowPanel = 2 * kTileLanes;  // of a block of sums
// Bytes of the second-level cache: weights beside which a thread takes band after band, a band of an image at most, and
// bands that it takes together where weights are larger, so that these are read less often.
constexpr std::int64_t kFewWeights = 512 << 10, kBandBytes = 640 << 10, kBandsAtOnce = 768 << 10,
                       kSplitBandsAtOnce = 1400 << 10;
constexpr std::int64_t kWindowChannels = 32, kPlaceBytes = 64;  // of a place in a plane
constexpr std::int64_t kPackedTogether = 4;                     // panels of weights
// Of several parts: rows whose sums are written together, and pairs that are multiplied at a time, those of a panel of
// weights being in the first-level cache.
constexpr std::int64_t kRowsAtOnce = 128, kPairsAtOnce = 64;
// The most elements that one line of results may see. Wide dilations see mostly padding, which would have to be copied.
constexpr std::int64_t kMostElements = 4 << 20;

/// A convolution by windows, whichever part is computed: images [n, h, w, c] give [n, oh, ow, o].
struct Windows {
  std::int64_t n, h, w, c, oh, ow, o, kh, kw;
  std::int64_t stride[2], dilation[2], before[2];
  bool turned;         // the weight's taps are in reverse order, and what is summed over are its filters
  std::int64_t parts;  // of bfloat16: float16 is two, float32 three

  explicit Windows(const ConvCall& call) {
    const ConvGeometry& g = call.geometry;
    n = g.n, kh = g.kh, kw = g.kw;
    turned = call.part == ConvPart::input;
    parts = call.input.dtype == DType::bf16 ? 1 : call.input.dtype == DType::f16 ? 2 : 3;
    h = turned ? g.oh : g.h, w = turned ? g.ow : g.w, c = turned ? g.o : g.c;
    oh = turned ? g.h : g.oh, ow = turned ? g.w : g.ow, o = turned ? g.c : g.o;
    const std::int64_t window[] = {kh, kw};
    for (int d = 0; d < 2; ++d) {
      stride[d] = turned ? 1 : g.stride[d];
      dilation[d] = g.dilation[d];
      before[d] = turned ? g.dilation[d] * (window[d] - 1) - g.before[d] : g.before[d];
    }
  }
  const TensorView& from(const ConvCall& call) const { return turned ? call.output : call.input; }
  bool split() const { return parts > 1; }
};

/// How bands of images, of `height` lines of the result, lie in the cache. The places that windows see of each pair of
/// remainders by strides are numbered: `lines` by `width` of them. Zeros behind a line are those before the next one;
/// so the last line is followed by `shared` more. Behind all places are some that the last block of rows reads. For
/// each 32 channels there is a plane of all places, 64 bytes of a place after those of the one before: 16 neighbours
/// are a tile.
struct Copies {
  std::int64_t height, bands;
  std::int64_t lines, width, shared;
  std::vector<std::int64_t> first;  // [stride * stride] the number of the first place, below 0 for none
  std::int64_t places = 0;          // of a plane
  std::int64_t band;                // elements of all planes; each part has as many
  std::vector<std::int64_t> runs;   // of each tap: where its place lies, in pairs
  std::int64_t run_steps, steps;

  explicit Copies(const Windows& g, std::int64_t height) : height(height), bands(divide_up(g.oh, height)) {
    lines = height + (g.kh - 1) * g.dilation[0] / g.stride[0];
    const PaddedLine line = {g.ow, g.w, g.kw, g.stride[1], g.dilation[1], g.before[1]};
    shared = line.shared();
    width = line.seen() - shared;
    first.assign(static_cast<std::size_t>(g.stride[0] * g.stride[1]), -1);
    for (std::int64_t k = 0; k < g.kh; ++k) {
      for (std::int64_t l = 0; l < g.kw; ++l) {
        const std::int64_t y = k * g.dilation[0], x = l * g.dilation[1];
        std::int64_t& number = first[static_cast<std::size_t>(y % g.stride[0] * g.stride[1] + x % g.stride[1])];
        if (number < 0) number = places, places += lines * width + shared;
        runs.push_back((number + y / g.stride[0] * width + x / g.stride[1]) * kTileLanes);
      }
    }
    // An odd number, so that planes don't take each other's sets of the cache.
    places = (places + kWindowRows) | 1;
    band = places * g.c;
    run_steps = g.c / 2;
    steps = static_cast<std::int64_t>(runs.size()) * run_steps;
  }
  /// Pairs from a plane to the next.
  std::int64_t plane() const { return places * kTileLanes; }
  /// For tiles of a band.
  void set_rows(TileProduct& product) const {
    product.a_row = kTileLanes, product.a_rows = kTileLanes * kTileLanes;
    product.a_steps = plane(), product.a_part = band / 2;
  }
  bool sees_all() const {
    return std::ranges::all_of(first, [](std::int64_t at) { return at >= 0; });
  }

  // For TileResults::rows, of a band of `count` lines: the place in the band of each window in turn.
  std::vector<std::int32_t> rows_of(const Windows& g, std::int64_t count) const {
    std::vector<std::int32_t> all(static_cast<std::size_t>(round_up((count - 1) * width + g.ow, kWindowRows)), -1);
    for (std::int64_t p = 0; p < count; ++p) {
      for (std::int64_t q = 0; q < g.ow; ++q) {
        all[static_cast<std::size_t>(p * width + q)] = static_cast<std::int32_t>(p * g.ow + q);
      }
    }
    return all;
  }
};

// What `copies` wants of an image for the band that begins at line `line` of the result.
template <class Element>
void copy_band(const Windows& g, const Copies& copies, const Element* image, std::int64_t line, std::uint32_t* to) {
  const std::int64_t plane = copies.plane(), planes = g.parts * g.c / kWindowChannels;
  const auto zeros = [&](std::uint32_t* at, std::int64_t count) {
    for (std::int64_t p = 0; p < planes && count > 0; ++p) {
      for (std::int64_t v = 0; v < count; ++v) std::memset(at + p * plane + v * kTileLanes, 0, kPlaceBytes);
    }
  };
  const auto copy = [&](const Element* from, std::int64_t count, std::int64_t stride, std::uint32_t* at) {
    if constexpr (!std::is_same_v<Element, std::uint16_t>) {
      for (std::int64_t v = 0; v < count; ++v) {
        split_along(from + v * stride, g.c, {at + v * kTileLanes, copies.band / 2}, plane);
      }
    } else {
      for (std::int64_t p = 0; p < planes; ++p, from += kWindowChannels, at += plane) {
        for (std::int64_t v = 0; v < count; ++v) std::memcpy(at + v * kTileLanes, from + v * stride, kPlaceBytes);
      }
    }
  };
  for (std::int64_t phase = 0; phase < g.stride[0] * g.stride[1]; ++phase) {
    if (copies.first[static_cast<std::size_t>(phase)] < 0) continue;
    std::uint32_t* at = to + copies.first[static_cast<std::size_t>(phase)] * kTileLanes;
    // Place (u, v) of the copy is (u * stride + i, v * stride + j) of the image.
    const std::int64_t i = line * g.stride[0] + phase / g.stride[1] - g.before[0],
                       j = phase % g.stride[1] - g.before[1];
    // Those of a line that are inside.
    const std::int64_t begin = std::min(divide_up(std::max<std::int64_t>(-j, 0), g.stride[1]), copies.width),
                       behind = g.w > j ? divide_up(g.w - j, g.stride[1]) : 0,
                       end = std::clamp(behind, begin, copies.width);
    for (std::int64_t u = 0; u < copies.lines; ++u, at += copies.width * kTileLanes) {
      const std::int64_t y = u * g.stride[0] + i;
      if (y < 0 || y >= g.h) {
        zeros(at, copies.width);
        continue;
      }
      zeros(at, begin);
      copy(image + (y * g.w + j + begin * g.stride[1]) * g.c, end - begin, g.stride[1] * g.c, at + begin * kTileLanes);
      zeros(at + end * kTileLanes, copies.width - end);
    }
    zeros(at, copies.shared);
  }
}

// Lines of the result in a band: images that don't fit the cache are cut.
std::int64_t band_height(const Windows& g) {
  const std::int64_t whole = 2 * g.parts * Copies(g, g.oh).band;
  return divide_up(g.oh, std::min(g.oh, divide_up(whole, kBandBytes)));
}

/// The weight in panels of 32 columns of the result, pair by pair along the sum: lines of the window, taps, channels.
/// Of float32 and float16 the parts of 16 pairs follow each other.
class WindowWeight {
 public:
  WindowWeight(const Windows& g, const TensorView& w, std::int64_t steps)
      : g_(g), data_(static_cast<const char*>(w.data)), steps_(steps) {
    std::copy_n(w.strides, 4, strides_);
  }
  std::size_t bytes() const {
    return static_cast<std::size_t>(panels() * kWindowPanel * steps_ * g_.parts) * sizeof(std::uint32_t);
  }
  std::int64_t panels() const { return divide_up(g_.o, kWindowPanel); }

  void pack(std::uint32_t* to) const {
    const std::int64_t pieces = divide_up(panels(), kPackedTogether);
    parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t first = i * kPackedTogether * kWindowPanel;
        const std::int64_t n = std::min(g_.o - first, kPackedTogether * kWindowPanel);
        std::uint32_t* const at = to + first * steps_ * g_.parts;
        pack_any(first, n, at);
      }
    });
  }

 private:
  void pack_columns(std::int64_t first, std::int64_t n, std::uint32_t* to) const {
    std::vector<const void*> rows(static_cast<std::size_t>(g_.turned ? g_.c : 0));
    for (std::int64_t k = 0; k < g_.kh; ++k) {
      for (std::int64_t l = 0; l < g_.kw; ++l) {
        std::uint32_t* const at = to + (k * g_.kw + l) * g_.c / 2 * kWindowPanel;
        if (g_.turned) {
          const auto* const tap = at_tap<std::uint16_t>(g_.kh - 1 - k, g_.kw - 1 - l);
          for (std::int64_t o = 0; o < g_.c; ++o) rows[static_cast<std::size_t>(o)] = tap + o * strides_[0];
          gather_pairs(rows.data(), g_.c / 2, first, n, kWindowPanel, kWindowPanel * steps_,
                       reinterpret_cast<float*>(at), kWindowPanel);
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

  void pack_any(std::int64_t first, std::int64_t n, std::uint32_t* to) const {
    if (g_.parts == 3) return split_columns_of<float>(first, n, to);
    if (g_.parts == 2) return split_columns_of<Half>(first, n, to);
    pack_columns(first, n, to);
  }

  template <class Element>
  void split_columns_of(std::int64_t first, std::int64_t n, std::uint32_t* to) const {
    constexpr std::int64_t kPart = kTileLanes * kWindowPanel, kGroup = kSplitParts<Element> * kPart;
    const std::int64_t panel = kWindowPanel * steps_ * kSplitParts<Element>;
    for (std::int64_t k = 0; k < g_.kh; ++k) {
      for (std::int64_t l = 0; l < g_.kw; ++l) {
        const auto* const tap = g_.turned ? at_tap<Element>(g_.kh - 1 - k, g_.kw - 1 - l) + first
                                          : at_tap<Element>(k, l) + first * strides_[0];
        std::uint32_t* at = to + (k * g_.kw + l) * g_.c / kSplitGroup * kGroup;
        for (std::int64_t c = 0; c < g_.c; c += kSplitGroup, at += kGroup) {
          if (!g_.turned) {
            for (std::int64_t j = 0; j < n; j += kTileLanes) {
              split_columns(tap + j * strides_[0] + c, strides_[0], n - j, kSplitGroup,
                            {at + j / kWindowPanel * panel + j % kWindowPanel, kPart});
            }
            continue;
          }
          for (std::int64_t i = 0; i < kTileLanes; ++i) {
            const Element* const line = tap + (c + i) * strides_[0];
            split_across(line, line + kTileLanes * strides_[0], n, {at + i * kWindowPanel, kPart}, panel, 0);
          }
        }
      }
    }
  }
  template <class Element>
  const Element* at_tap(std::int64_t k, std::int64_t l) const {
    return reinterpret_cast<const Element*>(data_) + k * strides_[2] + l * strides_[3];
  }

  const Windows& g_;
  const char* data_;
  std::int64_t strides_[4];
  std::int64_t steps_;
};

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

// A row-major [O, C, KH, KW] with the channels next to each other.
template <class Element>
void channels_next(const Windows& g, const TensorView& w, Element* to) {
  const std::int64_t channels = w.sizes[1], taps = g.kh * g.kw;
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

/// Rows of a band whose sums are made together: at most kRowsAtOnce.
struct RowBlock {
  const std::uint32_t* band;
  std::int64_t row, rows;
  const std::int32_t* lines;  ///< where their results go, of the lines at `to`
  void* to;
};

/// Products of parts.
struct SplitWindows {
  static constexpr std::int64_t kBlockSums = kRowsAtOnce * kWindowPanel;
  const Windows& g;
  const Copies& copies;
  const AmxKernels& amx;
  const std::uint32_t* weight;
  const float* bias;  // or null
  bool stream;
  float* sums;  // kBlockSums for each block and panel

  // Columns [first, first + n) of some blocks. Each piece of the weight is read once for all of them. False where a sum
  // isn't finite.
  bool multiply(std::span<const RowBlock> blocks, std::int64_t first, std::int64_t n) const {
    const std::int64_t panels = divide_up(n, kWindowPanel);
    TileProduct product = {};
    product.parts = g.parts == 3 ? TileParts::three : TileParts::two;
    copies.set_rows(product);
    product.ldc = kWindowPanel;
    for (std::int64_t j = 0; j < panels; ++j) {
      product.columns = std::min(kWindowPanel, n - j * kWindowPanel);
      product.b = weight + (first + j * kWindowPanel) * copies.steps * g.parts;
      product.accumulate = false;
      for (const std::int64_t run : copies.runs) {
        for (std::int64_t s = 0; s < copies.run_steps; s += product.steps) {
          product.steps = std::min(kPairsAtOnce, copies.run_steps - s);
          for (std::size_t i = 0; i < blocks.size(); ++i) {
            product.rows = blocks[i].rows;
            product.a = blocks[i].band + blocks[i].row * kTileLanes + run + s / kTileLanes * product.a_steps;
            product.c = sums + (static_cast<std::int64_t>(i) * panels + j) * kBlockSums;
            amx.multiply(product);
          }
          product.b += product.steps * kWindowPanel * g.parts;
          product.accumulate = true;
        }
      }
    }
    bool finite = true;
    const float* block_sums = sums;
    for (const RowBlock& block : blocks) {
      const PanelSums from = {block_sums, kBlockSums, block.rows, n, bias != nullptr ? bias + first : nullptr,
                              block.lines};
      const bool copied = g.parts == 3 ? copy_finite(from, static_cast<float*>(block.to) + first, g.o, stream)
                                       : copy_finite(from, static_cast<Half*>(block.to) + first, g.o, stream);
      finite = finite && copied;
      block_sums += panels * kBlockSums;
    }
    return finite;
  }
};

Status no_room_for_windows(KernelContext* context) {
  context->set_error(context, "convolution: out of memory for the workspace");
  return Status::failed;
}

}  // namespace

bool windows_serve(const ConvCall& call) noexcept {
  const ConvGeometry& g = call.geometry;
  const DType dtype = call.input.dtype;
  const bool served = dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f16;
  if (!served || call.weight.dtype != dtype || call.output.dtype != dtype) return false;
  if (g.groups != 1 || call.part == ConvPart::weight) return false;
  if (!channels_last(call.input) || !channels_last(call.output)) return false;
  if (!channels_last(call.weight) && !row_major(call.weight)) return false;
  // Of an input gradient's windows none may begin further inside of the image than its first place.
  if (call.part == ConvPart::input &&
      (g.stride[0] != 1 || g.stride[1] != 1 || g.before[0] > g.dilation[0] * (g.kh - 1) ||
       g.before[1] > g.dilation[1] * (g.kw - 1))) {
    return false;
  }
  const Windows windows(call);
  const std::int64_t lines = 1 + (g.kh - 1) * g.dilation[0] / windows.stride[0],
                     width = windows.ow + (g.kw - 1) * g.dilation[1] / windows.stride[1];
  return windows.c % kWindowPanel == 0 &&
         lines * width * windows.c * windows.stride[0] * windows.stride[1] <= kMostElements;
}

bool windows_suit(const ConvCall& call) noexcept {
  // Sums that are dropped take as long as others. oneDNN's kernels leave more for windows of several places.
  const Windows g(call);
  const std::int64_t places = g.oh * g.ow;
  return amx_usable() && (g.kh * g.kw > 1 || places * 8 >= round_up(places, kWindowRows) * 7);
}

Status convolve_windows(KernelContext* context, ConvCall& call) {
  const Windows g(call);
  const Copies copies(g, band_height(g));
  TensorView& result = call.result();
  float* bias = nullptr;
  if (call.bias != nullptr && !take_workspace(context, static_cast<std::size_t>(g.o), bias))
    return no_room_for_windows(context);
  TensorView w = call.weight;
  const std::int64_t channels = w.sizes[1], taps = g.kh * g.kw;
  const std::int64_t next_strides[] = {taps * channels, 1, g.kw * channels, channels};
  char* turned = nullptr;
  const bool copied = !channels_last(w);
  if (copied) {
    const auto bytes = static_cast<std::size_t>(w.numel) * item_size(w.dtype);
    if (!take_workspace(context, bytes, turned)) return no_room_for_windows(context);
    w.data = turned, w.strides = next_strides;
  }
  const WindowWeight weight(g, w, copies.steps);
  // For packed_weight(): below int8's orders.
  constexpr std::int64_t kOutputOrder = -101, kInputOrder = -102;
  const PackedWeight packed =
      packed_weight(context, call.weight_storage, call.weight, g.turned ? kInputOrder : kOutputOrder, g.parts,
                    weight.bytes(), [&](void* to) {
                      if (runs_dry(context)) return true;
                      if (copied && w.dtype == DType::f32) {
                        channels_next(g, call.weight, reinterpret_cast<float*>(turned));
                      } else if (copied) {
                        channels_next(g, call.weight, reinterpret_cast<std::uint16_t*>(turned));
                      }
                      weight.pack(static_cast<std::uint32_t*>(to));
                      return true;
                    });
  if (packed.data == nullptr) return no_room_for_windows(context);

  const std::int64_t threads = num_threads(), panels = weight.panels(), bands = g.n * copies.bands;
  const bool few = static_cast<std::int64_t>(weight.bytes()) <= kFewWeights;
  const std::int64_t most =
      few ? 1
          : std::clamp<std::int64_t>((g.split() ? kSplitBandsAtOnce : kBandsAtOnce) / (2 * g.parts * copies.band), 1,
                                     bands);
  const std::int64_t groups = std::min(bands, round_up(divide_up(bands, most), threads));
  const std::int64_t parts = std::min(panels, divide_up(threads, groups)), jobs = groups * parts;
  const std::int64_t all_parts = g.parts * copies.band;  // of a band
  const std::int64_t workers = num_workers(jobs), each = round_up(divide_up(bands, groups) * all_parts, 32);
  const std::int64_t blocks_of_a_group =
      divide_up(bands, groups) *
      divide_up(static_cast<std::int64_t>(copies.rows_of(g, copies.height).size()), kRowsAtOnce);
  const std::int64_t most_sums =
      g.split() ? SplitWindows::kBlockSums * (few ? divide_up(panels, parts) : blocks_of_a_group) : 0;
  std::uint16_t* room = nullptr;
  float* all_sums = nullptr;
  if (!take_workspace(context, static_cast<std::size_t>(workers * each), room) ||
      !take_workspace(context, static_cast<std::size_t>(workers * most_sums), all_sums)) {
    return no_room_for_windows(context);
  }
  if (runs_dry(context)) return Status::ok;
  if (bias != nullptr) read_row(*call.bias, 0, call.bias->strides[0], g.o, bias);

  const std::vector<std::int32_t> all_rows = copies.rows_of(g, copies.height),
                                  last_rows = copies.rows_of(g, g.oh - (copies.bands - 1) * copies.height);
  const AmxKernels amx = amx_kernels(amx_usable());
  const bool stream = written_past_caches(result);
  std::atomic<bool> finite{true};
  const void* const images = g.from(call).data;
  const auto line_of = [&](std::int64_t band) { return band % copies.bands * copies.height; };
  const auto image_of = [&](auto tag, std::int64_t band) {
    return static_cast<const decltype(tag)*>(images) + band / copies.bands * g.h * g.w * g.c;
  };
  parallel_jobs(jobs, workers, [&](std::int64_t job, std::int64_t worker) {
    const std::int64_t group = job / parts, part = job % parts;
    const std::int64_t first = bands * group / groups, last = bands * (group + 1) / groups;
    const std::int64_t panel = panels * part / parts, end = panels * (part + 1) / parts;
    std::uint16_t* const copy = room + worker * each;
    for (std::int64_t i = first; i < last; ++i) {
      auto* const to = reinterpret_cast<std::uint32_t*>(copy + (i - first) * all_parts);
      if (g.parts == 3) {
        copy_band(g, copies, image_of(float{}, i), line_of(i), to);
      } else if (g.parts == 2) {
        copy_band(g, copies, image_of(Half{}, i), line_of(i), to);
      } else {
        copy_band(g, copies, image_of(std::uint16_t{}, i), line_of(i), to);
      }
    }
    if (g.split()) {
      const auto* const weights = static_cast<const std::uint32_t*>(packed.data);
      const SplitWindows split = {g, copies, amx, weights, bias, stream, all_sums + worker * most_sums};
      std::vector<RowBlock> blocks;
      for (std::int64_t i = first; i < last; ++i) {
        const auto& rows = line_of(i) + copies.height >= g.oh ? last_rows : all_rows;
        const auto* const band = reinterpret_cast<const std::uint32_t*>(copy + (i - first) * all_parts);
        void* const to = element(result.dtype, result.data, (i / copies.bands * g.oh + line_of(i)) * g.ow * g.o);
        const auto count = static_cast<std::int64_t>(rows.size());
        for (std::int64_t r = 0; r < count; r += kRowsAtOnce) {
          blocks.push_back({band, r, std::min(kRowsAtOnce, count - r), rows.data() + r, to});
        }
      }
      const std::int64_t column = panel * kWindowPanel, columns = std::min(g.o, end * kWindowPanel) - column;
      bool all_finite = true;
      if (few) {
        for (const RowBlock& block : blocks) all_finite = split.multiply({&block, 1}, column, columns) && all_finite;
      } else {
        for (std::int64_t j = 0; j < columns; j += kWindowPanel) {
          all_finite = split.multiply(blocks, column + j, std::min(kWindowPanel, columns - j)) && all_finite;
        }
      }
      if (!all_finite) finite.store(false, std::memory_order_relaxed);
    }
    const std::int64_t chunk = last - first == 1 ? end - panel : 1;
    for (std::int64_t p = panel; p < end && !g.split(); p += chunk) {
      const std::int64_t column = p * kWindowPanel;
      TileProduct product = {};
      product.steps = copies.steps;
      product.columns = std::min(g.o - column, chunk * kWindowPanel);
      copies.set_rows(product);
      product.runs = copies.runs.data(), product.run_steps = copies.run_steps;
      product.b = static_cast<const std::uint32_t*>(packed.data) + column * copies.steps * g.parts;
      for (std::int64_t i = first; i < last; ++i) {
        const auto& rows = line_of(i) + copies.height >= g.oh ? last_rows : all_rows;
        product.a = reinterpret_cast<const std::uint32_t*>(copy + (i - first) * all_parts);
        const std::int64_t line = i / copies.bands * g.oh + line_of(i);
        const float* const own_bias = bias != nullptr ? bias + column : nullptr;
        product.rows = static_cast<std::int64_t>(rows.size());
        // What comes next: the next columns' weights, or bands that this thread most likely takes then.
        const std::int64_t next = i + last - first;
        product.next_bytes = 0;
        if (p + chunk < end) {
          product.next = product.b + kWindowPanel * copies.steps;
          if (i == first) product.next_bytes = 4 * kWindowPanel * copies.steps;
        } else if (next < bands && copies.sees_all()) {
          const std::int64_t seen = std::clamp<std::int64_t>(line_of(next) * g.stride[0] - g.before[0], 0, g.h),
                             lines = std::min(copies.lines * g.stride[0], g.h - seen);
          product.next = image_of(std::uint16_t{}, next) + seen * g.w * g.c;
          product.next_bytes = 2 * lines * g.w * g.c;
        }
        auto* const to = static_cast<std::uint16_t*>(result.data) + line * g.ow * g.o + column;
        amx.multiply_rounded(product, {to, g.o, own_bias, false, rows.data(), stream});
      }
    }
    amx.release();
    if (stream) amx.fence();
  });
  return finite || g.parts == 2 ? Status::ok : Status::unsupported;
}

}  // namespace halfstep::cpu
