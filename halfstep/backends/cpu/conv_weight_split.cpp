// SPDX-License-Identifier: Apache-2.0
// The output's places are numbered line after line, with zeros between lines and between images. A tap of the window
// then sees the input at a fixed distance from each place. Each place of the input is packed in a pair with the one 16
// places on, so that any 16 consecutive pairs form a tile, whatever the distance: the input is packed once, and not
// once per tap.
#include "halfstep/backends/cpu/conv_weight_split.h"

#include <algorithm>
#include <array>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_shares.h"
#include "halfstep/backends/cpu/conv_weight_sums.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/shared_padding.h"
#include "halfstep/backends/cpu/split_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kPanel = 2 * kTileLanes;  // channels that are packed at a time
// The filters that are packed at a time, their bytes, and the bytes of a packed panel of the input. Both stay in the
// second-level cache while they are multiplied.
constexpr std::int64_t kMostFilters = 128, kFilterBytes = 768 << 10, kPanelBytes = 512 << 10;
// Pairs that are multiplied at a time. Those of a panel and a tap stay in the first-level cache for all filters.
constexpr std::int64_t kPairsOfATap = 64;
// The most places that a window may span. Wide dilations see mostly padding.
constexpr std::int64_t kMostSeen = 1 << 16;
// With fewer weights packing takes longer than the tiles save: 1x1 with 64 channels and filters took 1.5 times as long.
constexpr std::int64_t kFewestWeights = 64 * 128;
// The most sums that all terms have together.
constexpr std::int64_t kTermSums = 640 << 10;

/// What a tap sees from place i of the output: place i + offset of a phase. A phase has the places of the input with
/// the same remainders by the strides.
struct TapPlace {
  std::int64_t phase, offset;
};

/// How the places of output and input are numbered.
struct PlaceOrder {
  const ConvGeometry& g;
  std::int64_t seen[2];           // places of a phase that the windows of a column and of a line see
  std::int64_t width, lines;      // places from one line to the next, lines from one image to the next
  std::vector<TapPlace> taps;     // [kh * kw]
  std::vector<std::int64_t> end;  // [phase] the largest offset plus one, or 0 for a phase that no tap sees

  explicit PlaceOrder(const ConvGeometry& g) : g(g) {
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
        const std::int64_t y = k * g.dilation[0], x = l * g.dilation[1];
        const TapPlace tap = {y % g.stride[0] * g.stride[1] + x % g.stride[1],
                              y / g.stride[0] * width + x / g.stride[1]};
        taps.push_back(tap);
        std::int64_t& behind = end[static_cast<std::size_t>(tap.phase)];
        behind = std::max(behind, tap.offset + 1);
      }
    }
  }
  std::int64_t image() const { return lines * width; }
  /// How many places of a phase are packed for `places` places of the output.
  std::int64_t packed(std::size_t phase, std::int64_t places) const {
    return end[phase] == 0 ? 0 : places + end[phase] - 1;
  }
  /// The most that are read of a phase: the second place of a pair lies 16 places behind the first.
  std::int64_t most(std::int64_t places) const { return places + *std::ranges::max_element(end) - 1 + kTileLanes; }
};

/// Places that are multiplied together: whole images, or some lines of one image.
struct PlaceChunk {
  std::int64_t image, images;
  std::int64_t line, count;  // of each image
};

/// The terms of the sum and their chunks, which depend on the geometry and the dtype alone.
struct PlaceChunks {
  std::int64_t terms;
  std::int64_t images;  // the most of a chunk
  std::int64_t count;   // the most lines of a chunk

