// SPDX-License-Identifier: Apache-2.0
// Convolutions: oneDNN's float32 kernels on channels-last images, or matrix products for 1x1 where they are faster.
// 16-bit images are widened a few at a time, so that what is widened stays in the cache, or while a product packs them;
// results are rounded once. Where the processor has 16-bit units, oneDNN uses them. Images of other layouts are brought
// to channels-last first. Products and sums are float32 (float64 for float64).
// Winograd's algorithms take part where they are asked for. Depthwise convolutions have kernels of their own.
#include "halfstep/backends/cpu/conv.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv_depthwise.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_matrix.h"
#include "halfstep/backends/cpu/conv_reorder.h"
#include "halfstep/backends/cpu/conv_spread.h"
#include "halfstep/backends/cpu/conv_tuning.h"
#include "halfstep/backends/cpu/conv_weight.h"
#include "halfstep/backends/cpu/conv_weight_tiles.h"
#include "halfstep/backends/cpu/conv_windows.h"
#include "halfstep/backends/cpu/conv_winograd.h"
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/move.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

bool floats(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

ConvPath float32_path(const ConvCall& call, Isa isa) noexcept {
  if (matrix_serves(call) && matrix_suits(call, isa)) return ConvPath::matrix;
  return products_serve(call) && products_suit(call.geometry) ? ConvPath::products : ConvPath::blocks;
}

// Where the units have no kernel of oneDNN's.
ConvPath path_without_onednn(const ConvCall& call) noexcept {
  return tiles_serve(call) ? ConvPath::tiles : float32_path(call, compute_isa());
}

bool has_units(DType dtype, Isa isa) {
  return (dtype == DType::bf16 && has_bf16_units(isa)) || (dtype == DType::f16 && has_f16_units(isa));
}

// Whether oneDNN's kernels on the processor's 16-bit units may serve. Not for groups of one channel: they take the
// units for a matrix of one column, up to 30 times as long as in float32.
bool by_units(const ConvCall& call, Isa isa) {
  if (call.geometry.groups > 1 && call.geometry.groups == call.geometry.c) return false;
  const DType operands = call.part == ConvPart::output ? call.input.dtype : call.output.dtype;
  const DType result = const_cast<ConvCall&>(call).result().dtype;
  return has_units(operands, isa) && channels_last(call.input) && channels_last(call.output) &&
         (result == operands || result == DType::f32);
}

// The path of a call that depthwise kernels don't serve, or refuse since a weight isn't finite.
ConvPath dense_path(const ConvCall& call, Isa isa, Winograd allowed) noexcept {
  // One filter: a product with a vector, where oneDNN computes a block of 16 filters.
  if (call.part == ConvPart::output && call.geometry.o == 1 && matrix_serves(call)) return ConvPath::matrix;
  const bool native = by_units(call, isa);
  // AMX multiplies float32 as sums of bfloat16; so it does float16 where the processor has no units for it.
  const bool in_parts = !native && (call.input.dtype == DType::f32 || call.input.dtype == DType::f16);
  const bool by_tiles = isa == Isa::amx && amx_usable() && (in_parts || (native && call.input.dtype == DType::bf16));
  if (allowed != Winograd::off && winograd_serves(call) && !(native && isa >= Isa::amx)) {
    const int tiles = winograd_tiles(call.part, call.geometry, static_cast<int>(allowed), native || by_tiles ? 2 : 1);
    if (tiles != 0) return tiles == 4 ? ConvPath::winograd4 : ConvPath::winograd2;
  }
  const bool by_matrix = matrix_serves(call) || split_matrix_serves(call);
  if (by_tiles && by_matrix && matrix_suits_tiles(call)) return ConvPath::matrix;
  if (by_tiles && windows_serve(call) && windows_suit(call)) return ConvPath::windows;
  if (by_tiles && tiles_serve(call) && tiles_suit(call)) return ConvPath::tiles;
  if (native && pair_products_serve(call, isa) && pair_products_suit(call.geometry)) return ConvPath::pairs;
  return native ? ConvPath::native : float32_path(call, isa);
}

}  // namespace

Status conv_out_of_memory(KernelContext* context) {
  context->set_error(context, "convolution: out of memory for the workspace");
  return Status::failed;
}

bool all_floats(const ConvCall& call) noexcept {
  return floats(call.input.dtype) && floats(call.weight.dtype) && floats(call.output.dtype);
}

ConvPath choose_conv_path(const ConvCall& call, Isa isa, Winograd allowed) noexcept {
  if (!all_floats(call)) return ConvPath::reference;
  return depthwise_serves(call) ? ConvPath::depthwise : dense_path(call, isa, allowed);
}

std::vector<ConvPath> conv_paths(const ConvCall& call, Isa isa, Winograd allowed, ConvPath first) {
  std::vector<ConvPath> paths = {first};
  if (!all_floats(call)) return paths;
  const auto add = [&](ConvPath path, bool serves) {
    if (serves && path != first) paths.push_back(path);
  };
  const bool winograd = winograd_serves(call);
  add(ConvPath::native, by_units(call, isa));
  add(ConvPath::pairs, pair_products_serve(call, isa));
  add(ConvPath::tiles, tiles_serve(call));
  add(ConvPath::blocks, true);
  add(ConvPath::products, products_serve(call));
  add(ConvPath::matrix, matrix_serves(call) || (split_matrix_serves(call) && isa == Isa::amx && amx_usable()));
  add(ConvPath::windows, isa == Isa::amx && windows_serve(call) && amx_usable());
  add(ConvPath::depthwise, depthwise_serves(call));
  add(ConvPath::winograd2, winograd && allowed != Winograd::off);
  add(ConvPath::winograd4, winograd && allowed == Winograd::tiles_4x4);
  return paths;
}

