// SPDX-License-Identifier: Apache-2.0
// Convolutions: oneDNN's float32 kernels on channels-last images. 16-bit images are widened a few at a time, so that
// what is widened stays in the cache, and results are rounded once; where the processor has 16-bit units, oneDNN uses
// them. Products and sums are float32 (float64 for float64).
#include "halfstep/backends/cpu/conv.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_weight.h"
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/move.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

// Of widened images, in and out, a thread. ResNet-50's layers at batch 16 on two threads with 1 MiB of second and 36
// MiB of third cache: 1 to 4 MiB are equal within 4%, with half a MiB input gradients take 10% longer.
constexpr std::int64_t kBlockBytes = 2 << 20;
constexpr std::int64_t kAddGrain = 1 << 15;  // elements worth a thread

bool floats(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

std::int64_t input_image(const ConvGeometry& g) { return g.c * g.h * g.w; }
std::int64_t output_image(const ConvGeometry& g) { return g.o * g.oh * g.ow; }

Status out_of_memory(KernelContext* context) {
  context->set_error(context, "convolution: out of memory for the workspace");
  return Status::failed;
}

template <class T>
bool take(KernelContext* context, std::size_t count, T*& to) {
  to = count == 0 ? nullptr : static_cast<T*>(context->workspace(context, count * sizeof(T)));
  return count == 0 || to != nullptr;
}

/// Images as the float32 kernels want them: as they are where they can be read so, or through `buffer`, a block at a
/// time.
struct Images {
  TensorView* view;
  std::int64_t each;  ///< elements of an image
  float* buffer = nullptr;
  bool direct() const { return view->dtype == DType::f32 && channels_last(*view); }
  float* at(std::int64_t image) const { return direct() ? static_cast<float*>(view->data) + image * each : buffer; }
};

/// The bias as float32, next to each other.
bool read_bias(KernelContext* context, const TensorView* bias, float*& to) {
  to = nullptr;
  if (bias == nullptr) return true;
  if (!take(context, static_cast<std::size_t>(bias->sizes[0]), to)) return false;
  read_row(*bias, 0, bias->strides[0], bias->sizes[0], to);
  return true;
}

// Adds to float32 [count, places, channels].
void add_bias(float* images, std::int64_t places, std::int64_t channels, const float* bias) {
  parallel_for(places, std::max<std::int64_t>(1, kAddGrain / channels), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      for (std::int64_t c = 0; c < channels; ++c) images[p * channels + c] += bias[c];
    }
  });
}

void add(const float* from, std::int64_t n, float* to) {
  parallel_for(n, kAddGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] += from[i];
  });
}

/// The convolution of `images` images like those of `g`.
std::shared_ptr<OneDnnConv> find(ConvPart part, ConvGeometry g, std::int64_t images, bool bias) {
  g.n = images;
  return OneDnnConv::find(part, g, DType::f32, DType::f32, bias);
}

/// The weight in the order that `conv` wants: as it is, as it was `kept` with the weight's memory, or made for this
/// call (and kept, when it is asked for again and again without being changed, as evaluation does). `convert` gives the
/// elements as `conv` may read them, with the weight's strides; none: they are so already. Null when memory ran out.
void* packed_weight_for(KernelContext* context, const ConvCall& call, OneDnnConv& conv,
                        const std::function<const void*()>& convert, Ref<Storage>& kept) {
  const TensorView& w = call.weight;
  if (!convert && conv.takes(w.strides)) return w.data;
  Storage* const storage = call.weight_storage;
  Storage::DerivedKey key = {};
  if (storage != nullptr) {
    key = {conv.weight_order(), static_cast<std::int64_t>(w.dtype),
           static_cast<const char*>(w.data) - static_cast<const char*>(storage->data())};
    std::copy_n(w.sizes, 4, key.begin() + 3);
    std::copy_n(w.strides, 4, key.begin() + 7);
    kept = storage->derived(key);
    if (kept) return kept->data();
  }
  const void* const from = convert ? convert() : w.data;
  if (from == nullptr) return nullptr;
  if (storage != nullptr && storage->keeps_derived(key)) {
    try {
      kept = Storage::allocate(conv.weight_bytes(), Device{});
    } catch (const std::exception&) {
      // For this call then, if there is memory for that.
    }
  }
  char* to = kept ? static_cast<char*>(kept->data()) : nullptr;
  if ((to == nullptr && !take(context, conv.weight_bytes(), to)) || !conv.pack(from, w.strides, to)) return nullptr;
  if (kept) storage->keep_derived(key, kept);
  return to;
}

