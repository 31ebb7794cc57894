// SPDX-License-Identifier: Apache-2.0
// Sessions against the networks that they are made of: folded, in any batch, from several threads.
#include "halfstep/infer/session.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <thread>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/io/onnx.h"
#include "halfstep/io/onnx_import.h"
#include "halfstep/models/mlp.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/resnet.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/fold.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/view.h"
#include "halfstep/quant/quantization.h"
#include "tests/support/errors.h"

// Every allocation by operator new of this program and the library, while somebody counts.
namespace {
std::atomic<bool> counting{false};
std::atomic<std::int64_t> allocations{0};
void* counted_or_null(std::size_t bytes) noexcept {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* counted(std::size_t bytes) {
  void* p = counted_or_null(bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
}  // namespace
void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
// std::stable_sort allocates by this one and frees by the delete below: under the address sanitizer both must be ours.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return counted_or_null(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return counted_or_null(bytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

namespace halfstep::infer {
namespace {

#define EXPECT_ERROR(call, text)                                                 \
  EXPECT_NE(test::error_of([&] { (void)(call); }).find(text), std::string::npos) \
      << test::error_of([&] { (void)(call); })

std::vector<float> bits(const Tensor& t) { return t.to(f32).to_vector<float>(); }

// Statistics and weights of batch norm as training leaves them.
void season(const nn::ModuleBase& module) {
  manual_seed(3);
  for (const NamedTensor& t : module.state_dict()) {
    if (t.tensor.dim() != 1 || !t.tensor.is_floating()) continue;
    const bool factor = t.name.ends_with("var") || t.name.ends_with("weight");
    const Tensor values = factor ? rand(t.tensor.sizes()) * 0.6 + 0.7 : rand(t.tensor.sizes()) * 0.4 - 0.2;
    nn::replace_contents(t.tensor, values.to(t.tensor.dtype()));
  }
}

// The network as a session computes it: folded, channels-last, in evaluation mode.
template <class M>
M reference_of(const M& net, const Tensor& example) {
  M folded = nn::fold_batch_norms(net, example);
  folded.to(MemoryFormat::channels_last).eval();
  return folded;
}

template <class M>
void expect_the_bits(const M& net, const Shape& sample, std::initializer_list<std::int64_t> batches) {
  season(net);
  Shape sizes = sample;
  sizes.insert(0, 1);
  manual_seed(5);
  const Tensor example = randn(sizes);
  const M folded = reference_of(net, example);
  const Session session(net, example);
  const NoGrad no_grad;
  for (const std::int64_t n : batches) {
    sizes[0] = n;
    const Tensor x = randn(sizes);
    const Tensor expected = folded(x);
    for (int call = 0; call < 3; ++call) {
      const Tensor got = session(x);
      ASSERT_EQ(got.sizes(), expected.sizes());
      EXPECT_TRUE(got.is_contiguous());
      EXPECT_EQ(bits(got), bits(expected)) << n << " samples, call " << call;
    }
  }
  EXPECT_EQ(session.why_not(), "");
  EXPECT_EQ(session.stats().planned, batches.size());
  EXPECT_EQ(session.stats().interpreted, 0u);
  for (const std::string& call : session.calls()) EXPECT_NE(call, "batch_norm");
}

TEST(Session, HasTheBitsOfTheFoldedNetworkForAnyBatch) {
  expect_the_bits(models::MLP(), {1, 28, 28}, {1, 2, 5, 32});
  expect_the_bits(models::cifar_resnet(20), {3, 32, 32}, {1, 2, 7});
  expect_the_bits(models::MobileNetV2({.width = 0.25, .classes = 10}), {3, 64, 64}, {1, 3});
}

TEST(Session, HasTheBitsOfADetectorsHeads) {
  const models::Yolov5 net({.classes = 3});
  season(net);
  net.eval();
  const nn::TracedForward forward = [&](std::span<const Tensor> in) { return net(in[0]); };
  manual_seed(5);
  const Session session(net, forward, {randn({1, 3, 64, 64})});
  models::Yolov5 folded = nn::clone(net);
  const NoGrad no_grad;
  nn::fold_batch_norms(folded, [&] { (void)folded(randn({1, 3, 64, 64})); });
  folded.to(MemoryFormat::channels_last).eval();
  for (const std::int64_t n : {1, 3}) {
    const Tensor x = randn({n, 3, 64, 64});
    const std::vector<Tensor> expected = folded(x);
    for (int call = 0; call < 2; ++call) {
      const std::vector<Tensor> got = session.run({&x, 1});
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(bits(got[i]), bits(expected[i])) << i;
    }
  }
}

// Views, constants and sizes that follow the batch; a linear layer with a norm behind it; a sequence's convolution;
// activations of what is read later, too.
struct Odd : nn::Module<Odd> {
  nn::Conv1d conv = child("conv", nn::Conv1d{{.in = 2, .out = 4, .kernel = {3}, .padding = 1}});
  nn::BatchNorm1d bn = child("bn", nn::BatchNorm1d{{.channels = 4}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 32, .out = 6}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 6}});
  nn::Buffer table = buffer("table", arange(6).to(f32));
  std::vector<Tensor> forward(const Tensor& x) const {
    const std::int64_t n = x.size(0);
    const Tensor a = relu(bn(conv(x)));
    const Tensor b = norm(fc(a.reshape({n, -1})));
    const Tensor whole = x.permute({0, 2, 1}).reshape({n * 8, 2}).slice(0, 0, n * 4).transpose(0, 1);
    const Tensor ones_of_batch = full({n, 6}, 0.5);
    const Tensor weights = softmax(b + table * 2, 1) * ones_of_batch;
    const Tensor pair = cat({b.unsqueeze(1), weights.unsqueeze(1)}, 1);
    return {pair, whole, x, table, mean(a, Shape{2}), b.select(1, 2), pair, sigmoid(b) * b + relu(b)};
  }
};

TEST(Session, FollowsTheBatchThroughViewsConstantsAndSizes) {
  const Odd net;
  season(net);
  net.eval();
  const nn::TracedForward forward = [&](std::span<const Tensor> in) { return net(in[0]); };
  manual_seed(7);
  const Session session(net, forward, {randn({4, 2, 8})});
  const NoGrad no_grad;
  for (const std::int64_t n : {1, 2, 3, 9}) {
    const Tensor x = randn({n, 2, 8});
    const std::vector<Tensor> expected = net(x);
    for (int call = 0; call < 2; ++call) {
      const std::vector<Tensor> got = session.run({&x, 1});
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i].sizes(), expected[i].sizes()) << i;
        const std::vector<float> a = bits(got[i]), b = bits(expected[i]);
        // Folding rounds each weight once more: 34 products of numbers below 4, and a softmax.
        for (std::size_t k = 0; k < a.size(); ++k) EXPECT_NEAR(a[k], b[k], 64 * 0x1p-24 * 4) << i;
      }
      EXPECT_EQ(bits(got[2]), bits(x)) << "an input that comes out";
      EXPECT_NE(got[2].storage().get(), x.storage().get());
      EXPECT_NE(got[0].storage().get(), got[6].storage().get());
    }
  }
  EXPECT_EQ(session.why_not(), "");
}

