// SPDX-License-Identifier: Apache-2.0
// The output's places are numbered line after line, with zeros between lines and between images. A tap of the window
// then sees the input at a fixed distance from each place. A chunk of places is cut in two halves, and place i of the
// first half is packed in a pair with place i of the second one. Any 16 consecutive pairs then form a tile, whatever
// the distance: the input is packed once, and not once per tap.
#include "halfstep/backends/cpu/conv_weight_tiles.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_shares.h"
#include "halfstep/backends/cpu/conv_weight_sums.h"
#include "halfstep/backends/cpu/pair_tile.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/shared_padding.h"
#include "halfstep/backends/cpu/split_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kPanel = 2 * kTileLanes;  // channels, and filters of a block of sums
// Packed filters and panels of channels: both stay in the second-level cache while they are multiplied.
constexpr std::int64_t kFilterBytes = 768 << 10, kPanelBytes = 512 << 10;
// How much is packed and multiplied at a time, for elements of so many parts. Measured on a Granite Rapids.
struct Packing {
  std::int64_t filters;
  std::int64_t panels;  // where there is one tap
  // Multiplied at a time: in bfloat16 as many as stay in the first-level cache, of 32 filters and of a panel. Products
  // of several parts read each pair several times, and take longer the more often sums are loaded and stored.
  std::int64_t pairs;
};
constexpr std::int64_t kAllPairs = std::numeric_limits<std::int64_t>::max();
constexpr Packing kPackings[] = {{}, {512, 8, 128}, {256, 4, kAllPairs}, {256, 4, kAllPairs}};
// The most places that are numbered, or packed, for one that is seen.
constexpr std::int64_t kMostPadding = 4;
// The most places that a window may span. Wide dilations see mostly padding.
constexpr std::int64_t kMostSeen = 1 << 16;
// Jobs that a thread has where that costs little, and the fewest taps times panels of channels of a share then.
constexpr std::int64_t kJobsOfThread = 4, kTapsOfShare = 32;
// The most sums that all terms have together.
constexpr std::int64_t kTermSums = 640 << 10;

// Whether the channels of the taps of a line become the channels of one tap: few channels would leave most of a tile
// empty. Such lines of the input are copied with the padding around them.
bool folds(const ConvGeometry& g) { return g.c < kTileLanes && g.kw > 1 && g.dilation[1] == 1; }
ConvGeometry folded(const ConvGeometry& g) {
  if (!folds(g)) return g;
  ConvGeometry one = g;
  one.w = g.ow, one.c = g.kw * g.c, one.kw = 1;
  one.stride[1] = 1, one.before[1] = one.after[1] = 0;
  return one;
}

/// How the places of output and input are numbered.
struct PlaceOrder {
  const ConvGeometry g;           // folded
  std::int64_t line;              // elements of a copied line, or 0
  std::int64_t seen[2];           // places of a phase that the windows of a column and of a line see
  std::int64_t width, lines;      // places from one line to the next, lines from one image to the next
  std::vector<TapPlace> taps;     // [kh * kw] place i of the output sees place i + offset of the input's phase
  std::vector<std::int64_t> end;  // [phase] the largest offset plus one, or 0 for a phase that no tap sees

