// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_windows.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/packed_weight.h"
#include "halfstep/backends/cpu/past_caches.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/split_block.h"
#include "halfstep/backends/cpu/window_copies.h"
#include "halfstep/backends/cpu/window_weight.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Bytes of the second-level cache: weights beside which a thread takes band after band, and bands that it takes
// together where weights are larger, so that these are read less often.
constexpr std::int64_t kFewWeights = 512 << 10, kBandsAtOnce = 768 << 10, kSplitBandsAtOnce = 1400 << 10;
// Of elements of several parts: rows whose sums are written together, and pairs that are multiplied at a time, whose
// weights stay in the second-level cache. Fewer pairs, whose weights stay in the first one, take longer, because sums
// are loaded and stored more often: 64 took 1.09 to 1.15 of the time of 512 (f32, 3x3 of ResNet-50, Granite Rapids).
constexpr std::int64_t kRowsAtOnce = 128, kPairsAtOnce = 768, kBlockSums = kRowsAtOnce * kWindowPanel;
// The most elements that one line of results may see. Wide dilations see mostly padding, which would have to be copied.
constexpr std::int64_t kMostElements = 4 << 20;
constexpr std::int64_t kMostWindowPhases = 64;

/// Rows of a band whose sums are made together: at most kRowsAtOnce.
struct RowBlock {
  const std::uint32_t* band;
  std::int64_t row, rows;
  const std::int32_t* lines;  ///< where their results go, of the lines at `to`
  void* to;
};

/// How the work is shared: groups of bands, whose copies a thread makes, by parts of the panels of the weight.
struct WindowShares {
  std::int64_t bands, panels;
  std::int64_t groups, parts;
  bool few_weights;

  WindowShares(const WindowGeometry& g, const WindowCopies& copies, const WindowWeight& weight)
      : bands(g.n * copies.bands),
        panels(weight.panels()),
        few_weights(static_cast<std::int64_t>(weight.bytes()) <= kFewWeights) {
    const std::int64_t threads = num_threads(), size = 2 * g.parts * copies.band;
    const std::int64_t at_once = few_weights ? 1 : (g.split() ? kSplitBandsAtOnce : kBandsAtOnce) / size;
    groups = std::min(bands, round_up(divide_up(bands, std::clamp<std::int64_t>(at_once, 1, bands)), threads));
    parts = std::min(panels, divide_up(threads, groups));
  }
  std::int64_t jobs() const { return groups * parts; }
  std::int64_t most_bands() const { return divide_up(bands, groups); }
  std::int64_t most_panels() const { return divide_up(panels, parts); }
};

/// A call whose weight is packed.
class WindowsProduct {
 public:
  WindowsProduct(const WindowGeometry& g, const WindowCopies& copies, const WindowShares& shares,
                 const TensorView& from, TensorView& to, const std::uint32_t* weight, const float* bias)
      : g_(g),
        copies_(copies),
        shares_(shares),
        images_(from.data),
        to_(to),
        weight_(weight),
        bias_(bias),
        rows_(copies.rows_of(g, copies.height)),
        last_rows_(copies.rows_of(g, g.oh - (copies.bands - 1) * copies.height)) {}

  /// Pairs that a thread's copies take, and floats that its sums take.
  std::int64_t copy_size() const { return shares_.most_bands() * band_size(); }
  std::int64_t sum_size() const {
    if (!g_.split()) return 0;
    const std::int64_t blocks = divide_up(static_cast<std::int64_t>(rows_.size()), kRowsAtOnce);
    return kBlockSums * (shares_.few_weights ? shares_.most_panels() : shares_.most_bands() * blocks);
  }

  void run(std::int64_t job, std::uint32_t* copies, float* sums) {
    const std::int64_t group = job / shares_.parts, part = job % shares_.parts;
    const std::int64_t first = shares_.bands * group / shares_.groups,
                       last = shares_.bands * (group + 1) / shares_.groups;
    for (std::int64_t i = first; i < last; ++i) copy(i, copies + (i - first) * band_size());
    const std::int64_t panel = shares_.panels * part / shares_.parts, end = shares_.panels * (part + 1) / shares_.parts;
    if (g_.split()) {
      add_parts(first, last, panel, end, copies, sums);
    } else {
      round(first, last, panel, end, copies);
    }
    amx_.release();
    if (stream_) amx_.fence();
  }
  /// Whether all results of elements of several parts were finite before the bias was added.
  bool finite() const { return finite_; }

