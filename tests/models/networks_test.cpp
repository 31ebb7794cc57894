// SPDX-License-Identifier: Apache-2.0
// Small image networks against PyTorch (tests/goldens/make_models.py): logits, and five steps of training.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/node.h"
#include "halfstep/io/pth.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/resnet.h"
#include "halfstep/nn/init.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "tests/models/peer_numbers.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using test::GoldenEntry;

struct Net {
  std::shared_ptr<const nn::ModuleBase> module;
  std::function<Tensor(const Tensor&)> forward;
};
template <class M>
Net net_of(const M& m) {
  const auto module = std::make_shared<const M>(m);
  return {module, [module](const Tensor& x) { return (*module)(x); }};
}

// The golden's network with the golden's weights.
Net network(const GoldenEntry& e, DType dtype) {
  const std::int64_t classes = e.integer("classes");
  const Net net = e.op == "mobilenet"
                      ? net_of(models::MobileNetV2{{.width = e.real("width"), .classes = classes, .dropout = 0}})
                      : net_of(models::ResNet{{.block = e.text("block") == "basic" ? models::ResNetBlock::basic
                                                                                   : models::ResNetBlock::bottleneck,
                                               .layers = Shape(e.integers("layers")),
                                               .width = e.integer("width"),
                                               .classes = classes,
                                               .cifar_stem = e.flag("cifar")}});
  net.module->to(dtype);
  net.module->load_state_dict(test::peer_state(*net.module));
  return net;
}

Tensor images_of(const GoldenEntry& e, DType dtype) {
  const std::int64_t size = e.integer("size");
  return test::peer_images(1000, {e.integer("images"), 3, size, size}, dtype);
}

Tensor labels_of(const GoldenEntry& e) {
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < e.integer("images"); ++i) labels.push_back(i % e.integer("classes"));
  return tensor(labels, {e.integer("images")});
}

double largest(const std::vector<double>& values) {
  double result = 0;
  for (const double v : values) result = std::max(result, std::abs(v));
  return result;
}

// The largest difference, as a share of the largest value.
double difference(const Tensor& got, const test::GoldenTensor& expected) {
  std::vector<double> v = got.to_vector<double>();
  EXPECT_EQ(got.sizes(), Shape(expected.shape));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] -= expected.data[i];
  const double d = largest(v);
  return std::isfinite(d) ? d / largest(expected.data) : 1e300;
}

double difference(const Tensor& got, const Tensor& expected) {
  return difference(got, test::GoldenTensor{{expected.sizes().begin(), expected.sizes().end()},
                                            name(expected.dtype()),
                                            expected.to_vector<double>()});
}

class Networks : public testing::TestWithParam<const char*> {
 protected:
  static GoldenEntry golden() {
    for (GoldenEntry& e : test::read_goldens("models.json")) {
      if (e.name == GetParam()) return e;
    }
    throw std::runtime_error("models.json: no such entry");
  }
};
INSTANTIATE_TEST_SUITE_P(, Networks,
                         testing::Values("resnet/basic", "resnet/bottleneck", "resnet/tiny", "resnet/20",
                                         "resnet/18_cifar", "mobilenet/0.1"));

// Both sides round in float64, in other orders; tests/goldens/README.md has the bounds.
TEST_P(Networks, TrainAlongPyTorchsTrajectory) {
  const GoldenEntry e = golden();
  const Net net = network(e, f64);
  const Tensor images = images_of(e, f64), labels = labels_of(e);
  net.module->eval();
  EXPECT_LE(difference(net.forward(images), e.outputs[0]), 1e-11);
  net.module->train();
  optim::SGD optimizer{net.module->parameters(), {.lr = e.real("lr"), .momentum = 0.9, .weight_decay = 1e-4}};
  const std::vector<double>& losses = e.tensor("losses").data;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(net.forward(images), labels);
    EXPECT_NEAR(loss.item<double>(), losses[i], 1e-9 * largest(losses)) << "step " << i;
    loss.backward();
    optimizer.step();
  }
  net.module->eval();
  EXPECT_LE(difference(net.forward(images), e.outputs[1]), 1e-9);
}

