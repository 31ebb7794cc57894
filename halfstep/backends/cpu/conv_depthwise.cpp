// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_depthwise.h"

#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "halfstep/backends/cpu/conv_depthwise_kernels.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_shares.h"
#include "halfstep/backends/cpu/past_caches.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Multiply-adds of a range of results that is worth a thread.
constexpr std::int64_t kDepthwiseGrain = 1 << 18;
// Places and bytes of the gradient in a block whose sums stay in registers.
constexpr std::int64_t kBlockPlaces = 224, kBlockBytes = 128 << 10;
// Bytes ahead at least that are fetched, so that memory has answered before they are read.
constexpr std::int64_t kLeastAhead = 8 << 10;
// Bytes of an input from the forward pass that is no longer in the caches.
constexpr std::int64_t kLongGone = 1 << 20;
// Pointers to places of an image, and of what is around its rows, that a thread keeps.
constexpr std::int64_t kMostPointers = 1 << 20;
// Channels of a job of a weight's gradient at least.
constexpr std::int64_t kJobChannels = 64;

/// Some neighbouring taps of one row of the window that one row of a kernel's strip computes.
struct TapRow {
  std::int64_t column;  ///< the place that the first tap of result 0 sees
  std::int64_t tap;     ///< the first tap's place in the order of the phase
};

/// Results of a row that see their places through the same taps: all, or in an input's gradient every stride-th.
struct Phase {
  std::int64_t first, apart, count;  ///< columns of results
  std::int64_t taps, step;           ///< of a row of a kernel's strip, and places from a result to the next
  std::vector<std::int64_t> order;   ///< taps of a row of the window
  std::vector<TapRow> rows;          ///< that they are cut into
};

/// Which places results of the output see or, where `gradient`, those of the input's gradient.
class Window {
 public:
  Window(const ConvGeometry& geometry, bool gradient) : g_(geometry), gradient_(gradient) {}

  bool of_gradient() const { return gradient_; }
  std::int64_t result_rows() const { return gradient_ ? g_.h : g_.oh; }
  std::int64_t result_columns() const { return gradient_ ? g_.w : g_.ow; }
  /// Of the images that results are computed from.
  std::int64_t rows() const { return gradient_ ? g_.oh : g_.h; }
  std::int64_t columns() const { return gradient_ ? g_.ow : g_.w; }

  /// The row of those that tap `r` of result row `i` sees, or -1.
  std::int64_t row_seen(std::int64_t i, std::int64_t r) const {
    const std::int64_t s = g_.stride[0], tap = r * g_.dilation[0];
    std::int64_t row = gradient_ ? i + g_.before[0] - tap : i * s - g_.before[0] + tap;
    if (gradient_) {
      if (row % s != 0) return -1;
      row /= s;
    }
    return row >= 0 && row < rows() ? row : -1;
  }

  /// Cuts the window's columns. `has(taps, step)`: whether there is a kernel of so many.
  template <class Has>
  std::vector<Phase> phases(Has&& has) const {
    const std::int64_t s = g_.stride[1], d = g_.dilation[1], b = g_.before[1], all = result_columns();
    std::vector<Phase> result;
    for (std::int64_t p = 0; p < (gradient_ ? std::min(s, all) : 1); ++p) {
      Phase phase{p, gradient_ ? s : 1, gradient_ ? divide_up(all - p, s) : all, 1, gradient_ ? 1 : s, {}, {}};
      // The place that tap k of the first result sees. (In order are the taps for which the division is exact.)
      const auto place = [&](std::int64_t k) { return gradient_ ? (p + b - k * d) / s : k * d - b; };
      for (std::int64_t k = 0; k < g_.kw; ++k) {
        if (!gradient_ || (p + b - k * d) % s == 0) phase.order.push_back(k);
      }
      if (gradient_) std::reverse(phase.order.begin(), phase.order.end());
      const auto n = static_cast<std::int64_t>(phase.order.size());
      const bool side_by_side = n > 0 && place(phase.order.back()) - place(phase.order.front()) == n - 1;
      phase.taps = side_by_side && has(n, phase.step) ? n : 1;
      for (std::int64_t i = 0; i < n; i += phase.taps) {
        phase.rows.push_back({place(phase.order[static_cast<std::size_t>(i)]), i});
      }
      result.push_back(std::move(phase));
    }
    return result;
  }

