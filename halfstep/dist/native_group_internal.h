// SPDX-License-Identifier: Apache-2.0
// Internal: the plug-in's own group behind the ranks' devices, which all ranks make together.
#pragma once

#include <string>

#include "halfstep/dist/process_group_internal.h"
#include "halfstep/runtime/plugin.h"

namespace halfstep {
class DeviceBackend;
}

namespace halfstep::dist::detail {

class CommunicationThread;

/// Makes the group for the device of a call. All ranks call it; null on all if any can't.
halfstep_group* make_native_group(CommunicationThread& thread, const Call& call);

/// Destroys it, on a thread of its own: libraries may wait for the other ranks. All ranks call it.
void destroy_native_group(CommunicationThread& thread, const Call& call, const DeviceBackend& backend,
                          halfstep_group* group);

/// What the plug-in says of its last failure on this thread.
std::string reason_of(const DeviceBackend& backend);

}  // namespace halfstep::dist::detail
