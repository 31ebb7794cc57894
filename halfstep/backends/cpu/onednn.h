// SPDX-License-Identifier: Apache-2.0
// The one place that knows oneDNN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/core/export.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Whether oneDNN can hold such a product: both operands bf16 giving bf16 or f32, both f16 giving f16 or f32, or all
/// f32. It computes f16 with AVX512-FP16 only, and bf16 slowly where it has to emulate it.
bool onednn_serves(const GemmArgs& args) noexcept;

/// Scratch memory that such a product needs on the calling thread; none where oneDNN has no kernel that may run. Its
/// matrices must be dense.
std::optional<std::size_t> onednn_product_scratch(const GemmArgs& args) noexcept;
/// The product by oneDNN's matmul primitive, which is kept for its shape, on the calling thread. False where it fails.
bool onednn_product(const GemmArgs& args, void* scratch) noexcept;

/// Which tensor of a convolution is computed from the other two.
enum class ConvPart : std::uint8_t { output, input, weight };

/// The sizes of a convolution: input [n, c, h, w], weight [o, c / groups, kh, kw], output [n, o, oh, ow]; `before` and
/// `after` are the zeros around the input, height first.
struct ConvGeometry {
  std::int64_t n, c, h, w, o, oh, ow, kh, kw, groups;
  std::int64_t stride[2], dilation[2], before[2], after[2];
};

/// A convolution of dense channels-last images, compiled for one geometry and computed on the calling thread. Its
/// weights have an order of their own. Several threads may run it at once.
class HS_API OneDnnConv {
 public:
  /// The one for this part, geometry and dtypes, made when it is new; null where oneDNN has none that may run (plain
  /// loops, and products by its float32 routine, during which a signal would corrupt memory). `bias`: float32 numbers
  /// are added to the output.
  static std::shared_ptr<OneDnnConv> find(ConvPart part, const ConvGeometry& geometry, DType operands, DType result,
                                          bool bias) noexcept;

  OneDnnConv();
  ~OneDnnConv();

  std::size_t scratch_bytes() const;
  /// Bytes of weights in their own order.
  std::size_t weight_bytes() const;
  /// A number of that order, the same for every convolution that wants it.
  std::int64_t weight_order() const;
  /// Whether weights with these strides are in that order as they are.
  bool takes(const std::int64_t* weight_strides) const;
  /// oneDNN's name of the kernel, such as "brgconv:avx512_core_bf16".
  const char* implementation() const;
  /// Weights of any strides into their own order, and back, rounded to `dtype`. False where oneDNN fails.
  bool pack(const void* weight, const std::int64_t* strides, void* packed) noexcept;
  bool unpack(const void* packed, void* weight, DType dtype, const std::int64_t* strides) noexcept;
  /// Computes the part. False where oneDNN fails.
  bool run(void* input, void* packed_weight, void* output, const float* bias, void* scratch) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// oneDNN's version, as "3.2.0".
HS_API const char* onednn_version() noexcept;

}  // namespace halfstep::cpu