 private:
  const ConvGeometry& g_;
  const bool gradient_;
};

/// Pointers to the places of rows of images, and to zeros where a window leaves them.
class PlaceRows {
 public:
  /// Columns [low, high) are asked for, and `kept` rows at a time that follow each other, or all of an image.
  PlaceRows(const TensorView& images, const void* zeros, std::int64_t low, std::int64_t high, std::int64_t kept)
      : data_(static_cast<const char*>(images.data)),
        place_(images.sizes[1] * static_cast<std::int64_t>(item_size(images.dtype))),
        columns_(images.sizes[3]),
        zeros_(zeros),
        low_(low),
        length_(high - low),
        kept_(kept),
        places_(static_cast<std::size_t>((kept + 1) * length_), zeros),
        rows_(static_cast<std::size_t>(kept), -1) {}

  /// Of row `row` of all rows of all images: column `low` and those behind it.
  DepthwisePlaces row(std::int64_t row) {
    const std::int64_t slot = row % kept_;
    const void** const places = places_.data() + slot * length_;
    if (rows_[static_cast<std::size_t>(slot)] == row) return places;
    rows_[static_cast<std::size_t>(slot)] = row;
    const char* const first = data_ + row * columns_ * place_;
    const std::int64_t from = std::clamp<std::int64_t>(-low_, 0, length_);
    const std::int64_t to = std::clamp<std::int64_t>(columns_ - low_, from, length_);
    for (std::int64_t i = from; i < to; ++i) places[i] = first + (low_ + i) * place_;
    return places;
  }
  DepthwisePlaces zeros() const { return places_.data() + kept_ * length_; }

 private:
  const char* data_;
  std::int64_t place_, columns_;
  const void* zeros_;
  std::int64_t low_, length_, kept_;
  std::vector<const void*> places_;
  std::vector<std::int64_t> rows_;
};

/// The width of strips that takes the least time for `n` results: their number, and as much as 1.5 results for each
/// strip. Strips that are `whole` have results to the last.
int strip_width(std::int64_t n, bool whole) {
  int best = whole ? 1 : 4;
  double least = static_cast<double>(n) * 4;
  for (const int width : kDepthwiseWidths) {
    if (width == 1 || (whole && width > n)) continue;
    const double cost = static_cast<double>(divide_up(n, width)) * (width + 1.5);
    if (cost < least) least = cost, best = width;
  }
  return best;
}

std::int64_t lowest_column(const std::vector<Phase>& phases) {
  std::int64_t low = 0;
  for (const Phase& p : phases) {
    for (const TapRow& row : p.rows) low = std::min(low, row.column);
  }
  return low;
}
/// Behind the last that a result sees, when each phase has `more` results than it has.
std::int64_t end_column(const std::vector<Phase>& phases, std::int64_t more) {
  std::int64_t end = 1;
  for (const Phase& p : phases) {
    for (const TapRow& row : p.rows) end = std::max(end, row.column + (p.count + more - 1) * p.step + p.taps);
  }
  return end;
}
/// Places that the windows of `results` see in dimension `d`.
std::int64_t extent_of(const ConvGeometry& g, int d, std::int64_t results) {
  return (results - 1) * g.stride[d] + ((d == 0 ? g.kh : g.kw) - 1) * g.dilation[d] + 1;
}

/// The output, or the input's gradient.
class Results {
 public:
  Results(KernelContext* context, ConvCall& call)
      : context_(context),
        call_(call),
        g_(call.geometry),
        window_(g_, call.part == ConvPart::input),
        source_(call.part == ConvPart::input ? call.output : call.input),
        result_(call.result()) {
    const DType dtype = result_.dtype;
    phases_ = window_.phases(
        [&](std::int64_t taps, std::int64_t step) { return depthwise_strip_kernel(dtype, taps, step, 1) != nullptr; });
    for (const Phase& p : phases_) {
      const int width = strip_width(p.count, true);
      strips_.push_back({depthwise_strip_kernel(dtype, p.taps, p.step, width), width});
    }
  }