// The layouts of images and weights change nothing but the order of sums.
TEST_P(Networks, LayoutsGiveTheSameGradients) {
  const GoldenEntry e = golden();
  const Net net = network(e, f32), other = network(e, f32);
  other.module->to(MemoryFormat::channels_last);
  const Tensor images = images_of(e, f32), labels = labels_of(e);
  cross_entropy(net.forward(images), labels).backward();
  cross_entropy(other.forward(to_channels_last(images)), labels).backward();
  const NamedTensors a = net.module->parameters(), b = other.module->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = a[i].tensor.grad().to_vector<double>();
    auto y = b[i].tensor.grad().to_vector<double>();
    for (std::size_t k = 0; k < x.size(); ++k) y[k] -= x[k];
    // As tests/goldens/README.md says of float64's rounding, batch statistics magnify float32's by up to 1e4.
    EXPECT_LE(largest(y), 1e-3 * largest(x)) << a[i].name;
  }
}

// float32: sums of at most 600 products and some dozens of layers, each within a few units of 2^-24 of its scale.
// 16 bits: every layer rounds its result once, by up to 2^-9 in bfloat16; over the layers that adds up as a random
// walk.
TEST_P(Networks, LogitsInEveryPrecision) {
  const GoldenEntry e = golden();
  const Net net = network(e, f32);
  net.module->eval();
  const NoGrad no_grad;
  const Tensor images = images_of(e, f32);
  EXPECT_LE(difference(net.forward(images), e.outputs[0]), 1e-4);
  for (const DType dtype : {bf16, f16}) {
    const amp::Autocast autocast{{.dtype = dtype}};
    const Tensor logits = net.forward(images);
    EXPECT_EQ(logits.dtype(), dtype);
    EXPECT_LE(difference(logits, e.outputs[0]), 2 * e.real(name(dtype))) << name(dtype);
    EXPECT_GT(difference(logits, e.outputs[0]), 0) << "nothing was rounded to " << name(dtype);
  }
}

// Counts calls that give images which don't lie channels-last, and copies that change a layout.
struct LayoutObserver : OpObserver {
  LayoutObserver() { add_observer(this); }
  ~LayoutObserver() override { remove_observer(this); }
  void after_call(const ObservedCall& call) override {
    for (const Tensor* out : call.outputs) {
      if (!out->defined() || out->dim() != 4 || out->size(2) * out->size(3) == 1 || out->size(1) == 1) continue;
      ++images;
      if (!is_channels_last(*out)) others.push_back(std::string(call.name) + " " + out->sizes().str());
    }
    if (call.inputs.empty() || call.outputs.empty() || !call.inputs[0]->defined()) return;
    const Tensor &from = *call.inputs[0], &to = *call.outputs[0];
    if (from.dim() == 4 && from.sizes() == to.sizes() && from.strides() != to.strides()) {
      turned.push_back(std::string(call.name) + " " + from.sizes().str());
    }
  }
  int images = 0;
  std::vector<std::string> others;
  std::vector<std::string> turned;
};

TEST_P(Networks, ImagesStayChannelsLast) {
  const GoldenEntry e = golden();
  const Net net = network(e, f32);
  const Tensor images = images_of(e, f32), last = to_channels_last(images);
  const NoGrad no_grad;
  {
    const LayoutObserver seen;
    net.forward(last);
    EXPECT_GT(seen.images, 10);
    EXPECT_TRUE(seen.others.empty()) << seen.others[0];
    EXPECT_TRUE(seen.turned.empty()) << seen.turned[0];
  }
  const LayoutObserver seen;
  net.forward(images);
  EXPECT_TRUE(seen.others.empty()) << seen.others[0];
  EXPECT_EQ(seen.turned.size(), 1U) << "the input, once";
}

struct Names : OpObserver {
  Names() { add_observer(this); }
  ~Names() override { remove_observer(this); }
  void after_call(const ObservedCall& call) override {
    const std::lock_guard lock(mutex);
    // The counter of batches is the one scalar.
    if (!call.op || std::string_view(call.name) == "add_scalar") return;
    ++count[call.name];
    places[call_origin().module_path].push_back(call.name);
  }
  std::mutex mutex;
  std::map<std::string, int> count;
  std::map<std::string, std::vector<std::string>> places;
};

// How often each op stands in the graph of a result.
std::map<std::string, int> graph_of(const Tensor& result) {
  std::map<std::string, int> count;
  std::set<const Node*> seen;
  std::vector<const Node*> left{autograd_meta(result).grad_fn.get()};
  while (!left.empty()) {
    const Node* node = left.back();
    left.pop_back();
    if (!node || !seen.insert(node).second) continue;
    ++count[node->name()];
    for (const Edge& e : node->edges) left.push_back(e.node.get());
  }
  return count;
}

