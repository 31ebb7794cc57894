// SPDX-License-Identifier: Apache-2.0
// The numbers of elementwise ops, from whichever attributes hold them.
#pragma once

#include "device/elementwise.cuh"
#include "device/math.cuh"
#include "halfstep/runtime/plugin_attributes.h"

namespace hscuda {

/// The numbers of an op's attributes, in what is computed in.
template <class C>
struct Numbers {
  C a, b, c;
};

// What the attributes hold.
enum class Has { kNothing, kScalar, kClamp, kActivation, kElu, kNanToNum };
template <class C>
Numbers<C> numbers(const Call& call, Has has) {
  switch (has) {
    case Has::kScalar:
      return {number<C>(call.attributes<halfstep_scalar_attributes>().value), C{0}, C{0}};
    case Has::kClamp: {
      const auto& a = call.attributes<halfstep_clamp_attributes>();
      return {static_cast<C>(a.min), static_cast<C>(a.max), C{0}};
    }
    case Has::kActivation: {
      const auto& a = call.attributes<halfstep_activation_attributes>();
      return {static_cast<C>(a.a), static_cast<C>(a.b), C{0}};
    }
    case Has::kElu: {
      const auto& a = call.attributes<halfstep_activation_attributes>();
      return {static_cast<C>(a.a * a.b), static_cast<C>(a.b), C{0}};
    }
    case Has::kNanToNum: {
      const auto& a = call.attributes<halfstep_nan_to_num_attributes>();
      return {static_cast<C>(a.nan), static_cast<C>(a.posinf), static_cast<C>(a.neginf)};
    }
    default:
      return {};
  }
}

}  // namespace hscuda
