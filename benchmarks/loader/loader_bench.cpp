// SPDX-License-Identifier: Apache-2.0
// How fast pictures come out of the loader: loader_bench FOLDER [--workers N] [--batch-size N] [--size N] [--seconds S]
// [--stages] prints one JSON line. FOLDER has class folders, or pictures themselves. benchmarks/peers/loader_bench.py
// runs it in turns with PyTorch's DataLoader.
#include <time.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/loader/pictures.h"
#include "halfstep/data/image_dataset.h"
#include "halfstep/data/loader.h"

namespace {

using namespace halfstep;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Seconds of processor time, of this thread or of the whole program: on a busy machine they say more than a clock.
double processor_seconds(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Milliseconds of processor time a picture takes in each stage.
void print_stages(const data::ImageSource& source, const data::TrainTransform& transform) {
  double read = 0, decode = 0, resize = 0, whole = 0, all = 0;
  const auto now = [] { return processor_seconds(CLOCK_THREAD_CPUTIME_ID); };
  data::TransformScratch scratch;
  std::vector<std::uint8_t> buffer;
  std::vector<float> out(static_cast<std::size_t>(3 * transform.size * transform.size));
  const data::ImagePipeline pipeline(transform);
  for (std::int64_t i = 0; i < source.size(); ++i) {
    double start = now();
    const auto bytes = source.read(i, buffer);
    read += now() - start;
    start = now();
    data::ImageDecoder picture(bytes, source.name(i));
    RandomStream random(static_cast<std::uint64_t>(i));
    const auto region = data::random_resized_region(picture.info().width, picture.info().height, transform, random);
    const auto patch = picture.decode(region, 1, scratch.decoded);
    decode += now() - start;
    start = now();
    const data::ResizePlan plan(region.width, region.height, {.width = transform.size, .height = transform.size});
    plan.run(scratch.decoded.view({region.left - patch.left, region.top - patch.top, region.width, region.height}), 0,
             0, scratch.rows, scratch.result);
    resize += now() - start;
    start = now();
    data::ImageDecoder again(bytes, source.name(i));
    again.decode(scratch.decoded);
    whole += now() - start;
    start = now();
    data::ImageDecoder once_more(bytes, source.name(i));
    pipeline.run(once_more, {.sample = i}, scratch, out.data());
    all += now() - start;
  }
  const double ms = 1000 / static_cast<double>(source.size());
  std::printf(
      "{\"read_ms\": %.3f, \"decode_ms\": %.3f, \"decode_whole_ms\": %.3f, \"resize_ms\": %.3f, \"all_but_read_ms\": "
      "%.3f}\n",
      read * ms, decode * ms, whole * ms, resize * ms, all * ms);
}

int run(int argc, char** argv) {
  std::string folder;
  int workers = 2;
  std::int64_t batch_size = 32, size = 224;
  double limit = 5;
  bool stages = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::atof(argv[++i]) : 0.0; };
    if (flag == "--workers") {
      workers = static_cast<int>(value());
    } else if (flag == "--batch-size") {
      batch_size = static_cast<std::int64_t>(value());
    } else if (flag == "--size") {
      size = static_cast<std::int64_t>(value());
    } else if (flag == "--seconds") {
      limit = value();
    } else if (flag == "--stages") {
      stages = true;
    } else {
      folder = flag;
    }
  }
  const std::shared_ptr<const data::ImageSource> source = bench::open_pictures(folder);
  const data::TrainTransform transform{.size = size};
  if (stages) {
    print_stages(*source, transform);
    return 0;
  }
  data::DataLoader loader{data::ImageDataset{source, transform},
                          {.batch_size = batch_size, .shuffle = true, .drop_last = true, .workers = workers}};
  // An epoch to warm up, then whole epochs until the time is over.
  std::int64_t pictures = 0;
  double sum = 0, elapsed = 0, processor = 0;
  for (int epoch = 0; epoch == 0 || elapsed < limit; ++epoch) {
    const auto start = Clock::now();
    const double processor_start = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
    std::int64_t seen = 0;
    for (const auto& [images, labels] : loader) {
      seen += images.size(0);
      sum += static_cast<double>(images.data<float>()[0]);
    }
    if (epoch == 0) continue;
    elapsed += seconds_since(start);
    processor += processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - processor_start;
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
                 "usage: loader_bench FOLDER [--workers N] [--batch-size N] [--size N] [--seconds S] [--stages]\n");
    return 2;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "loader_bench: %s\n", error.what());
    return 1;
  }
}