// Batch norms of a network: all, and those that nothing follows in the same pass.
std::pair<int, int> norms_of(const Net& net) {
  int all = 0, bare = 0;
  net.module->apply([&](const std::string& path, const nn::ModuleBase& m) {
    if (dynamic_cast<const nn::BatchNorm2d*>(&m)) ++all;
    if (path.ends_with("downsample.1")) ++bare;
    if (const auto* b = dynamic_cast<const models::InvertedResidual*>(&m)) {
      if (b->options.stride != 1 || b->options.in != b->options.out) ++bare;
    }
  });
  return {all, bare};
}

std::vector<std::vector<double>> gradients_of(const Net& net) {
  std::vector<std::vector<double>> result;
  for (const NamedTensor& p : net.module->parameters()) result.push_back(p.tensor.grad().to_vector<double>());
  return result;
}

// What follows a batch norm is done in its pass; with an observer all is as if the ops ran one by one, to the bit in
// float32.
TEST_P(Networks, NormsTakeInWhatFollows) {
  const GoldenEntry e = golden();
  const Net net = network(e, f32), other = network(e, f32);
  const Tensor images = to_channels_last(images_of(e, f32)), labels = labels_of(e);
  const auto [all, bare] = norms_of(net);
  ASSERT_GT(all, bare);

  const Tensor fused = net.forward(images);
  auto graph = graph_of(fused);
  EXPECT_EQ(graph["batch_norm_act"], all - bare);
  EXPECT_EQ(graph["batch_norm"], bare);
  for (const char* single : {"relu", "hardtanh", "add"}) EXPECT_EQ(graph[single], 0) << single;
  cross_entropy(fused, labels).backward();
  const auto expected = gradients_of(net);

  Names seen;
  const Tensor single = other.forward(images);
  EXPECT_EQ(seen.count["batch_norm_act"], 0);
  EXPECT_EQ(seen.count["batch_norm"], all);
  const bool mobile = e.op == "mobilenet";
  EXPECT_GT(seen.count[mobile ? "hardtanh" : "relu"], 5 * all / 10);
  EXPECT_GT(seen.count["add"], 0);
  // The module that they are called in is the norm's.
  const auto& place = seen.places[mobile ? "features.3.conv.3" : "layer1.0.bn1"];
  EXPECT_EQ(place, mobile ? std::vector<std::string>({"batch_norm", "add"})
                          : std::vector<std::string>({"batch_norm", "relu"}));
  EXPECT_EQ(single.to_vector<float>(), fused.to_vector<float>());
  cross_entropy(single, labels).backward();
  EXPECT_EQ(seen.count["batch_norm_act_backward"], 0);
  EXPECT_EQ(gradients_of(other), expected);
}

// What a forward pass leaves for the backward one: of a convolution and what follows it the convolution's result and
// the end's, in 16 bits half of that and channels' float32 statistics.
TEST_P(Networks, ActivationsThatAreKept) {
  const GoldenEntry e = golden();
  const Net net = network(e, f32);
  const bool mobile = e.op == "mobilenet";
  const std::int64_t size = e.integer("size");
  const Tensor images = to_channels_last(test::peer_images(1, {mobile ? 8 : 32, 3, size, size}, f32));
  struct Held {
    double now, peak;
  };
  const auto held = [&](DType dtype) {
    const amp::Autocast autocast{{.dtype = bf16, .enabled = dtype == bf16}};
    const std::uint64_t before = memory_stats().allocated;
    reset_peak_memory();
    const Tensor logits = net.forward(images);
    const MemoryStats after = memory_stats();
    return Held{static_cast<double>(after.allocated - before), static_cast<double>(after.allocated_peak - before)};
  };
  // Float32 needs no copies of images and weights.
  double copies = 2 * static_cast<double>(images.numel());
  for (const NamedTensor& p : net.module->parameters()) {
    if (p.tensor.dim() > 1) copies += 2 * static_cast<double>(p.tensor.numel());
  }
  Held fused[2], single[2];
  for (const DType dtype : {f32, bf16}) {
    fused[dtype == bf16] = held(dtype);
    const Names observed;
    single[dtype == bf16] = held(dtype);
    // The ops one by one keep relu's result too, but relu6 needs its input for its gradient.
    EXPECT_LE(fused[dtype == bf16].now, (mobile ? 0.75 : 1) * single[dtype == bf16].now) << halfstep::name(dtype);
    EXPECT_LE(fused[dtype == bf16].peak, single[dtype == bf16].peak) << halfstep::name(dtype);
  }
  const double share = (fused[1].now - copies) / fused[0].now;
  EXPECT_LE(share, 0.52);
}