  Status run() {
    const std::int64_t c = g_.c;
    char* zeros = nullptr;
    if (!take_workspace(context_, static_cast<std::size_t>(g_.kh * g_.kw * c), taps_) ||
        !take_workspace(context_, static_cast<std::size_t>(call_.bias != nullptr ? c : 0), bias_) ||
        !take_workspace(context_, static_cast<std::size_t>(c) * item_size(source_.dtype), zeros)) {
      return conv_out_of_memory(context_);
    }
    if (runs_dry(context_)) return Status::ok;
    if (!read_taps()) return Status::unsupported;
    if (bias_ != nullptr) read_row(*call_.bias, 0, call_.bias->strides[0], c, bias_);
    std::fill_n(zeros, static_cast<std::size_t>(c) * item_size(source_.dtype), char{0});
    zeros_ = zeros;
    const std::int64_t work = window_.result_columns() * c * g_.kh * g_.kw;
    parallel_for(g_.n * window_.result_rows(), std::max<std::int64_t>(1, kDepthwiseGrain / work),
                 [&](std::int64_t begin, std::int64_t end) { run_rows(begin, end); });
    return Status::ok;
  }

 private:
  struct Strip {
    DepthwiseStripKernel kernel;
    int width;
  };

  // [phases][rows of the window][taps in the phase's order][channels]. False where one isn't finite.
  bool read_taps() {
    const TensorView& w = call_.weight;
    float* to = taps_;
    for (const Phase& p : phases_) {
      for (std::int64_t r = 0; r < g_.kh; ++r) {
        for (const std::int64_t k : p.order) {
          read_row(w, r * w.strides[2] + k * w.strides[3], w.strides[0], g_.c, to);
          to += g_.c;
        }
      }
    }
    return std::all_of(taps_, to, [](float tap) { return std::isfinite(tap); });
  }

  void run_rows(std::int64_t begin, std::int64_t end) const {
    const std::int64_t low = lowest_column(phases_);
    PlaceRows places(source_, zeros_, low, end_column(phases_, 0), std::min(extent_of(g_, 0, 1), window_.rows()));
    std::vector<DepthwisePlaces> rows(static_cast<std::size_t>(g_.kh * g_.kw));
    std::vector<const float*> taps(rows.size());
    const std::int64_t bytes = static_cast<std::int64_t>(item_size(result_.dtype));
    DepthwiseStrip strip = {};
    strip.places = rows.data(), strip.taps = taps.data();
    strip.bias = bias_, strip.channels = g_.c;
    strip.stream = written_past_caches(result_) && reinterpret_cast<std::uintptr_t>(result_.data) % 64 == 0 &&
                   g_.c * bytes % 64 == 0;
    strip.fetched = !fetched_ ? 0 : window_.of_gradient() ? 1 : std::min(g_.stride[0], g_.kh);
    strip.ahead = std::max(kLeastAhead, strip.fetched * window_.columns() * g_.c * bytes);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t image = i / window_.result_rows(), row = i % window_.result_rows();
      char* const results = static_cast<char*>(result_.data) + i * window_.result_columns() * g_.c * bytes;
      const float* phase_taps = taps_;
      for (std::size_t at = 0; at < phases_.size(); ++at) {
        const Phase& p = phases_[at];
        const auto in_order = static_cast<std::int64_t>(p.order.size());
        strip.rows = 0;
        for (std::int64_t k = 0; k < g_.kh; ++k) {  // from upper rows of the other images to lower ones
          const std::int64_t r = window_.of_gradient() ? g_.kh - 1 - k : k;
          const std::int64_t seen = window_.row_seen(row, r);
          if (seen < 0) continue;
          const DepthwisePlaces first = places.row(image * window_.rows() + seen);
          for (const TapRow& t : p.rows) {
            rows[static_cast<std::size_t>(strip.rows)] = first + (t.column - low);
            taps[static_cast<std::size_t>(strip.rows)] = phase_taps + (r * in_order + t.tap) * g_.c;
            ++strip.rows;
          }
        }
        phase_taps += g_.kh * in_order * g_.c;
        strip.pitch = p.apart * g_.c, strip.step = p.step;
        const std::int64_t width = strips_[at].width;
        for (std::int64_t t = 0; t < p.count; t += width) {
          const std::int64_t from = std::min(t, p.count - width);  // the last ones again rather than few
          strip.first = from * p.step;
          strip.result = results + (p.first + from * p.apart) * g_.c * bytes;
          strips_[at].kernel(strip);
        }
      }
    }
    hwy::FlushStream();
  }

  KernelContext* const context_;
  ConvCall& call_;
  const ConvGeometry& g_;
  const Window window_;
  const TensorView &source_, &result_;
  std::vector<Phase> phases_;
  std::vector<Strip> strips_;  // of each phase
  float *taps_ = nullptr, *bias_ = nullptr;
  const void* zeros_ = nullptr;
  // What is larger than that was written past the caches by the norm before, or doesn't fit them.
  const bool fetched_ = written_past_caches(source_);
};