Status by_blocks(KernelContext* context, ConvCall& call) {
  const ConvGeometry& g = call.geometry;
  Images x{&call.input, input_image(g)}, y{&call.output, output_image(g)};
  const bool whole = x.direct() && y.direct();
  const std::int64_t block = whole ? g.n : conv_block_images(g, num_threads()), rest = g.n % block;
  const bool fused_bias = call.bias != nullptr && call.part == ConvPart::output;
  // Before anything is written: whether oneDNN has both.
  const auto conv = find(call.part, g, block, fused_bias);
  const auto last = rest == 0 ? conv : find(call.part, g, rest, fused_bias);
  if (conv == nullptr || last == nullptr) return convolve_by(ConvRoad::reference, context, call);

  const auto buffer_size = [&](const Images& i) {
    return i.direct() ? std::size_t{0} : static_cast<std::size_t>(block * i.each);
  };
  char* scratch = nullptr;
  float* bias = nullptr;
  float *weight = nullptr, *packed = nullptr, *packed_last = nullptr, *part_sum = nullptr;
  TensorView& w = call.weight;
  const auto weights = static_cast<std::size_t>(w.numel);
  const bool computes_weight = call.part == ConvPart::weight, wide = w.dtype == DType::f32;
  const bool one_block = g.n == block;
  std::function<const void*()> widen;
  if (!wide) {
    widen = [&] {
      if (weight == nullptr && take(context, weights, weight)) load_all(w, weight);
      return weight;
    };
  }
  Ref<Storage> kept, kept_last;
  if (!take(context, std::max(conv->scratch_bytes(), last->scratch_bytes()), scratch) ||
      !take(context, buffer_size(x), x.buffer) || !take(context, buffer_size(y), y.buffer) ||
      !read_bias(context, call.bias, bias)) {
    return out_of_memory(context);
  }
  if (computes_weight) {
    if (wide) weight = static_cast<float*>(w.data);
    // Sums over blocks are taken in the weight's own order.
    const bool as_is = wide && one_block && conv->takes(w.strides);
    if (!wide && !take(context, weights, weight)) return out_of_memory(context);
    if (!take(context, one_block ? 0 : weights, part_sum) ||
        !take(context, as_is ? 0 : conv->weight_bytes() / sizeof(float), packed) ||
        !take(context, rest == 0 ? 0 : last->weight_bytes() / sizeof(float), packed_last)) {
      return out_of_memory(context);
    }
    if (as_is) packed = weight;
  } else {
    // The two may want other orders of weights.
    packed = static_cast<float*>(packed_weight_for(context, call, *conv, widen, kept));
    packed_last = rest == 0 ? packed : static_cast<float*>(packed_weight_for(context, call, *last, widen, kept_last));
    if (packed == nullptr || packed_last == nullptr) return out_of_memory(context);
  }
  for (std::int64_t first = 0; first < g.n; first += block) {
    const std::int64_t count = std::min(block, g.n - first);
    const auto& c = count == block ? conv : last;
    float* const packed_weight = count == block ? packed : packed_last;
    if (call.part != ConvPart::input && !x.direct()) load_images(*x.view, first, count, x.buffer);
    if (call.part != ConvPart::output && !y.direct()) load_images(*y.view, first, count, y.buffer);
    if (!c->run(x.at(first), packed_weight, y.at(first), fused_bias ? bias : nullptr, scratch)) {
      context->set_error(context, "convolution: oneDNN could not run it");
      return Status::failed;
    }
    if (call.part == ConvPart::output && !y.direct()) store_images(y.buffer, first, count, *y.view);
    if (call.part == ConvPart::input) {
      if (bias != nullptr) add_bias(x.at(first), count * g.h * g.w, g.c, bias);
      if (!x.direct()) store_images(x.buffer, first, count, *x.view);
    }
    if (computes_weight && !one_block) {
      float* const to = first == 0 ? weight : part_sum;
      if (c->takes(w.strides)) {
        std::copy_n(packed_weight, weights, to);
      } else if (!c->unpack(packed_weight, to, w.strides)) {
        return out_of_memory(context);
      }
      if (first != 0) add(part_sum, w.numel, weight);
    }
  }
  if (computes_weight) {
    if (one_block && packed != weight && !conv->unpack(packed, weight, w.strides)) return out_of_memory(context);
    if (!wide) store_all(weight, w);
  }
  return Status::ok;
}

