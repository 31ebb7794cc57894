// SPDX-License-Identifier: Apache-2.0
// `halfstep quantize`: weights in 8-bit integers, with ranges of activations from a part of the training data.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/integers.h"
#include "cli/left_weights.h"
#include "cli/options.h"
#include "cli/precision.h"
#include "cli/quantize_table.h"
#include "cli/verbs.h"
#include "cli/weight_only.h"
#include "cli/weights_files.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/text.h"
#include "halfstep/infer/parity.h"
#include "halfstep/infer/session.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/quant/assignment.h"
#include "halfstep/quant/calibrate.h"
#include "halfstep/quant/sensitivity.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/trainer.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

struct QuantizeOptions : TrainedOptions {
  training::QuantizationConfig quantization;
  fs::path data, out, qat_weights;
  std::string amp;
  double max_drop = -1;  // not given
  std::int64_t batches = 32, batch_size = 32, layers = 5, sensitivity = 0;
  int workers = 1;
  std::uint64_t seed = 0;
  bool overwrite = false, no_eval = false;
  bool weight_only = false;
  std::int64_t group_size = 0;

  bool limits_drop() const { return max_drop >= 0; }
  fs::path figure() const { return fs::path(out).replace_extension(".svg"); }
};

// What is said of weights before they are trained again.
std::vector<Flag> rows(training::QuantizationConfig& config) {
  std::vector<Flag> all = training::flags(config);
  std::erase_if(all, [](const Flag& f) {
    return f.name() == "--qat" || f.name() == "--no-quant" || f.name() == "--quant-learned" ||
           f.name().starts_with("--quant-freeze");
  });
  for (Flag& f : all) f.needs.reset();
  return all;
}

constexpr const char* kIntegers = "8-bit integers";
constexpr const char* kTrained = " after --qat";
constexpr double kRounding = 1e-9;  // of shares

// A signal came.
struct Stopped {};

class Quantizer {
 public:
  Quantizer(QuantizeOptions& o, Loaded loaded, training::TrainConfig config, training::RunData data)
      : options_(o),
        loaded_(std::move(loaded)),
        config_(std::move(config)),
        data_(std::move(data)),
        as_it_is_(loaded_.network) {
    table_.model = options_.model;
    table_.samples = data_.test->size();
    if (options_.limits_drop()) table_.max_drop = options_.max_drop;
    // What isn't said is what the CPU is good at. Activations of 16 bits want float32 around them.
    const bool low = machine().bf16_units && options_.quantization.activation_bits <= kMostBits;
    amp_ = options_.amp.empty() && options_.limits_drop() ? (low ? "bf16" : "off") : options_.amp;
  }

  int run(std::optional<Loaded> trained_with_it) {
    try {
      steps(std::move(trained_with_it));
    } catch (const Stopped&) {
      return 128 + g_signal;
    }
    return kDone;
  }

 private:
  static constexpr int kMostBits = 8;  // of weights that are computed with in integers

  void steps(std::optional<Loaded> trained_with_it) {
    const bool trained = quant::quantization_of(module()) != nullptr;
    if (task()->larger_is_better()) table_.score = task()->best_by();
    if (options_.limits_drop() && table_.score.empty()) {
      throw UsageError(fmt::format("--max-drop: {} has no accuracy, its evaluations are compared by their {}",
                                   options_.model, task()->best_by()));
    }
    if (trained) {
      quant::enable_fake_quant(module(), false);
    } else {
      config_.quantization = options_.quantization;
    }
    const NamedTensors floats = weights();
    const double whole = measure("float32", {});
    add_session({}, io::safetensors_bytes(floats));
    const DType wide = amp_.empty() ? (machine().bf16_units ? bf16 : f32) : left_dtype(loaded_, amp_);
    if (wide != f32 && !options_.no_eval) {
      measure(std::string(name(wide)), wide);
      add_session({.dtype = wide}, io::safetensors_bytes(in_16_bits(floats, wide)));
    }
    if (!trained) {
      prepare({});
      fmt::print("ranges of {} activations from {} samples of the training data\n",
                 std::ranges::count_if(quantization().tensors(), [](const auto& t) { return !t.weight; }), seen_);
    }
    quant::enable_fake_quant(module(), true);
    measure(trained ? "rounded as in training" : "rounded to integers", {});
    const std::vector<infer::LayerParity> layers = integers() ? compare() : std::vector<infer::LayerParity>();
    const std::vector<quant::LayerSensitivity> costs = sensitivity();
    if (integers()) {
      measure_integers(integers_name());
      add_integers(training::with_integers(module()));
    }
    if (options_.limits_drop()) assign(whole, costs);
    if (trained_with_it) add_trained(std::move(*trained_with_it));
    if (g_stop) throw Stopped();
    const std::uintmax_t bytes = write(trained);
    report(layers, costs, bytes);
  }