/// The weight's gradient.
class WeightTerms {
 public:
  WeightTerms(KernelContext* context, ConvCall& call)
      : context_(context), call_(call), g_(call.geometry), window_(g_, false), width_(strip_width(g_.ow, false)) {
    const DType dtype = call.input.dtype;
    phase_ = window_
                 .phases([&](std::int64_t taps, std::int64_t step) {
                   return depthwise_terms_kernel(dtype, taps, step, width_, g_.kh) != nullptr;
                 })
                 .front();
    rows_ = g_.kh * static_cast<std::int64_t>(phase_.rows.size());
    kernel_ = depthwise_terms_kernel(dtype, phase_.taps, phase_.step, width_, rows_);
    terms_ = std::min(weight_terms(g_.n * g_.oh * g_.ow), g_.n * g_.oh);
    row_strips_ = divide_up(g_.ow, width_);
    const std::int64_t bytes = g_.c * static_cast<std::int64_t>(item_size(dtype));
    block_places_ = std::clamp<std::int64_t>(kBlockBytes / bytes, 1, kBlockPlaces);
  }

  Status run() {
    const std::int64_t sum = g_.kh * g_.kw * g_.c;
    char* zeros = nullptr;
    const std::size_t zero_bytes = static_cast<std::size_t>(g_.c) * item_size(call_.input.dtype);
    if (!take_workspace(context_, static_cast<std::size_t>(terms_ * sum), sums_) ||
        !take_workspace(context_, zero_bytes, zeros)) {
      return conv_out_of_memory(context_);
    }
    if (runs_dry(context_)) return Status::ok;
    std::fill_n(zeros, zero_bytes, char{0});
    zeros_ = zeros;
    std::int64_t shares = 1;
    const std::int64_t threads = in_parallel_region() ? 1 : num_threads();
    while (threads > 1 && terms_ * shares < 2 * threads && g_.c / (2 * shares) >= kJobChannels) shares *= 2;
    // Shares begin at multiples of 16 channels and have at least as many, or vectors would reach into the next one.
    const auto edge = [&](std::int64_t share) {
      return share == shares ? g_.c : g_.c * share / shares / kFewestDepthwiseChannels * kFewestDepthwiseChannels;
    };
    parallel_jobs(terms_ * shares, [&](std::int64_t job, std::int64_t) {
      const std::int64_t share = job % shares;
      run_term(job / shares, edge(share), edge(share + 1) - edge(share));
    });
    for (std::int64_t t = 1; t < terms_; ++t) {
      for (std::int64_t i = 0; i < sum; ++i) sums_[i] += sums_[t * sum + i];
    }
    TensorView& w = call_.weight;
    for (std::int64_t r = 0; r < g_.kh; ++r) {
      for (std::int64_t k = 0; k < g_.kw; ++k) {
        write_row(w, r * w.strides[2] + k * w.strides[3], w.strides[0], g_.c, sums_ + (r * g_.kw + k) * g_.c);
      }
    }
    return Status::ok;
  }

