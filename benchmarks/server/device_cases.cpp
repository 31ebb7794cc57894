// SPDX-License-Identifier: Apache-2.0
// What is measured on an accelerator (`bench_server --device cuda`): training steps, and the parts of a step that only
// move memory. Each case ends with a wait for the device, once a repetition.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <optional>

#include "benchmarks/server/layers.h"
#include "benchmarks/server/server.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/core/random.h"
#include "halfstep/models/mlp.h"
#include "halfstep/models/registry.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/train_step.h"

namespace halfstep::bench {
namespace {

// One that waits at its end.
Prepared on_device(Device device, std::function<void()> run) {
  Prepared prepared{std::move(run)};
  prepared.finish = [device] { synchronize(device); };
  prepared.facts = [device] {
    const MemoryStats stats = memory_stats(device);
    return std::map<std::string, double>{{"handed_out_bytes", static_cast<double>(stats.allocated_peak)},
                                         {"reserved_bytes", static_cast<double>(stats.reserved_peak)}};
  };
  return prepared;
}

// A training step under autocast: f16 with a scaler, bf16 without.
template <class Net>
struct Step {
  std::shared_ptr<Net> net;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::optional<training::TrainStep> step;
  data::Batch batch;

  void start(const nn::ModuleBase& module, std::function<Tensor(const Tensor&)> forward, std::optional<DType> low) {
    const training::Classifier classifier{.module = &module, .forward = std::move(forward)};
    step = training::make_train_step(std::make_shared<training::ClassificationTask>(classifier), *optimizer,
                                     amp::GradScaler({.enabled = low == f16}), {.autocast = low});
  }
  void train() { step->run({&batch, 1}); }
};

using LowPrecision = std::optional<DType>;

Prepared prepare_resnet(Device device, LowPrecision low, std::int64_t batch, std::int64_t size) {
  manual_seed(1);
  const auto step = std::make_shared<Step<models::Model>>();
  step->net = std::make_shared<models::Model>(models::make_model("resnet50"));
  step->net->module->to(MemoryFormat::channels_last);
  step->net->module->to(device);
  step->optimizer =
      std::make_unique<optim::SGD>(step->net->module->parameters(), optim::SGDOptions{.lr = 0.01, .momentum = 0.9});
  step->start(*step->net->module, step->net->forward, low);
  step->batch = {randn({batch, 3, size, size}, {.device = device}).contiguous(MemoryFormat::channels_last),
                 randint(0, 1000, {batch}, {.dtype = i64, .device = device})};
  return on_device(device, [step] { step->train(); });
}

Prepared prepare_mlp(Device device, LowPrecision low, std::int64_t batch, bool captured) {
  manual_seed(1);
  const auto step = std::make_shared<Step<models::MLP>>();
  step->net = std::make_shared<models::MLP>();
  step->net->to(device);
  step->optimizer = std::make_unique<optim::SGD>(step->net->parameters(), optim::SGDOptions{.lr = 0.01});
  step->start(
      *step->net, [net = step->net](const Tensor& x) { return (*net)(x); }, low);
  step->batch = {randn({batch, 784}, {.device = device}), randint(0, 10, {batch}, {.dtype = i64, .device = device})};
  if (captured) return on_device(device, [step] { step->step->run_captured({&step->batch, 1}); });
  return on_device(device, [step] { step->train(); });
}

// The small GPT: blocks of norm, attention, norm and a network four times as wide; positions are learnt.
struct GptBlock : nn::Module<GptBlock> {
  explicit GptBlock(std::int64_t width)
      : norm1(child("norm1", nn::LayerNorm{{.normalized_shape = {width}}})),
        norm2(child("norm2", nn::LayerNorm{{.normalized_shape = {width}}})),
        qkv(child("qkv", nn::Linear{{.in = width, .out = 3 * width}})),
        out(child("out", nn::Linear{{.in = width, .out = width}})),
        up(child("up", nn::Linear{{.in = width, .out = 4 * width}})),
        down(child("down", nn::Linear{{.in = 4 * width, .out = width}})) {}
  Tensor forward(const Tensor& x) const {
    const std::int64_t n = x.size(0), length = x.size(1), width = x.size(2), heads = width / 64;
    const Tensor all = qkv(norm1(x)).view({n, length, 3, heads, 64}).permute({2, 0, 3, 1, 4});
    const Tensor seen = scaled_dot_product_attention(all[0], all[1], all[2], {.is_causal = true});
    const Tensor y = x + out(seen.transpose(1, 2).reshape({n, length, width}));
    return y + down(gelu(up(norm2(y))));
  }
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, up, down;
};
struct Gpt : nn::Module<Gpt> {
  Gpt(std::int64_t words, std::int64_t length, std::int64_t width, int layers)
      : word(child("word", nn::Embedding{{.num = words, .dim = width}})),
        place(child("place", nn::Embedding{{.num = length, .dim = width}})),
        blocks(child("blocks", make_blocks(width, layers))),
        norm(child("norm", nn::LayerNorm{{.normalized_shape = {width}}})),
        head(child("head", nn::Linear{{.in = width, .out = words, .bias = false}})) {}
  static nn::ModuleList<GptBlock> make_blocks(std::int64_t width, int layers) {
    nn::ModuleList<GptBlock> list;
    for (int i = 0; i < layers; ++i) list.push_back(GptBlock(width));
    return list;
  }
  Tensor forward(const Tensor& tokens) const {
    const Tensor places = arange(0, tokens.size(1), 1, {.dtype = i64, .device = tokens.device()});
    Tensor x = word(tokens) + place(places);
    for (const GptBlock& block : blocks) x = block(x);
    return head(norm(x)).view({-1, head.options.out});
  }
  nn::Embedding word, place;
  nn::ModuleList<GptBlock> blocks;
  nn::LayerNorm norm;
  nn::Linear head;
};

constexpr std::int64_t kWords = 65, kLength = 256, kWidth = 384;  // characters of a play, as small GPTs are shown
constexpr int kLayers = 6;

Prepared prepare_gpt(Device device, LowPrecision low, std::int64_t batch) {
  manual_seed(1);
  const auto step = std::make_shared<Step<Gpt>>();
  step->net = std::make_shared<Gpt>(kWords, kLength, kWidth, kLayers);
  step->net->to(device);
  step->optimizer = std::make_unique<optim::AdamW>(step->net->parameters(), optim::AdamWOptions{.lr = 1e-3});
  step->start(
      *step->net, [net = step->net](const Tensor& x) { return (*net)(x); }, low);
  step->batch = {randint(0, kWords, {batch, kLength}, {.dtype = i64, .device = device}),
                 randint(0, kWords, {batch * kLength}, {.dtype = i64, .device = device})};
  return on_device(device, [step] { step->train(); });
}

// Forward, and twice as much backward: the products of each token's weights, and half of the scores (causal).
double gpt_operations(std::int64_t batch) {
  const double tokens = static_cast<double>(batch * kLength), width = kWidth;
  const double weights = kLayers * 12 * width * width + width * kWords;
  const double scores = kLayers * 2 * (static_cast<double>(kLength) / 2) * width;
  return 3 * 2 * tokens * (weights + scores);
}

NamedTensors many_parameters(Device device, DType dtype, double parameters) {
  // 100 tensors, as networks have them.
  const auto rows = static_cast<std::int64_t>(parameters / 100 / 1000);
  NamedTensors all;
  for (int i = 0; i < 100; ++i) {
    Tensor p = randn({rows, 1000}, {.device = device}).to(dtype);
    p.set_grad(randn({rows, 1000}, {.device = device}).to(dtype));
    all.push_back({fmt::format("p{}", i), p.requires_grad_()});
  }
  return all;
}

Prepared prepare_unscale(Device device, DType dtype, double parameters) {
  struct State {
    NamedTensors all;
    optim::SGD optimizer;
    amp::GradScaler scaler{{.init_scale = 1, .growth_factor = 1.0000001}};
  };
  NamedTensors all = many_parameters(device, dtype, parameters);
  const std::shared_ptr<State> state(new State{all, optim::SGD(all, {.lr = 0.01})});
  state->scaler.scale(zeros({1}, {.device = device}));
  // f16 gradients become f32 ones, and then stay: each call begins with the same.
  std::vector<Tensor> gradients;
  for (const auto& [name, p] : state->all) gradients.push_back(p.grad());
  return on_device(device, [state, gradients] {
    for (std::size_t i = 0; i < gradients.size(); ++i) state->all[i].tensor.set_grad(gradients[i]);
    state->scaler.unscale_(state->optimizer);
    state->scaler.update();
  });
}

Prepared prepare_optimizer(Device device, const std::string& kind, DType dtype, double parameters) {
  const NamedTensors all = many_parameters(device, dtype, parameters);
  std::shared_ptr<optim::Optimizer> optimizer;
  if (kind == "sgd") {
    optimizer = std::make_shared<optim::SGD>(all, optim::SGDOptions{.lr = 1e-3, .momentum = 0.9});
  } else {
    optimizer = std::make_shared<optim::AdamW>(all, optim::AdamWOptions{.lr = 1e-3});
  }
  return on_device(device, [optimizer] { optimizer->step(); });
}

Prepared prepare_copy(Device device, std::int64_t bytes) {
  const Tensor from = zeros({bytes / 4}, {.device = device});
  auto to = std::make_shared<Tensor>(empty({bytes / 4}, {.device = device}));
  return on_device(device, [from, to] { to->copy_(from); });
}

Prepared prepare_product(Device device, DType dtype, std::int64_t m, std::int64_t k, std::int64_t n) {
  const Tensor a = randn({m, k}, {.device = device}).to(dtype), b = randn({n, k}, {.device = device}).to(dtype);
  return on_device(device, [a, b] { linear(a, b); });
}

Prepared prepare_conv(Device device, DType dtype, const ConvLayer& layer, std::int64_t batch) {
  const Tensor x = randn({batch, layer.in, layer.size, layer.size}, {.device = device})
                       .to(dtype)
                       .contiguous(MemoryFormat::channels_last);
  const Tensor w = randn({layer.out, layer.in, layer.kernel, layer.kernel}, {.device = device})
                       .to(dtype)
                       .contiguous(MemoryFormat::channels_last);
  return on_device(device, [x, w, layer] { conv2d(x, w, {}, {.stride = {layer.stride}, .padding = {layer.padding}}); });
}

double item(DType dtype) { return static_cast<double>(item_size(dtype)); }

}  // namespace

void add_device_cases(std::vector<Case>& cases, Device device, bool small) {
  constexpr DType kLow[] = {f16, bf16};
  // What the memory gives: a copy reads and writes each byte once.
  const std::int64_t bytes = small ? std::int64_t{1} << 20 : std::int64_t{1} << 30;
  cases.push_back({"gpu/copy", [=] { return prepare_copy(device, bytes); }, 0, 2.0 * static_cast<double>(bytes)});
  const std::int64_t side = small ? 64 : 8192;
  for (DType dtype : {f16, bf16, f32}) {
    cases.push_back(
        {fmt::format("gpu/product/{}", name(dtype)), [=] { return prepare_product(device, dtype, side, side, side); },
         2 * std::pow(static_cast<double>(side), 3), 3 * std::pow(static_cast<double>(side), 2) * item(dtype)});
  }

  const std::int64_t images = small ? 2 : 256, size = small ? 32 : 224;
  const auto layers = resnet50_convolutions();
  double elements = 0;  // input read forward and backward, its gradient written; output written, its gradient read
  for (const ConvLayer& l : layers) elements += l.count * (3 * l.input() + 2 * l.output());
  const double share = static_cast<double>(size * size) / (224.0 * 224.0);
  for (DType low : kLow) {
    cases.push_back({fmt::format("gpu/resnet50/{}/b{}", name(low), images),
                     [=] { return prepare_resnet(device, low, images, size); },
                     share * step_operations(layers, 2048, 1000, images),
                     share * 2 * elements * static_cast<double>(images)});
  }
  constexpr double kWeights = 784 * 512 + 512 * 512 + 512 * 10, kHidden = 512 * 512 + 512 * 10;
  for (const auto& [kind, low, captured] : {std::tuple{"f32", LowPrecision{}, false},
                                            {"f16", LowPrecision{f16}, false},
                                            {"bf16", LowPrecision{bf16}, false},
                                            {"f16_captured", LowPrecision{f16}, true},
                                            {"bf16_captured", LowPrecision{bf16}, true}}) {
    cases.push_back({fmt::format("gpu/mlp/{}/b64", kind),
                     [=, low = low, captured = captured] { return prepare_mlp(device, low, 64, captured); },
                     2.0 * 64 * (2 * kWeights + kHidden), (low ? 2 : 4) * (kWeights + kHidden) + 4 * 4 * kWeights});
  }
  const std::int64_t texts = small ? 1 : 64;
  for (DType low : kLow) {
    cases.push_back({fmt::format("gpu/gpt/{}/b{}", name(low), texts), [=] { return prepare_gpt(device, low, texts); },
                     gpt_operations(texts), 0});
  }

  const double parameters = small ? 1e5 : 1e8;
  // f32 is unscaled where it lies; f16 is read and becomes f32.
  cases.push_back({"gpu/unscale/f32", [=] { return prepare_unscale(device, f32, parameters); }, 0, 8 * parameters});
  cases.push_back({"gpu/unscale/f16", [=] { return prepare_unscale(device, f16, parameters); }, 0, 6 * parameters});
  // Gradient read, parameter written, in 16 bits; master weight and moments, in float32, read and written.
  for (DType low : kLow) {
    cases.push_back({fmt::format("gpu/optimizer/adamw/{}", name(low)),
                     [=] { return prepare_optimizer(device, "adamw", low, parameters); }, 0,
                     (2 + 2 + 3 * 8) * parameters});
    cases.push_back({fmt::format("gpu/optimizer/sgd/{}", name(low)),
                     [=] { return prepare_optimizer(device, "sgd", low, parameters); }, 0,
                     (2 + 2 + 2 * 8) * parameters});
  }
  // Gradient and parameter read, parameter written, moments read and written.
  cases.push_back({"gpu/optimizer/adamw/f32", [=] { return prepare_optimizer(device, "adamw", f32, parameters); }, 0,
                   (4 + 8 + 16) * parameters});

  // Products and convolutions of networks, one by one: which algorithm was chosen shows here.
  struct Product {
    std::int64_t m, k, n;
  };
  for (const Product& p : {Product{64, 784, 512},
                           {16384, 384, 1152},
                           {16384, 384, 1536},
                           {16384, 1536, 384},
                           {256, 2048, 1000},
                           {4096, 4096, 4096}}) {
    const std::int64_t part = small ? 8 : 1;
    const std::int64_t m = p.m / part, k = p.k / part, n = p.n / part;
    cases.push_back({fmt::format("gpu/linear/{}x{}x{}", m, k, n), [=] { return prepare_product(device, f16, m, k, n); },
                     2.0 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n),
                     2.0 * static_cast<double>(m * k + k * n + m * n)});
  }
  for (ConvLayer l : layers) {
    const std::string which = fmt::format("gpu/conv/{0}x{0}-{1}-{2}-s{3}-{4}", l.kernel, l.in, l.out, l.stride, l.size);
    if (small) l.size = std::max<std::int64_t>(l.size / 8, 7);
    const double batch = static_cast<double>(images);
    cases.push_back({which, [=] { return prepare_conv(device, f16, l, images); }, 2 * batch * l.multiply_adds(),
                     2 * (batch * (l.input() + l.output()) + l.weight())});
  }
}

}  // namespace halfstep::bench