  const nn::ModuleBase& module() const { return *loaded_.network.module; }
  quant::Quantization& quantization() const { return *quant::quantization_of(module()); }
  std::shared_ptr<training::Task> task() const { return training::make_task(config_, data_, loaded_.network); }
  bool images() const { return training::network_input(options_.model).images; }
  bool integers() const { return quantization().options.weight_bits <= kMostBits; }
  std::string integers_name() const {
    const quant::QuantizationOptions& o = quantization().options;
    if (o.weight_bits == kMostBits && o.activation_bits == kMostBits) return kIntegers;
    return fmt::format("integers w{}a{}", o.weight_bits, o.activation_bits);
  }

  // The accuracy, where there is one. A row of the table is added unless the name is empty.
  double measure(const std::string& name, std::optional<DType> dtype) {
    if (g_stop) throw Stopped();
    if (options_.no_eval) return NAN;
    const std::optional<QuantizedRow> row = evaluated_row(*task(), data_.test, name,
                                                          {.autocast = dtype,
                                                           .batch_size = options_.batch_size,
                                                           .workers = std::max(options_.workers, 1),
                                                           .prefetch = config_.prefetch});
    if (!row) throw Stopped();
    last_ = *row;
    if (!name.empty()) table_.rows.push_back(last_);
    return last_.score.value_or(NAN);
  }
  double measure_integers(const std::string& name) {
    use_integers(loaded_, amp_);
    const double score = measure(name, {});
    loaded_.network = as_it_is_;
    return score;
  }

  // Of the last row: what computes it, and the bytes of its weights in a file.
  void add_session(const infer::SessionOptions& options, std::uint64_t file) {
    if (options_.no_eval) return;
    table_.rows.back().session.emplace(
        module(), [this](std::span<const Tensor> in) { return outputs(in[0]); }, std::vector<Tensor>{example()},
        options);
    table_.rows.back().file = file;
  }
  void add_integers(const NamedTensors& file) {
    add_session({.dtype = left_dtype(loaded_, amp_), .int8 = true}, io::safetensors_bytes(file));
  }
  // What a file of the quantized network holds.
  NamedTensors state() const {
    NamedTensors result = training::with_integers(module());
    if (left_weights_) left_weights_->lower(result);
    return result;
  }
  const Tensor& example() {
    if (!example_.defined()) {
      data::DataLoader loader(data_.test, {.batch_size = options_.batch_size});
      for (const data::Batch& batch : loader) {
        example_ = batch.input;
        break;
      }
    }
    return example_;
  }

  // The network without what quantizes it.
  NamedTensors weights() const {
    NamedTensors state = module().state_dict();
    std::erase_if(state, [](const NamedTensor& t) { return t.name.starts_with(training::kQuantizationPrefix); });
    return state;
  }

  // Quantizes the network anew, with `left` in floating point besides what flags say.
  void prepare(std::span<const std::string> left) {
    module().remove_attached("quantization");
    if (left_weights_) left_weights_->round(left);
    training::TrainConfig config = config_;
    for (const std::string& name : left) {
      config.quantization.skip += (config.quantization.skip.empty() ? "" : ",") + name;
    }
    training::prepare_quantization(config, *task());
    calibrate();
    quant::enable_fake_quant(module(), true);
    left_.assign(left.begin(), left.end());
    skip_ = config.quantization.skip;
  }