  PlaceChunks(const PlaceOrder& order, std::int64_t parts) {
    const ConvGeometry& g = order.g;
    terms = std::min(weight_terms(g.n * g.oh * g.ow), g.n);
    while (terms > 1 && terms * g.o * g.kh * g.kw * g.c > kTermSums) terms /= 2;
    const std::int64_t phases = std::ranges::count_if(order.end, [](std::int64_t end) { return end > 0; });
    const std::int64_t places =
        std::min(kFilterBytes / (2 * parts) / std::min(g.o, kMostFilters), kPanelBytes / (4 * parts * kPanel) / phases);
    images = std::clamp<std::int64_t>(places / order.image(), 1, divide_up(g.n, terms));
    count = order.image() <= places ? g.oh : std::clamp<std::int64_t>(places / order.width, 1, g.oh);
    // Chunks of about the same size.
    images = divide_up(divide_up(g.n, terms), divide_up(divide_up(g.n, terms), images));
    count = divide_up(g.oh, divide_up(g.oh, count));
  }
  std::vector<PlaceChunk> of(const ConvGeometry& g, std::int64_t term) const {
    const std::int64_t first = g.n * term / terms, last = g.n * (term + 1) / terms;
    std::vector<PlaceChunk> chunks;
    for (std::int64_t i = first; i < last; i += images) {
      for (std::int64_t p = 0; p < g.oh; p += count) {
        chunks.push_back({i, std::min(images, last - i), p, std::min(count, g.oh - p)});
      }
    }
    return chunks;
  }
  /// Places of the largest chunk, rounded up to whole groups.
  std::int64_t places(const PlaceOrder& order) const {
    return round_up((images - 1) * order.image() + count * order.width, kSplitGroup);
  }
};

/// The memory of a thread that multiplies.
template <class Element>
struct Room {
  std::uint32_t* filters;
  std::uint32_t* panel;
  const Element** places;  // of the output, and of the input's phases, one after another
  const Element* zeros;
};

constexpr std::int64_t kMostPhases = 16;

template <class Element>
class TileJob {
 public:
  TileJob(const ConvCall& call, const PlaceOrder& order, const Room<Element>& room, float* sums)
      : call_(call), g_(call.geometry), order_(order), room_(room), sums_(sums) {}

  /// Adds the chunk's products to the sums of filters [o0, o1) and channels [c0, c1); the first chunk sets them.
  void run(const PlaceChunk& chunk, bool begins, std::int64_t o0, std::int64_t o1, std::int64_t c0, std::int64_t c1) {
    const std::int64_t places = round_up((chunk.images - 1) * order_.image() + chunk.count * order_.width, kSplitGroup);
    load_filters(chunk, places, o0, o1);
    find_input(chunk, order_.most(places));
    TileProduct product = {};
    product.parts = kParts == 3 ? TileParts::three : TileParts::two, product.steps = places / 2;
    product.rows = o1 - o0;
    product.set_packed(room_.filters);
    product.b_steps = kSplitGroup * kPanel;
    product.ldc = kPanel;
    for (std::int64_t c = c0; c < c1; c += kPanel) {
      product.columns = std::min(kPanel, c1 - c);
      load_panel(c, product.columns, places);
      float* const sums = sums_ + (c / kPanel * g_.kh * g_.kw * g_.o + o0) * kPanel;
      for (std::int64_t s = 0; s < places / 2; s += kPairsOfATap) {
        product.steps = std::min(kPairsOfATap, places / 2 - s);
        product.a = room_.filters + s / kTileLanes * product.a_steps;
        product.accumulate = !begins || s > 0;
        product.c = sums;
        for (const TapPlace& tap : order_.taps) {
          const auto phase = static_cast<std::size_t>(tap.phase);
          product.b = panels_[phase] + (tap.offset + 2 * s) * kPanel;
          product.b_part = order_.packed(phase, places) * kPanel;
          amx_.multiply(product);
          product.c += g_.o * kPanel;
        }
      }
    }
  }
  void release() const { amx_.release(); }

 private:
  static constexpr std::int64_t kParts = kSplitParts<Element>;

