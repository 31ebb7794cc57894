// SPDX-License-Identifier: Apache-2.0
// Elementwise kernels apart from their arithmetic: a family gives functions for contiguous runs, and this walks tensors
// of any layout with them, over threads where there is enough to do.
#pragma once

#include <cstdint>

#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// out[i] = f(in[0][i], in[1][i], ...) for i < n; all contiguous. `state` is what the kernel passes on (its attributes,
/// as a rule). An input may be `out` itself, exactly.
using RunFn = void (*)(const void* state, void* out, const void* const* in, std::int64_t n);

/// The functions of one op and dtype.
struct Runs {
  RunFn straight = nullptr;
  /// The same where input k (0 or 1) is one value for all elements; null: it is repeated into a block instead.
  RunFn repeated[2] = {};
  /// Elements worth a thread.
  std::int32_t grain = 32768;
};

/// Writes out[0] from the first `n_in` (0 to 4) inputs, broadcast to it.
Status run_elementwise(const Runs& runs, const void* state, const TensorView* in, int n_in, TensorView* out);

/// The kernel of `op`, one of a family's enumeration, with N inputs: runs_of(op, dtype of the result) gives the runs
/// for the instruction set that the program runs on, and the attributes are their state.
template <auto op, int N, const Runs& (*runs_of)(decltype(op), DType)>
Status elementwise_kernel(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  return run_elementwise(runs_of(op, out[0].dtype), attributes, in, N, out);
}

}  // namespace halfstep::cpu
