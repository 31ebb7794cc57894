// SPDX-License-Identifier: Apache-2.0
// A context for kernels that are called without a dispatcher.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// Hands out workspace that holds NaN until it is written, and keeps the error. What lies outside the asked size is
/// watched by the address sanitizer.
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

}  // namespace halfstep::cpu
