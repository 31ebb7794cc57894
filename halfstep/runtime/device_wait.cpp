// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include "halfstep/runtime/device_wait_internal.h"

namespace halfstep {
namespace {

std::atomic<int> g_waiting{0};

}  // namespace

DeviceWait::DeviceWait() noexcept { g_waiting.fetch_add(1, std::memory_order_relaxed); }
DeviceWait::~DeviceWait() { g_waiting.fetch_sub(1, std::memory_order_relaxed); }
bool DeviceWait::any() noexcept { return g_waiting.load(std::memory_order_relaxed) > 0; }

}  // namespace halfstep
