// SPDX-License-Identifier: Apache-2.0
// What the library itself registers, see train/registry.h.
#pragma once

#include <vector>

#include "halfstep/train/registry.h"

namespace halfstep::training {

/// `digits`, `cifar` and `imagenet`; in data_kinds.cpp.
std::vector<DataKind> built_in_data();
/// `boxes`; in detection_kinds.cpp.
DataKind boxes_kind();
/// The networks that detect; there too.
std::vector<NetworkKind> detection_networks();
/// `classification`; in classification.cpp.
TaskKind classification_kind();
/// `detection`; in detection_kinds.cpp.
TaskKind detection_kind();

}  // namespace halfstep::training