/// group_norm of channels that lie together, of slices, and of what a convolution leaves channels-last.
struct Grouped : nn::Module<Grouped> {
  nn::Conv2d conv = child("conv", nn::Conv2d{{.in = 4, .out = 8, .kernel = {3}, .padding = 1}});
  std::vector<Tensor> forward(const Tensor& x) const {
    const Tensor images = x.reshape({x.size(0), 4, 6, 8}), last = conv(images);
    return {group_norm(x.transpose(1, 2), 3), group_norm(images.slice(2, 0, 6, 2), 2),
            group_norm(last.slice(2, 0, 6, 2), 2), group_norm(last, 2)};
  }
};

TEST(Session, GroupNormTakesItsInputAsTheOpDoes) {
  Grouped net;
  season(net);
  net.to(MemoryFormat::channels_last).eval();
  const nn::TracedForward forward = [&](std::span<const Tensor> in) { return net(in[0]); };
  manual_seed(8);
  const Session session(net, forward, {randn({2, 16, 12})});
  const NoGrad no_grad;
  for (const std::int64_t n : {1, 2, 5}) {
    const Tensor x = randn({n, 16, 12});
    const std::vector<Tensor> expected = net(x), got = session.run({&x, 1});
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(bits(got[i]), bits(expected[i])) << i;
  }
  EXPECT_EQ(session.why_not(), "");
}

