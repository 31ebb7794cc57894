// SPDX-License-Identifier: Apache-2.0
// How kernels are started on the CPU. launch.cuh includes this where there is no CUDA compiler.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "block.h"

#pragma GCC visibility push(hidden)

namespace hscuda::emulator {

/// Puts a kernel behind what is in a stream. A failure is what cudaGetLastError() says next, as of <<< >>>. `pointers`:
/// the kernel's arguments that are pointers, which must be the device's by the time it runs.
void enqueue(cudaStream_t stream, dim3 grid, dim3 block, std::size_t shared, bool alone, std::function<void()> body,
             std::vector<const void*> pointers);

template <class... P, class... A>
void launch(cudaStream_t stream, dim3 grid, dim3 block, std::size_t shared, bool alone, void (*kernel)(P...),
            A... arguments) {
  static_assert((sizeof(A) + ... + 0) <= 32764, "a kernel's arguments may take 32764 bytes");
  std::vector<const void*> pointers;
  const auto note = [&](const auto& argument) {
    if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(argument)>>) {
      pointers.push_back(const_cast<const void*>(static_cast<const volatile void*>(argument)));
    }
  };
  (note(arguments), ...);
  enqueue(
      stream, grid, block, shared, alone, [kernel, all = std::tuple<A...>(arguments...)] { std::apply(kernel, all); },
      std::move(pointers));
}

}  // namespace hscuda::emulator

#pragma GCC visibility pop
