// SPDX-License-Identifier: Apache-2.0
// The scratch memory of products, and what a step of dense layers takes with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/core/random.h"
#include "halfstep/data/dataset.h"
#include "halfstep/models/mlp.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/train_step.h"

namespace halfstep::cpu {
namespace {

/// Hands out memory full of NaN, or none, and remembers how much was asked for.
struct Context : KernelContext {
  explicit Context(bool memory) : KernelContext{}, has_memory(memory) {
    workspace = [](KernelContext* self, std::size_t bytes) -> void* {
      auto& c = *static_cast<Context*>(self);
      c.bytes += bytes;
      if (!c.has_memory) return nullptr;
      c.memory.emplace_back(std::aligned_alloc(64, (bytes + 63) / 64 * 64), &std::free);
      std::memset(c.memory.back().get(), 0xFF, bytes);
      return c.memory.back().get();
    };
    set_error = [](KernelContext*, const char*) {};
  }
  bool has_memory;
  std::size_t bytes = 0;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory;
};

class Guard {
 public:
  explicit Guard(int threads) { set_num_threads(threads); }
  ~Guard() {
    set_num_threads(threads_);
    set_isa_for_test(isa_);
  }

 private:
  const Isa isa_ = compute_isa();
  int threads_ = num_threads();
};

/// The products of a linear layer: the forward pass, the weight's gradient and the input's gradient.
enum class Part { forward, weight, input };

GemmArgs product(Part part, std::int64_t batch, std::int64_t in, std::int64_t out, DType dtype) {
  GemmArgs g;
  g.m = part == Part::weight ? out : batch;
  g.n = part == Part::forward ? out : in;
  g.k = part == Part::forward ? in : part == Part::weight ? batch : out;
  g.a = {nullptr, dtype, part == Part::weight ? 1 : g.k, part == Part::weight ? g.m : 1};
  g.b = {nullptr, dtype, part == Part::forward ? 1 : g.n, part == Part::forward ? g.k : 1};
  g.c_dtype = part == Part::weight ? f32 : dtype;
  g.ldc = g.n;
  return g;
}

std::vector<unsigned char> numbers(std::int64_t count, DType dtype, std::uint64_t state) {
  std::vector<unsigned char> bytes(static_cast<std::size_t>(count) * item_size(dtype));
  visit_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t i = 0; i < count; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const T v = convert<T>(static_cast<float>(state >> 40) * 0x1p-23f - 1);
      std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(T), &v, sizeof(T));
    }
  });
  return bytes;
}

// A block of panels, one of rows and their sums fit the second-level cache; sums of 16-bit results that wait for the
// rest of their terms take as much again.
TEST(GemmWorkspace, IsOfTheSizeOfCaches) {
  for (const Isa isa : {compute_isa(), Isa::avx512, Isa::avx2}) {
    if (isa > compute_isa()) continue;
    for (const int threads : {1, 2, 4}) {
      const Guard guard(threads);
      set_isa_for_test(isa);
      for (const DType dtype : {f32, f16, bf16}) {
        for (const Part part : {Part::forward, Part::weight, Part::input}) {
          for (const auto& [batch, in, out] : {std::array<std::int64_t, 3>{4096, 784, 512},
                                               {4096, 512, 512},
                                               {1000, 2048, 64},
                                               {512, 512, 512},
                                               {64, 1024, 1024}}) {
            // Without memory nothing is computed: what was asked for is known.
            Context context(false);
            ASSERT_EQ(gemm_by(GemmPath::blocked, &context, product(part, batch, in, out, dtype)), Status::failed);
            EXPECT_GT(context.bytes, 0U);
            EXPECT_LE(context.bytes, static_cast<std::size_t>(threads) << 21)
                << name(isa) << " " << threads << " threads " << name(dtype) << " part " << static_cast<int>(part)
                << " of " << batch << "x" << in << "x" << out;
          }
        }
      }
    }
  }
}