  // Packs the output's gradient as TileProduct::a.
  void load_filters(const PlaceChunk& chunk, std::int64_t places, std::int64_t o0, std::int64_t o1) {
    const auto* const y = static_cast<const Element*>(call_.output.data);
    std::fill_n(room_.places, places, room_.zeros);
    for (std::int64_t m = 0; m < chunk.images; ++m) {
      for (std::int64_t p = 0; p < chunk.count; ++p) {
        const Element* at = y + ((chunk.image + m) * g_.oh + chunk.line + p) * g_.ow * g_.o;
        const Element** const to = room_.places + m * order_.image() + p * order_.width;
        for (std::int64_t q = 0; q < g_.ow; ++q, at += g_.o) to[q] = at;
      }
    }
    constexpr std::int64_t kPart = kTileLanes * kTileLanes, kGroup = kParts * kPart;
    const std::int64_t groups = places / kSplitGroup;
    std::array<const Element*, kSplitGroup> lines;
    for (std::int64_t group = 0; group < groups; ++group) {
      for (std::int64_t i = 0; i < kSplitGroup; ++i) {
        lines[static_cast<std::size_t>(i)] = room_.places[group * kSplitGroup + i] + o0;
      }
      for (std::int64_t o = o0; o < o1; o += kTileLanes) {
        std::uint32_t* const to = room_.filters + ((o - o0) / kTileLanes * groups + group) * kGroup;
        split_turned(lines.data(), o1 - o, {to, kPart}, kSplitGroup * g_.o);
        for (const Element*& at : lines) at += kTileLanes;
      }
    }
  }

  // Packs channels [c, c + n) of all phases as TileProduct::b.
  void load_panel(std::int64_t c, std::int64_t n, std::int64_t places) {
    std::uint32_t* to = room_.panel;
    for (std::size_t phase = 0; phase < order_.end.size(); ++phase) {
      const std::int64_t count = order_.packed(phase, places);
      const Element* const* const from = room_.places + static_cast<std::int64_t>(phase) * order_.most(places);
      panels_[phase] = to;
      for (std::int64_t i = 0; i < count; ++i) {
        split_across(from[i] + c, from[i + kTileLanes] + c, n, {to + i * kPanel, count * kPanel}, 0, 0);
        __builtin_prefetch(from[i + kTileLanes] + c + kPanel, 0, 2);  // of the next channels
        __builtin_prefetch(from[i + kTileLanes] + c + kPanel + kTileLanes, 0, 2);
      }
      to += kParts * count * kPanel;
    }
  }

