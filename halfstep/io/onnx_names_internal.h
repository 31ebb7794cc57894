// SPDX-License-Identifier: Apache-2.0
// Internal: how tensors of ONNX files are called in a network.
#pragma once

#include <string>

#include "halfstep/io/onnx_internal.h"

namespace halfstep::io::detail {

/// Whether an exporter made the name up: `onnx::Conv_193`, `val_22`, `/layer1/Constant_output_0`, `12`.
bool is_made_up(const std::string& name);
/// Whether the last part of a name says that it is no parameter: `anchors`.
bool is_constant_name(const std::string& name);
/// `name` without what quantizers add to it.
std::string strip(const std::string& name);
/// The name of a parameter: letters, digits, `_` and `-` in parts between dots. `role` is what it is if the name has
/// it wrong: PyTorch calls the bias of a folded norm `conv1.weight_bias`.
std::string parameter_name(const std::string& name, const std::string& role);
/// The same without dots.
std::string one_component(const std::string& name);
/// The path of the module that a node stands for: `layer1.0.conv1` of PyTorch's `/layer1/layer1.0/conv1/Conv`.
std::string path_of(const OnnxNode& node);

}  // namespace halfstep::io::detail
