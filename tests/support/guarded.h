// SPDX-License-Identifier: Apache-2.0
// Memory beside pages that may not be touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "halfstep/runtime/kernel.h"

namespace halfstep::test {

/// Memory that ends where a page begins that may not be touched, and begins close behind another.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : pages_((bytes + 4095) / 4096 + 2) {
    base_ = static_cast<char*>(mmap(nullptr, pages_ * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + 4096, (pages_ - 2) * 4096, PROT_READ | PROT_WRITE);
    // Aligned to 64 bytes, as all memory of tensors is.
    data_ = base_ + (pages_ - 1) * 4096 - (bytes + 63) / 64 * 64;
    for (std::size_t i = 0; i + 4 <= bytes; i += 4) {
      const float value = static_cast<float>(i % 13) - 6;
      std::memcpy(data_ + i, &value, 4);
    }
  }
  ~Guarded() { munmap(base_, pages_ * 4096); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  void* data() const { return data_; }

 private:
  std::size_t pages_;
  char *base_, *data_;
};

/// A kernel's context whose workspace is such memory.
struct GuardedContext : KernelContext {
  GuardedContext() : KernelContext{} {
    workspace = [](KernelContext* self, std::uint64_t bytes) -> void* {
      return static_cast<GuardedContext*>(self)->pieces.emplace_back(std::make_unique<Guarded>(bytes))->data();
    };
  }
  std::vector<std::unique_ptr<Guarded>> pieces;
};

}  // namespace halfstep::test