 private:
  std::int64_t band_size() const { return g_.parts * copies_.band / 2; }
  std::int64_t line_of(std::int64_t band) const { return band % copies_.bands * copies_.height; }
  template <class Element>
  const Element* image_of(std::int64_t band) const {
    return static_cast<const Element*>(images_) + band / copies_.bands * g_.h * g_.w * g_.c;
  }
  /// The first line of the result that a band computes.
  void* result_of(std::int64_t band) const {
    const std::int64_t image = band / copies_.bands * g_.result_places[0] * g_.result_places[1];
    return element(to_.dtype, to_.data, (image + g_.result_place(line_of(band), 0)) * g_.o);
  }
  const std::vector<std::int32_t>& rows_of(std::int64_t band) const {
    return line_of(band) + copies_.height >= g_.oh ? last_rows_ : rows_;
  }

  void copy(std::int64_t band, std::uint32_t* to) const {
    with_split_number(g_.tile_parts, [&]<class Number>(Number) {
      copy_band<Number>(g_, copies_, image_of<typename Number::Element>(band), line_of(band), to);
    });
  }

  // Panels [panel, end) of bands [first, last) of bfloat16, whose sums are rounded while the next ones are made.
  void round(std::int64_t first, std::int64_t last, std::int64_t panel, std::int64_t end,
             const std::uint32_t* copies) const {
    const std::int64_t chunk = last - first == 1 ? end - panel : 1;
    for (std::int64_t p = panel; p < end; p += chunk) {
      const std::int64_t column = p * kWindowPanel;
      TileProduct product = {};
      product.steps = copies_.steps;
      product.columns = std::min(g_.o - column, chunk * kWindowPanel);
      copies_.set_rows(product);
      product.runs = copies_.runs.data(), product.run_steps = copies_.run_steps;
      // Larger windows read a place for several taps: rows stay in the first-level cache, unless columns fit it. With
      // strides the taps read different places, and going by rows took 0.97 to 1.07 of the time.
      const std::int64_t rows = std::ssize(rows_);
      const bool one_tap = copies_.runs.size() == 1, shared = !one_tap && g_.stride[0] * g_.stride[1] == 1;
      product.rows_once = one_tap && 4 * copies_.steps * rows >= kBytesReadOnce;
      product.by_rows = shared && 4 * copies_.steps * kWindowPanel >= kBytesReadOnce && rows > kWindowRows;
      product.b = weight_ + column * copies_.steps;
      for (std::int64_t i = first; i < last; ++i) {
        product.a = copies + (i - first) * band_size();
        product.rows = static_cast<std::int64_t>(rows_of(i).size());
        // What comes next: the next columns' weights, or bands that this thread most likely takes then.
        const std::int64_t next = i + last - first;
        product.next_bytes = 0;
        if (p + chunk < end) {
          product.next = product.b + kWindowPanel * copies_.steps;
          if (i == first) product.next_bytes = 4 * kWindowPanel * copies_.steps;
        } else if (next < shares_.bands && copies_.sees_all()) {
          const std::int64_t seen = std::clamp<std::int64_t>(line_of(next) * g_.stride[0] - g_.before[0], 0, g_.h),
                             lines = std::min(copies_.lines * g_.stride[0], g_.h - seen);
          product.next = image_of<std::uint16_t>(next) + seen * g_.w * g_.c;
          product.next_bytes = 2 * lines * g_.w * g_.c;
        }
        amx_.multiply_rounded(product,
                              {static_cast<std::uint16_t*>(result_of(i)) + column, g_.o,
                               bias_ != nullptr ? bias_ + column : nullptr, false, rows_of(i).data(), stream_});
      }
    }
  }

  // The same of elements of several parts.
  void add_parts(std::int64_t first, std::int64_t last, std::int64_t panel, std::int64_t end,
                 const std::uint32_t* copies, float* sums) {
    std::vector<RowBlock> blocks;
    for (std::int64_t i = first; i < last; ++i) {
      const auto& rows = rows_of(i);
      const auto count = static_cast<std::int64_t>(rows.size());
      for (std::int64_t r = 0; r < count; r += kRowsAtOnce) {
        blocks.push_back(
            {copies + (i - first) * band_size(), r, std::min(kRowsAtOnce, count - r), rows.data() + r, result_of(i)});
      }
    }
    const std::int64_t column = panel * kWindowPanel, columns = std::min(g_.o, end * kWindowPanel) - column;
    bool finite = true;
    if (shares_.few_weights) {
      for (const RowBlock& block : blocks) finite = add_parts({&block, 1}, column, columns, sums) && finite;
    } else {
      for (std::int64_t j = 0; j < columns; j += kWindowPanel) {
        finite = add_parts(blocks, column + j, std::min(kWindowPanel, columns - j), sums) && finite;
      }
    }
    if (!finite) finite_.store(false, std::memory_order_relaxed);
  }