  explicit PlaceOrder(const ConvGeometry& call)
      : g(folded(call)), line(folds(call) ? ((call.ow - 1) * call.stride[1] + call.kw) * call.c : 0) {
    const std::int64_t window[] = {g.kh, g.kw}, results[] = {g.oh, g.ow}, places[] = {g.h, g.w};
    std::int64_t step[2];
    for (int d = 0; d < 2; ++d) {
      const PaddedLine line = {results[d], places[d], window[d], g.stride[d], g.dilation[d], g.before[d]};
      seen[d] = line.seen();
      step[d] = seen[d] - line.shared();
    }
    lines = step[0], width = step[1];
    end.resize(static_cast<std::size_t>(g.stride[0] * g.stride[1]));
    for (std::int64_t k = 0; k < g.kh; ++k) {
      for (std::int64_t l = 0; l < g.kw; ++l) {
        const TapPlace tap = tap_place(g.stride, k * g.dilation[0], l * g.dilation[1], width);
        taps.push_back(tap);
        std::int64_t& behind = end[static_cast<std::size_t>(tap.phase)];
        behind = std::max(behind, tap.offset + 1);
      }
    }
  }
  std::int64_t image() const { return lines * width; }
  /// Panels of channels that are packed together.
  std::int64_t panels(const Packing& packing) const {
    return taps.size() == 1 ? std::min(packing.panels, divide_up(g.c, kPanel)) : 1;
  }
  std::int64_t phases() const {
    return std::ranges::count_if(end, [](std::int64_t e) { return e > 0; });
  }
  /// Lines of a phase that `count` lines of the output see.
  std::int64_t lines_seen(std::int64_t count) const { return count + seen[0] - g.oh; }
  /// Elements between copied lines: a panel more may be read.
  std::int64_t line_stride() const { return line == 0 ? 0 : round_up(line + kPanel, kPanel); }
  /// How many pairs of a phase are packed for `pairs` pairs of the output.
  std::int64_t packed(std::size_t phase, std::int64_t pairs) const {
    return end[phase] == 0 ? 0 : pairs + end[phase] - 1;
  }
  /// How many places one behind another a window sees at most.
  std::int64_t span() const { return *std::ranges::max_element(end); }
};

/// Places that are multiplied together: whole images, or some lines of one image.
struct PlaceChunk {
  std::int64_t image, images;
  std::int64_t line, count;  // of each image

  std::int64_t pairs(const PlaceOrder& order) const {
    return round_up((images - 1) * order.image() + count * order.width, kSplitGroup) / 2;
  }
};

/// The terms of the sum and their chunks, which depend on the geometry and the dtype alone.
struct PlaceChunks {
  std::int64_t terms;
  std::int64_t images;  // the most of a chunk
  std::int64_t count;   // the most lines of a chunk

  PlaceChunks(const PlaceOrder& order, std::int64_t parts) {
    const ConvGeometry& g = order.g;
    terms = std::min(weight_terms(g.n * g.oh * g.ow), g.n * g.oh);
    while (terms > 1 && terms * g.o * g.kh * g.kw * g.c > kTermSums) terms /= 2;
    const Packing& packing = kPackings[parts];
    const std::int64_t places = std::min(kFilterBytes / (2 * parts) / std::min(g.o, packing.filters),
                                         kPanelBytes / (2 * parts * kPanel * order.panels(packing)) / order.phases());
    // Of a term's lines: whole images, or some lines of one. Chunks are about the same size.
    const std::int64_t lines = divide_up(g.n * g.oh, terms);
    images = 1, count = std::clamp<std::int64_t>(places / order.width, 1, std::min(g.oh, lines));
    count = divide_up(g.oh, divide_up(g.oh, count));
    if (order.image() <= places && lines >= g.oh) {
      const std::int64_t whole = lines / g.oh;
      count = g.oh, images = std::min(whole, places / order.image());
      images = divide_up(whole, divide_up(whole, images));
    }
  }
  std::vector<PlaceChunk> of(const ConvGeometry& g, std::int64_t term) const {
    const std::int64_t lines = g.n * g.oh, last = lines * (term + 1) / terms;
    std::vector<PlaceChunk> chunks;
    for (std::int64_t at = lines * term / terms; at < last;) {
      const std::int64_t line = at % g.oh, whole = line == 0 && count == g.oh ? (last - at) / g.oh : 0;
      const PlaceChunk chunk = whole > 0 ? PlaceChunk{at / g.oh, std::min(images, whole), 0, g.oh}
                                         : PlaceChunk{at / g.oh, 1, line, std::min({count, g.oh - line, last - at})};
      chunks.push_back(chunk);
      at += chunk.images * chunk.count;
    }
    return chunks;
  }
  /// Of the largest chunk.
  std::int64_t pairs(const PlaceOrder& order) const { return PlaceChunk{0, images, 0, count}.pairs(order); }
};

