// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/kernel.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace halfstep {

KernelTable& kernel_table(std::string_view name) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<KernelTable>, std::less<>> tables;
  std::lock_guard lock(mutex);
  auto it = tables.find(name);
  if (it == tables.end()) it = tables.emplace(std::string(name), std::make_unique<KernelTable>()).first;
  return *it->second;
}

RegisterCpuKernel::RegisterCpuKernel(std::string_view op, std::initializer_list<DType> dtypes, KernelFn kernel) {
  KernelTable& table = kernel_table(op);
  for (DType dtype : dtypes) table.kernels[0][static_cast<int>(dtype)] = kernel;
}

}  // namespace halfstep
