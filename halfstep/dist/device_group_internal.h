// SPDX-License-Identifier: Apache-2.0
// Internal: collectives of a device's own library (the plug-in table's group), as the communication thread runs them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "halfstep/core/device.h"
#include "halfstep/core/tensor.h"
#include "halfstep/dist/process_group_internal.h"
#include "halfstep/runtime/plugin.h"
#include "halfstep/runtime/queue.h"

namespace halfstep {
class DeviceBackend;
}

namespace halfstep::dist::detail {

class CommunicationThread;

/// The tensors of a call that are on a device.
struct DeviceOperands {
  Device device;
  Tensor input, output;        ///< either may be undefined
  bool output_counts = false;  ///< what is in the output before the call
  Event ready;                 ///< on the caller's queue, behind what it has computed so far
  bool staged = false;         ///< copied to the host, and the result has to go back
};

/// Prepares a call for the device that its tensors are on, if its plug-in has collectives and there is enough to do;
/// otherwise returns false. Tensors may be undefined.
bool use_device(Call& call, const Tensor& input, const Tensor& output, bool output_counts);

/// What a rank offers: 0 if the host has to do it, otherwise a number that is the same for devices which can be in one
/// group. Where all ranks offer the same, run_on_device() follows.
std::uint32_t device_offer(const Call& call);
/// Does a call on the devices. False where they can't, on all ranks alike, and nothing has been done. Throws DistError.
bool run_on_device(CommunicationThread& thread, Call& call);

/// Does a send or receive, which the other rank does too. Throws DistError.
void run_message_on_device(CommunicationThread& thread, Call& call);
/// Ends a group; all its ranks do. It has no work left.
void destroy_device_group(CommunicationThread& thread, const Call& call, std::shared_ptr<DeviceGroup> group);

/// Copies the call's tensors to the host, after what was computed before the call, and the result back.
void stage_to_host(Call& call);
void return_to_device(Call& call);

}  // namespace halfstep::dist::detail