// Saved by Halfstep and read again, with the layouts of a network in use: the same network.
TEST(ResNet, GoesThroughFilesOfTorchsForm) {
  const models::ResNet net = models::cifar_resnet(20), again = models::cifar_resnet(20);
  net.to(MemoryFormat::channels_last);
  const Tensor images = test::peer_images(3, {4, 3, 16, 16}, f32);
  cross_entropy(net(images), tensor(std::vector<std::int64_t>{0, 1, 2, 3}, {4})).backward();
  optim::SGD{net.parameters(), {.lr = 0.1}}.step();
  const test::TemporaryDir dir;
  io::save_pth(dir.path() / "net.pth", net.state_dict());
  const io::PthFile file = io::load_pth(dir.path() / "net.pth");
  ASSERT_EQ(file.tensors.size(), net.state_dict().size());
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    EXPECT_EQ(file.tensors[i].name, net.state_dict()[i].name);
    EXPECT_EQ(file.tensors[i].tensor.sizes(), net.state_dict()[i].tensor.sizes()) << file.tensors[i].name;
  }
  again.load_state_dict(file.tensors);
  EXPECT_EQ(again.bn1.num_batches_tracked.item<int>(), 1);
  net.eval();
  again.eval();
  EXPECT_LE(difference(again(images), net(images)), 1e-5) << "the layouts of weights differ, and so the order of sums";
  again.to(MemoryFormat::channels_last);
  EXPECT_EQ(again(images).to_vector<float>(), net(images).to_vector<float>());
}

TEST(ResNet, LoadsWhatTorchSaved) {
  const std::vector<GoldenEntry> all = test::read_goldens("models.json");
  const auto e = std::find_if(all.begin(), all.end(), [](const GoldenEntry& g) { return g.name == "resnet/tiny"; });
  ASSERT_NE(e, all.end());
  const models::ResNet net{{.layers = {1, 1}, .width = 4, .classes = 10}};
  net.load_state_dict(io::load_pth(test::goldens_dir() / "resnet_tiny.pth").tensors);
  net.eval();
  EXPECT_LE(difference(net(images_of(*e, f32)), e->outputs[0]), 1e-4);
}

// With the last batch norm at zero a block is relu of its shortcut.
TEST(ResNet, ZeroInitMakesBlocksShortcuts) {
  const models::ResNet net{{.layers = {2}, .width = 4, .classes = 2, .zero_init_residual = true}};
  EXPECT_EQ(net.layer1.at<models::Bottleneck>(1).bn3.weight.to_vector<float>(), std::vector<float>(16, 0));
  EXPECT_EQ(net.layer1.at<models::Bottleneck>(1).bn2.weight.to_vector<float>(), std::vector<float>(4, 1));
  const Tensor x = to_channels_last(test::peer_images(3, {2, 16, 5, 5}, f32));
  EXPECT_EQ(net.layer1.at<models::Bottleneck>(1)(x).to_vector<float>(), relu(x).to_vector<float>());
  const models::ResNet basic{
      {.block = models::ResNetBlock::basic, .layers = {1}, .width = 16, .classes = 2, .zero_init_residual = true}};
  EXPECT_EQ(basic.layer1.at<models::BasicBlock>(0)(x).to_vector<float>(), relu(x).to_vector<float>());
  const models::ResNet plain{{.layers = {1}, .width = 4, .classes = 2}};
  EXPECT_EQ(plain.layer1.at<models::Bottleneck>(0).bn3.weight.to_vector<float>(), std::vector<float>(16, 1));
}

struct Moments {
  double mean, deviation, largest;
};
Moments moments(const Tensor& t) {
  const auto v = t.to_vector<double>();
  double sum = 0, squares = 0;
  for (const double x : v) sum += x, squares += x * x;
  const auto n = static_cast<double>(v.size());
  return {sum / n, std::sqrt(squares / n), largest(v)};
}

// Six standard errors: deviation / sqrt(n) of a mean, deviation / sqrt(2 n) of a deviation.
void expect_normal(const Tensor& t, double deviation) {
  const Moments m = moments(t);
  const auto n = static_cast<double>(t.numel());
  EXPECT_NEAR(m.mean, 0, 6 * deviation / std::sqrt(n));
  EXPECT_NEAR(m.deviation, deviation, 6 * deviation / std::sqrt(2 * n));
  EXPECT_GT(m.largest, 3 * deviation) << "not a normal distribution";
}

