// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/summary.h"

#include <fmt/format.h>

#include <functional>

#include "cli/options.h"
#include "cli/placement.h"
#include "cli/verbs.h"
#include "halfstep/train/flags.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::cli {
namespace {

struct SummaryOptions : CommonOptions {
  std::string amp = "off";
  std::int64_t batch_size = 1;
  std::int64_t image_size = 0;
  std::int64_t depth = -1;
  training::QuantizationConfig quantization = {};
  std::function<std::size_t(const std::string& flag)> count;
};

// Of the flags of `train` those that change what is quantized, and how.
std::vector<Flag> quantization_flags(training::QuantizationConfig& config) {
  std::vector<Flag> all = training::flags(config);
  std::erase_if(all, [](const Flag& f) { return f.name() == "--no-quant" || f.name().starts_with("--quant-freeze"); });
  return all;
}

int run(SummaryOptions& o) {
  for (const Flag& flag : quantization_flags(o.quantization)) {
    if (o.count(flag.name()) == 0 || !flag.needs || flag.needs->there) continue;
    throw UsageError(fmt::format("{}: belongs to {}, which is not given", flag.name(), flag.needs->flag));
  }
  const Device device = apply_common(o);
  const auto dtype = as_usage([&] { return training::amp_dtype(o.amp); });
  checked_input(o.model, o.image_size);
  silence_fallback_warnings();
  std::shared_ptr<const void> holder;
  const training::Classifier net = training::make_classifier(o.model, holder);
  net.module->to(device);
  const Tensor images = training::random_batch(o.model, o.batch_size, o.image_size).input.to(device);
  if (o.quantization.is_on()) {
    const auto forward = [&](std::span<const Tensor> in) { return std::vector<Tensor>{net.forward(in[0])}; };
    quant::prepare(*net.module, forward, {images}, training::quantization_options(o.quantization));
  }
  const nn::Summary summary = nn::summary(*net.module, [&] { net.forward(images); }, {.amp = dtype});
  fmt::print("{} for {} on {}\n\n", o.model, images.sizes().str(), device.str());
  fmt::print("{}", summary.str(o.depth < 0 ? std::nullopt : std::optional(static_cast<int>(o.depth))));
  return kDone;
}

}  // namespace

void add_summary(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "summary",
                             "Modules, shapes, parameters, operations and memory of a network, and where its ops run");
  auto o = std::make_shared<SummaryOptions>();
  add_common(verb, *o);
  add_word(verb, "--amp", o->amp, "Precision of the list of ops: off, bf16 or f16");
  add_training_flag(verb, "--batch-size", &o->batch_size);
  add_fresh_image_size(verb, o->image_size);
  add_whole(verb, "--depth", o->depth, 0, 100, "Show no modules deeper than that (default: all)");
  for (const Flag& row : quantization_flags(o->quantization)) add_flag(verb, row);
  o->count = [verb](const std::string& flag) { return verb.count(flag); };
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