TEST(Session, RunsNetworksOfFiles) {
  const models::ResNet net = models::cifar_resnet(8);
  season(net);
  const auto path = std::filesystem::temp_directory_path() / fmt::format("session_{}.onnx", getpid());
  io::export_onnx(path, net, zeros({1, 3, 32, 32}));
  const io::OnnxNetwork read = io::load_onnx(path);
  read.to(zeros({1}).device());
  std::filesystem::remove(path);
  manual_seed(2);
  const Session session(read, zeros({1, 3, 32, 32})), own(net, zeros({1, 3, 32, 32}));
  for (const std::int64_t n : {1, 4}) {
    const Tensor x = randn({n, 3, 32, 32});
    EXPECT_EQ(bits(session(x)), bits(own(x)));
  }
  EXPECT_EQ(session.why_not(), "");
}

TEST(Session, DoesNotChangeWithTheNetwork) {
  const models::MLP net;
  manual_seed(1);
  const Tensor x = randn({3, 784});
  const Session session(net, x);
  const Session copy = session;
  const std::vector<float> before = bits(session(x));
  for (const NamedTensor& p : net.parameters()) {
    const NoGrad no_grad;
    Tensor t = p.tensor;
    t.fill_(1);
  }
  EXPECT_EQ(bits(session(x)), before);
  EXPECT_EQ(bits(copy(x)), before);
  EXPECT_NE(bits(net.eval()(x)), before);
  EXPECT_EQ(copy.stats().calls, 3u) << "copies share";
}

TEST(Session, RunsAsItIsInsideOfOtherModes) {
  const models::MLP net;
  manual_seed(1);
  const Tensor x = randn({3, 784}, {.requires_grad = true});
  const Session session(net, x.detach());
  const std::vector<float> expected = bits(session(x));
  EXPECT_FALSE(session(x).requires_grad());
  {
    const amp::Autocast autocast{{.dtype = bf16}};
    EXPECT_EQ(session(x).dtype(), f32);
    EXPECT_EQ(bits(session(x)), expected);
    EXPECT_TRUE(amp::is_autocast_enabled());
  }
  struct Names final : OpObserver {
    std::vector<std::string> seen;
    void after_call(const ObservedCall& call) override { seen.emplace_back(call.name); }
  } names;
  {
    const Observing observing(&names);
    EXPECT_EQ(bits(session(x)), expected);
  }
  EXPECT_GE(std::count(names.seen.begin(), names.seen.end(), "linear"), 1);
  EXPECT_EQ(session.stats().interpreted, 1u);
  auto step = capture([&](const Tensor& in) { return session(in) * 2; });
  const NoGrad no_grad;
  std::vector<float> twice;
  for (const float v : expected) twice.push_back(2 * v);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bits(step(x.detach())), twice);
  EXPECT_TRUE(step.replayed()) << step.why_not();
}

TEST(Session, InSixteenBitsFollowsThePolicyOfAutocast) {
  for (const DType dtype : {bf16, f16}) {
    const models::ResNet net = models::cifar_resnet(20);
    season(net);
    net.eval();
    manual_seed(2);
    const Tensor x = randn({4, 3, 32, 32});
    const Session session(net, x, {.dtype = dtype});
    const NoGrad no_grad;
    const Tensor exact = net(x);
    Tensor low;
    {
      const amp::Autocast autocast{{.dtype = dtype}};
      low = net(x);
    }
    const Tensor got = session(x), again = session(x);
    EXPECT_EQ(got.dtype(), low.dtype());
    EXPECT_EQ(bits(got), bits(again));
    // Its own error is of the size of autocast's: both round each layer's result to 8 (11) bits.
    const auto error = [&](const Tensor& t) {
      const std::vector<float> a = bits(t), b = bits(exact);
      double sum = 0, size = 0;
      for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(a[i] - b[i], 2), size += std::pow(b[i], 2);
      return std::sqrt(sum / size);
    };
    EXPECT_GT(error(got), 0);
    EXPECT_LT(error(got), 2 * error(low)) << name(dtype);
    // Weights are converted once, not in calls: one conversion a call is the picture's.
    struct Copies final : OpObserver {
      int count = 0;
      void after_call(const ObservedCall& call) override {
        for (const Tensor* t : call.inputs) {
          if (call.op == nullptr && t->defined() && t->dim() == 4 && t->size(2) <= 3) ++count;
        }
      }
      bool takes_fused() const override { return true; }
    } copies;
    const Observing observing(&copies);
    (void)session(x);
    EXPECT_EQ(copies.count, 0);
  }
}

