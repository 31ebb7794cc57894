// SPDX-License-Identifier: Apache-2.0
// The kernel contract: what the op layer passes to a kernel of any device, and the table in which kernels are
// registered. Plain structs and C functions, so that a kernel may live in a plug-in.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "halfstep/core/device.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/core/storage.h"

namespace halfstep {

/// A tensor as a kernel sees it; halfstep_tensor of plugin.h. The op layer owns everything it points to, for the
/// duration of the call.
struct TensorView {
  void* data;  ///< first element, in the device's memory; null for an absent optional input and for empty tensors
  const std::int64_t* sizes;    ///< `ndim` of them
  const std::int64_t* strides;  ///< in elements, 0 where a dimension is repeated
  std::int64_t numel;           ///< product of the sizes
  std::int32_t ndim;
  DType dtype;
  bool defined;     ///< false for an absent optional input
  bool contiguous;  ///< row-major without gaps
  std::uint8_t reserved = 0;
};

/// How a kernel or another call of a device ended.
enum class Status : std::int32_t {
  ok = 0,
  unsupported = 1,  ///< this combination is not supported: the caller may fall back (to the CPU)
  failed = 2,       ///< it failed; the context has the reason
  out_of_memory = 3,
  lost = 4,       ///< the device is gone
  not_ready = 5,  ///< from a query: the work is not done yet
};

/// Services for a kernel while it runs; halfstep_context of plugin.h.
struct KernelContext {
  std::uint32_t size = sizeof(KernelContext);  ///< of this struct, for plug-ins compiled with another version
  std::int32_t device = 0;                     ///< the device's index among its kind
  std::uint64_t call = 0;                      ///< the call's number on a device; 0 on the CPU
  void* queue = nullptr;                       ///< the device's queue; null on the CPU
  /// Scratch memory of the device, aligned to 64 bytes, freed when the kernel's work is done; null when there is none
  /// left.
  void* (*workspace)(KernelContext* context, std::uint64_t bytes) = nullptr;
  /// Records why the kernel returns a status other than ok; the text is copied.
  void (*set_error)(KernelContext* context, const char* text) = nullptr;
  /// Reports that no value of the first output is larger in magnitude than `bound`, or NaN. Null if not requested;
  /// reporting is optional. A kernel that can derive the bound from inputs much smaller than its output saves a
  /// gradient scaler from reading it.
  void (*set_magnitude_bound)(KernelContext* context, float bound) = nullptr;
  void* owner = nullptr;  ///< the op layer's own
  void* state = nullptr;  ///< state that a plug-in supplied with the kernel; on the CPU null or a CpuKernelState
};

/// Additional state for CPU kernels, passed as KernelContext::state.
struct CpuKernelState {
  /// The storage of input `index`; null for an absent input.
  Storage* (*storage)(KernelContext* context, int index) = nullptr;
  /// The tensors are of the device meta: the kernel asks for the workspace that it would need, keeps what it would
  /// keep, and returns without touching any of them. Only for kernels that are registered with kRunsDry.
  bool dry = false;
};

/// Whether a CPU kernel is to compute nothing: CpuKernelState::dry. It returns ok behind its last request for
/// workspace.
inline bool runs_dry(const KernelContext* context) {
  const auto* state = static_cast<const CpuKernelState*>(context->state);
  return state != nullptr && state->dry;
}

/// A kernel: reads `in[0..n)`, writes `out[0..m)`, which have been allocated with the shapes, strides and dtypes that
/// the op's shape rule gave. `attributes` points to the op's struct in ops/attributes.h (null for ops without). It
/// neither allocates (except workspace) nor throws. Inputs and outputs overlap only where the op's in-place form is
/// called, and then exactly.
using KernelFn = Status (*)(KernelContext* context, const TensorView* in, int n, TensorView* out, int m,
                            const void* attributes);

/// How a CPU kernel computes slices of tensors: called with parts of its tensors that lie at the same elements, as
/// row-major tensors of one dimension, it writes what it would write there for the whole tensors, bit for bit; inputs
/// of one element stay as they are. Such a kernel has one output, of which it writes every element, and neither takes
/// workspace nor reports bounds.
enum class Slices : std::uint8_t {
  none,      ///< only whole tensors
  elements,  ///< an element of its output depends on the same elements of its inputs, and on nothing else
  random,    ///< likewise, and on the element's number: input 1 has a PhiloxState (core/philox.h) as two i64, of which
             ///< each block serves four elements in row-major order
};

/// What a CPU kernel can do beyond computing whole tensors.
struct KernelTraits {
  bool runs_dry = false;         ///< it heeds runs_dry(), so that a dry run counts its workspace
  Slices slices = Slices::none;  ///< calls of captured steps can go through the cache together (capture/capture.h)
};
/// For RegisterCpuKernel.
/// @{
inline constexpr KernelTraits kRunsDry = {.runs_dry = true};
inline constexpr KernelTraits kElementwise = {.slices = Slices::elements};
/// @}

/// The kernels of one op: a function for each kind of device and each dtype (that of the op's key input, see ops/op.h).
/// The CPU's are registered when the program starts; a device's are looked up when first needed.
struct KernelTable {
  std::string name;
  int version = 1;  ///< of the op, for plug-ins
  // Mutable: a plug-in's answers are cached on first use.
  mutable std::array<std::array<std::atomic<KernelFn>, kNumDTypes>, kMaxDeviceTypes> kernels = {};
  /// Plug-in state to be passed to its kernel.
  mutable std::array<std::array<std::atomic<void*>, kNumDTypes>, kMaxDeviceTypes> states = {};
  /// Whether the kernel takes tensors of any strides, or only row-major ones without gaps.
  mutable std::array<std::array<std::atomic<bool>, kNumDTypes>, kMaxDeviceTypes> strided = {};
  /// By dtype: what the CPU's kernel can do.
  std::array<KernelTraits, kNumDTypes> traits = {};
  KernelFn find(Device device, DType dtype) const {
    return kernels[device.type][static_cast<std::size_t>(dtype)].load(std::memory_order_acquire);
  }
};

/// The table of the op called `name`, created if it is new; the reference stays valid. Ops and kernels are matched here
/// by name, so that neither needs the other to be loaded first.
HS_API KernelTable& kernel_table(std::string_view name);
/// The same without creating it: null if there is none.
HS_API const KernelTable* find_kernel_table(std::string_view name);

/// Registers a CPU kernel for some dtypes when a program starts: a namespace-scope constant in a backend's .cpp file.
struct HS_API RegisterCpuKernel {
  RegisterCpuKernel(std::string_view op, std::initializer_list<DType> dtypes, KernelFn kernel,
                    const KernelTraits& traits = {});
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
