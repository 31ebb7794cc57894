// SPDX-License-Identifier: Apache-2.0
// What a training step takes, before a run: found by taking it on the device meta, where nothing is computed and no
// memory is used.
#pragma once

#include <cstdint>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/debug/call_trace.h"
#include "halfstep/train/config.h"

namespace halfstep::training {

/// Memory of a training step on the CPU, in bytes. All but `peak` are the tensors' own, without what the allocator
/// rounds up.
struct StepMemory {
  std::uint64_t parameters = 0;
  std::uint64_t gradients = 0;  ///< after the step
  std::uint64_t optimizer = 0;  ///< its state, and the averages of the weights
  std::uint64_t buffers = 0;    ///< of the network, such as running statistics
  std::uint64_t batch = 0;      ///< the samples of a step
  /// The most that is allocated at a time from the first step on (MemoryStats::allocated_peak): all of the above, the
  /// 16-bit copies of weights, activations, and what kernels work in.
  std::uint64_t peak = 0;
};

/// The memory of the configuration's training steps on batches of `batch_size` samples: with its precision, loss scale,
/// optimizer, average of the weights and accumulated batches, captured if the configuration says so. `image_size`:
/// pixels of a side, 0 for the network's own. Takes the steps on the device meta, in which the process must not
/// allocate elsewhere meanwhile; the kernels counted are those of this processor and number of threads. Whatever the
/// configuration's device, the figures are the CPU's, of one process. Leaves the default generator as it was. Throws as
/// train() does, Error for a kind of data without random samples, and DeviceError where a step needs values on the
/// host.
HS_API StepMemory predict_memory(const TrainConfig& config, std::int64_t batch_size, std::int64_t image_size = 0);

/// The same, found by really taking the steps on the configuration's device, on samples whose values don't matter.
HS_API StepMemory measure_memory(const TrainConfig& config, std::int64_t batch_size, std::int64_t image_size = 0);

/// The calls of one such step, uncaptured, as trace_step() gives them and with the configuration's device, without
/// computing anything: those of the second step, on as many batches as the configuration accumulates. Images are
/// channels-last, as loaders give them.
HS_API std::vector<debug::TracedCall> predict_calls(const TrainConfig& config, std::int64_t batch_size,
                                                    std::int64_t image_size = 0);

}  // namespace halfstep::training