TEST(Session, TakesPicturesOfBytes) {
  const models::ResNet net = models::cifar_resnet(20);
  season(net);
  net.eval();
  manual_seed(2);
  const Tensor p = (rand({3, 3, 32, 32}) * 256).to(u8);
  const Session session(net, zeros({1, 3, 32, 32}),
                        {.pictures = Pictures{.mean = {0.5F, 0.25F, 0.125F}, .std = {0.25F}}});
  const Session plain(net, zeros({1, 3, 32, 32}));
  const NoGrad no_grad;
  const Tensor mean = tensor({0.5, 0.25, 0.125}, {1, 3, 1, 1});
  EXPECT_EQ(bits(session(p)), bits(plain((p.to(f32) / 255 - mean) / 0.25)));
  EXPECT_ERROR(session(p.to(f32)), "session: expected u8 as the input, got f32");
  EXPECT_ERROR(Session(net, zeros({1, 3, 32, 32}), {.pictures = Pictures{.mean = {0, 1}}}),
               "session: pictures: expected 1 or 3 numbers of mean, got 2");
  EXPECT_ERROR(Session(models::MLP(), zeros({1, 784}), {.pictures = Pictures{}}),
               "session: pictures: expected a network of one floating input [N, C, H, W]");
}

TEST(Session, TakesInputsOfAnyLayout) {
  const models::ResNet net = models::cifar_resnet(20);
  net.eval();
  manual_seed(2);
  const Session session(net, zeros({1, 3, 32, 32}));
  const Tensor x = randn({2, 3, 32, 32});
  const std::vector<float> expected = bits(session(x));
  EXPECT_EQ(bits(session(x.contiguous(MemoryFormat::channels_last))), expected);
  EXPECT_EQ(bits(session(x.permute({0, 1, 3, 2}).contiguous().permute({0, 1, 3, 2}))), expected);
  const Tensor wide = cat({x, x}, 2).slice(2, 0, 32);
  EXPECT_FALSE(wide.is_contiguous());
  EXPECT_EQ(bits(session(wide)), expected);
  Tensor out = empty({10, 2}).t();
  EXPECT_FALSE(out.is_contiguous());
  session.run_into({&x, 1}, {&out, 1});
  EXPECT_EQ(bits(out), expected);
}

// A session in integers of a copy of the network.
Session integers_of(const models::ResNet& net) {
  const models::ResNet own = nn::clone(net);
  const NoGrad no_grad;
  quant::prepare(own, zeros({1, 3, 32, 32}));
  own.train();
  for (int i = 0; i < 3; ++i) (void)own(randn({4, 3, 32, 32}));
  quant::enable_observer(own, false);
  return Session(own, zeros({1, 3, 32, 32}), {.int8 = true});
}