TEST(ResNet, StartsAsTorchvisions) {
  const models::ResNet net = models::resnet18();
  expect_normal(net.conv1.weight, std::sqrt(2.0 / (64 * 49)));
  expect_normal(net.layer2.at<models::BasicBlock>(0).conv1.weight, std::sqrt(2.0 / (128 * 9)));
  expect_normal(net.layer2.at<models::BasicBlock>(0).downsample.at<nn::Conv2d>(0).weight, std::sqrt(2.0 / 128));
  const Moments fc = moments(net.fc.weight);
  EXPECT_LE(fc.largest, 1 / std::sqrt(512.0));
  EXPECT_NEAR(fc.deviation, 1 / std::sqrt(3 * 512.0), 1e-3 / std::sqrt(512.0));
  EXPECT_EQ(moments(net.bn1.weight).mean, 1);
}

TEST(MobileNetV2, StartsAsTorchvisions) {
  const models::MobileNetV2 net{{.width = 0.5}};
  expect_normal(net.features.at<models::ConvNormReLU6>(18).conv.weight, std::sqrt(2.0 / 1280));
  // Of a depthwise convolution too the fan out is as PyTorch counts it: all channels.
  const auto& depthwise = net.features.at<models::InvertedResidual>(17).conv.at<models::ConvNormReLU6>(1).conv.weight;
  EXPECT_EQ(depthwise.sizes(), (Shape{480, 1, 3, 3}));
  expect_normal(depthwise, std::sqrt(2.0 / (480 * 9)));
  expect_normal(net.classifier.at<nn::Linear>(1).weight, 0.01);
  EXPECT_EQ(moments(net.classifier.at<nn::Linear>(1).bias).largest, 0);
}

TEST(ResNet, RefusesWhatDoesNotFit) {
  EXPECT_THROW((models::ResNet{{.layers = {}}}), Error);
  EXPECT_THROW((models::ResNet{{.layers = {1, 1, 1, 1, 1}}}), Error);
  EXPECT_THROW((models::ResNet{{.layers = {1, 0}}}), Error);
  EXPECT_THROW((models::ResNet{{.layers = {1}, .classes = 0}}), Error);
  EXPECT_THROW(models::cifar_resnet(21), Error);
  const models::ResNet net{{.layers = {1}, .width = 4, .classes = 2}};
  const std::string said = test::error_of<ShapeError>([&] { net(zeros({2, 1, 32, 32})); });
  EXPECT_NE(said.find("expected images [N, 3, H, W], got [2, 1, 32, 32]"), std::string::npos) << said;
  EXPECT_THROW(net(zeros({3, 32, 32})), ShapeError);
  EXPECT_THROW((models::MobileNetV2{{.width = 0}}), Error);
  EXPECT_THROW((models::MobileNetV2{{.width = NAN}}), Error);
  EXPECT_THROW((models::MobileNetV2{{.width = 0.1}}(zeros({2, 1, 32, 32}))), ShapeError);
}

// Float32 statistics and parameters under 16-bit activations, and clones that share nothing.
TEST(ResNet, TrainsUnderAutocast) {
  const models::ResNet net = models::cifar_resnet(8);
  const models::ResNet other = nn::clone(net);
  const Tensor images = test::peer_images(5, {4, 3, 16, 16}, f32);
  {
    const amp::Autocast autocast{{.dtype = bf16}};
    const Tensor loss = cross_entropy(net(images), tensor(std::vector<std::int64_t>{0, 1, 2, 3}, {4}));
    loss.backward();
  }
  for (const NamedTensor& p : net.parameters()) {
    EXPECT_EQ(p.tensor.dtype(), f32) << p.name;
    ASSERT_TRUE(p.tensor.grad().defined()) << p.name;
    EXPECT_EQ(p.tensor.grad().dtype(), f32) << p.name;
    EXPECT_GT(largest(p.tensor.grad().to_vector<double>()), 0) << p.name;
  }
  EXPECT_EQ(net.bn1.running_mean.dtype(), f32);
  EXPECT_EQ(net.bn1.num_batches_tracked.item<int>(), 1);
  EXPECT_EQ(other.bn1.num_batches_tracked.item<int>(), 0);
  EXPECT_FALSE(other.conv1.weight.grad().defined());
}

}  // namespace
}  // namespace halfstep