  // Columns [first, first + n) of some blocks. Each piece of the weight is read once for all of them. False where a sum
  // isn't finite.
  bool add_parts(std::span<const RowBlock> blocks, std::int64_t first, std::int64_t n, float* sums) const {
    const std::int64_t panels = divide_up(n, kWindowPanel);
    TileProduct product = {};
    product.parts = g_.tile_parts;
    copies_.set_rows(product);
    product.ldc = kWindowPanel;
    const auto taps = static_cast<std::size_t>(std::max<std::int64_t>(kPairsAtOnce / copies_.run_steps, 1));
    for (std::int64_t j = 0; j < panels; ++j) {
      product.columns = std::min(kWindowPanel, n - j * kWindowPanel);
      product.b = weight_ + (first + j * kWindowPanel) * copies_.steps * g_.parts;
      product.accumulate = false;
      for (std::size_t tap = 0; tap < copies_.runs.size(); tap += taps) {
        const auto count = static_cast<std::int64_t>(std::min(taps, copies_.runs.size() - tap));
        product.runs = copies_.runs.data() + tap;
        for (std::int64_t s = 0; s < copies_.run_steps; s += product.run_steps) {
          product.run_steps = std::min(kPairsAtOnce, copies_.run_steps - s);
          product.steps = count * product.run_steps;
          for (std::size_t i = 0; i < blocks.size(); ++i) {
            product.rows = blocks[i].rows;
            product.a = blocks[i].band + blocks[i].row * kTileLanes + s / kTileLanes * product.a_steps;
            product.c = sums + (static_cast<std::int64_t>(i) * panels + j) * kBlockSums;
            amx_.multiply(product);
          }
          product.b += product.steps * kWindowPanel * g_.parts;
          product.accumulate = true;
        }
      }
    }
    bool finite = true;
    for (const RowBlock& block : blocks) {
      const PanelSums from = {sums, kBlockSums, block.rows, n, bias_ != nullptr ? bias_ + first : nullptr, block.lines};
      finite = write(from, block.to, first) && finite;
      sums += panels * kBlockSums;
    }
    return finite;
  }

  bool write(const PanelSums& from, void* to, std::int64_t column) const {
    return to_.dtype == DType::f32 ? copy_finite(from, static_cast<float*>(to) + column, g_.o, stream_)
                                   : copy_finite(from, static_cast<Half*>(to) + column, g_.o, stream_);
  }

  const WindowGeometry& g_;
  const WindowCopies& copies_;
  const WindowShares& shares_;
  const void* const images_;
  TensorView& to_;
  const std::uint32_t* const weight_;
  const float* const bias_;  // or null
  const std::vector<std::int32_t> rows_, last_rows_;
  const AmxKernels amx_ = amx_kernels(amx_usable());
  const bool stream_ = written_past_caches(to_);
  std::atomic<bool> finite_{true};
};

/// A phase of a call.
struct WindowsPhase {
  WindowGeometry g;
  WindowCopies copies;
  WindowWeight weight;
  WindowShares shares;
  std::optional<WindowsProduct> product;

  WindowsPhase(const WindowGeometry& geometry, const TensorView& w)
      : g(geometry), copies(g, band_height(g)), weight(g, w, copies.steps), shares(g, copies, weight) {}
};

// For packed_weight(), below int8's orders. The taps of an input gradient's phases follow from the strides and from the
// padding's remainders by them.
std::int64_t packed_order(const ConvCall& call) {
  constexpr std::int64_t kOutput = -101, kInput = -102, kMost = std::int64_t{1} << 15;
  if (call.part == ConvPart::output) return kOutput;
  const ConvGeometry& g = call.geometry;
  std::int64_t order = 0;
  for (int d = 0; d < 2; ++d) order = (order * kMost + g.stride[d] - 1) * kMost + g.before[d] % g.stride[d];
  return kInput - order;
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
  // No window of an input gradient may begin behind the image's first place, whatever its phase.
  const std::int64_t window[] = {g.kh, g.kw};
  if (WindowGeometry::phases(call) > kMostWindowPhases) return false;
  for (int d = 0; d < 2 && call.part == ConvPart::input; ++d) {
    if (g.stride[d] > 1 && g.dilation[d] > 1) return false;
    if (g.before[d] + g.stride[d] - 1 > g.dilation[d] * (window[d] - 1)) return false;
  }
  const WindowGeometry windows(call);  // the first phase, which is the largest
  const std::int64_t lines = 1 + (g.kh - 1) * g.dilation[0] / windows.stride[0],
                     width = windows.ow + (g.kw - 1) * g.dilation[1] / windows.stride[1];
  return windows.c % kWindowPanel == 0 &&
         lines * width * windows.c * windows.stride[0] * windows.stride[1] <= kMostElements;
}

