// SPDX-License-Identifier: Apache-2.0
// What the library itself registers, see train/registry.h.
#pragma once

#include <vector>

#include "halfstep/train/registry.h"

namespace halfstep::training {

/// `digits`, `cifar` and `imagenet`; in data_kinds.cpp.
std::vector<DataKind> built_in_data();
/// `classification`; in classification.cpp.
TaskKind classification_kind();

}  // namespace halfstep::training