bool has_units(DType dtype, Isa isa) {
  return (dtype == DType::bf16 && isa >= Isa::avx512_bf16) || (dtype == DType::f16 && isa >= Isa::avx512_fp16);
}

// Images and weights as they are.
Status natively(KernelContext* context, ConvCall& call) {
  const ConvGeometry& g = call.geometry;
  TensorView& w = call.weight;
  const bool computes_weight = call.part == ConvPart::weight, fused = call.part == ConvPart::output;
  const DType operands = fused ? call.input.dtype : call.output.dtype;
  const auto conv = OneDnnConv::find(call.part, g, operands, call.result().dtype, fused && call.bias != nullptr);
  if (conv == nullptr) return convolve_by(ConvRoad::blocks, context, call);
  char *scratch = nullptr, *packed = nullptr;
  float* bias = nullptr;
  const bool as_is = conv->takes(w.strides);
  if (!take(context, conv->scratch_bytes(), scratch) || !read_bias(context, call.bias, bias)) {
    return out_of_memory(context);
  }
  Ref<Storage> kept;
  if (!computes_weight) {
    packed = static_cast<char*>(packed_weight_for(context, call, *conv, {}, kept));
  } else if (as_is) {
    packed = static_cast<char*>(w.data);
  } else {
    take(context, conv->weight_bytes(), packed);
  }
  if (packed == nullptr) return out_of_memory(context);
  if (!conv->run(call.input.data, packed, call.output.data, bias, scratch)) {
    context->set_error(context, "convolution: oneDNN could not run it");
    return Status::failed;
  }
  if (!as_is && computes_weight && !conv->unpack(packed, w.data, w.strides)) return out_of_memory(context);
  return Status::ok;
}

}  // namespace

ConvRoad choose_conv_road(const ConvCall& call, Isa isa) noexcept {
  const TensorView* all[] = {&call.input, &call.weight, &call.output};
  for (const TensorView* t : all) {
    if (!floats(t->dtype)) return ConvRoad::reference;
  }
  const DType operands = call.part == ConvPart::output ? call.input.dtype : call.output.dtype;
  const DType result = const_cast<ConvCall&>(call).result().dtype;
  // A bias of a transposed convolution would be rounded after the sum is.
  const bool native = has_units(operands, isa) && channels_last(call.input) && channels_last(call.output) &&
                      (result == operands || result == DType::f32) &&
                      (call.bias == nullptr || call.part == ConvPart::output);
  if (native) return ConvRoad::native;
  return products_serve(call) && products_suit(call.geometry) ? ConvRoad::products : ConvRoad::blocks;
}

std::int64_t conv_block_images(const ConvGeometry& g, int threads) noexcept {
  const std::int64_t bytes = (input_image(g) + output_image(g)) * 4;
  const std::int64_t most = std::clamp<std::int64_t>(threads * kBlockBytes / std::max<std::int64_t>(bytes, 1), 1, g.n);
  const std::int64_t blocks = (g.n + most - 1) / most;
  return (g.n + blocks - 1) / blocks;
}

