// SPDX-License-Identifier: Apache-2.0
// Elementwise kernels apart from their arithmetic: a family gives functions for contiguous runs, and this walks tensors
// of any layout with them, over threads where there is enough to do.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <utility>

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

/// One op of a family: a row of the table in the family's file, which is all there is to say of it. Its inputs have one
/// dtype.
struct ElementwiseOp {
  const char* name;
  std::initializer_list<DType> dtypes;  ///< that it has a kernel for
  int inputs;
  const Runs* runs;  ///< kNumDTypes of them, for each dtype of the inputs
};

/// How the ops of a family run; this is what most do, with the attributes as the runs' state.
using RunOp = Status (*)(const ElementwiseOp& op, KernelContext* context, const TensorView* in, TensorView* out,
                         const void* attributes);
inline const Runs& runs_for(const ElementwiseOp& op, const TensorView* in) {
  return op.runs[static_cast<int>(in[0].dtype)];
}
inline Status run_op(const ElementwiseOp& op, KernelContext*, const TensorView* in, TensorView* out,
                     const void* attributes) {
  return run_elementwise(runs_for(op, in), attributes, in, op.inputs, out);
}

/// The kernel of a family's row i; `family()` gives the table for the instruction set that the program runs on.
template <const ElementwiseOp* (*family)(), RunOp run, std::size_t i>
Status elementwise_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                          const void* attributes) {
  return run(family()[i], context, in, out, attributes);
}

/// Registers the kernels of a family, which run on slices too. Of `rows`, its table for any one instruction set, names
/// and dtypes are read.
template <const ElementwiseOp* (*family)(), RunOp run = run_op>
struct RegisterFamily {
  template <std::size_t N>
  explicit RegisterFamily(const ElementwiseOp (&rows)[N]) {
    add(rows, std::make_index_sequence<N>());
  }

 private:
  template <std::size_t... I>
  static void add(const ElementwiseOp* rows, std::index_sequence<I...>) {
    (RegisterCpuKernel(rows[I].name, rows[I].dtypes, elementwise_kernel<family, run, I>, kElementwise), ...);
  }
};

}  // namespace halfstep::cpu
