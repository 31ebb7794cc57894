// SPDX-License-Identifier: Apache-2.0
#include "cli/weight_only.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <vector>

#include "cli/integers.h"
#include "cli/left_weights.h"
#include "cli/quantize_table.h"
#include "cli/weights_files.h"
#include "halfstep/core/text.h"
#include "halfstep/data/loader.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/quant/quantization.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/trainer.h"
#include "halfstep/train/weight_only.h"

namespace halfstep::cli {
namespace {

class WeightOnlyQuantizer {
 public:
  WeightOnlyQuantizer(const WeightOnlyRun& o, Loaded loaded) : options_(o), loaded_(std::move(loaded)) {}

  int run() {
    check();
    // Whether the options fit is said before anything takes time.
    const std::shared_ptr<nn::ModuleBase> copy = module().copy();
    copy->unshare();
    as_usage([&] { quant::quantize_weights(*copy, options_.options); });
    load_data();
    const NamedTensors floats = module().state_dict();
    const std::optional<DType> low = machine().bf16_units ? std::optional(bf16) : std::nullopt;
    if (!measure("float32", {}, io::safetensors_bytes(floats))) return 128 + g_signal;
    if (low && !measure(std::string(name(*low)), low, io::safetensors_bytes(in_16_bits(floats, *low)))) {
      return 128 + g_signal;
    }
    const auto layers = quant::quantize_weights(module(), options_.options);
    const std::uint64_t file = io::safetensors_bytes(module().state_dict());
    const std::string weights = fmt::format("{}-bit weights", options_.options.bits);
    if (!measure(weights, {}, file)) return 128 + g_signal;
    if (low && !measure(fmt::format("{}, {}", weights, name(*low)), low, file)) return 128 + g_signal;
    std::uint64_t integers = 0;
    for (const quant::WeightOnlyLayer& l : layers) integers += static_cast<std::uint64_t>(l.bytes);
    const std::int64_t group = options_.options.group_size;
    fmt::print("{} linear layer{}: {}{}, {}\n", layers.size(), layers.size() == 1 ? "" : "s", weights,
               group > 0 ? fmt::format(" in groups of {}", group) : ", a scale a row", bytes_text(integers));
    write();
    report();
    return kDone;
  }

 private:
  const nn::ModuleBase& module() const { return *loaded_.network.module; }

  void check() const {
    if (quant::quantization_of(module())) {
      throw UsageError(fmt::format("{}: {} was trained with --qat or quantized, which has said what its integers are",
                                   kWeightOnlyFlag, shown_path(loaded_.file)));
    }
    if (!quant::weight_only_layers(module()).empty()) {
      throw UsageError(
          fmt::format("{}: the weights of {} are integers already", kWeightOnlyFlag, shown_path(loaded_.file)));
    }
  }

  void load_data() {
    const DataPlace place = place_of_data(loaded_, options_.data, options_.seed);
    const bool built_in = !training::data_of(options_.model).built_in.empty();
    evaluates_ = !options_.no_eval && (built_in || !place.folder.empty());
    fmt::print("quantizing the weights of {}{}\n", loaded_.text(options_.model),
               evaluates_         ? ", measured on " + place.text(loaded_)
               : options_.no_eval ? std::string()
                                  : ", not measured, since it isn't known on which data");
    std::fflush(stdout);
    config_ = data_config(options_.model, loaded_, place, options_.images, options_.batch_size, options_.device);
    data_.num_classes = loaded_.num_classes;
    if (evaluates_) {
      data_ = training::load_data(config_, false);
      if (!data_.classes.empty()) check_classes(loaded_, data_.classes, loaded_.file, place.folder);
    }
    if (!loaded_.classes.empty()) data_.classes = loaded_.classes;
    if (!evaluates_) return;
    table_.model = options_.model;
    table_.samples = data_.test->size();
    if (task()->larger_is_better()) table_.score = task()->best_by();
    data::DataLoader loader(data_.test, {.batch_size = options_.batch_size});
    example_ = (*loader.begin()).input;
  }

  std::shared_ptr<training::Task> task() const { return training::make_task(config_, data_, loaded_.network); }

  // False: a signal came. `file`: bytes of its weights in a file.
  bool measure(const std::string& name, std::optional<DType> dtype, std::uint64_t file) {
    if (!evaluates_) return !g_stop;
    std::optional<QuantizedRow> row = evaluated_row(*task(), data_.test, name,
                                                    {.autocast = dtype,
                                                     .batch_size = options_.batch_size,
                                                     .workers = std::max(options_.workers, 1),
                                                     .prefetch = config_.prefetch});
    if (!row) return false;
    const auto outputs = [this](std::span<const Tensor> in) {
      return loaded_.network.outputs ? loaded_.network.outputs(in[0])
                                     : std::vector<Tensor>{loaded_.network.forward(in[0])};
    };
    row->session.emplace(module(), outputs, std::vector{example_}, infer::SessionOptions{.dtype = dtype});
    row->file = file;
    table_.rows.push_back(std::move(*row));
    return true;
  }

  void write() {
    training::Checkpoint checkpoint =
        rewritten(options_.model, loaded_, *task(), options_.images ? &config_.images : nullptr, module().state_dict());
    for (const auto& [key, value] : training::weight_only_recipe(options_.options)) checkpoint.recipe[key] = value;
    training::save_checkpoint(options_.out, checkpoint);
  }

  void report() {
    const std::string written = shown_path(options_.out);
    const std::string size = bytes_text(std::filesystem::file_size(options_.out));
    if (!evaluates_) {
      fmt::print("\n{} written ({})\n", written, size);
      return;
    }
    table_.time(example_);
    table_.figure().save(options_.figure);
    fmt::print("\n{}\n{} ({}) and {} written\n", table_.text(), written, size, shown_path(options_.figure));
  }

  const WeightOnlyRun& options_;
  Loaded loaded_;
  training::TrainConfig config_ = {};
  training::RunData data_ = {};
  bool evaluates_ = false;
  Tensor example_ = {};
  QuantizedTable table_ = {};
};

}  // namespace

quant::WeightOnlyOptions weight_only_options(const training::QuantizationConfig& config, std::int64_t group_size) {
  if (config.weight_bits != 8 && config.weight_bits != 4) {
    throw UsageError(
        fmt::format("--quant-weight-bits: expected 8 or 4 with {}, got {}", kWeightOnlyFlag, config.weight_bits));
  }
  return {.bits = config.weight_bits, .group_size = group_size, .skip = training::quantization_options(config).skip};
}

int quantize_weight_only(const WeightOnlyRun& o, Loaded loaded) {
  return WeightOnlyQuantizer(o, std::move(loaded)).run();
}

}  // namespace halfstep::cli
