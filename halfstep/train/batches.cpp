// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/batches.h"

namespace halfstep::training {

Batches::Batches(data::DataLoader& loader) : size_(loader.size()) {
  each_ = [&loader, size = size_](const Visitor& visit) {
    for (const data::Batch& batch : loader) {
      // Left before its end the loop leaves the loader there: until it is evaluated the epoch isn't over.
      if (!visit(batch) || loader.state().batch == size) return;
    }
    // It stood behind the last batch.
    if (const auto now = loader.state(); now.epoch > 0 && size > 0) {
      loader.seek({.epoch = now.epoch - 1, .batch = size});
    }
  };
  finish_ = [&loader] { loader.seek({.epoch = loader.state().epoch + 1, .batch = 0}); };
}

}  // namespace halfstep::training