Status convolve_by(ConvPath path, KernelContext* context, ConvCall& call) {
  if (path == ConvPath::products) return weight_by_products(context, call);
  if (path == ConvPath::pairs) return weight_by_pair_products(context, call);
  if (path == ConvPath::matrix) return convolve_matrix(context, call);
  if (path == ConvPath::windows || path == ConvPath::tiles) {
    const Status status = path == ConvPath::tiles ? weight_by_tiles(context, call) : convolve_windows(context, call);
    // A float32 result that isn't finite is computed as without AMX.
    return status == Status::unsupported ? convolve_by(choose_conv_path(call, Isa::avx512_fp16), context, call)
                                         : status;
  }
  if (path == ConvPath::depthwise) {
    const Status status = convolve_depthwise(context, call);
    return status == Status::unsupported ? convolve_by(dense_path(call, compute_isa(), Winograd::off), context, call)
                                         : status;
  }
  if (path == ConvPath::winograd2 || path == ConvPath::winograd4) {
    const int m = path == ConvPath::winograd4 ? 4 : 2;
    const Status status =
        call.part == ConvPart::weight ? weight_by_winograd(context, call, m) : convolve_winograd(context, call, m);
    return status == Status::unsupported ? convolve_by(choose_conv_path(call, compute_isa()), context, call) : status;
  }
  if (path != ConvPath::reference) {
    const bool native = path == ConvPath::native;
    const DType operands = call.part == ConvPart::output ? call.input.dtype : call.output.dtype;
    const Status status = convolve_onednn(context, call, native ? operands : DType::f32);
    if (status != Status::unsupported) return status;
    // Where the units have no kernel (f16 weight gradients, for one) our own or the float32 paths are taken.
    if (native) return convolve_by(path_without_onednn(call), context, call);
    if (products_serve(call)) return weight_by_products(context, call);
  }
  double* bias = nullptr;
  if (call.bias != nullptr) {
    if (!take_workspace(context, static_cast<std::size_t>(call.bias->sizes[0]), bias))
      return conv_out_of_memory(context);
    if (!runs_dry(context)) read_row(*call.bias, 0, call.bias->strides[0], call.bias->sizes[0], bias);
  }
  if (runs_dry(context)) return Status::ok;
  convolve_reference(call, bias);
  return Status::ok;
}

std::string describe_conv(ConvCall& call) {
  if (needs_reorder(call)) {
    ReorderedCall reordered(call, nullptr, nullptr);
    return describe_conv(reordered.call);
  }
  if (is_spread(call)) {
    SpreadCall dense(call, nullptr);
    return describe_conv(dense.call);
  }
  ConvPath path = tuned_conv_path(call, choose_conv_path(call, compute_isa(), winograd()), false);
  if (path == ConvPath::winograd2) return "winograd 2x2";
  if (path == ConvPath::winograd4) return "winograd 4x4";
  if (path == ConvPath::native) {
    const DType operands = call.part == ConvPart::output ? call.input.dtype : call.output.dtype;
    const std::string kernel = onednn_kernel(call, operands);
    if (!kernel.empty()) return kernel;
    path = path_without_onednn(call);
  }
  if (path == ConvPath::pairs) return "pairs";
  if (path == ConvPath::tiles) return "tiles";
  if (path == ConvPath::matrix) return "matrix";
  if (path == ConvPath::windows) return "windows";
  if (path == ConvPath::depthwise) return "depthwise";
  if (path == ConvPath::blocks) {
    const std::string kernel = onednn_kernel(call, DType::f32);
    const bool widened = call.input.dtype != DType::f32 || call.output.dtype != DType::f32;
    if (!kernel.empty()) return widened ? "blocks " + kernel : kernel;
    if (products_serve(call)) path = ConvPath::products;
  }
  return path == ConvPath::products ? "products" : "reference";
}

Status convolve(KernelContext* context, ConvCall& call) {
  TensorView& result = call.result();
  if (result.numel == 0) return Status::ok;
  const ConvGeometry& g = call.geometry;
  const bool no_sum = g.n == 0 || g.c == 0 || g.o == 0 || g.oh == 0 || g.ow == 0 || g.h == 0 || g.w == 0;
  if (no_sum) return convolve_by(ConvPath::reference, context, call);
  if (needs_reorder(call)) return convolve_reordered(context, call);
  if (is_spread(call)) return convolve_spread(context, call);
  const ConvPath model = choose_conv_path(call, compute_isa(), winograd());
  return convolve_by(tuned_conv_path(call, model, !runs_dry(context)), context, call);
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

const RegisterCpuKernel conv_kernels[] = {
    {"conv2d", kFloatingDTypes, conv2d, kRunsDry},
    {"conv_transpose2d", kFloatingDTypes, backward_input, kRunsDry},
    {"conv2d_backward_input", kFloatingDTypes, backward_input, kRunsDry},
    {"conv2d_backward_weight", kFloatingDTypes, backward_weight, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
