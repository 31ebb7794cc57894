// SPDX-License-Identifier: Apache-2.0
// Pictures from files to batches, as training reads them.
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "benchmarks/loader/pictures.h"
#include "benchmarks/server/server.h"
#include "halfstep/core/tensor.h"
#include "halfstep/data/image_dataset.h"
#include "halfstep/data/loader.h"

namespace halfstep::bench {
namespace {

constexpr std::int64_t kBatch = 32, kEpoch = 640;  // pictures

Prepared prepare_loader(int workers) {
  const char* folder = std::getenv("HALFSTEP_BENCH_IMAGES");
  if (!folder || !*folder) throw std::invalid_argument("HALFSTEP_BENCH_IMAGES names no folder of pictures");
  const auto pictures = open_pictures(folder);
  const auto source = std::make_shared<const Repeated>(pictures, (kEpoch + pictures->size() - 1) / pictures->size());
  const auto loader = std::make_shared<data::DataLoader>(
      data::ImageDataset{source, data::TrainTransform{.size = 224}},
      data::LoaderOptions{.batch_size = kBatch, .shuffle = true, .drop_last = true, .workers = workers});
  const auto batches = source->size() / kBatch;
  return {[loader] {
            double sum = 0;
            for (const auto& [images, labels] : *loader) sum += static_cast<double>(images.data<float>()[0]);
            volatile double used = sum;
            (void)used;
          },
          static_cast<int>(batches * kBatch)};
}

}  // namespace

void add_loader_cases(std::vector<Case>& cases) {
  cases.push_back({"loader/jpeg224/w2", [] { return prepare_loader(2); }});
}

}  // namespace halfstep::bench
