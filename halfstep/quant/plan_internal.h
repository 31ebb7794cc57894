// SPDX-License-Identifier: Apache-2.0
// Internal: where a network is quantized, found in the trace of a run.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "halfstep/nn/trace.h"

namespace halfstep::quant::detail {

/// A tensor of a call: its input of that number, or its result.
struct Site {
  std::string module = {};  ///< path of the module whose forward() makes the call
  std::string op = {};
  int occurrence = 0;         ///< which call of that op in one forward() of the module, from 0
  int input = -1;             ///< number of the input; -1: the result
  bool weight = false;        ///< a parameter, quantized by output channel
  std::int64_t channels = 0;  ///< of a weight
  bool non_negative = false;  ///< a result of relu or the like
  std::string name = {};      ///< of its fake quantization: `layer1.0.conv1.weight`, `layer1.0.bn1`, `input`
  std::string group = {};     ///< what is computed in one go: `conv2d + batch_norm + add + relu`; of a result only
};

/// What is left in floating point although it has weights, and why.
struct LeftOut {
  std::string module = {};
  std::string why = {};
};

struct Plan {
  std::vector<Site> sites = {};  ///< in the order of the calls
  std::vector<LeftOut> left = {};
};

/// `skip` says which modules with weights are left in floating point; `first` and `last`: whether the products that are
/// computed first and last are quantized.
Plan plan_quantization(const nn::Trace& trace, const std::function<bool(const std::string& module)>& skip, bool first,
                       bool last);

}  // namespace halfstep::quant::detail
