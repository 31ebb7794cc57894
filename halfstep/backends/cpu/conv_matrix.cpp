// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_matrix.h"

#include <algorithm>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/conv_weight_tiles.h"
#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/backends/cpu/gemm_internal.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kFewest = 8;  // channels and filters: a narrow product takes memory for all places
constexpr std::int64_t kFewestByAvx2 = 32;
// In float32 a product gains from fetching rows ahead, where images come from memory and a sum is made in one go
// (measured on a Zen 4): the bytes of both images, and the fewest steps of the sum for columns of the result.
constexpr std::int64_t kBytesOfLargeImages = 8 << 20;
// Places from which on weight_by_tiles() is the faster one for float16. Measured on a Granite Rapids: 0.90 to 0.95 of
// the time for 56 x 56 at batch 16, 1.0 to 1.2 for 28 x 28. For float32 there is no clear difference.
constexpr std::int64_t kPlacesForTiles = 32 << 10;
constexpr struct { std::int64_t steps, columns; } kFewestInFloat32[] = {{64, 64}, {96, 16}};

bool single_places(const ConvCall& call) {
  const ConvGeometry& g = call.geometry;
  return g.groups == 1 && g.kh * g.kw == 1 && g.before[0] == 0 && g.before[1] == 0 && channels_last(call.input) &&
         channels_last(call.output);
}
// The places that windows see lie side by side.
bool dense(const ConvGeometry& g) { return g.oh == g.h && g.ow == g.w; }

// The input's lines of channels that strided windows see, to [N, OH, OW, C].
template <class Element>
void gather_places(const ConvGeometry& g, const Element* from, Element* to) {
  parallel_for(g.n * g.oh, row_grain(g.ow * g.c), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Element* at = from + (i / g.oh * g.h + i % g.oh * g.stride[0]) * g.w * g.c;
      Element* const line = to + i * g.ow * g.c;
      for (std::int64_t j = 0; j < g.ow; ++j, at += g.stride[1] * g.c) std::copy_n(at, g.c, line + j * g.c);
    }
  });
}
// [O, N OH OW] times [N OH OW, C].
GemmArgs weight_product(const ConvCall& call, const void* places) {
  const ConvGeometry& g = call.geometry;
  GemmArgs product;
  product.m = g.o, product.n = g.c, product.k = g.n * g.oh * g.ow;
  product.a = {call.output.data, call.output.dtype, 1, g.o};
  product.b = {places, call.input.dtype, g.c, 1};
  product.c = call.weight.data, product.c_dtype = call.weight.dtype, product.ldc = g.c;
  product.precision = call.precision;
  return product;
}

}  // namespace

bool matrix_serves(const ConvCall& call) noexcept {
  return call.part != ConvPart::weight && single_places(call) && dense(call.geometry) && all_floats(call);
}

bool split_matrix_serves(const ConvCall& call) noexcept {
  const ConvGeometry& g = call.geometry;
  const DType dtype = call.input.dtype;
  const bool weight = call.part == ConvPart::weight;
  const bool in_parts = (dtype == DType::f32 || dtype == DType::f16) && call.output.dtype == dtype &&
                        (weight || call.weight.dtype == dtype);
  const bool inside = (g.oh - 1) * g.stride[0] < g.h && (g.ow - 1) * g.stride[1] < g.w;
  return (weight || (call.part == ConvPart::output && !dense(g))) && in_parts && inside && single_places(call) &&
         channels_last(call.weight);
}

bool matrix_suits(const ConvCall& call, Isa isa) noexcept {
  const ConvGeometry& g = call.geometry;
  if (call.input.dtype == DType::f32 && call.output.dtype == DType::f32) {
    const bool forward = call.part == ConvPart::output;
    const std::int64_t steps = forward ? g.c : g.o, columns = forward ? g.o : g.c;
    const std::int64_t bytes = g.n * g.h * g.w * (g.c + g.o) * static_cast<std::int64_t>(sizeof(float));
    return isa >= Isa::avx512 && steps <= kGemmMostSteps && bytes >= kBytesOfLargeImages &&
           std::ranges::any_of(kFewestInFloat32,
                               [&](const auto& least) { return steps >= least.steps && columns >= least.columns; });
  }
  return std::min(g.c, g.o) >= (isa >= Isa::avx512 ? kFewest : kFewestByAvx2);
}

bool matrix_suits_tiles(const ConvCall& call) noexcept {
  const auto all = [&](DType dtype) {
    return call.input.dtype == dtype && call.weight.dtype == dtype && call.output.dtype == dtype;
  };
  // Whole tiles along the sum, which are read in place, or whole lines of results; weights are packed in pairs.
  const ConvGeometry& g = call.geometry;
  if (call.part == ConvPart::weight) {
    const bool few = call.input.dtype == DType::f32 || g.n * g.oh * g.ow < kPlacesForTiles;
    return few && std::min(g.c, g.o) >= 2 * kTileLanes && weight_repays_packing(call) && amx_usable();
  }
  const bool whole = g.c % (2 * kTileLanes) == 0 || g.o % (2 * kTileLanes) == 0;
  const bool in_parts = all(DType::f32) || all(DType::f16);
  const bool suits = (all(DType::bf16) && whole && g.c % 2 == 0) || (in_parts && std::min(g.c, g.o) >= 2 * kTileLanes);
  return suits && amx_usable();
}

Status convolve_matrix(KernelContext* context, ConvCall& call) {
  const ConvGeometry& g = call.geometry;
  const bool forward = call.part == ConvPart::output;
  const TensorView &to = call.result(), &w = call.weight;
  void* places = call.input.data;  // that windows see
  if (!dense(g)) {
    char* copy = nullptr;
    const auto bytes = static_cast<std::size_t>(g.n * g.oh * g.ow * g.c) * item_size(call.input.dtype);
    if (!take_workspace(context, bytes, copy)) return conv_out_of_memory(context);
    if (!runs_dry(context) && item_size(call.input.dtype) == sizeof(std::uint32_t)) {
      gather_places(g, static_cast<const std::uint32_t*>(places), reinterpret_cast<std::uint32_t*>(copy));
    } else if (!runs_dry(context)) {
      gather_places(g, static_cast<const std::uint16_t*>(places), reinterpret_cast<std::uint16_t*>(copy));
    }
    places = copy;
  }
  if (call.part == ConvPart::weight) return gemm(context, weight_product(call, places));
  GemmArgs product;
  product.m = g.n * g.oh * g.ow;
  product.n = forward ? g.o : g.c;
  product.k = forward ? g.c : g.o;
  product.a = {forward ? places : call.output.data, forward ? call.input.dtype : call.output.dtype, product.k, 1};
  product.b = {w.data, w.dtype, w.strides[forward ? 1 : 0], w.strides[forward ? 0 : 1]};
  product.c = to.data, product.c_dtype = to.dtype, product.ldc = product.n;
  product.precision = call.precision;
  if (call.bias != nullptr) {
    float* bias = nullptr;
    if (!take_workspace(context, static_cast<std::size_t>(product.n), bias)) return conv_out_of_memory(context);
    if (!runs_dry(context)) read_row(*call.bias, 0, call.bias->strides[0], product.n, bias);
    product.bias = bias;
  }
  return gemm(context, product);
}

}  // namespace halfstep::cpu
