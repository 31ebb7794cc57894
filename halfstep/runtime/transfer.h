// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "halfstep/core/device.h"
#include "halfstep/core/export.h"

namespace halfstep {

/// Copies bytes between or on devices, on the current queue of the device (of the source's, between two devices). Waits
/// until it is done unless `non_blocking` is set and host memory is pinned. Between different kinds of device the bytes
/// go through the host. Throws DeviceError.
HS_API void copy_memory(void* destination, Device to, const void* source, Device from, std::size_t bytes,
                        bool non_blocking = false);
/// Reads device memory into the host's, waiting for the work before it: the one place where values of a device reach
/// the program. On the CPU a plain copy.
HS_API void read_memory(void* destination, const void* source, Device from, std::size_t bytes);

/// Pinned host memory for devices of `device`'s kind; an ordinary block if they don't support it. Blocks are cached for
/// reuse, but not reused before copies that use them are done. Throws DeviceError if there is no memory left.
HS_API void* allocate_pinned(Device device, std::size_t bytes);
HS_API void free_pinned(void* data) noexcept;
/// The queue is gone and all its work done: nothing is recorded in it any more.
void pinned_queue_destroyed(const void* queue);
/// Whether the address lies in a block of allocate_pinned() that devices know.
HS_API bool is_pinned_memory(const void* data);

/// What copies did so far, for tests and reports.
struct TransferStats {
  std::uint64_t to_device = 0;  ///< copies
  std::uint64_t to_host = 0;
  std::uint64_t between = 0;
  std::uint64_t bytes = 0;
  std::uint64_t asynchronous = 0;  ///< of all copies
};
HS_API TransferStats transfer_stats();

}  // namespace halfstep