bool windows_suit(const ConvCall& call) noexcept {
  // Sums that are dropped take as long as others. For windows of several places oneDNN's kernels are slower than that.
  // For those of one place a quarter may be dropped: 14 x 14 with strides of two keeps 49 of 64 and took 0.62 to 0.85
  // of oneDNN's time (bf16, 128 to 1024 channels).
  const WindowGeometry g(call);
  const std::int64_t places = g.oh * g.ow, phases = WindowGeometry::phases(call);
  // Each phase copies the gradient again. Measured with strides of two, down to 4 x 4 places a phase.
  if (phases > 1 && (phases > 4 || places < 16)) return false;
  return amx_usable() && (call.geometry.kh * call.geometry.kw > 1 || places * 4 >= round_up(places, kWindowRows) * 3);
}

Status convolve_windows(KernelContext* context, ConvCall& call) {
  const bool turned = call.part == ConvPart::input;
  const std::int64_t results = turned ? call.geometry.c : call.geometry.o;
  float* bias = nullptr;
  if (call.bias != nullptr && !take_workspace(context, static_cast<std::size_t>(results), bias)) {
    return conv_out_of_memory(context);
  }
  TensorView w = call.weight;
  const std::int64_t channels = w.sizes[1], taps = w.sizes[2] * w.sizes[3];
  const std::int64_t last_strides[] = {taps * channels, 1, w.sizes[3] * channels, channels};
  if (!channels_last(w)) {
    char* room = nullptr;
    const std::size_t bytes = static_cast<std::size_t>(w.numel) * item_size(w.dtype);
    if (!take_workspace(context, bytes, room)) return conv_out_of_memory(context);
    w.data = room, w.strides = last_strides;
  }
  std::vector<std::unique_ptr<WindowsPhase>> phases;
  std::size_t bytes = 0;  // of the packed weights
  for (std::int64_t i = 0; i < WindowGeometry::phases(call); ++i) {
    const WindowGeometry g(call, i);
    if (g.oh == 0 || g.ow == 0) continue;
    bytes += phases.emplace_back(std::make_unique<WindowsPhase>(g, w))->weight.bytes();
  }
  const PackedWeight packed = packed_weight(context, call.weight_storage, call.weight, packed_order(call),
                                            phases[0]->g.parts, bytes, [&](void* to) {
                                              if (runs_dry(context)) return true;
                                              if (w.data != call.weight.data) put_channels_last(call.weight, w.data);
                                              for (const auto& p : phases) {
                                                p->weight.pack(static_cast<std::uint32_t*>(to));
                                                to = static_cast<char*>(to) + p->weight.bytes();
                                              }
                                              return true;
                                            });
  if (packed.data == nullptr) return conv_out_of_memory(context);
  const auto* weight = static_cast<const std::uint32_t*>(packed.data);
  std::int64_t jobs = 0, copy_size = 0, sum_size = 0;  // the most of a phase
  for (const auto& p : phases) {
    p->product.emplace(p->g, p->copies, p->shares, p->g.from(call), call.result(), weight, bias);
    weight += p->weight.bytes() / sizeof(std::uint32_t);
    jobs = std::max(jobs, p->shares.jobs());
    copy_size = std::max(copy_size, round_up(p->product->copy_size(), kTileLanes));
    sum_size = std::max(sum_size, p->product->sum_size());
  }
  std::uint32_t* room = nullptr;
  float* sums = nullptr;
  const std::int64_t most_workers = num_workers(jobs);
  if (!take_workspace(context, static_cast<std::size_t>(most_workers * copy_size), room) ||
      !take_workspace(context, static_cast<std::size_t>(most_workers * sum_size), sums)) {
    return conv_out_of_memory(context);
  }
  if (runs_dry(context)) return Status::ok;
  if (bias != nullptr) read_row(*call.bias, 0, call.bias->strides[0], results, bias);
  bool finite = true;
  for (const auto& p : phases) {
    parallel_jobs(p->shares.jobs(), num_workers(p->shares.jobs()), [&](std::int64_t job, std::int64_t worker) {
      p->product->run(job, room + worker * copy_size, sums + worker * sum_size);
    });
    finite = finite && p->product->finite();
  }
  return finite || call.input.dtype == DType::f16 ? Status::ok : Status::unsupported;
}

}  // namespace halfstep::cpu