  // Leaves as few layers in floating point as keep the accuracy.
  void assign(double whole, const std::vector<quant::LayerSensitivity>& costs) {
    std::vector<std::string> order;
    for (const quant::LayerSensitivity& c : costs) {
      // Several products of one module are left together.
      if (!c.module.empty() && std::ranges::find(order, c.module) == order.end()) order.push_back(c.module);
    }
    const std::string wide = amp_ == "off" ? "float32" : amp_;
    left_weights_.emplace(module(), left_dtype(loaded_, amp_));
    std::vector<QuantizedRow> rows;
    std::vector<std::string> enough;  // the last that were
    const auto accuracy = [&](std::span<const std::string> left) {
      if (!std::ranges::equal(left, left_)) prepare(left);
      // Without any it has been measured.
      if (!left.empty()) (void)(integers() ? measure_integers("") : measure("", {}));
      rows.push_back(last_);
      return *last_.score;
    };
    const auto on_round = [&](const quant::AssignmentRound& round) {
      const std::string which = set_text(round.left, enough);
      if (round.met) enough = round.left;
      fmt::print("--max-drop {:g}: {} of {} layers in {}{}: {} {:.2f}%, {:+.2f} points\n", options_.max_drop,
                 round.left.size(), order.size(), wide, which, table_.score, 100 * round.accuracy,
                 100 * (round.accuracy - whole));
      std::fflush(stdout);
    };
    const quant::Assignment found = quant::assign_precision(
        order, accuracy, {.least_accuracy = whole - options_.max_drop / 100 - kRounding, .on_round = on_round});
    if (!found.met) {
      const std::string again = found.left.empty() ? "without --max-drop that is written"
                                                   : fmt::format("--amp {} --quant-skip {} writes that", amp_,
                                                                 fmt::join(all_left(found.left), ","));
      throw Error(
          fmt::format("--max-drop {:g}: expected {} of at least {:.2f}%, the best that was found is {:.2f}% with {} of "
                      "{} layers in "
                      "{}; nothing is written, {}",
                      options_.max_drop, table_.score, 100 * whole - options_.max_drop, 100 * found.accuracy,
                      found.left.size(), order.size(), wide, again));
    }
    if (found.left.empty()) return;
    if (!std::ranges::equal(found.left, left_)) prepare(found.left);
    const auto round = std::ranges::find(found.rounds, found.left, &quant::AssignmentRound::left);
    QuantizedRow row = rows[static_cast<std::size_t>(round - found.rounds.begin())];
    row.name =
        fmt::format("{}, {} layer{} {}", integers_name(), found.left.size(), found.left.size() == 1 ? "" : "s", wide);
    table_.rows.push_back(std::move(row));
    if (integers()) add_integers(state());
    fmt::print("{} of {} layers stay in {}: {}\n", found.left.size(), order.size(), wide, fmt::join(found.left, ", "));
  }
  // With those that a flag names.
  std::vector<std::string> all_left(const std::vector<std::string>& left) const {
    std::vector<std::string> result;
    if (!options_.quantization.skip.empty()) result.push_back(options_.quantization.skip);
    result.insert(result.end(), left.begin(), left.end());
    return result;
  }

  // The row of a network that was trained with the rounding.
  void add_trained(Loaded other) {
    std::swap(loaded_, other);
    as_it_is_ = loaded_.network;
    measure_integers(integers_name() + kTrained);
    add_integers(training::with_integers(module()));
    std::swap(loaded_, other);
    as_it_is_ = loaded_.network;
  }

  std::vector<Tensor> outputs(const Tensor& x) const {
    return loaded_.network.outputs ? loaded_.network.outputs(x) : std::vector<Tensor>{loaded_.network.forward(x)};
  }

  // Ranges from the training part, as a run would give it to the network.
  void calibrate() {
    data::DataLoader loader(
        data_.training,
        {.batch_size = options_.batch_size, .shuffle = true, .workers = options_.workers, .seed = options_.seed});
    auto batch = loader.begin();
    std::int64_t batches = 0;
    seen_ = 0;
    quant::calibrate(module(), [&] {
      if (g_stop) throw Stopped();
      (void)outputs((*batch).input);
      seen_ += (*batch).input.size(0);
      return ++batches < options_.batches && ++batch != loader.end();
    });
  }

