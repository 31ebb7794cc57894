// SPDX-License-Identifier: Apache-2.0
// X has a row for the window of each place of y. Of 1 x 1 windows side by side the rows are x itself; others are
// gathered, for some images at a time.
#include "kernels/conv_products.h"

#include "device/elementwise.cuh"
#include "host/settings.h"
#include "kernels/copy.h"
#include "kernels/matmul.h"

namespace hscuda {
namespace {

using Word = uint16_t;  // an element of f16 or bf16, which is only moved
constexpr int kWidth = 8;
constexpr int kStrip = 4;                       // places that a thread gathers for where it moves single elements
constexpr int64_t kMostTaps = 9;                // gathered rows are so many times as long as x
constexpr int64_t kMostTapsOfFewChannels = 64;  // of images as they are read from files
constexpr int64_t kGatheredBytes = int64_t{256} << 20;  // at a time, of a whole image at least
constexpr int64_t kMostGathered = int64_t{2} << 30;     // of an image

/// Where windows lie in x, which is channels-last, and in the gathered rows. A window is made of runs of elements that
/// lie behind each other in x: its rows, or with a dilation its taps.
struct Gather {
  int channels, height, line;  // of x; a line of pixels has so many elements
  uint32_t columns;            // elements of a window: the tap's row, column and the channel, the last fastest
  uint32_t rows;               // gathered ones
  Divisor packs, run, runs_of_row, place_row, strips, image;
  int stride[2], padding[2], dilation[2];
};

/// A run from one of its elements on: those of a line of pixels from `at` on. One that begins left of the line has its
/// elements behind that begin.
struct Run {
  int line;  ///< the line's first element
  int at;
  uint32_t length;  ///< of the line; 0 outside of the image
};
/// The windows of a place, which is number `q` of its line of places.
struct Place {
  int image, top, left;
  __device__ __forceinline__ Place(const Gather& g, uint32_t line, uint32_t q) {
    const uint32_t n = g.image.divide(line), p = line - n * g.image.divisor;
    image = static_cast<int>(n) * g.height;
    top = static_cast<int>(p) * g.stride[0] - g.padding[0];
    left = static_cast<int>(q) * g.stride[1] - g.padding[1];
  }
  __device__ __forceinline__ Run run(const Gather& g, uint32_t number, uint32_t inside) const {
    const uint32_t a = g.runs_of_row.divide(number), b = number - a * g.runs_of_row.divisor;
    const int h = top + static_cast<int>(a) * g.dilation[0];
    const int at = (left + static_cast<int>(b) * g.dilation[1]) * g.channels + static_cast<int>(inside);
    const bool there = h >= 0 && h < g.height;
    return {there ? (image + h) * g.line : 0, at, there ? static_cast<uint32_t>(g.line) : 0u};
  }
};

/// Windows whose taps have whole packs of channels: a pack a thread.
__global__ void __launch_bounds__(kThreads) gather_pixels(Gather g, const Word* x, Word* rows) {
  const int64_t all = static_cast<int64_t>(g.rows) * g.packs.divisor;
  for (int64_t i = thread_index(); i < all; i += grid_threads()) {
    const uint32_t row = g.packs.divide(static_cast<uint32_t>(i));
    const uint32_t first = (static_cast<uint32_t>(i) - row * g.packs.divisor) * kWidth;
    const uint32_t line = g.place_row.divide(row), number = g.run.divide(first);
    const Run run = Place(g, line, row - line * g.place_row.divisor).run(g, number, first - number * g.run.divisor);
    Pack<Word, kWidth> pack = {};
    if (static_cast<uint32_t>(run.at) < run.length) {
      pack = *reinterpret_cast<const Pack<Word, kWidth>*>(x + run.line + run.at);
    }
    *reinterpret_cast<Pack<Word, kWidth>*>(rows + i * kWidth) = pack;
  }
}

/// Any windows: a thread has the same pack of the windows of some places side by side, which differ by a step only.
__global__ void __launch_bounds__(kThreads) gather_elements(Gather g, const Word* x, Word* rows) {
  const uint32_t lines = g.rows / g.place_row.divisor;
  const int64_t all = static_cast<int64_t>(lines) * g.strips.divisor * g.packs.divisor;
  const int step = g.stride[1] * g.channels;
  for (int64_t i = thread_index(); i < all; i += grid_threads()) {
    const uint32_t strip = g.packs.divide(static_cast<uint32_t>(i));
    const uint32_t first = (static_cast<uint32_t>(i) - strip * g.packs.divisor) * kWidth;
    const uint32_t line = g.strips.divide(strip), q = (strip - line * g.strips.divisor) * kStrip;
    const Place place(g, line, q);
    uint32_t number = g.run.divide(first), inside = first - number * g.run.divisor;
    int at[kWidth], line_at[kWidth];
    uint32_t length[kWidth];
    Run run = place.run(g, number, inside);
#pragma unroll
    for (uint32_t j = 0; j < kWidth; ++j) {
      at[j] = run.at, line_at[j] = run.line;
      length[j] = first + j < g.columns ? run.length : 0;
      ++run.at;
      if (++inside == g.run.divisor) {
        inside = 0;
        run = place.run(g, ++number, 0);
      }
    }
    const uint32_t row = line * g.place_row.divisor + q;
    Word* const to = rows + (static_cast<int64_t>(row) * g.packs.divisor) * kWidth + first;
#pragma unroll
    for (int u = 0; u < kStrip; ++u) {
      if (q + u >= g.place_row.divisor) break;
      Pack<Word, kWidth> pack = {};
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int element = at[j] + u * step;
        if (static_cast<uint32_t>(element) < length[j]) pack.values[j] = x[line_at[j] + element];
      }
      *reinterpret_cast<Pack<Word, kWidth>*>(to + static_cast<int64_t>(u) * g.packs.divisor * kWidth) = pack;
    }
  }
}

/// How a call is cut into products.
struct Cut {
  int64_t taps, columns, length;  // of a window; of a row with what fills its last pack
  int64_t places;                 // of an image of y
  int64_t images;                 // of a product
  bool gathered;
};
Cut cut_of(const ConvCall& conv) {
  const halfstep_conv_attributes& a = *conv.attributes;
  Cut c = {};
  c.taps = conv.w->sizes[2] * conv.w->sizes[3];
  c.columns = c.taps * conv.w->sizes[1];
  c.length = divide_up(c.columns, kWidth) * kWidth;
  c.places = conv.y->sizes[2] * conv.y->sizes[3];
  c.gathered = c.taps > 1 || c.length != c.columns || a.stride[0] != 1 || a.stride[1] != 1 || a.padding[0] != 0 ||
               a.padding[1] != 0;
  const int64_t bytes = c.places * c.length * static_cast<int64_t>(sizeof(Word));
  static const int64_t most = bytes_setting("HALFSTEP_CUDA_GATHER_BYTES", kGatheredBytes);
  c.images = c.gathered ? std::clamp<int64_t>(most / bytes, 1, conv.x->sizes[0]) : conv.x->sizes[0];
  return c;
}

void gather(const Call& call, const ConvCall& conv, const Cut& cut, const Word* x, int64_t images, Word* rows) {
  const halfstep_conv_attributes& a = *conv.attributes;
  const auto small = [](int64_t n) { return static_cast<uint32_t>(n); };
  Gather g = {};
  const int64_t channels = conv.x->sizes[1], taps = conv.w->sizes[3];
  const bool dilated = a.dilation[1] != 1;
  g.channels = static_cast<int>(channels), g.height = static_cast<int>(conv.x->sizes[2]);
  g.line = static_cast<int>(conv.x->sizes[3] * channels);
  g.columns = small(cut.columns), g.rows = small(images * cut.places);
  g.packs = Divisor(small(cut.length / kWidth));
  g.run = Divisor(small(dilated ? channels : taps * channels)), g.runs_of_row = Divisor(small(dilated ? taps : 1));
  g.place_row = Divisor(small(conv.y->sizes[3])), g.image = Divisor(small(conv.y->sizes[2]));
  g.strips = Divisor(small(divide_up(conv.y->sizes[3], kStrip)));
  for (int d = 0; d < 2; ++d) {
    g.stride[d] = static_cast<int>(a.stride[d]), g.padding[d] = static_cast<int>(a.padding[d]);
    g.dilation[d] = static_cast<int>(a.dilation[d]);
  }
  const bool pixels = conv.x->sizes[1] % kWidth == 0 && aligned(x, kWidth);
  const int64_t threads = images * conv.y->sizes[2] * (pixels ? conv.y->sizes[3] : g.strips.divisor) * g.packs.divisor;
  launch(call, {.grid = grid_size(threads, kThreads, INT32_MAX), .alone = true},
         pixels ? gather_pixels : gather_elements, g, x, rows);
}

/// Calls product(first place, places) for some images at a time, whose windows are in `rows` then.
template <class F>
halfstep_status for_images(const Call& call, const ConvCall& conv, const Cut& cut, const Word* x, Word* rows,
                           F&& product) {
  const int64_t images = conv.x->sizes[0], image = conv.x->sizes[1] * conv.x->sizes[2] * conv.x->sizes[3];
  for (int64_t first = 0; first < images; first += cut.images) {
    const int64_t count = std::min(cut.images, images - first);
    if (cut.gathered) gather(call, conv, cut, x + first * image, count, rows);
    if (const auto status = product(first * cut.places, count * cut.places)) return status;
  }
  return HALFSTEP_OK;
}

/// A tensor as channels-last words: its own, or a copy.
class Last {
 public:
  Last(const Call& call, const Tensor& t) : t_(t), data_(static_cast<Word*>(t.data)) {
    copied_ = (conv_layouts(t) & kChannelsLast) == 0;
    if (copied_) data_ = call.workspace<Word>(t.numel);
  }
  Word* data() const { return data_; }
  void fill(const Call& call) const {
    if (!copied_) return;
    const int64_t c = t_.sizes[1], h = t_.sizes[2], w = t_.sizes[3];
    copy_view(call, View(data_, t_.dtype, {t_.sizes[0], c, h, w}, {h * w * c, 1, w * c, c}), t_);
  }

