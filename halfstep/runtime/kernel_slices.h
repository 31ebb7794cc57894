// SPDX-License-Identifier: Apache-2.0
// Which kernels of the CPU may run on a part of their elements, so that several calls can go through the cache
// together.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "halfstep/core/export.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep {

/// How a kernel computes slices of tensors.
enum class Slices : std::uint8_t {
  none,      ///< only whole tensors
  elements,  ///< an element of its output depends on the same elements of its inputs, and on nothing else
  random,    ///< likewise, and on the element's number: input 1 has a PhiloxState (core/philox.h) as two i64, of which
             ///< each block serves four elements in row-major order
};

/// What was registered for the kernel; none for others.
HS_API Slices slices_of(KernelFn kernel);

/// Declares when a program starts, beside RegisterCpuKernel, how these kernels run on slices: called with parts of
/// their tensors that lie at the same elements, as row-major tensors of one dimension, they write what they would write
/// there for the whole tensors, bit for bit; inputs of one element stay as they are. They have one output, of which
/// they write every element, and neither take workspace nor report bounds.
struct HS_API RegisterSlices {
  RegisterSlices(Slices slices, std::initializer_list<KernelFn> kernels);
};

}  // namespace halfstep