  std::vector<infer::LayerParity> compare() {
    data::DataLoader loader(data_.test, {.batch_size = std::min<std::int64_t>(options_.batch_size, 16)});
    for (const data::Batch& batch : loader) {
      return infer::compare_layers(module(), [&](std::span<const Tensor> in) { return outputs(in[0]); }, {batch.input});
    }
    return {};
  }

  // What each layer costs alone, in the loss of some batches of the training data.
  std::vector<quant::LayerSensitivity> sensitivity() {
    if (options_.sensitivity == 0 && !options_.limits_drop()) return {};
    constexpr std::size_t kMost = 8;
    std::vector<data::Batch> batches;
    data::DataLoader loader(data_.training,
                            {.batch_size = options_.batch_size, .shuffle = true, .seed = options_.seed});
    for (const data::Batch& batch : loader) {
      batches.push_back(batch);
      if (batches.size() == kMost) break;
    }
    const std::shared_ptr<training::Task> measured = task();
    const nn::EvalMode evaluation(module());
    return quant::sensitivity(module(), [&] {
      if (g_stop) throw Stopped();
      const NoGrad no_grad;
      double sum = 0;
      for (const data::Batch& batch : batches) sum += measured->loss(batch).loss.item<double>();
      return sum / static_cast<double>(batches.size());
    });
  }

  std::uintmax_t write(bool trained) {
    training::Checkpoint checkpoint =
        rewritten(options_.model, loaded_, *task(), images() ? &config_.images : nullptr, state());
    if (!trained) {
      training::QuantizationConfig config = config_.quantization;
      config.skip = skip_;
      for (const auto& [key, value] : training::quantization_recipe(config)) checkpoint.recipe[key] = value;
    }
    // How it was measured is how it is computed.
    if (!amp_.empty()) checkpoint.recipe.erase(kLeftPrecision);
    if (!amp_.empty() && amp_ != "off") checkpoint.recipe[kLeftPrecision] = amp_;
    training::save_checkpoint(options_.out, checkpoint);
    return fs::file_size(options_.out);
  }

  void report(const std::vector<infer::LayerParity>& layers, const std::vector<quant::LayerSensitivity>& costs,
              std::uintmax_t bytes) {
    fmt::print("{}{}", parity_text(layers, options_.layers), sensitivity_text(costs, options_.sensitivity));
    if (options_.no_eval) {
      fmt::print("\n{} written\n", shown_path(options_.out));
      return;
    }
    const auto written = std::ranges::find_if(table_.rows.rbegin(), table_.rows.rend(), [](const QuantizedRow& row) {
      return row.session && !row.name.ends_with(kTrained);
    });
    if (integers()) written->file = bytes;
    table_.time(example());
    table_.figure().save(options_.figure());
    fmt::print("\n{}\n{} and {} written\n", table_.text(), shown_path(options_.out), shown_path(options_.figure()));
  }

  QuantizeOptions& options_;
  Loaded loaded_;
  training::TrainConfig config_;
  training::RunData data_;
  training::Network as_it_is_;
  std::string amp_ = {};                // what layers that are left compute in, as --amp says it; empty: as it is
  std::vector<std::string> left_ = {};  // of the search
  std::optional<LeftWeights> left_weights_ = {};
  std::string skip_ = {};  // all that are left
  std::int64_t seen_ = 0;  // samples that ranges come from
  Tensor example_ = {};
  QuantizedRow last_ = {};  // of what was measured last
  QuantizedTable table_ = {};
};

