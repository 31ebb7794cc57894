// SPDX-License-Identifier: Apache-2.0
// oneDNN's convolutions of 8-bit integers.
#pragma once

#include <cstdint>
#include <memory>

#include "halfstep/backends/cpu/int8_product.h"
#include "halfstep/core/export.h"

namespace halfstep::cpu {

/// A convolution of dense channels-last integers with what follows it, compiled for one geometry and computed on the
/// calling thread. Its weights have an order of their own. Several threads may run it at once.
class HS_API OneDnnInt8Conv {
 public:
  /// The one for this geometry, dtype of the input (u8, i8), and epilogue, made when it is new; null where oneDNN has
  /// none that may run. Primitives are shared by all threads.
  static std::shared_ptr<OneDnnInt8Conv> find(const ConvGeometry& geometry, DType input, bool zero_point, bool bias,
                                              const Int8Epilogue& epilogue) noexcept;

  OneDnnInt8Conv();
  ~OneDnnInt8Conv();

  std::size_t scratch_bytes() const;
  /// Bytes of weights in their own order, with what the kernel wants to know of them.
  std::size_t weight_bytes() const;
  /// A number of that order, the same for every convolution that wants it.
  std::int64_t weight_order() const;
  /// oneDNN's name of the kernel, such as "brgconv:avx512_core_vnni".
  const char* implementation() const;
  /// Weights [o, c / groups, kh, kw] of any strides into their own order. False where oneDNN fails.
  bool pack(const void* weight, const std::int64_t* strides, void* packed) noexcept;
  /// Computes it. False where oneDNN fails. `zero_point`, `bias` and `residual` as asked for.
  bool run(const void* input, const void* packed_weight, void* output, const float* scale, const float* bias,
           std::int32_t zero_point, const void* residual, void* scratch) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep::cpu
