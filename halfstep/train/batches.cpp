// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/batches.h"

#include <memory>

namespace halfstep::training {

Batches::Batches(data::DataLoader& loader) : size_([&loader] { return loader.size(); }) {
  const auto shown = std::make_shared<std::int64_t>(0);  // epoch
  each_ = [&loader, shown](const Visitor& visit) {
    bool any = false;
    for (const data::Batch& batch : loader) {
      any = true;
      *shown = loader.state().epoch;
      // Left before its end the loop leaves the loader there: until it is evaluated the epoch isn't over.
      if (!visit(batch) || loader.state().batch >= loader.size()) return;
    }
    if (any) return;
    // It stood behind the last batch, and now at the begin of the next epoch.
    const auto now = loader.state();
    *shown = now.epoch - 1;
    if (now.epoch > 0 && loader.size() > 0) loader.seek({.epoch = *shown, .batch = loader.size()});
  };
  finish_ = [&loader, shown] { loader.seek({.epoch = *shown + 1, .batch = 0}); };
  position_ = [&loader] { return loader.state(); };
}

}  // namespace halfstep::training
