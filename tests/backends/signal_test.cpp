// SPDX-License-Identifier: Apache-2.0
// Kernels under a storm of signals whose handlers run on the ordinary stack, as those of profilers, language runtimes
// and Ctrl-C do. A kernel that keeps something else in the stack pointer has the handler write over it: oneDNN's
// float32 matrix products of AVX-512 did, and corrupted the heap. Results must be the same bits as without signals.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <array>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "halfstep/autograd/engine.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/int8.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/isa_child.h"

namespace halfstep {
namespace {

volatile sig_atomic_t g_signals = 0;

void scribble(int) {
  // As much stack as a handler that unwinds or prints may take.
  volatile char frame[24 << 10];
  for (std::size_t i = 0; i < sizeof frame; i += 8) frame[i] = 0x5A;
  g_signals = g_signals + 1;
}

class Storm {
 public:
  Storm() { set(250); }
  ~Storm() { set(0); }

 private:
  static void set(int microseconds) {
    itimerval timer = {};
    timer.it_interval.tv_usec = timer.it_value.tv_usec = microseconds;
    setitimer(ITIMER_REAL, &timer, nullptr);
  }
};

/// Bytes of a result.
using Bytes = std::vector<unsigned char>;

Bytes bytes_of(const Tensor& t) {
  const Tensor dense = t.contiguous();
  const auto* p = static_cast<const unsigned char*>(dense.const_raw_data());
  return {p, p + static_cast<std::size_t>(dense.numel()) * dense.item_size()};
}

/// Repeats `compute` under signals, at least twice and until 25 have come, and compares.
void storm(const std::string& what, const std::function<Tensor()>& compute) {
  SCOPED_TRACE(what);
  const Bytes quiet = bytes_of(compute());
  const sig_atomic_t before = g_signals;
  const Storm signals;
  for (int run = 0; run < 2 || g_signals - before < 25; ++run) {
    ASSERT_TRUE(bytes_of(compute()) == quiet) << "run " << run;
  }
}

Tensor numbers(const Shape& sizes, DType dtype, std::uint64_t seed) {
  manual_seed(seed);
  return randn(sizes).to(dtype);
}

void products(DType dtype) {
  // Every class of shape that a product's path is chosen by: large ones, batches of a linear layer, long and short
  // sums, few rows, odd sizes; operands as they lie and turned.
  const std::array<std::int64_t, 3> shapes[] = {{1000, 512, 784}, {512, 784, 1000}, {64, 512, 784}, {512, 784, 64},
                                                {256, 256, 256},  {64, 64, 64},     {37, 45, 53},   {2000, 9, 300},
                                                {1, 1000, 1000},  {4, 513, 700},    {700, 3, 512},  {128, 4096, 33}};
#ifdef __SANITIZE_ADDRESS__  // the test takes 50 times as long: the large ones as they lie alone
  const std::int64_t limit = 10'000'000;
#else
  const std::int64_t limit = std::numeric_limits<std::int64_t>::max();
#endif
  for (const auto& [m, n, k] : shapes) {
    for (const int turned : {0, 1, 2, 3}) {
      if (turned && m * n * k > limit) continue;
      const Tensor a = turned & 1 ? numbers({k, m}, dtype, 1).t() : numbers({m, k}, dtype, 1);
      const Tensor b = turned & 2 ? numbers({n, k}, dtype, 2).t() : numbers({k, n}, dtype, 2);
      storm(std::string("matmul ") + std::to_string(m) + 'x' + std::to_string(n) + 'x' + std::to_string(k) +
                " turned " + std::to_string(turned),
            [&] { return matmul(a, b); });
    }
  }
  const Tensor q = numbers({2, 4, 128, 64}, dtype, 3);
  storm("batched matmul", [&] { return matmul(q, q.transpose(-1, -2)); });
  storm("attention", [&] { return scaled_dot_product_attention(q, q, q); });
}

struct Window {
  std::int64_t n, c, size, o, window, stride, padding, groups;
};

void convolutions(DType dtype) {
  const Window windows[] = {{2, 3, 64, 64, 7, 2, 3, 1},    {2, 64, 28, 64, 1, 1, 0, 1},   {2, 64, 28, 64, 3, 1, 1, 1},
                            {2, 256, 14, 128, 1, 2, 0, 1}, {2, 128, 14, 128, 3, 2, 1, 1}, {2, 256, 7, 256, 3, 1, 1, 1},
                            {2, 32, 14, 32, 3, 1, 1, 32},  {2, 96, 14, 96, 3, 2, 1, 96},  {2, 16, 32, 16, 3, 1, 1, 1},
                            {1, 3, 32, 16, 6, 2, 2, 1},    {2, 5, 17, 7, 3, 1, 1, 1},     {2, 32, 14, 64, 3, 1, 1, 4},
                            {2, 4, 35, 8, 1, 2, 0, 1},     {3, 1, 28, 8, 5, 1, 2, 1}};
  for (const Window& w : windows) {
    for (const bool last : {true, false}) {
      const auto format = last ? MemoryFormat::channels_last : MemoryFormat::contiguous;
      const Tensor x = numbers({w.n, w.c, w.size, w.size}, dtype, 1).contiguous(format).requires_grad_();
      const Tensor weight = numbers({w.o, w.c / w.groups, w.window, w.window}, dtype, 2).requires_grad_();
      const ConvFuncOptions options = {.stride = {w.stride}, .padding = {w.padding}, .groups = w.groups};
      const std::string name = "conv2d " + std::to_string(w.c) + " of " + std::to_string(w.size) + " to " +
                               std::to_string(w.o) + ", window " + std::to_string(w.window) + (last ? " last" : "");
      storm(name, [&] { return conv2d(x.detach(), weight.detach(), {}, options); });
      storm(name + " backward", [&] {
        x.set_grad({}), weight.set_grad({});
        const Tensor y = conv2d(x, weight, {}, options);
        y.backward(y.detach());
        return cat({flatten(x.grad()), flatten(weight.grad())});
      });
    }
  }
}

void integers() {
  const Window windows[] = {{2, 3, 64, 64, 7, 2, 3, 1},   {2, 64, 28, 64, 1, 1, 0, 1},   {2, 64, 28, 64, 3, 1, 1, 1},
                            {2, 32, 14, 32, 3, 1, 1, 32}, {2, 128, 14, 128, 3, 2, 1, 1}, {2, 5, 17, 7, 3, 1, 1, 1},
                            {2, 32, 14, 64, 3, 1, 1, 4}};
  manual_seed(1);
  for (const Window& w : windows) {
    const Tensor x = randint(0, 256, {w.n, w.c, w.size, w.size}, {.dtype = u8});
    const Tensor weight = randint(-128, 128, {w.o, w.c / w.groups, w.window, w.window}, {.dtype = i8});
    Conv2dInt8Options options;
    options.stride = {w.stride}, options.padding = {w.padding}, options.groups = w.groups;
    options.input = {.scale = 0.01, .zero_point = 100};
    options.output = Int8Grid{.scale = 2, .zero_point = 50};
    options.activation = Int8Activation::silu;
    storm(
        "conv2d_int8 of " + std::to_string(w.c) + " to " + std::to_string(w.o) + ", window " + std::to_string(w.window),
        [&] { return conv2d_int8(x, weight, full({w.o}, 0.02), {}, {}, options); });
  }
  const Tensor rows = randint(0, 256, {64, 512}, {.dtype = u8}), weight = randint(-128, 128, {96, 512}, {.dtype = i8});
  storm("linear_int8", [&] { return linear_int8(rows, weight, ones({96})); });
  const Tensor x = numbers({7, 512}, f32, 4);
  storm("linear_weight_only", [&] { return linear_weight_only(x, weight, ones({96})); });
}

void everything_else() {
  const Tensor x = numbers({64, 500}, f32, 1).requires_grad_();
  storm("softmax and sums", [&] {
    x.set_grad({});
    sum(softmax(x, 1) * x).backward();
    return x.grad();
  });
  const Tensor images = numbers({4, 32, 14, 14}, bf16, 2).contiguous(MemoryFormat::channels_last);
  storm("batch norm", [&] { return batch_norm(images, {.training = true}); });
  const Tensor halves = numbers({1000, 100}, f16, 3);
  storm("casts and pointwise", [&] { return gelu(halves.to(f32)).to(bf16); });
}

TEST(SignalStormChild, DISABLED_InThisProcess) {
  set_num_threads(1);  // so that the thread that signals reach computes everything
  struct sigaction action = {};
  action.sa_handler = scribble;
  action.sa_flags = SA_RESTART;
  ASSERT_EQ(sigaction(SIGALRM, &action, nullptr), 0);
  for (const DType dtype : {f32, bf16, f16}) {
    SCOPED_TRACE(name(dtype));
    products(dtype);
    convolutions(dtype);
  }
  integers();
  everything_else();
  EXPECT_GT(g_signals, 1000);
}

class SignalStorm : public testing::TestWithParam<cpu::Isa> {};

TEST_P(SignalStorm, LeavesResultsAndMemoryAlone) {
  if (GetParam() > cpu::detected_isa()) GTEST_SKIP() << "this processor has no " << cpu::name(GetParam());
  test::pass_in_child(GetParam(), "SignalStormChild.DISABLED_InThisProcess");
}

INSTANTIATE_TEST_SUITE_P(Isas, SignalStorm, test::kIsas, test::isa_name);

}  // namespace
}  // namespace halfstep