/// The memory of a thread that multiplies.
template <class Element>
struct Room {
  std::uint32_t* filters;
  std::uint32_t* panels;
  const void** pairs;  // of places: first the output's, then the input's, phase after phase
  Element* lines;      // of the input that are copied
  const Element* zeros;
};

constexpr std::int64_t kMostPhases = 64;

template <class Number>
class TileJob {
  using Element = typename Number::Element;

 public:
  TileJob(const ConvCall& call, const PlaceOrder& order, const Room<Element>& room, float* sums)
      : call_(call), g_(order.g), order_(order), room_(room), sums_(sums) {}

  /// Adds the chunk's products to the sums of filters [o0, o1) and channels [c0, c1); the first chunk sets them.
  void run(const PlaceChunk& chunk, bool begins, std::int64_t o0, std::int64_t o1, std::int64_t c0, std::int64_t c1) {
    const std::int64_t pairs = chunk.pairs(order_), together = kPanel * order_.panels(kPacking);
    load_filters(chunk, pairs, o0, o1);
    find_input(chunk, pairs);
    TileProduct product = {};
    product.parts = Number::kTileParts, product.steps = pairs;
    product.set_packed(room_.filters);
    product.b_steps = kTileLanes * kPanel;
    product.ldc = kPanel;
    for (std::int64_t c = c0; c < c1; c += kPanel) {
      const std::int64_t first = (c - c0) % together;
      if (first == 0) load_panels(c, std::min(together, c1 - c), pairs);
      product.columns = std::min(kPanel, c1 - c);
      float* const sums = sums_ + (c / kPanel * g_.kh * g_.kw * g_.o + o0) * kPanel;
      for (std::int64_t s = 0; s < pairs; s += kPacking.pairs) {
        product.steps = std::min(kPacking.pairs, pairs - s);
        product.accumulate = !begins || s > 0;
        for (std::int64_t o = 0; o < o1 - o0; o += kPanel) {
          product.rows = std::min(kPanel, o1 - o0 - o);
          product.a = room_.filters + o / kTileLanes * product.a_rows + s / kTileLanes * product.a_steps;
          product.c = sums + o * kPanel;
          for (const TapPlace& tap : order_.taps) {
            const auto phase = static_cast<std::size_t>(tap.phase);
            const std::int64_t count = order_.packed(phase, pairs);
            product.b = panels_[phase] + (tap.offset + s) * kPanel + first * kParts * count;
            product.b_part = count * kPanel;
            amx_.multiply(product);
            product.c += g_.o * kPanel;
          }
        }
      }
    }
  }
  void release() const { amx_.release(); }

 private:
  static constexpr std::int64_t kParts = Number::kParts;
  static constexpr Packing kPacking = kPackings[kParts];

  static const Element* place(const void* pair) { return static_cast<const Element*>(pair); }

  // Sets place i in the pairs of which it is part.
  static void set(const void** pairs, std::int64_t i, std::int64_t half, std::int64_t count, const Element* at) {
    if (i < count) pairs[2 * i] = at;
    if (i >= half) pairs[2 * (i - half) + 1] = at;
  }