 private:
  void run_term(std::int64_t term, std::int64_t from, std::int64_t channels) const {
    float* const sums = sums_ + term * g_.kh * g_.kw * g_.c;
    for (std::int64_t i = 0; i < g_.kh * g_.kw; ++i) std::fill_n(sums + i * g_.c + from, channels, 0.0f);
    const std::vector<Phase> phases = {phase_};
    const std::int64_t low = lowest_column(phases), padded = row_strips_ * width_;
    // As many whole rows as fit a block, or some strips of one.
    const std::int64_t block_rows = std::clamp<std::int64_t>(block_places_ / padded, 1, g_.oh);
    const std::int64_t block_strips =
        block_rows > 1 ? block_rows * row_strips_ : std::clamp<std::int64_t>(block_places_ / width_, 1, row_strips_);
    PlaceRows inputs(call_.input, zeros_, low, end_column(phases, padded - g_.ow),
                     std::min(extent_of(g_, 0, block_rows), g_.h));
    PlaceRows gradients(call_.output, zeros_, 0, padded, block_rows);
    std::vector<DepthwisePlaces> places(static_cast<std::size_t>(block_strips * rows_)),
        wholes(static_cast<std::size_t>(block_strips));
    DepthwiseTerms terms = {};
    terms.places = places.data(), terms.gradients = wholes.data();
    terms.rows = rows_, terms.step = phase_.step, terms.sums = sums;
    const std::int64_t bytes = static_cast<std::int64_t>(item_size(call_.input.dtype));
    terms.fetched = fetched_ ? std::min(g_.stride[0], g_.kh) : 0;
    terms.ahead = std::max(kLeastAhead, block_rows * g_.stride[0] * g_.w * g_.c * bytes);
    terms.ahead_of_gradients = std::max(kLeastAhead, block_rows * g_.ow * g_.c * bytes);
    terms.channels = channels, terms.all = g_.c, terms.offset = from;
    const auto add = [&] {
      if (terms.strips > 0) kernel_(terms);
      terms.strips = 0;
    };
    const std::int64_t all = g_.n * g_.oh, end = (term + 1) * all / terms_;
    for (std::int64_t i = term * all / terms_; i < end; ++i) {
      const std::int64_t image = i / g_.oh, row = i % g_.oh;
      if (row == 0 || terms.strips + row_strips_ > block_strips) add();
      for (std::int64_t q = 0; q < row_strips_; ++q) {
        if (terms.strips == block_strips) add();
        wholes[static_cast<std::size_t>(terms.strips)] = gradients.row(i) + q * width_;
        auto* to = places.data() + terms.strips * rows_;
        for (std::int64_t r = 0; r < g_.kh; ++r) {
          const std::int64_t seen = window_.row_seen(row, r);
          const DepthwisePlaces first = seen < 0 ? inputs.zeros() : inputs.row(image * g_.h + seen);
          for (const TapRow& t : phase_.rows) *to++ = first + (t.column - low) + q * width_ * phase_.step;
        }
        ++terms.strips;
      }
    }
    add();
  }

  KernelContext* const context_;
  ConvCall& call_;
  const ConvGeometry& g_;
  const Window window_;
  const int width_;
  Phase phase_;
  std::int64_t rows_ = 0, terms_ = 0, row_strips_ = 0, block_places_ = 0;
  DepthwiseTermsKernel kernel_ = nullptr;
  float* sums_ = nullptr;
  const void* zeros_ = nullptr;
  // The input was written in the forward pass: unless it is small, all that followed has taken its place in the cache.
  const bool fetched_ = call_.input.numel * static_cast<std::int64_t>(item_size(call_.input.dtype)) >= kLongGone;
};

}  // namespace

bool depthwise_serves(const ConvCall& call) noexcept {
  const ConvGeometry& g = call.geometry;
  return g.groups == g.c && g.o == g.c && g.c >= kFewestDepthwiseChannels && all_floats(call) &&
         call.input.dtype == call.output.dtype && channels_last(call.input) && channels_last(call.output) &&
         extent_of(g, 1, g.ow) <= kMostPointers / (1 + std::min(extent_of(g, 0, 1), std::max(g.h, g.oh)));
}

Status convolve_depthwise(KernelContext* context, ConvCall& call) {
  try {
    return call.part == ConvPart::weight ? WeightTerms(context, call).run() : Results(context, call).run();
  } catch (const std::exception& error) {  // no memory for the plan
    context->set_error(context, error.what());
    return Status::failed;
  }
}

}  // namespace halfstep::cpu