void check_target(const QuantizeOptions& o) {
  std::error_code error;
  if (fs::is_directory(o.out, error)) {
    throw IoError(fmt::format("--out: expected a file, got the folder {}", shown_path(o.out)));
  }
  const fs::path folder = o.out.has_parent_path() ? o.out.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error)) {
    throw IoError(fmt::format("--out: expected a file in a folder, there is no folder {}", shown_path(folder)));
  }
  if (access(folder.c_str(), W_OK) != 0) {
    throw IoError(fmt::format("--out: nothing can be written into {}", shown_path(folder)));
  }
  if (o.out.extension() != ".safetensors") {
    throw UsageError(fmt::format("--out: expected a name that ends in .safetensors, got {}", shown_path(o.out)));
  }
  for (const fs::path& file : {o.out, o.figure()}) {
    if ((o.no_eval && file != o.out) || !fs::exists(file, error)) continue;
    if (!fs::is_regular_file(file, error)) {
      throw IoError(fmt::format("--out: expected a file, {} is none", shown_path(file)));
    }
    for (const fs::path& read : {o.weights, o.qat_weights}) {
      if (fs::equivalent(file, read, error)) {
        throw UsageError(fmt::format("--out: {} holds the weights that are read", shown_path(file)));
      }
    }
    if (!o.overwrite) {
      throw IoError(fmt::format("{} is there; --overwrite replaces it, or name another file", shown_path(file)));
    }
  }
}

// Weights that were trained with --qat, to be compared with.
std::optional<Loaded> load_trained(QuantizeOptions& o, const Loaded& loaded) {
  if (o.qat_weights.empty()) return std::nullopt;
  Loaded other = load_classifier(o.model, o.qat_weights);
  const std::string file = shown_path(other.file);
  if (!quant::quantization_of(*other.network.module)) {
    throw UsageError(fmt::format("--qat-weights: expected weights of a run with --qat, got those of {}", file));
  }
  if (other.num_classes != loaded.num_classes) {
    throw UsageError(fmt::format("--qat-weights: expected {} classes, as {} has, got {} in {}", loaded.num_classes,
                                 shown_path(loaded.file), other.num_classes, file));
  }
  (void)left_dtype(other, o.amp);
  return other;
}

// Flags of activations have no meaning without integers of theirs.
void check_weight_only(const QuantizeOptions& o) {
  if (!o.weight_only) {
    if (o.pictures.count(kGroupSizeFlag) > 0) {
      throw UsageError(fmt::format("{}: only with {}", kGroupSizeFlag, kWeightOnlyFlag));
    }
    return;
  }
  std::vector<std::string> others{"--batches", "--layers", "--sensitivity", "--max-drop", "--amp", "--qat-weights"};
  training::QuantizationConfig config;
  for (const Flag& row : rows(config)) {
    if (row.name() != "--quant-weight-bits" && row.name() != "--quant-skip") others.push_back(row.name());
  }
  for (const std::string& flag : others) {
    if (o.pictures.count(flag) > 0) {
      throw UsageError(
          fmt::format("{}: expected it without {}, which leaves activations as they are", flag, kWeightOnlyFlag));
    }
  }
}

