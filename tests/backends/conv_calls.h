// SPDX-License-Identifier: Apache-2.0
// Calls of the CPU's convolutions without a dispatcher.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/conv.h"
#include "halfstep/core/tensor.h"

namespace halfstep::cpu {

/// Hands out workspace that holds NaN until it is written, and keeps the error.
struct Context : KernelContext {
  Context() : KernelContext{} {
    workspace = [](KernelContext* self, std::uint64_t bytes) -> void* {
      auto& piece = static_cast<Context*>(self)->pieces.emplace_back(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      std::memset(piece.get(), 0xFF, bytes);
      return piece.get();
    };
    set_error = [](KernelContext* self, const char* text) { static_cast<Context*>(self)->error = text; };
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::vector<std::unique_ptr<void, Free>> pieces;
  std::string error;
};

inline TensorView view(const Tensor& t) {
  return {.data = t.raw_data(),
          .sizes = t.sizes().data(),
          .strides = t.strides().data(),
          .numel = t.numel(),
          .ndim = t.dim(),
          .dtype = t.dtype(),
          .defined = true,
          .contiguous = t.is_contiguous()};
}

inline ConvGeometry geometry(std::int64_t n, std::int64_t c, std::int64_t size, std::int64_t o, std::int64_t k,
                             std::int64_t stride, std::int64_t padding) {
  const std::int64_t out = (size + 2 * padding - k) / stride + 1;
  return {n, c, size, size, o, out, out, k, k, 1, {stride, stride}, {1, 1}, {padding, padding}, {padding, padding}};
}

}  // namespace halfstep::cpu
