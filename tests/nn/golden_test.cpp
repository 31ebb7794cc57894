// SPDX-License-Identifier: Apache-2.0
// Modules with options other than the defaults against PyTorch's (tests/goldens/make_layers.py), in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <set>

#include "halfstep/nn/activation.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/loss.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/create.h"
#include "tests/support/golden.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using test::GoldenTensor;

Tensor tensor_of(const GoldenTensor& t) {
  const DType dtype = t.dtype == "i64" ? i64 : t.dtype == "f32" ? f32 : f64;
  return tensor(t.data, Shape(t.shape), {.dtype = dtype});
}

// 1e-12 of the largest value: sums of some dozens of terms in float64.
void expect_equal(const Tensor& got, const GoldenTensor& expected, const std::string& what) {
  ASSERT_EQ(got.sizes(), Shape(expected.shape)) << what;
  const auto v = got.to_vector<double>();
  double largest = 1;
  for (double x : expected.data) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < v.size(); ++i) EXPECT_NEAR(v[i], expected.data[i], 1e-12 * largest) << what << " " << i;
}

struct Layer {
  std::shared_ptr<nn::ModuleBase> module;
  std::function<Tensor(const Tensor&)> call;
};
template <class M>
Layer layer(const M& m) {
  const auto module = std::make_shared<M>(m);
  return {module, [module](const Tensor& x) { return Tensor((*module)(x)); }};
}

template <class M>
Layer batch_norm(const GoldenEntry& e) {
  nn::BatchNormOptions o{.channels = e.integer("channels"),
                         .affine = e.flag("affine", true),
                         .track_running_stats = e.flag("track", true),
                         .dtype = f64};
  if (e.has("eps")) o.eps = e.real("eps");
  if (e.has("momentum")) o.momentum = e.real("momentum");
  if (e.flag("cumulative", false)) o.momentum = std::nullopt;
  return layer(M{o});
}

Shape sizes_of(const GoldenEntry& e, const char* attribute, std::int64_t otherwise) {
  return e.has(attribute) ? Shape(e.integers(attribute)) : Shape{otherwise};
}

nn::ConvOptions conv_options(const GoldenEntry& e) {
  nn::ConvOptions o{.in = 4,
                    .out = e.integer("out"),
                    .kernel = Shape(e.integers("kernel")),
                    .stride = sizes_of(e, "stride", 1),
                    .dilation = sizes_of(e, "dilation", 1),
                    .groups = e.integer("groups", 1),
                    .bias = e.flag("bias", true),
                    .dtype = f64};
  const bool word = e.has("padding") && std::holds_alternative<std::string>(e.attributes.at("padding"));
  o.padding = word ? nn::Padding(e.text("padding").c_str()) : nn::Padding(sizes_of(e, "padding", 0));
  const std::string mode = e.text("padding_mode", "zeros");
  if (mode == "reflect") o.padding_mode = nn::PaddingMode::reflect;
  if (mode == "replicate") o.padding_mode = nn::PaddingMode::replicate;
  if (mode == "circular") o.padding_mode = nn::PaddingMode::circular;
  return o;
}

nn::ConvTransposeOptions conv_transpose_options(const GoldenEntry& e) {
  return {.in = 4,
          .out = e.integer("out"),
          .kernel = Shape(e.integers("kernel")),
          .stride = sizes_of(e, "stride", 1),
          .padding = sizes_of(e, "padding", 0),
          .output_padding = sizes_of(e, "output_padding", 0),
          .groups = e.integer("groups", 1),
          .bias = e.flag("bias", true),
          .dilation = sizes_of(e, "dilation", 1),
          .dtype = f64};
}