// A float32 result holds sums that wait for the rest of their terms; one of 16 bits can't. They are added up in the
// same order all the same: rounding is the only difference, whether tiles round their sums or a pass after them does.
TEST(GemmWorkspace, SixteenBitsAreTheRoundedFloat32Result) {
  struct Shape {
    std::int64_t m, n, k;
    bool turn_a, turn_b;
  };
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    if (isa > compute_isa()) continue;
    for (const int threads : {1, 3}) {
      const Guard guard(threads);
      set_isa_for_test(isa);
      // Panels of all steps; sums that wait, for some rows at a time; the same turned, and in place; few rows; panels
      // of whole vectors, the last of one.
      for (const Shape& s :
           {Shape{700, 300, 900, false, true}, Shape{1000, 500, 3300, false, false}, Shape{70, 900, 1600, false, true},
            Shape{900, 90, 3300, true, true}, Shape{120, 800, 1552, false, false}, Shape{40, 170, 500, true, false},
            Shape{1003, 176, 800, false, true}, Shape{1003, 64, 70, false, false}}) {
        for (const DType dtype : {f32, f16, bf16}) {
          const auto a = numbers(s.m * s.k, dtype, 3), b = numbers(s.k * s.n, dtype, 4), bias = numbers(s.n, dtype, 5);
          GemmArgs g;
          g.m = s.m, g.n = s.n, g.k = s.k, g.ldc = s.n;
          g.a = {a.data(), dtype, s.turn_a ? 1 : s.k, s.turn_a ? s.m : 1};
          g.b = {b.data(), dtype, s.turn_b ? 1 : s.n, s.turn_b ? s.k : 1};
          for (const bool epilogue : {false, true}) {
            if (epilogue) g.bias = bias.data(), g.bias_dtype = dtype, g.activation = GemmActivation::relu;
            const auto count = static_cast<std::size_t>(s.m * s.n);
            std::vector<float> wide(count);
            std::vector<Half> half(count);
            std::vector<BFloat16> brain(count);
            Context context(true);
            g.c = wide.data(), g.c_dtype = f32;
            ASSERT_EQ(gemm_by(GemmPath::blocked, &context, g), Status::ok);
            g.c = half.data(), g.c_dtype = f16;
            ASSERT_EQ(gemm_by(GemmPath::blocked, &context, g), Status::ok);
            g.c = brain.data(), g.c_dtype = bf16;
            ASSERT_EQ(gemm_by(GemmPath::blocked, &context, g), Status::ok);
            std::size_t different = 0;
            for (std::size_t i = 0; i < count; ++i) {
              different += half[i].bits != convert<Half>(wide[i]).bits;
              different += brain[i].bits != convert<BFloat16>(wide[i]).bits;
            }
            EXPECT_EQ(different, 0U) << name(isa) << " " << threads << " threads " << name(dtype) << " " << s.m << "x"
                                     << s.n << "x" << s.k << (epilogue ? " with bias and relu" : "");
          }
        }
      }
    }
  }
}

// Long sums of units with float32 results go in pieces, whether a part of the product has operands to copy or not.
TEST(DenseLayers, HaveTheSameBitsForAnyNumberOfThreads) {
  struct Shape {
    std::int64_t m, n, k;
    bool turn_a, turn_b;
  };
  for (const Isa isa : {Isa::amx, Isa::avx512_fp16, Isa::avx512_bf16}) {
    if (isa > compute_isa()) continue;
    for (const DType dtype : {bf16, f16}) {
      for (const Shape& s : {Shape{512, 512, 4096, true, false}, Shape{130, 200, 1600, false, true},
                             Shape{33, 700, 1100, true, false}}) {
        const auto a = numbers(s.m * s.k, dtype, 5), b = numbers(s.k * s.n, dtype, 6);
        std::vector<float> first;
        for (const int threads : {1, 2, 3, 4}) {
          const Guard guard(threads);
          set_isa_for_test(isa);
          std::vector<float> c(static_cast<std::size_t>(s.m * s.n), NAN);
          GemmArgs g;
          g.m = s.m, g.n = s.n, g.k = s.k, g.ldc = s.n;
          g.a = {a.data(), dtype, s.turn_a ? 1 : s.k, s.turn_a ? s.m : 1};
          g.b = {b.data(), dtype, s.turn_b ? 1 : s.n, s.turn_b ? s.k : 1};
          g.c = c.data(), g.c_dtype = f32;
          Context context(true);
          const Status status = gemm_by(GemmPath::onednn, &context, g);
          if (status == Status::unsupported) break;  // no units for the dtype
          ASSERT_EQ(status, Status::ok);
          if (threads == 1) first = c;
          EXPECT_EQ(std::memcmp(c.data(), first.data(), c.size() * sizeof(float)), 0)
              << name(isa) << ' ' << name(dtype) << ' ' << s.m << 'x' << s.n << 'x' << s.k << ", " << threads;
        }
      }
    }
  }
}

/// The most memory that steps of the MLP take beyond its parameters and the batch.
std::uint64_t step_peak(std::optional<DType> low) {
  manual_seed(1);
  models::MLP net({.in = 512, .hidden = 512});
  optim::SGD optimizer(net.parameters(), {.lr = 0.01});
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  auto step = training::make_train_step(std::make_shared<training::ClassificationTask>(classifier), optimizer,
                                        amp::GradScaler({.enabled = low == f16}), {.autocast = low});
  const data::Batch batch = {randn({4096, 512}), randint(0, 10, {4096})};
  const std::uint64_t before = memory_stats().allocated;
  reset_peak_memory();
  for (int i = 0; i < 2; ++i) step.run({&batch, 1});
  return memory_stats().allocated_peak - before;
}

// With copies of the weights and of the batch, and with all scratch memory. What is saved is half as large; float32
// inputs and the optimizer's state stay.
TEST(DenseLayers, TakeLessMemoryIn16Bits) {
  for (const Isa isa : {compute_isa(), Isa::avx2}) {
    const Guard guard(4);
    set_isa_for_test(isa);
    const auto f32_peak = static_cast<double>(step_peak({}));
    EXPECT_LE(static_cast<double>(step_peak(f16)) / f32_peak, 0.7) << name(isa);
    EXPECT_LE(static_cast<double>(step_peak(bf16)) / f32_peak, 0.7) << name(isa);
  }
}

}  // namespace
}  // namespace halfstep::cpu