void expect_the_same_from_threads(const Session& session) {
  constexpr int kThreads = 4, kCalls = 12;
  std::vector<Tensor> inputs;
  std::vector<std::vector<float>> expected;
  for (int i = 0; i < kCalls; ++i) {
    inputs.push_back(randn({1 + i % 3, 3, 32, 32}));
    expected.push_back(bits(session(inputs.back())));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const Session own = session;
      for (int i = 0; i < kCalls; ++i) {
        const auto at = static_cast<std::size_t>((i + t) % kCalls);
        if (bits(own(inputs[at])) != expected[at]) ++wrong;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong.load(), 0);
  const SessionStats stats = session.stats();
  EXPECT_EQ(stats.calls, static_cast<std::uint64_t>(kCalls * (kThreads + 1)));
  EXPECT_LE(stats.planned, 3u * kThreads);
  EXPECT_EQ(stats.interpreted, 0u) << session.why_not();
}

TEST(Session, ServesSeveralThreadsAtOnce) {
  const models::ResNet net = models::cifar_resnet(20);
  season(net);
  manual_seed(2);
  expect_the_same_from_threads(Session(net, zeros({1, 3, 32, 32})));
  expect_the_same_from_threads(Session(net, zeros({1, 3, 32, 32}), {.dtype = bf16}));
  expect_the_same_from_threads(integers_of(net));
}

// Counts what tensors take from the CPU's allocator.
class CountingAllocator final : public Allocator {
 public:
  explicit CountingAllocator(Allocator& inner) : inner_(inner) {}
  void* allocate(std::size_t bytes) override {
    ++count;
    return inner_.allocate(bytes);
  }
  void deallocate(void* data, std::size_t bytes) noexcept override { inner_.deallocate(data, bytes); }
  std::atomic<std::int64_t> count{0};

 private:
  Allocator& inner_;
};

// What one call takes from the heap and from the allocator of tensors, after a few others.
std::pair<std::int64_t, std::int64_t> memory_of_a_call(const Session& session, const Tensor& x, Tensor& out) {
  for (int i = 0; i < 4; ++i) session.run_into({&x, 1}, {&out, 1});
  static CountingAllocator& counter = *new CountingAllocator(allocator_for(Device{}));
  Allocator& usual = allocator_for(Device{});
  set_allocator(Device{}, &counter);
  counter.count = 0;
  allocations = 0;
  counting = true;
  session.run_into({&x, 1}, {&out, 1});
  counting = false;
  set_allocator(Device{}, &usual);
  return {allocations.load(), counter.count.load()};
}

// Layers without oneDNN's convolutions, which make lists in each call.
struct Pointwise : nn::Module<Pointwise> {
  nn::Parameter weight = parameter("weight", ones({3, 1, 1}));
  Tensor forward(const Tensor& x) const {
    const Tensor a = silu(x * weight + 1);
    return softmax(flatten(max_pool2d(relu(a) + x, {.kernel_size = {2, 2}}), 1), 1);
  }
};

TEST(Session, TakesNoMemoryInCalls) {
  if (!zeros({1}).device().is_cpu()) GTEST_SKIP() << "devices' calls are messages";
  manual_seed(2);
  {
    const Pointwise net;
    const Session session(net, zeros({1, 3, 8, 8}));
    const Tensor x = randn({2, 3, 8, 8});
    Tensor out = empty({2, 48});
    EXPECT_EQ(memory_of_a_call(session, x, out), (std::pair<std::int64_t, std::int64_t>(0, 0)));
    EXPECT_EQ(session.stats().planned, 1u);
  }
  const models::ResNet net = models::cifar_resnet(20);
  const Session session(net, zeros({1, 3, 32, 32}));
  const Tensor x = randn({2, 3, 32, 32});
  Tensor out = empty({2, 10});
  const auto [heap, tensors] = memory_of_a_call(session, x, out);
  EXPECT_EQ(tensors, 0);
  EXPECT_EQ(memory_of_a_call(integers_of(net), x, out).second, 0);
  // oneDNN's kernels make lists of pieces and arguments, a few dozen entries on each of two threads for 22 products;
  // another program's threads may change how they share the work. The calls between them make none, as above.
  EXPECT_LT(heap, 22 * 200);
}

TEST(Session, KeepsAsManyPlansAsItMay) {
  const models::MLP net;
  const Session session(net, zeros({1, 784}), {.plans = 2});
  for (const std::int64_t n : {1, 2, 1, 2, 3, 2, 1}) (void)session(zeros({n, 784}));
  EXPECT_EQ(session.stats().planned, 4u) << "1 is used longest ago when 3 comes, and planned again";
}

TEST(Session, RefusesWhatDoesNotFit) {
  const models::MLP net;
  const Session session(net, zeros({5, 784}));
  EXPECT_ERROR(session(zeros({2, 783})), "session: expected the input of sizes [N, 784], got [2, 783]");
  EXPECT_ERROR(session(zeros({784})), "session: expected the input of sizes [N, 784], got [784]");
  EXPECT_ERROR(session(zeros({0, 784})), "session: expected the input with at least one sample in dimension 0");
  EXPECT_ERROR(session(zeros({1, 784}, {.dtype = f64})), "session: expected f32 as the input, got f64");
  EXPECT_ERROR(session(Tensor()), "session: expected a tensor as the input, got an undefined one");
  EXPECT_ERROR(session.run({}), "session: expected 1 inputs, got 0");
  const Tensor x = zeros({2, 784});
  Tensor wrong = zeros({2, 9});
  const std::string device = x.device().str();
  EXPECT_ERROR(session.run_into({&x, 1}, {&wrong, 1}),
               "session: expected f32 [2, 10] on " + device + " to write output 0 to, got f32 [2, 9] on " + device);
  EXPECT_ERROR(session.run_into({&x, 1}, {}), "session: expected 1 outputs to write to, got 0");
  EXPECT_ERROR(Session(net, zeros({1, 784}), {.dtype = f64}), "session: expected dtype f32, f16 or bf16, got f64");
  EXPECT_ERROR(Session(net, zeros({1, 784}), {.plans = 0}), "session: expected plans of at least 1, got 0");
  EXPECT_ERROR(Session(net, zeros({1, 784}), {.dtype = bf16, .int8 = true}),
               "session: int8: expected a network that quant::prepare() has prepared");

  using Forward = nn::TracedForward;
  const auto make = [&](const Forward& forward, std::vector<Tensor> example, bool dynamic = true) {
    return Session(net, forward, std::move(example), {.dynamic_batch = dynamic});
  };
  const Forward random = [](std::span<const Tensor> in) { return std::vector<Tensor>{dropout(in[0], 0.5)}; };
  EXPECT_ERROR(make(random, {zeros({2, 4})}), "draws random numbers");
  const Forward one_less = [](std::span<const Tensor> in) {
    return std::vector<Tensor>{in[0].slice(0, 0, in[0].size(0) - 1) * 2};
  };
  EXPECT_ERROR(make(one_less, {zeros({2, 4})}), "session: slice: end is 1 for 2 samples and 2 for 3, no multiple");
  const Forward counts = [](std::span<const Tensor> in) {
    return std::vector<Tensor>{in[0] / static_cast<double>(in[0].size(0))};
  };
  EXPECT_ERROR(make(counts, {zeros({2, 4})}), "follows the number of samples");
  const Forward ranges = [](std::span<const Tensor> in) {
    return std::vector<Tensor>{in[0] + arange(in[0].size(0)).to(f32).unsqueeze(1)};
  };
  EXPECT_ERROR(make(ranges, {zeros({2, 4})}), "reads a constant that follows the number of samples");
  const Session fixed = make(ranges, {zeros({2, 4})}, false);
  EXPECT_EQ(bits(fixed(zeros({2, 4}))), (std::vector<float>{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_ERROR(fixed(zeros({3, 4})), "session: expected the input of sizes [2, 4], got [3, 4]");
  const Forward both = [](std::span<const Tensor> in) { return std::vector<Tensor>{in[0] + in[1], in[1]}; };
  EXPECT_ERROR(make(both, {zeros({2, 4}), zeros({1, 4})}),
               "expected the example's inputs with the samples in dimension 0");
  const Session two = make(both, {zeros({2, 4}), zeros({2, 4})});
  const std::vector<Tensor> uneven = {zeros({2, 4}), zeros({3, 4})};
  EXPECT_ERROR(two.run(uneven), "session: expected input 1 with as many samples as input 0 has in dimension 0");
  EXPECT_ERROR(two(zeros({2, 4})), "session: the network has 2 outputs; call run()");
}

// Three layers of one size, whose memory can be counted by hand.
struct Chain : nn::Module<Chain> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 32, .out = 32}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 32, .out = 32}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 32, .out = 32}});
  Tensor forward(const Tensor& x) const { return fc3(relu(fc2(relu(fc1(x))))); }
};