 private:
  const Tensor& t_;
  Word* data_;
  bool copied_;
};

/// dW [filters, window] = dY^T [filters, places] X [places, window].
halfstep_status weight_gradient(Call& call, const ConvCall& conv) {
  const Cut cut = cut_of(conv);
  const int64_t filters = conv.w->sizes[0], channels = conv.w->sizes[1], h = conv.w->sizes[2], w = conv.w->sizes[3];
  const Last x(call, *conv.x), y(call, *conv.y);
  Word* const rows = cut.gathered ? call.workspace<Word>(cut.images * cut.places * cut.length) : x.data();
  // A window's elements are in channels-last order.
  const bool direct = cut.length == cut.columns && (conv_layouts(*conv.w) & kChannelsLast) != 0;
  float* const sums = direct ? static_cast<float*>(conv.w->data) : call.workspace<float>(filters * cut.length);
  ProductSpace space(call);
  if (x.data() == nullptr || y.data() == nullptr || rows == nullptr || sums == nullptr || !space.reserve_any()) {
    return call.no_memory();
  }
  x.fill(call);
  y.fill(call);
  const auto status = for_images(call, conv, cut, x.data(), rows, [&](int64_t first, int64_t places) {
    Product p;
    p.dtype = conv.x->dtype, p.out_dtype = HALFSTEP_F32;
    p.m = filters, p.n = cut.length, p.k = places;
    p.a = {y.data() + first * filters, 1, filters, 0};
    p.b = {rows, cut.length, 1, 0};
    p.c = {sums, cut.length, 1, 0};
    p.accumulate = first > 0;
    return multiply(call, p, space);
  });
  if (status) return status;
  if (!direct) {
    copy_view(call, *conv.w,
              View(sums, HALFSTEP_F32, {filters, channels, h, w}, {cut.length, 1, w * channels, channels}));
  }
  return call.launched();
}

/// Y [places, filters] = X [places, window] W^T [window, filters].
halfstep_status output(Call& call, const ConvCall& conv) {
  const Cut cut = cut_of(conv);
  const int64_t filters = conv.w->sizes[0], channels = conv.w->sizes[1], h = conv.w->sizes[2], w = conv.w->sizes[3];
  const Last x(call, *conv.x);
  Word* const rows = call.workspace<Word>(cut.images * cut.places * cut.length);
  Word* const weight = call.workspace<Word>(filters * cut.length);
  ProductSpace space(call);
  if (x.data() == nullptr || rows == nullptr || weight == nullptr || !space.reserve_any()) return call.no_memory();
  x.fill(call);
  const auto bytes = static_cast<std::size_t>(filters * cut.length) * sizeof(Word);
  if (const auto status = check(cudaMemsetAsync(weight, 0, bytes, call.stream()), "cudaMemsetAsync", call.number())) {
    return status;
  }
  copy_view(call, View(weight, conv.w->dtype, {filters, channels, h, w}, {cut.length, 1, w * channels, channels}),
            *conv.w);
  const auto status = for_images(call, conv, cut, x.data(), rows, [&](int64_t first, int64_t places) {
    Product p;
    p.dtype = p.out_dtype = conv.x->dtype;
    p.m = places, p.n = filters, p.k = cut.length;
    p.a = {rows, cut.length, 1, 0};
    p.b = {weight, 1, cut.length, 0};
    p.c = {static_cast<Word*>(conv.y->data) + first * filters, filters, 1, 0};
    if (conv.bias != nullptr) p.bias = conv.bias->data, p.bias_dtype = conv.bias->dtype;
    return multiply(call, p, space);
  });
  return status ? status : call.launched();
}

}  // namespace

