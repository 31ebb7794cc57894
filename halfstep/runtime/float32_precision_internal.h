// SPDX-License-Identifier: Apache-2.0
// Internal: for the loader of plug-ins.
#pragma once

namespace halfstep {

class DeviceBackend;

namespace detail {
/// Tells a plug-in that has just been loaded, and is listed, what set_float32_precision() was called with.
void tell_float32_precision(const DeviceBackend& backend);
}  // namespace detail

}  // namespace halfstep
