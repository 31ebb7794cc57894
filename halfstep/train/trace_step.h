// SPDX-License-Identifier: Apache-2.0
// Where the ops of a training step run, before a run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/data/dataset.h"
#include "halfstep/debug/call_trace.h"
#include "halfstep/train/config.h"
#include "halfstep/train/task.h"

namespace halfstep::training {

/// Makes the configuration's network on its device with fresh weights, takes two training steps on random pictures, and
/// returns the calls of the second one, in which optimizers and caches have what they make once. `image_size`: pixels
/// of a side, 0 for the network's own; the same ops run for smaller pictures, and sooner. Leaves the default generator
/// as it was. Throws as train() does.
HS_API std::vector<debug::TracedCall> trace_step(const TrainConfig& config, std::int64_t image_size = 0);

/// The task of the configuration's network without data: fresh weights from the default generator, on the CPU, as many
/// classes as customary. Throws as make_task() does.
HS_API std::shared_ptr<Task> random_task(const TrainConfig& config);

/// A batch of random samples for the network of that name, on the CPU, as its data are: see DataKind::random. Throws
/// Error for a kind of data without.
HS_API data::Batch random_batch(const std::string& model, std::int64_t batch_size, std::int64_t image_size = 0);

/// An input of zeros with the sizes and the dtype of random_batch()'s, on `device`: for what depends on them alone,
/// such as an export. Leaves the default generator as it was. Throws Error for a kind of data without random samples.
HS_API Tensor example_input(const std::string& model, std::int64_t batch_size = 1, std::int64_t image_size = 0,
                            Device device = {});

}  // namespace halfstep::training
