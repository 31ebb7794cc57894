// SPDX-License-Identifier: Apache-2.0
// Internal: the attributes of a call, for people and programs.
#pragma once

#include <nlohmann/json.hpp>

#include "halfstep/core/dtype.h"
#include "halfstep/ops/observer.h"

namespace halfstep::debug::detail {

/// The fields of an op's attributes as an object; for a custom op's struct `{"bytes": "00ff..."}`; null for
/// none.
nlohmann::ordered_json attributes_of(const ObservedCall& call);
/// Turns the dtypes that a call asks for its results to be of into `dtype`, where it asks.
void widen_results(const Op& op, void* attributes, DType dtype);
/// A number; JSON has no infinities and NaN, so they are texts.
nlohmann::ordered_json number(double value);

}  // namespace halfstep::debug::detail
