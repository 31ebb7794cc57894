// SPDX-License-Identifier: Apache-2.0
// The kernel contract: what the op layer hands to a kernel of any device, and the table in which kernels are
// registered. Plain structs and C functions, so that a kernel may live in a plug-in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "halfstep/core/device.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"

namespace halfstep {

/// A tensor as a kernel sees it. The op layer owns everything it points to, for the time of the call.
struct TensorView {
  void* data;  ///< first element, in the device's memory; null for an absent optional input and for empty tensors
  const std::int64_t* sizes;    ///< `ndim` of them
  const std::int64_t* strides;  ///< in elements, 0 where a dimension is repeated
  std::int64_t numel;           ///< product of the sizes
  std::int32_t ndim;
  DType dtype;
  bool defined;     ///< false for an absent optional input
  bool contiguous;  ///< row-major without gaps
};

/// How a kernel ended.
enum class Status : std::int32_t {
  ok = 0,
  unsupported = 1,  ///< this combination is not handled here: another road (the CPU) may be taken
  failed = 2,       ///< it went wrong; the context has the reason
};

/// What a kernel may ask for while it runs.
struct KernelContext {
  /// Scratch memory of the device, aligned to 64 bytes, freed when the kernel's work is done; null when there is none
  /// left.
  void* (*workspace)(KernelContext* context, std::size_t bytes);
  /// Records why the kernel returns something else than ok; the text is copied.
  void (*set_error)(KernelContext* context, const char* text);
  /// Says that no value of the first output is larger in magnitude than `bound`, nor NaN. Null where nobody asks, and
  /// for a kernel to pass over as it likes; one that can tell from inputs much smaller than its output spares a
  /// gradient scaler the reading of it.
  void (*set_magnitude_bound)(KernelContext* context, float bound);
  Device device;  ///< where the tensors are
  void* queue;    ///< the device's queue; null on the CPU
  void* owner;    ///< the op layer's own
};

/// A kernel: reads `in[0..n)`, writes `out[0..m)`, which have been allocated with the shapes, strides and dtypes that
/// the op's shape rule gave. `attributes` points to the op's struct in ops/attributes.h (null for ops without). It
/// neither allocates (but workspace) nor throws. Inputs and outputs overlap only where the op's in-place form is
/// called, and then exactly.
using KernelFn = Status (*)(KernelContext* context, const TensorView* in, int n, TensorView* out, int m,
                            const void* attributes);

/// The kernels of one op: a function for each kind of device and each dtype (that of the op's key input, see ops/op.h).
struct KernelTable {
  KernelFn kernels[kMaxDeviceTypes][kNumDTypes] = {};
  KernelFn find(Device device, DType dtype) const { return kernels[device.type][static_cast<int>(dtype)]; }
};

/// The table of the op called `name`, made when it is new; the reference stays valid. Ops and kernels meet here by
/// name, so that neither needs the other to be loaded first.
HS_API KernelTable& kernel_table(std::string_view name);

/// Registers a CPU kernel for some dtypes when a program starts: a namespace-scope constant in a backend's .cpp file.
struct HS_API RegisterCpuKernel {
  RegisterCpuKernel(std::string_view op, std::initializer_list<DType> dtypes, KernelFn kernel);
};

/// Groups of dtypes for registration.
inline constexpr std::initializer_list<DType> kFloatingDTypes = {DType::f32, DType::f64, DType::f16, DType::bf16};
inline constexpr std::initializer_list<DType> kIntegralDTypes = {DType::i64, DType::i32, DType::i8, DType::u8};
inline constexpr std::initializer_list<DType> kNumericDTypes = {DType::f32, DType::f64, DType::f16, DType::bf16,
                                                                DType::i64, DType::i32, DType::i8,  DType::u8};
inline constexpr std::initializer_list<DType> kComputeDTypes = {
    DType::f32, DType::f64, DType::f16, DType::bf16, DType::i64, DType::i32, DType::i8, DType::u8, DType::boolean};
inline constexpr std::initializer_list<DType> kAllDTypes = {DType::f32,    DType::f64,    DType::f16,    DType::bf16,
                                                            DType::f8e4m3, DType::f8e5m2, DType::i64,    DType::i32,
                                                            DType::i8,     DType::u8,     DType::boolean};

}  // namespace halfstep