  // Sets room_.places to where the input's places are, `most` for each phase.
  void find_input(const PlaceChunk& chunk, std::int64_t most) {
    const auto* const x = static_cast<const Element*>(call_.input.data);
    const std::int64_t lines = std::min(order_.seen[0] - chunk.line, chunk.count + order_.seen[0] - g_.oh);
    for (std::int64_t phase = 0; phase < g_.stride[0] * g_.stride[1]; ++phase) {
      if (order_.end[static_cast<std::size_t>(phase)] == 0) continue;
      const Element** const places = room_.places + phase * most;
      std::fill_n(places, most, room_.zeros);
      const std::int64_t first = phase % g_.stride[1] - g_.before[1];
      for (std::int64_t m = 0; m < chunk.images; ++m) {
        for (std::int64_t u = 0; u < lines; ++u) {
          const std::int64_t i = (chunk.line + u) * g_.stride[0] + phase / g_.stride[1] - g_.before[0];
          if (i < 0 || i >= g_.h) continue;
          const Element** const line = places + m * order_.image() + u * order_.width;
          const Element* const from = x + ((chunk.image + m) * g_.h + i) * g_.w * g_.c;
          for (std::int64_t v = 0; v < order_.seen[1]; ++v) {
            const std::int64_t j = v * g_.stride[1] + first;
            if (j >= 0 && j < g_.w) line[v] = from + j * g_.c;
          }
        }
      }
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

template <class Element>
Status weight_by_parts(KernelContext* context, ConvCall& call) {
  const ConvGeometry& g = call.geometry;
  const PlaceOrder order(g);
  constexpr std::int64_t kParts = kSplitParts<Element>;
  const PlaceChunks chunks(order, kParts);
  TensorView& w = call.weight;
  const std::int64_t panels = divide_up(g.c, kPanel), all = g.o * g.kh * g.kw * panels * kPanel;
  const std::int64_t filters = std::min(g.o, kMostFilters), blocks = divide_up(g.o, filters);
  const std::int64_t threads = in_parallel_region() ? 1 : num_threads();
  // Shares of the channels where there are too few blocks of filters.
  const std::int64_t shares = std::min(panels, divide_up(threads, chunks.terms * blocks));
  const std::int64_t jobs = chunks.terms * blocks * shares, workers = num_workers(jobs);
  const std::int64_t places = chunks.places(order);
  const std::int64_t filter_room = places / 2 * kParts * round_up(filters, kTileLanes);
  std::int64_t panel_room = 0;
  for (std::size_t phase = 0; phase < order.end.size(); ++phase) {
    panel_room += kParts * kPanel * order.packed(phase, places);
  }
  const std::int64_t place_room = g.stride[0] * g.stride[1] * order.most(places),
                     zero_room = round_up(std::max(g.c, g.o), kPanel) + kPanel;
  std::uint32_t* packed = nullptr;
  const Element** place = nullptr;
  Element* zeros = nullptr;
  float *sums = nullptr, *lines = nullptr;
  if (!take_workspace(context, static_cast<std::size_t>(workers * (filter_room + panel_room)), packed) ||
      !take_workspace(context, static_cast<std::size_t>(workers * place_room), place) ||
      !take_workspace(context, static_cast<std::size_t>(zero_room), zeros) ||
      !take_workspace(context, static_cast<std::size_t>(chunks.terms * all), sums) ||
      !take_workspace(context, static_cast<std::size_t>(weight_line_floats(g)), lines)) {
    return conv_out_of_memory(context);
  }
  if (runs_dry(context)) return Status::ok;
  std::fill_n(zeros, zero_room, Element(0.0F));
  parallel_jobs(jobs, workers, [&](std::int64_t job, std::int64_t worker) {
    const std::int64_t term = job / (blocks * shares), block = job / shares % blocks, share = job % shares;
    std::uint32_t* const memory = packed + worker * (filter_room + panel_room);
    const Room<Element> room = {memory, memory + filter_room, place + worker * place_room, zeros};
    TileJob<Element> one(call, order, room, sums + term * all);
    const std::int64_t o0 = block * filters, c0 = panels * share / shares * kPanel,
                       c1 = std::min(g.c, panels * (share + 1) / shares * kPanel);
    bool begins = true;
    for (const PlaceChunk& chunk : chunks.of(g, term)) {
      one.run(chunk, begins, o0, std::min(g.o, o0 + filters), c0, c1);
      begins = false;
    }
    one.release();
  });
  const WeightSums done = {sums, chunks.terms, all, kPanel, g.o * kPanel, kPanel, g.kh * g.kw * g.o * kPanel};
  return write_weight(g, done, lines, w) || kParts == 2 ? Status::ok : Status::unsupported;
}

}  // namespace

bool weight_split_serves(const ConvCall& call) noexcept {
  const ConvGeometry& g = call.geometry;
  const DType dtype = call.input.dtype;
  return call.part == ConvPart::weight && g.groups == 1 && (dtype == DType::f32 || dtype == DType::f16) &&
         call.output.dtype == dtype && channels_last(call.input) && channels_last(call.output) &&
         g.stride[0] * g.stride[1] <= kMostPhases && PlaceOrder(g).most(0) <= kMostSeen;
}

bool weight_split_suits(const ConvGeometry& g) noexcept {
  return g.c >= kPanel && g.o >= kPanel && g.o * g.kh * g.kw * g.c >= kFewestWeights;
}

Status weight_by_split(KernelContext* context, ConvCall& call) {
  return call.input.dtype == DType::f16 ? weight_by_parts<Half>(context, call) : weight_by_parts<float>(context, call);
}

}  // namespace halfstep::cpu