TEST(Session, TellsWhatItHolds) {
  if (!zeros({1}).device().is_cpu()) GTEST_SKIP() << "places are multiples of 64 bytes on the CPU";
  manual_seed(1);
  const Chain net;
  const Tensor x = randn({4, 32});
  const auto memory_of = [](const Session& session, const Tensor& input) {
    EXPECT_EQ(session.memory().activations, 0u) << "nothing is planned yet";
    (void)session(input);
    EXPECT_EQ(session.why_not(), "");
    return session.memory();
  };
  // Of the results of three layers two are there at a time, and the third takes the first one's place; relu() has none.
  constexpr std::uint64_t kElements = 4 * 32, kWeights = 3 * 32 * 32, kBiases = 3 * 32;
  const Session floats(net, x);
  const SessionMemory whole = memory_of(floats, x);
  EXPECT_EQ(whole.weights, 4 * (kWeights + kBiases));
  EXPECT_EQ(whole.activations, 2 * 4 * kElements);
  // The plan of the most samples counts.
  (void)floats(randn({16, 32}));
  EXPECT_EQ(floats.memory().activations, 4 * 2 * 4 * kElements);
  (void)floats(x);
  EXPECT_EQ(floats.memory().activations, 4 * 2 * 4 * kElements);
  // The input too comes in 16 bits, and its place is taken by the second result.
  const SessionMemory half = memory_of(Session(net, x, {.dtype = bf16}), x);
  EXPECT_EQ(half.weights, 2 * (kWeights + kBiases));
  EXPECT_EQ(half.activations, 2 * 2 * kElements);
  // Integers, one scale and one float32 bias for each channel; the last result is floating.
  quant::prepare(net, x);
  net.train();
  {
    const NoGrad no_grad;
    (void)net(x);
  }
  quant::enable_observer(net, false);
  net.eval();
  const SessionMemory integers = memory_of(Session(net, x, {.int8 = true}), x);
  EXPECT_EQ(integers.weights, kWeights + 2 * 4 * kBiases);
  EXPECT_EQ(integers.activations, 2 * kElements + 4 * kElements);
}

}  // namespace
}  // namespace halfstep::infer
