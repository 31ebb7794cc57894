// SPDX-License-Identifier: Apache-2.0
// Random numbers in kernels: the words of a Philox stream, as on the CPU.
#pragma once

#include "device/elementwise.cuh"
#include "halfstep/core/philox.h"

namespace hscuda {

using halfstep::philox_block;
using halfstep::PhiloxBlock;
using halfstep::PhiloxState;

/// Seed and offset, read when the kernel runs.
struct State {
  const int64_t* words;
  int64_t step;
  explicit State(const Tensor& t) : words(static_cast<const int64_t*>(t.data)), step(t.strides[0]) {}
  __device__ __forceinline__ PhiloxState operator()() const {
    return {static_cast<uint64_t>(words[0]), static_cast<uint64_t>(words[step])};
  }
};

}  // namespace hscuda
