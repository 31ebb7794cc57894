// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/fold.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "cli/weights_files.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/text.h"
#include "halfstep/io/onnx.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::cli {
namespace {

constexpr std::uint64_t kMostExportBatch = 65536;

struct ExportOptions : TrainedOptions {
  std::filesystem::path onnx;
  std::string batch_size = "dynamic", dtype = "f32";
  int opset = 17;
  bool fold = false, nms = false;
  io::OnnxNms suppression;
};

DType parse_onnx_dtype(const std::string& name) {
  for (const DType dtype : {f32, f16}) {
    if (name == halfstep::name(dtype)) return dtype;
  }
  throw UsageError(fmt::format("--dtype: expected f32 or f16, got '{}'{}", name,
                               name == "bf16" ? "; ONNX's convolution doesn't take it" : ""));
}

void check_target(const ExportOptions& o) {
  std::error_code error;
  if (std::filesystem::is_directory(o.onnx, error)) {
    throw UsageError(fmt::format("--onnx: expected a file to write, got the folder {}", shown_path(o.onnx)));
  }
  if (std::filesystem::equivalent(o.weights, o.onnx, error)) {
    throw UsageError(fmt::format("--onnx: {} is the file of weights; give another name", shown_path(o.onnx)));
  }
  // Most likely a slip, and --weights may be the folder that it is in.
  for (const char* extension : {".safetensors", ".pth", ".pt"}) {
    if (o.onnx.extension() == extension) {
      throw UsageError(
          fmt::format("--onnx: expected the name of an ONNX file, got {}, which is one of weights; "
                      "`halfstep convert` writes those",
                      shown_path(o.onnx)));
    }
  }
}

void check_suppression(const ExportOptions& o) {
  if (!o.nms) {
    for (const char* flag : {"--score", "--overlap"}) {
      if (o.pictures.count(flag) > 0) throw UsageError(fmt::format("{}: only with --nms", flag));
    }
    return;
  }
  for (const auto& [flag, value] : {std::pair("--score", o.suppression.score), {"--overlap", o.suppression.overlap}}) {
    if (!(value >= 0 && value <= 1)) {
      throw UsageError(fmt::format("{}: expected a number from 0 to 1, got {}", flag, value));
    }
  }
}

void check_predictions(const std::string& model, const training::Network& network, const Tensor& example) {
  const NoGrad no_grad;
  const nn::EvalMode evaluation(*network.module);
  const Shape sizes = network.forward(example).sizes();
  if (sizes.size() != 3 || sizes[2] < 6) {
    throw UsageError(fmt::format("--nms: expected a detector, which gives [N, predictions, 5 + classes]; {} gives {}",
                                 model, sizes.str()));
  }
}

int run(ExportOptions& o) {
  const Device device = apply_common(o);
  io::OnnxOptions options{
      .opset = o.opset, .dynamic_batch = o.batch_size == "dynamic", .dtype = parse_onnx_dtype(o.dtype)};
  const auto batch = options.dynamic_batch
                         ? 1
                         : static_cast<std::int64_t>(parse_whole("--batch-size", o.batch_size, 1, kMostExportBatch));
  check_target(o);
  const Loaded loaded = load_classifier(o.model, o.weights);
  const training::Network& network = loaded.network;
  check_suppression(o);
  if (o.nms) options.nms = o.suppression;
  const bool images = training::network_input(o.model).images;
  if (images) {
    resolve_images(o.pictures, o.model, loaded);
  } else {
    refuse_image_flags(o.pictures, o.model, {"--image-size"});
  }
  const std::int64_t size = images ? o.pictures.images.image_size : 0;
  const std::string folded = o.fold ? fold_network(loaded, o.model, size) : "";
  network.module->to(device);
  const Tensor example = training::example_input(o.model, batch, size, device);
  const auto forward = [&](std::span<const Tensor> in) { return std::vector<Tensor>{network.forward(in[0])}; };
  if (o.nms) check_predictions(o.model, network, example);
  const io::OnnxSummary summary =
      io::export_onnx(o.onnx, *network.module, forward, std::span<const Tensor>(&example, 1), options);
  const std::string samples = options.dynamic_batch ? "batch" : fmt::format("{}", batch);
  fmt::print("{}{}\n", loaded.text(o.model), folded);
  fmt::print("{}: {} operators, {} parameters and constants in {} tensors, {}; takes [{}, {}]\n", shown_path(o.onnx),
             summary.nodes, summary.elements, summary.initializers,
             bytes_text(static_cast<std::uint64_t>(summary.bytes)), samples,
             fmt::join(example.sizes().begin() + 1, example.sizes().end(), ", "));
  return kDone;
}

}  // namespace

void add_export(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "export", "Write a trained network as an ONNX file");
  auto o = std::make_shared<ExportOptions>();
  add_trained(verb, *o);
  add_path(verb, "--onnx", o->onnx, "File to write; one that is there is replaced").required();
  // A word, not training's number.
  add_word(verb, "--batch-size,-b", o->batch_size, "Samples of a batch, or dynamic: any number");
  add_image_size(verb, o->pictures);
  add_word(verb, "--dtype", o->dtype, "Dtype of the file's tensors: f32 or f16");
  add_whole(verb, "--opset", o->opset, 17, 21, "Version of ONNX's operators");
  add_fold(verb, o->fold);
  verb.add_switch("--nms", o->nms,
                  "Of a detector: the objects that it finds, by non-maximum suppression, in place of its predictions");
  add_real(verb, "--score", o->suppression.score, "With --nms: objects have a score above this");
  add_real(verb, "--overlap", o->suppression.overlap,
           "With --nms: boxes that overlap a better one by more are dropped");
  verb.run([o, &status] {
    refuse_many_processes("export");
    status = run(*o);
  });
}

}  // namespace halfstep::cli
