// SPDX-License-Identifier: Apache-2.0
// What a run of a network calls: the ops with their tensors as a graph, as torch.fx has it, but seen from outside, so
// that modules, functions and views of any kind count.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// A tensor that the run saw.
struct TracedValue {
  /// Where its contents come from.
  enum class Kind : std::uint8_t {
    input,      ///< of the network
    parameter,  ///< a parameter or buffer
    constant,   ///< made from none of the others
    computed,   ///< the result of a call
  };
  Kind kind = Kind::constant;
  /// Its contents, and sizes, dtype and device. What is computed from the inputs has zeros for contents (one element,
  /// repeated), unless it is an output: a run that kept all of it would need the memory of a training step.
  Tensor tensor = {};
  std::string name = {};     ///< of a parameter or buffer, as in state_dict()
  std::uint64_t writes = 0;  ///< how often its memory had been written when it got its value
  bool overwritten = false;  ///< it was written again later
};

/// A call of an op, with its tensors as numbers of values.
struct HS_API TracedCall {
  std::string op = {};
  std::string module = {};       ///< path of the module whose forward() called it
  std::vector<int> inputs = {};  ///< -1: none
  std::vector<int> outputs = {};
  std::vector<unsigned char> attributes = {};  ///< the bytes of the op's struct; empty for ops without

  /// `OP in module PATH`, for messages.
  std::string place() const;
};

/// A run. Fused ops appear as those that they are made of. Copies, conversions between floating dtypes and views that
/// change nothing are no calls: their results are the values that they copy.
struct Trace {
  std::vector<TracedValue> values = {};
  std::vector<TracedCall> calls = {};  ///< in the order in which they ran
  std::vector<int> inputs = {};
  std::vector<int> outputs = {};
};

/// A network as a function of its inputs, for modules with several inputs or outputs.
using TracedForward = std::function<std::vector<Tensor>(std::span<const Tensor> inputs)>;

/// Runs `forward` on `inputs` in evaluation mode, without gradients and without autocast, and tells what it called on
/// this thread. Parameters and buffers of `module` have the names of its state_dict(). Computations on values that are
/// read back from a tensor (item(), to_vector()) are not seen. Throws Error, in the name of `who`, for reads of memory
/// that was written through another view, and for outputs that are undefined.
HS_API Trace trace(const ModuleBase& module, const TracedForward& forward, std::vector<Tensor> inputs,
                   std::string_view who = "trace");

}  // namespace halfstep::nn
