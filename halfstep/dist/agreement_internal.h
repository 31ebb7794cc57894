// SPDX-License-Identifier: Apache-2.0
// Internal: ranks compare what they are about to do before any data are sent.
#pragma once

#include <cstdint>
#include <span>

#include "halfstep/dist/communication_thread_internal.h"

namespace halfstep::dist::detail {

/// What each rank sends ahead of a collective. Small operands travel in it.
struct alignas(64) Descriptor {
  std::uint64_t sequence = 0;
  std::uint64_t label = 0;  ///< a hash of it
  std::int64_t count = 0;
  std::uint32_t layout = 0;
  std::int32_t root = -1;
  std::uint8_t kind = 0, op = 0, dtype = 0;
  std::uint8_t reserved = 0;
  std::uint32_t offer = 0;  ///< device_offer(); may differ
  static constexpr std::int64_t kPayloadBytes = 24;
  alignas(8) char payload[kPayloadBytes] = {};
};
static_assert(sizeof(Descriptor) == 64);

/// Exchanges descriptors, `payload_bytes` of `payload` with them, and returns those of all ranks, in their order, until
/// the next call. Throws DistError on all ranks, with what each of them does, where they differ. (The lengths of texts
/// and the colors of split() may.)
std::span<const Descriptor> agree(CommunicationThread& thread, Call& call, const void* payload,
                                  std::int64_t payload_bytes);

/// Exchanges equal blocks of `bytes`, one a rank, in place.
void gather_blocks(CommunicationThread& thread, const Call& call, char* blocks, std::int64_t bytes);

}  // namespace halfstep::dist::detail