  // Packs the output's gradient as TileProduct::a.
  void load_filters(const PlaceChunk& chunk, std::int64_t pairs, std::int64_t o0, std::int64_t o1) {
    const auto* const y = static_cast<const Element*>(call_.output.data);
    std::fill_n(room_.pairs, 2 * pairs, room_.zeros);
    for (std::int64_t m = 0; m < chunk.images; ++m) {
      for (std::int64_t p = 0; p < chunk.count; ++p) {
        const Element* at = y + ((chunk.image + m) * g_.oh + chunk.line + p) * g_.ow * g_.o;
        const std::int64_t first = m * order_.image() + p * order_.width;
        for (std::int64_t q = 0; q < g_.ow; ++q, at += g_.o) set(room_.pairs, first + q, pairs, pairs, at);
      }
    }
    constexpr std::int64_t kPart = kTileLanes * kTileLanes, kGroup = kParts * kPart;
    const std::int64_t groups = pairs / kTileLanes;
    for (std::int64_t group = 0; group < groups; ++group) {
      const void* const* const from = room_.pairs + group * 2 * kTileLanes;
      if constexpr (kParts == 1) {
        const std::int64_t ahead = kTileLanes * g_.o * static_cast<std::int64_t>(sizeof(Element));
        for (std::int64_t o = o0; o < o1; o += kMostTurned) {
          std::uint32_t* const to = room_.filters + ((o - o0) / kTileLanes * groups + group) * kGroup;
          turn_places({from, o, std::min(kMostTurned, o1 - o), pairs, to, ahead});
        }
      } else {
        std::array<const Element*, kSplitGroup> lines;
        for (std::size_t i = 0; i < kTileLanes; ++i) {
          lines[i] = place(from[2 * i]) + o0, lines[i + kTileLanes] = place(from[2 * i + 1]) + o0;
        }
        for (std::int64_t o = o0; o < o1; o += kTileLanes) {
          std::uint32_t* const to = room_.filters + ((o - o0) / kTileLanes * groups + group) * kGroup;
          split_turned<Number>(lines.data(), o1 - o, {to, kPart}, kTileLanes * g_.o);
          for (const Element*& at : lines) at += kTileLanes;
        }
      }
    }
  }

  // Packs channels [c, c + n) of all phases as TileProduct::b.
  void load_panels(std::int64_t c, std::int64_t n, std::int64_t pairs) {
    if (order_.line > 0) n = round_up(n, kPanel);  // whole vectors; what follows isn't used
    std::uint32_t* to = room_.panels;
    const void* const* from = room_.pairs;
    for (std::size_t phase = 0; phase < order_.end.size(); ++phase) {
      const std::int64_t count = order_.packed(phase, pairs);
      panels_[phase] = to;
      if constexpr (kParts == 1) {
        gather_pairs(from, count, c, n, kPanel, count * kPanel, reinterpret_cast<float*>(to), kPanel);
      } else {
        for (std::int64_t i = 0; i < count; ++i) {
          const Element *const first = place(from[2 * i]) + c, *const second = place(from[2 * i + 1]) + c;
          split_across<Number>(first, second, n, {to + i * kPanel, count * kPanel}, kParts * count * kPanel, 0);
          __builtin_prefetch(second + kPanel, 0, 2);  // of the next channels
          __builtin_prefetch(second + kPanel + kTileLanes, 0, 2);
        }
      }
      from += 2 * count;
      to += kParts * count * round_up(n, kPanel);
    }
  }

  // The next of the copied lines, with the padding around it. `from`: the line of the input.
  Element* copy_line(const Element* from, Element*& next) const {
    const ConvGeometry& g = call_.geometry;
    Element* const to = next;
    const std::int64_t begin = std::min(g.before[1] * g.c, order_.line), end = std::min(begin + g.w * g.c, order_.line);
    std::fill_n(to, begin, Element{});
    std::copy_n(from, end - begin, to + begin);
    std::fill(to + end, to + order_.line_stride(), Element{});
    next += order_.line_stride();
    return to;
  }

