// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/kernel.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "halfstep/runtime/kernel_names.h"
#include "halfstep/runtime/plugin.h"

namespace halfstep {
namespace {

// A kernel of a plug-in is called as one of ours, with the same structs.
static_assert(sizeof(TensorView) == sizeof(halfstep_tensor) && sizeof(TensorView) == 40);
static_assert(offsetof(TensorView, data) == offsetof(halfstep_tensor, data));
static_assert(offsetof(TensorView, sizes) == offsetof(halfstep_tensor, sizes));
static_assert(offsetof(TensorView, strides) == offsetof(halfstep_tensor, strides));
static_assert(offsetof(TensorView, numel) == offsetof(halfstep_tensor, numel));
static_assert(offsetof(TensorView, ndim) == offsetof(halfstep_tensor, ndim));
static_assert(offsetof(TensorView, dtype) == offsetof(halfstep_tensor, dtype));
static_assert(offsetof(TensorView, defined) == offsetof(halfstep_tensor, defined));
static_assert(offsetof(TensorView, contiguous) == offsetof(halfstep_tensor, contiguous));
static_assert(sizeof(KernelContext) == sizeof(halfstep_context));
static_assert(offsetof(KernelContext, size) == offsetof(halfstep_context, size));
static_assert(offsetof(KernelContext, device) == offsetof(halfstep_context, device));
static_assert(offsetof(KernelContext, call) == offsetof(halfstep_context, call));
static_assert(offsetof(KernelContext, queue) == offsetof(halfstep_context, queue));
static_assert(offsetof(KernelContext, workspace) == offsetof(halfstep_context, workspace));
static_assert(offsetof(KernelContext, set_error) == offsetof(halfstep_context, set_error));
static_assert(offsetof(KernelContext, set_magnitude_bound) == offsetof(halfstep_context, set_magnitude_bound));
static_assert(offsetof(KernelContext, owner) == offsetof(halfstep_context, owner));
static_assert(offsetof(KernelContext, state) == offsetof(halfstep_context, state));
static_assert(static_cast<int>(Status::ok) == HALFSTEP_OK &&
              static_cast<int>(Status::unsupported) == HALFSTEP_UNSUPPORTED &&
              static_cast<int>(Status::failed) == HALFSTEP_FAILED &&
              static_cast<int>(Status::out_of_memory) == HALFSTEP_OUT_OF_MEMORY &&
              static_cast<int>(Status::lost) == HALFSTEP_LOST &&
              static_cast<int>(Status::not_ready) == HALFSTEP_NOT_READY);

struct Tables {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<KernelTable>, std::less<>> by_name;
};
Tables& tables() {
  static Tables instance;
  return instance;
}

}  // namespace

KernelTable& kernel_table(std::string_view name) {
  Tables& all = tables();
  std::lock_guard lock(all.mutex);
  auto it = all.by_name.find(name);
  if (it == all.by_name.end()) {
    it = all.by_name.emplace(std::string(name), std::make_unique<KernelTable>()).first;
    it->second->name = name;
  }
  return *it->second;
}

const KernelTable* find_kernel_table(std::string_view name) {
  Tables& all = tables();
  std::lock_guard lock(all.mutex);
  const auto it = all.by_name.find(name);
  return it == all.by_name.end() ? nullptr : it->second.get();
}

std::vector<std::string> kernel_names() {
  Tables& all = tables();
  std::lock_guard lock(all.mutex);
  std::vector<std::string> names;
  names.reserve(all.by_name.size());
  for (const auto& [name, table] : all.by_name) names.push_back(name);
  return names;
}

RegisterCpuKernel::RegisterCpuKernel(std::string_view op, std::initializer_list<DType> dtypes, KernelFn kernel,
                                     const KernelTraits& traits) {
  KernelTable& table = kernel_table(op);
  for (DType dtype : dtypes) {
    table.kernels[0][static_cast<std::size_t>(dtype)] = kernel;
    table.traits[static_cast<std::size_t>(dtype)] = traits;
  }
}

}  // namespace halfstep