bool products_suit(const ConvCall& conv) {
  const halfstep_conv_attributes& a = *conv.attributes;
  const int dtype = conv.operand().dtype, result = conv.result().dtype;
  if ((dtype != HALFSTEP_F16 && dtype != HALFSTEP_BF16) || a.groups != 1) return false;
  const Tensor* const tensors[] = {conv.x, conv.w, conv.y};
  for (const Tensor* t : tensors) {
    if (t->numel == 0 || t->numel > INT32_MAX || conv_layouts(*t) == 0) return false;
    if (t != &conv.result() && t->dtype != dtype) return false;
  }
  // Places of windows, outside of x too, are counted in 31 bits.
  const auto sum = [&](int d) {
    return conv.y->sizes[2 + d] * a.stride[d] + a.padding[d] + conv.w->sizes[2 + d] * a.dilation[d];
  };
  for (int d = 0; d < 2; ++d) {
    constexpr int64_t kFar = 1 << 24;
    if (a.stride[d] > kFar || a.padding[d] > kFar || a.dilation[d] > kFar) return false;
    if (sum(d) * conv.x->sizes[1] > INT32_MAX) return false;
  }
  const Cut cut = cut_of(conv);
  const bool few = conv.x->sizes[1] < kWidth;
  // A product's rows begin on whole packs: cuBLASLt's fast kernels read those alone.
  if (cut.taps > (few ? kMostTapsOfFewChannels : kMostTaps) || conv.y->sizes[1] % kWidth != 0 ||
      cut.images * cut.places * cut.length > kMostGathered / static_cast<int64_t>(sizeof(Word))) {
    return false;
  }
  switch (conv.part) {
    case ConvPart::kWeight:
      return result == HALFSTEP_F32;
    case ConvPart::kOutput:
      return few && cut.gathered && result == dtype && (conv_layouts(*conv.y) & kChannelsLast) != 0 &&
             (conv.bias == nullptr || (conv.bias->dtype == dtype && conv.bias->strides[0] == 1 &&
                                       reinterpret_cast<uintptr_t>(conv.bias->data) % kBiasAlignment == 0));
    default:
      return false;
  }
}

halfstep_status convolve_by_products(Call& call, const ConvCall& conv) {
  return conv.part == ConvPart::kWeight ? weight_gradient(call, conv) : output(call, conv);
}

}  // namespace hscuda
