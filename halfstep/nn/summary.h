// SPDX-License-Identifier: Apache-2.0
// What a network is made of and what it costs: modules, shapes, parameters, operations, memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/debug/call_trace.h"
#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// Options of summary.
struct SummaryOptions {
  /// Dtype of an autocast region: the ops are listed as they run in it; none: in float32.
  std::optional<DType> amp = {};
};

/// A module in the summary; numbers include its submodules.
struct SummaryRow {
  std::string path = {};            ///< such as `layer1.0.conv1`; empty for the network itself
  std::string kind = {};            ///< `Linear(784, 512)`
  int depth = 0;                    ///< 0 for the network itself
  bool called = false;              ///< an op ran in it
  Shape output = {};                ///< of the last op in it
  DType dtype = DType::f32;         ///< of that
  std::int64_t parameters = 0;      ///< elements; tied ones once
  std::int64_t multiply_adds = 0;   ///< of a forward pass
  std::uint64_t saved_float32 = 0;  ///< bytes kept for the backward pass in float32, memory that is shared once
  std::uint64_t saved_low = 0;      ///< the same in 16 bits
  /// What modules that are attached to the network (Module::attach) have for this one, such as its quantization:
  /// `weight 8 bits, output 8 bits`. Their parts, which are named after it, have no rows of their own.
  std::string attached = {};
};

/// See summary().
struct HS_API Summary {
  std::vector<SummaryRow> rows = {};  ///< the network, then its modules, each before those in it
  DType low = DType::f16;             ///< of the pass in 16 bits
  bool autocast = false;              ///< SummaryOptions::amp was given
  std::int64_t trainable = 0;         ///< of the network's parameters: elements that require grad
  std::int64_t buffers = 0;           ///< elements
  /// Bytes of 16-bit copies of weights, which the pass in 16 bits keeps in addition to saved_low.
  std::uint64_t weight_copies = 0;
  std::vector<debug::Placement> ops = {};  ///< of the forward pass

  /// Both tables as text. `depth`: of the deepest module shown; none: all.
  std::string str(std::optional<int> depth = {}) const;
};

/// Runs `forward`, which calls the module, in training mode twice, in float32 and under autocast in 16 bits, and says
/// what it saw: shapes, parameters, operations (debug::multiply_adds), and the memory kept for the backward pass,
/// without parameters. Buffers, modes and the random generator are left as they were; no gradients are made. The
/// network must not be at a level of mixed precision (amp::set_level): then float32 is what that makes of it. Throws
/// what `forward` throws.
HS_API Summary summary(const ModuleBase& module, const std::function<void()>& forward,
                       const SummaryOptions& options = {});
/// The same for an input.
template <TensorModule M>
Summary summary(const M& network, const Tensor& input, const SummaryOptions& options = {}) {
  return summary(
      network, [&] { network(input); }, options);
}

}  // namespace halfstep::nn