Layer layer_of(const GoldenEntry& e) {
  if (e.op == "Conv1d") return layer(nn::Conv1d{conv_options(e)});
  if (e.op == "Conv2d") return layer(nn::Conv2d{conv_options(e)});
  if (e.op == "ConvTranspose1d") return layer(nn::ConvTranspose1d{conv_transpose_options(e)});
  if (e.op == "ConvTranspose2d") return layer(nn::ConvTranspose2d{conv_transpose_options(e)});
  const auto shape = [&] { return Shape(e.integers("sizes")); };
  const bool affine = e.flag("affine", true);
  if (e.op == "LayerNorm") {
    return layer(nn::LayerNorm{{.normalized_shape = shape(),
                                .eps = e.real("eps", 1e-5),
                                .affine = affine,
                                .bias = e.flag("bias", true),
                                .dtype = f64}});
  }
  if (e.op == "RMSNorm") {
    nn::RMSNormOptions o{.normalized_shape = shape(), .affine = affine, .dtype = f64};
    if (e.has("eps")) o.eps = e.real("eps");
    return layer(nn::RMSNorm{o});
  }
  if (e.op == "GroupNorm") {
    return layer(nn::GroupNorm{{.groups = e.integer("groups"),
                                .channels = e.integer("channels"),
                                .eps = e.real("eps", 1e-5),
                                .affine = affine,
                                .dtype = f64}});
  }
  if (e.op == "BatchNorm1d") return batch_norm<nn::BatchNorm1d>(e);
  if (e.op == "BatchNorm2d") return batch_norm<nn::BatchNorm2d>(e);
  if (e.op == "Linear") {
    return layer(
        nn::Linear{{.in = e.integer("in"), .out = e.integer("out"), .bias = e.flag("bias", true), .dtype = f64}});
  }
  if (e.op == "PReLU") return layer(nn::PReLU{{.channels = e.integer("channels"), .dtype = f64}});
  if (e.op == "LeakyReLU") return layer(nn::LeakyReLU{{.negative_slope = e.real("slope")}});
  if (e.op == "GELU") return layer(nn::GELU{{.form = GeluForm::tanh}});
  if (e.op == "Softplus") return layer(nn::Softplus{{.beta = e.real("beta"), .threshold = e.real("threshold")}});
  if (e.op == "Softmax") return layer(nn::Softmax{{.dim = e.integer("dim")}});
  if (e.op == "LogSoftmax") return layer(nn::LogSoftmax{{.dim = e.integer("dim")}});
  if (e.op == "Flatten") return layer(nn::Flatten{{.start = e.integer("start"), .end = e.integer("end")}});
  return layer(nn::Embedding{
      {.num = e.integer("num"), .dim = e.integer("dim"), .padding_idx = e.integer("padding_idx"), .dtype = f64}});
}

Reduction reduction_of(const GoldenEntry& e) {
  const std::string text = e.text("reduction", "mean");
  if (text == "none") return Reduction::none;
  if (text == "sum") return Reduction::sum;
  return text == "batchmean" ? Reduction::batchmean : Reduction::mean;
}

Tensor loss_of(const GoldenEntry& e, const Tensor& a, const Tensor& b) {
  const auto state = [&](const char* name) {
    const auto it = e.tensors.find(std::string("start.") + name);
    return it == e.tensors.end() ? Tensor() : tensor_of(it->second);
  };
  const Reduction reduction = reduction_of(e);
  if (e.op == "CrossEntropyLoss") {
    return nn::CrossEntropyLoss{{.weight = state("weight"),
                                 .reduction = reduction,
                                 .ignore_index = e.integer("ignore_index", -100),
                                 .label_smoothing = e.real("label_smoothing", 0)}}(a, b);
  }
  if (e.op == "NLLLoss") {
    return nn::NLLLoss{
        {.weight = state("weight"), .reduction = reduction, .ignore_index = e.integer("ignore_index", -100)}}(a, b);
  }
  if (e.op == "MSELoss") return nn::MSELoss{{.reduction = reduction}}(a, b);
  if (e.op == "L1Loss") return nn::L1Loss{{.reduction = reduction}}(a, b);
  if (e.op == "SmoothL1Loss") return nn::SmoothL1Loss{{.reduction = reduction, .beta = e.real("beta")}}(a, b);
  if (e.op == "HuberLoss") return nn::HuberLoss{{.reduction = reduction, .delta = e.real("delta")}}(a, b);
  if (e.op == "KLDivLoss") {
    return nn::KLDivLoss{{.reduction = reduction, .log_target = e.flag("log_target", false)}}(a, b);
  }
  if (e.op == "BCEWithLogitsLoss") {
    return nn::BCEWithLogitsLoss{
        {.weight = state("weight"), .pos_weight = state("pos_weight"), .reduction = reduction}}(a, b);
  }
  return nn::BCELoss{{.weight = state("weight"), .reduction = reduction}}(a, b);
}

TEST(LayersGolden, OptionsAreThoseOfPyTorch) {
  std::set<std::string> kinds;
  for (const GoldenEntry& e : test::read_goldens("layers.json")) {
    kinds.insert(e.op);
    if (e.op.ends_with("Loss")) {
      expect_equal(loss_of(e, tensor_of(e.inputs[0]), tensor_of(e.inputs[1])), e.outputs[0], e.name);
      continue;
    }
    const Layer l = layer_of(e);
    NamedTensors start;
    for (const auto& [name, value] : e.tensors) {
      if (name.starts_with("start.")) start.push_back({name.substr(6), tensor_of(value)});
    }
    ASSERT_NO_THROW(l.module->load_state_dict(start)) << e.name;
    for (std::size_t i = 0; i < e.inputs.size(); ++i) {
      l.module->train(i + 1 < e.inputs.size());
      expect_equal(l.call(tensor_of(e.inputs[i])), e.outputs[i], e.name + " input " + std::to_string(i));
    }
    for (const NamedTensor& t : l.module->state_dict()) {
      expect_equal(t.tensor, e.tensor("end." + t.name), e.name + " " + t.name);
    }
  }
  EXPECT_EQ(kinds.size(), 27U);
}

}  // namespace
}  // namespace halfstep
