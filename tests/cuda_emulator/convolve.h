// SPDX-License-Identifier: Apache-2.0
// What the emulated cuDNN computes.
#pragma once

#include <cudnn.h>

namespace hscuda::emulator {

/// An engine: what it notes of itself, and how it computes.
enum Engine : int64_t { kUnsteady = 0, kRounding = 1, kPlain = 2, kCompiled = 3 };

struct View {
  int64_t sizes[4], strides[4];
  cudnnDataType_t dtype;

  int64_t at(int64_t i, int64_t j, int64_t k, int64_t l) const {
    return i * strides[0] + j * strides[1] + k * strides[2] + l * strides[3];
  }
};

/// A convolution as it runs.
struct Convolution {
  View x, w, y, result;
  View bias;
  int64_t stride[2], padding[2], dilation[2];
  int sought;  // 0 x, 1 w, 2 y
  Engine engine;
  bool flipped;  // the windows
};

/// `bias` may be null; of x, w and y the one that is sought is not read.
void convolve(Convolution k, const void* x, const void* w, const void* y, const void* bias, void* result);

}  // namespace hscuda::emulator
