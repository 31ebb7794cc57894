// SPDX-License-Identifier: Apache-2.0
// How fast augmented samples for a detector come out of the loader: detection_bench FOLDER [--split NAME] [--workers N]
// [--batch-size N] [--size N] [--seconds S] [--cache] prints one JSON line. FOLDER is a data set that load_detection()
// reads. benchmarks/peers/detection_loader_bench.py runs it in turns with the same pipeline in Python with OpenCV.
#include <time.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

#include "halfstep/data/detection_dataset.h"
#include "halfstep/data/detection_description.h"
#include "halfstep/data/loader.h"

namespace {

using namespace halfstep;
using Clock = std::chrono::steady_clock;

/// Seconds of processor time of the whole program: on a busy machine they say more than a clock.
double processor_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int run(int argc, char** argv) {
  std::string folder, split = "train";
  int workers = 2;
  std::int64_t batch_size = 16;
  double limit = 5;
  data::DetectionTransform transform;
  data::DetectionDatasetOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (flag == "--workers") {
      workers = std::atoi(value());
    } else if (flag == "--batch-size") {
      batch_size = std::atoll(value());
    } else if (flag == "--size") {
      transform.size = std::atoll(value());
    } else if (flag == "--seconds") {
      limit = std::atof(value());
    } else if (flag == "--split") {
      split = value();
    } else if (flag == "--cache") {
      options.cache = data::PictureCache::memory;
    } else {
      folder = flag;
    }
  }
  // A small set many times over makes an epoch that is not all beginning and end.
  constexpr std::int64_t kRepeat = 8;
  data::DataLoader loader{
      data::DetectionDataset{data::load_detection(folder, split), transform, options},
      {.batch_size = batch_size, .shuffle = true, .drop_last = true, .workers = workers, .repeat = kRepeat}};
  std::int64_t pictures = 0;
  double sum = 0, elapsed = 0, processor = 0;
  for (int epoch = 0; epoch == 0 || elapsed < limit; ++epoch) {
    const auto start = Clock::now();
    const double processor_start = processor_seconds();
    std::int64_t seen = 0;
    for (const auto& [images, targets] : loader) {
      seen += images.size(0);
      sum += static_cast<double>(images.data<float>()[0]);
    }
    if (seen == 0) throw Error("detection_bench: the data set has fewer pictures than a batch");
    if (epoch == 0) continue;  // to warm up
    elapsed += std::chrono::duration<double>(Clock::now() - start).count();
    processor += processor_seconds() - processor_start;
    pictures += seen;
  }
  std::printf(
      "{\"images_per_s\": %.1f, \"processor_ms_per_image\": %.3f, \"images\": %lld, \"workers\": %d, \"check\": "
      "%.3f}\n",
      static_cast<double>(pictures) / elapsed, 1000 * processor / static_cast<double>(pictures),
      static_cast<long long>(pictures), workers, sum);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "usage: detection_bench FOLDER [--split NAME] [--workers N] [--batch-size N] [--size N] [--seconds S] "
                 "[--cache]\n");
    return 2;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "detection_bench: %s\n", error.what());
    return 1;
  }
}