  // Sets room_.pairs to where the input's places are.
  void find_input(const PlaceChunk& chunk, std::int64_t pairs) {
    const auto* const x = static_cast<const Element*>(call_.input.data);
    const ConvGeometry& call = call_.geometry;
    const std::int64_t lines = order_.lines_seen(chunk.count);
    const std::int64_t place = order_.line > 0 ? call.stride[1] * call.c : g_.c;
    const void** to = room_.pairs;
    Element* copies = room_.lines;
    for (std::int64_t phase = 0; phase < g_.stride[0] * g_.stride[1]; ++phase) {
      const std::int64_t count = order_.packed(static_cast<std::size_t>(phase), pairs);
      if (count == 0) continue;
      std::fill_n(to, 2 * count, room_.zeros);
      const std::int64_t first = phase % g_.stride[1] - g_.before[1];
      for (std::int64_t m = 0; m < chunk.images; ++m) {
        for (std::int64_t u = 0; u < lines; ++u) {
          const std::int64_t i = (chunk.line + u) * g_.stride[0] + phase / g_.stride[1] - g_.before[0];
          if (i < 0 || i >= g_.h) continue;
          const std::int64_t line = m * order_.image() + u * order_.width;
          const Element* from = x + ((chunk.image + m) * g_.h + i) * call.w * call.c;
          if (order_.line > 0) from = copy_line(from, copies);
          for (std::int64_t v = 0; v < std::min(order_.seen[1], count + pairs - line); ++v) {
            const std::int64_t j = v * g_.stride[1] + first;
            if (j >= 0 && j < g_.w) set(to, line + v, pairs, count, from + j * place);
          }
        }
      }
      to += 2 * count;
    }
  }

  const ConvCall& call_;
  const ConvGeometry& g_;
  const PlaceOrder& order_;
  const Room<Element>& room_;
  float* sums_;
  std::array<const std::uint32_t*, kMostPhases> panels_ = {};  // of each phase
  const AmxKernels amx_ = amx_kernels(amx_usable());
};

template <class Number>
Status weight_by_parts(KernelContext* context, ConvCall& call) {
  using Element = typename Number::Element;
  const PlaceOrder order(call.geometry);
  const ConvGeometry& g = order.g;
  constexpr std::int64_t kParts = Number::kParts;
  constexpr Packing kPacking = kPackings[kParts];
  const PlaceChunks chunks(order, kParts);
  TensorView& w = call.weight;
  const std::int64_t panels = divide_up(g.c, kPanel), all = g.o * g.kh * g.kw * panels * kPanel;
  const std::int64_t filters = std::min(g.o, kPacking.filters), blocks = divide_up(g.o, filters);
  const std::int64_t threads = in_parallel_region() ? 1 : num_threads();
  // Where there are too few terms and blocks of filters, they are cut into shares of the channels. Each share packs the
  // filters and finds the input's places again. Shares that multiply enough to repay that may be several for a thread:
  // idle threads steal some.
  const std::int64_t whole = chunks.terms * blocks,
                     wanted = threads > 1 ? divide_up(kJobsOfThread * threads, whole) : 1;
  const std::int64_t large = panels * g.kh * g.kw / kTapsOfShare,
                     shares = std::min(panels, std::max(divide_up(threads, whole), std::min(wanted, large)));
  const std::int64_t jobs = chunks.terms * blocks * shares, workers = num_workers(jobs);
  const std::int64_t pairs = chunks.pairs(order);
  const std::int64_t filter_room = pairs * kParts * round_up(filters, kTileLanes);
  std::int64_t packed = 0;
  for (std::size_t phase = 0; phase < order.end.size(); ++phase) packed += order.packed(phase, pairs);
  const std::int64_t panel_room = kParts * kPanel * packed * order.panels(kPacking),
                     line_room = chunks.images * order.lines_seen(chunks.count) * order.phases() * order.line_stride(),
                     pair_room = 2 * std::max(pairs, packed), zero_room = round_up(std::max(g.c, g.o), kPanel) + kPanel;
  std::uint32_t* memory = nullptr;
  const void** pair = nullptr;
  Element *zeros = nullptr, *copies = nullptr;
  float *sums = nullptr, *lines = nullptr;
  if (!take_workspace(context, static_cast<std::size_t>(workers * (filter_room + panel_room)), memory) ||
      !take_workspace(context, static_cast<std::size_t>(workers * pair_room), pair) ||
      !take_workspace(context, static_cast<std::size_t>(workers * line_room), copies) ||
      !take_workspace(context, static_cast<std::size_t>(zero_room), zeros) ||
      !take_workspace(context, static_cast<std::size_t>(chunks.terms * all), sums) ||
      !take_workspace(context, static_cast<std::size_t>(weight_line_floats(call.geometry)), lines)) {
    return conv_out_of_memory(context);
  }
  if (runs_dry(context)) return Status::ok;
  std::fill_n(zeros, zero_room, Element{});
  parallel_jobs(jobs, workers, [&](std::int64_t job, std::int64_t worker) {
    const std::int64_t term = job / (blocks * shares), block = job / shares % blocks, share = job % shares;
    std::uint32_t* const own = memory + worker * (filter_room + panel_room);
    const Room<Element> room = {own, own + filter_room, pair + worker * pair_room, copies + worker * line_room, zeros};
    TileJob<Number> one(call, order, room, sums + term * all);
    const std::int64_t o0 = block * filters, c0 = panels * share / shares * kPanel,
                       c1 = std::min(g.c, panels * (share + 1) / shares * kPanel);
    bool begins = true;
    for (const PlaceChunk& chunk : chunks.of(g, term)) {
      one.run(chunk, begins, o0, std::min(g.o, o0 + filters), c0, c1);
      begins = false;
    }
    one.release();
  });
  const WeightSums done = {.sums = sums,
                           .terms = chunks.terms,
                           .all = all,
                           .filter = kPanel,
                           .taps = g.kh * g.kw,
                           .tap = g.o * kPanel,
                           .channels = g.c,
                           .run = kPanel,
                           .next_run = g.kh * g.kw * g.o * kPanel};
  const bool finite = write_weight(call.geometry, done, lines, w);
  return finite || !std::is_same_v<Element, float> ? Status::ok : Status::unsupported;
}

}  // namespace

