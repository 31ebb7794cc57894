// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/kernel_slices.h"

#include <mutex>
#include <unordered_map>

namespace halfstep {
namespace {

struct Sliced {
  std::mutex mutex;
  std::unordered_map<KernelFn, Slices> kernels;
};
Sliced& sliced() {
  static Sliced instance;
  return instance;
}

}  // namespace

Slices slices_of(KernelFn kernel) {
  Sliced& all = sliced();
  const std::lock_guard lock(all.mutex);
  const auto found = all.kernels.find(kernel);
  return found == all.kernels.end() ? Slices::none : found->second;
}

RegisterSlices::RegisterSlices(Slices slices, std::initializer_list<KernelFn> kernels) {
  Sliced& all = sliced();
  const std::lock_guard lock(all.mutex);
  for (const KernelFn kernel : kernels) all.kernels[kernel] = slices;
}

}  // namespace halfstep
