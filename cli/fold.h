// SPDX-License-Identifier: Apache-2.0
// --fold-batch-norm, of the verbs that run trained networks.
#pragma once

#include <string>

#include "cli/options.h"

namespace halfstep::cli {

/// Adds the flag.
void add_fold(const Verb& verb, bool& fold);
/// Folds the network's batch norms (nn::fold_batch_norms), which it finds by a run on an input as its data are, images
/// with `image_size` pixels of a side, and returns what to say of it: `, 20 batch norms folded`. Throws UsageError for
/// a network without any that can be folded.
std::string fold_network(const Loaded& loaded, const std::string& model, std::int64_t image_size);

}  // namespace halfstep::cli