Status convolve_by(ConvRoad road, KernelContext* context, ConvCall& call) {
  if (road == ConvRoad::native) return natively(context, call);
  if (road == ConvRoad::products) return weight_by_products(context, call);
  if (road == ConvRoad::blocks) return by_blocks(context, call);
  double* bias = nullptr;
  if (call.bias != nullptr) {
    if (!take(context, static_cast<std::size_t>(call.bias->sizes[0]), bias)) return out_of_memory(context);
    read_row(*call.bias, 0, call.bias->strides[0], call.bias->sizes[0], bias);
  }
  convolve_reference(call, bias);
  return Status::ok;
}

Status convolve(KernelContext* context, ConvCall& call) {
  TensorView& result = call.result();
  if (result.numel == 0) return Status::ok;
  const ConvGeometry& g = call.geometry;
  const bool no_sum = g.n == 0 || g.c == 0 || g.o == 0 || g.oh == 0 || g.ow == 0 || g.h == 0 || g.w == 0;
  return convolve_by(no_sum ? ConvRoad::reference : choose_conv_road(call, compute_isa()), context, call);
}

namespace {

ConvGeometry geometry_of(const ConvAttributes& a, const TensorView& x, const TensorView& w, const TensorView& y) {
  ConvGeometry g = {};
  g.n = x.sizes[0], g.c = x.sizes[1], g.h = x.sizes[2], g.w = x.sizes[3];
  g.o = y.sizes[1], g.oh = y.sizes[2], g.ow = y.sizes[3];
  g.kh = w.sizes[2], g.kw = w.sizes[3];
  g.groups = a.groups;
  const std::int64_t places[] = {g.h, g.w}, outputs[] = {g.oh, g.ow}, window[] = {g.kh, g.kw};
  for (int d = 0; d < 2; ++d) {
    g.stride[d] = a.stride[d];
    g.dilation[d] = a.dilation[d];
    g.before[d] = a.padding[d];
    // The same after as before, as far as it gives this output: the last window needn't reach all of it. A transposed
    // convolution's output_padding may ask for another.
    const std::int64_t extent = a.dilation[d] * (window[d] - 1) + 1;
    g.after[d] = a.padding[d];
    if ((places[d] + 2 * a.padding[d] - extent) / a.stride[d] + 1 != outputs[d]) {
      g.after[d] = (outputs[d] - 1) * a.stride[d] + extent - places[d] - a.padding[d];
    }
  }
  return g;
}

// Where input 1 lies; null where the caller can't say.
Storage* storage_of_weight(KernelContext* context) {
  const auto* state = static_cast<const CpuKernelState*>(context->state);
  return state == nullptr ? nullptr : state->storage(context, 1);
}

Status conv2d(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ConvAttributes*>(attributes);
  ConvCall call{ConvPart::output, geometry_of(a, in[0], in[1], out[0]), in[0], in[1], out[0]};
  if (n > 2 && in[2].defined) call.bias = &in[2];
  call.weight_storage = storage_of_weight(context);
  return convolve(context, call);
}
// Also conv_transpose2d, whose bias goes to what is an input here.
Status backward_input(KernelContext* context, const TensorView* in, int n, TensorView* out, int,
                      const void* attributes) {
  const auto& a = *static_cast<const ConvAttributes*>(attributes);
  ConvCall call{ConvPart::input, geometry_of(a, out[0], in[1], in[0]), out[0], in[1], in[0]};
  if (n > 2 && in[2].defined) call.bias = &in[2];
  call.weight_storage = storage_of_weight(context);
  return convolve(context, call);
}
Status backward_weight(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                       const void* attributes) {
  const auto& a = *static_cast<const ConvAttributes*>(attributes);
  ConvCall call{ConvPart::weight, geometry_of(a, in[1], out[0], in[0]), in[1], out[0], in[0]};
  return convolve(context, call);
}

const RegisterCpuKernel registered[] = {
    {"conv2d", kFloatingDTypes, conv2d},
    {"conv_transpose2d", kFloatingDTypes, backward_input},
    {"conv2d_backward_input", kFloatingDTypes, backward_input},
    {"conv2d_backward_weight", kFloatingDTypes, backward_weight},
};

}  // namespace
}  // namespace halfstep::cpu