bool tiles_serve(const ConvCall& call) noexcept {
  const ConvGeometry& g = call.geometry;
  const DType dtype = call.input.dtype;
  const bool served = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
  if (call.part != ConvPart::weight || g.groups != 1 || !served || call.output.dtype != dtype) return false;
  if (!channels_last(call.input) || !channels_last(call.output) || !amx_usable()) return false;
  const ConvGeometry one = folded(g);
  return one.stride[0] * one.stride[1] <= kMostPhases && PlaceOrder(g).span() <= kMostSeen;
}

bool weight_repays_packing(const ConvCall& call) noexcept {
  // Measured on a Granite Rapids, layer by layer of ResNet-50, YOLOv5n and others. In float32 the input is split in
  // three parts (or two, for which this wasn't measured), which takes enough filters.
  const ConvGeometry& g = call.geometry;
  const DType dtype = call.input.dtype;
  const std::int64_t weights = g.o * g.kh * g.kw * g.c;
  if (dtype == DType::f32) return g.o >= kPanel && weights > 64 * 64;
  return weights >= (dtype == DType::f16 ? 256 : 512);
}

bool tiles_suit(const ConvCall& call) noexcept {
  if (!weight_repays_packing(call)) return false;
  const ConvGeometry& g = call.geometry;
  const PlaceOrder order(g);
  const std::int64_t parts = count_parts(tile_parts(call.input.dtype, call.precision)),
                     pairs = PlaceChunks(order, parts).pairs(order);
  // Not where most of what is multiplied or packed is padding (windows as large as the image, wide dilations), or where
  // a line alone is larger than the cache.
  return order.image() <= kMostPadding * g.oh * g.ow && pairs + order.span() <= kMostPadding * pairs &&
         4 * parts * pairs * std::min(g.o, kPackings[parts].filters) <= 2 * kFilterBytes &&
         4 * parts * pairs * kPanel * order.panels(kPackings[parts]) * order.phases() <= 2 * kPanelBytes;
}

Status weight_by_tiles(KernelContext* context, ConvCall& call) {
  return with_split_number(tile_parts(call.input.dtype, call.precision),
                           [&]<class Number>(Number) { return weight_by_parts<Number>(context, call); });
}

}  // namespace halfstep::cpu