int run(QuantizeOptions& o) {
  if (o.data.empty()) o.data = take_model_for_path(o.model);
  const Device device = apply_common(o);
  if (!device.is_cpu()) throw UsageError("--device: integers are computed on the CPU");
  catch_signals();
  o.quantization.on = true;
  as_usage([&] { training::check(rows(o.quantization)); });
  check_weight_only(o);
  if (o.no_eval && o.limits_drop()) throw UsageError("--max-drop: only without --no-eval, since it goes by accuracy");
  if (o.no_eval && !o.qat_weights.empty()) throw UsageError("--qat-weights: only without --no-eval");
  check_target(o);
  Loaded loaded = load_classifier(o.model, o.weights);
  const bool images = training::network_input(o.model).images;
  if (images) {
    resolve_images(o.pictures, o.model, loaded);
  } else {
    refuse_image_flags(o.pictures, o.model, {"--image-size", "--resize"});
  }
  if (o.weight_only) {
    return quantize_weight_only({.model = o.model,
                                 .device = device,
                                 .options = weight_only_options(o.quantization, o.group_size),
                                 .images = images ? &o.pictures.images : nullptr,
                                 .data = o.data,
                                 .out = o.out,
                                 .figure = o.figure(),
                                 .batch_size = o.batch_size,
                                 .workers = o.workers,
                                 .seed = o.pictures.count("--seed") > 0 ? std::optional(o.seed) : std::nullopt,
                                 .no_eval = o.no_eval},
                                std::move(loaded));
  }
  if (!quant::weight_only_layers(*loaded.network.module).empty()) {
    throw UsageError(fmt::format("--weights: expected floating weights, those of {} are integers of {}",
                                 shown_path(loaded.file), kWeightOnlyFlag));
  }
  if (quant::quantization_of(*loaded.network.module)) {
    for (const Flag& row : rows(o.quantization)) {
      if (o.pictures.count(row.name()) > 0) {
        throw UsageError(
            fmt::format("{}: {} was trained with --qat, which has said so", row.name(), shown_path(loaded.file)));
      }
    }
    if (o.limits_drop()) {
      throw UsageError(fmt::format("--max-drop: {} was trained with --qat, which knows what is left in floating point",
                                   shown_path(loaded.file)));
    }
  }
  (void)left_dtype(loaded, o.amp);
  std::optional<Loaded> trained = load_trained(o, loaded);
  const auto seed = o.pictures.count("--seed") > 0 ? std::optional(o.seed) : std::nullopt;
  const DataPlace place = place_of_data(loaded, o.data, seed);
  fmt::print("quantizing {} by {}\n", loaded.text(o.model), place.text(loaded));
  std::fflush(stdout);
  training::TrainConfig c =
      data_config(o.model, loaded, place, images ? &o.pictures.images : nullptr, o.batch_size, device);
  training::RunData data = training::load_data(c);
  if (!data.classes.empty()) check_classes(loaded, data.classes, o.weights, place.folder);
  if (!loaded.classes.empty()) data.classes = loaded.classes;
  return Quantizer(o, std::move(loaded), std::move(c), std::move(data)).run(std::move(trained));
}

}  // namespace

void add_quantize(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "quantize", "Write a trained network's weights as 8-bit integers");
  auto o = std::make_shared<QuantizeOptions>();
  add_trained(verb, *o);
  add_path(
      verb, "DIR,--calibrate,--data", o->data,
      "Folder with the data set: ranges come from its training part, figures from its test part (default: the data "
      "of the run; for mlp, where none is known, the built-in digits)");
  add_path(verb, "--out,-o", o->out, "File to write (.safetensors)").required();
  verb.add_switch("--overwrite", o->overwrite, "Replace an existing file");
  add_whole(verb, "--batches", o->batches, 1, kMostCount, "Batches that ranges come from");
  add_training_flag(verb, "--batch-size", &o->batch_size);
  add_image_sizes(verb, o->pictures);
  for (const Flag& row : rows(o->quantization)) add_flag(verb, row);
  verb.add_switch(kWeightOnlyFlag, o->weight_only,
                  "Quantize only the weights of linear layers, to 8 or 4 bits; data are needed only to measure");
  add_whole(verb, kGroupSizeFlag, o->group_size, 0, kMostCount,
            "With --weight-only: weights of a row that share a scale; 0: whole rows")
      .value("N");
  add_flag(verb, {.names = "--max-drop",
                  .field = &o->max_drop,
                  .help = "Maximum loss of accuracy to float32, in points: as few layers as it takes stay in --amp, "
                          "those that cost most first",
                  .range = FlagRange::from_to(0, 100)})
      .value("POINTS");
  add_word(verb, "--amp", o->amp,
           "Precision of layers that stay in floating point: off, bf16 or f16 (default: with --max-drop bf16 where "
           "the CPU has units for it, else off)");
  add_path(verb, "--qat-weights", o->qat_weights,
           "Weights of a run with --qat, for a row of the last table: checkpoint or folder");
  add_whole(verb, "--layers", o->layers, 0, kMostCount, "Number of layers to list, those that differ most first");
  add_whole(verb, "--sensitivity", o->sensitivity, 0, kMostCount,
            "Number of layers to report by their individual cost, measured on 8 batches; 0: none");
  add_training_flag(verb, "--workers", &o->workers);
  add_training_flag(verb, "--seed", &o->seed, "Seed of the order of the training data");
  verb.add_switch("--no-eval", o->no_eval, "Evaluate nothing");
  verb.run([o, &status] {
    refuse_many_processes("quantize");
    status = run(*o);
  });
}

}  // namespace halfstep::cli
