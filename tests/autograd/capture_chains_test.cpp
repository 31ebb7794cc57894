// SPDX-License-Identifier: Apache-2.0
// Elementwise calls of a captured step that run together, block by block, give the bits that they give one by one.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/dtype.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/runtime/parallel.h"
#include "tests/support/errors.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

/// Devices have no chains: the CPU's kernels are tested.
class CaptureChains : public testing::Test {
 protected:
  void SetUp() override {
    if (!default_device().is_cpu()) GTEST_SKIP() << "only the CPU runs chains";
  }
};

using Tensors = std::vector<Tensor>;
using Program = std::function<Tensors(const Tensor&, const Tensor&)>;

std::string bits(const Tensor& t) {
  const Tensor c = t.contiguous();
  return {static_cast<const char*>(c.const_raw_data()), static_cast<std::size_t>(c.numel()) * item_size(c.dtype())};
}

// Runs the program on the inputs, as it is and captured with and without chains, and returns the calls that ran in
// chains in a replay.
std::uint64_t chained_in(const Program& program, const std::vector<std::pair<Tensor, Tensor>>& inputs) {
  constexpr int kCalls = 4;
  std::vector<std::vector<std::string>> got(3);
  std::uint64_t chained = 0;
  for (int way = 0; way < 3; ++way) {
    manual_seed(3);
    auto captured = capture(program, {.chains = way == 2});
    for (int i = 0; i < kCalls; ++i) {
      const auto& [x, y] = inputs[static_cast<std::size_t>(i) % inputs.size()];
      for (const Tensor& t : way == 0 ? program(x, y) : captured(x, y)) {
        got[static_cast<std::size_t>(way)].push_back(bits(t));
      }
    }
    if (way == 0) continue;
    EXPECT_EQ(captured.stats().replayed, kCalls - 2) << captured.why_not();
    if (way == 1) {
      EXPECT_EQ(captured.stats().chained, 0);
    } else {
      chained = captured.stats().chained / (kCalls - 2);
    }
  }
  EXPECT_TRUE(got[0] == got[1]) << "captured";
  EXPECT_TRUE(got[0] == got[2]) << "in chains";
  return chained;
}

// Values of every kind of number.
Tensor numbers(const Shape& sizes, DType dtype) {
  if (dtype == boolean) return gt(randn(sizes), 0);
  if (!is_floating(dtype)) return randint(1, 100, sizes, {.dtype = dtype});
  Tensor t = randn(sizes) * 4;
  Tensor flat = t.view({-1});
  const double special[] = {0.0, -0.0, HUGE_VAL, -HUGE_VAL, std::nan(""), 1e-42, 65504, 3e38};
  for (std::int64_t i = 0; i < 64; ++i) flat.narrow(0, i * (flat.numel() / 64), 1).fill_(special[i % 8]);
  return t.to(dtype);
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {{40001}, {32768}, {3, 17, 701}, {65, 4096}};
  return all;
}

Tensors gelu_by_hand(const Tensor& x, const Tensor& y) {
  const Tensor cube = x * x * x;
  return {x * 0.5 * (tanh((x + cube * 0.044715) * 0.7978845608) + 1) + y};
}
Tensors choices(const Tensor& x, const Tensor& y) {
  const Tensor larger = gt(x, y);
  return {where(larger, x * 2, masked_fill(y, lt(y, 0), -1e9)), logical_and(larger, isfinite(x))};
}
Tensors casts(const Tensor& x, const Tensor& y) {
  return {((x.to(f32) + y.to(f32)).to(bf16) * 2).to(x.dtype()), exp(x).to(f64).to(f16)};
}
Tensors in_place(const Tensor& x, const Tensor& y) {
  Tensor z = x.clone();
  z.add_(y).mul_(z);
  relu_(z);
  const Tensor kept = z + 1;
  z.sub_(kept);
  return {z, kept};
}
Tensors repeated(const Tensor& x, const Tensor& y) {
  const Tensor z = x + x;
  return {z * z - z, maximum(y, y) + z};
}
Tensors one_number(const Tensor& x, const Tensor& y) {
  const Tensor number = sum(y.narrow(0, 0, 1)).view({});
  return {(x * number + y - 3) / (number + 2), silu(x) * number.view({1})};
}
Tensors read_later(const Tensor& x, const Tensor& y) {
  const Tensor a = sigmoid(x), b = a * y, c = b + a;
  const Tensor total = sum(b);
  return {sqrt(abs(c)), total + 1};
}

TEST_F(CaptureChains, GiveTheBitsOfCallsOneByOne) {
  const NoGrad no_grad;
  const std::pair<const char*, Program> programs[] = {
      {"gelu", gelu_by_hand}, {"choices", choices},       {"casts", casts},          {"in place", in_place},
      {"repeated", repeated}, {"one number", one_number}, {"read later", read_later}};
  for (const int threads : {1, 2, 3}) {
    const test::ThreadsGuard set(threads);
    for (const DType dtype : {f32, f16, bf16, f64}) {
      for (const Shape& sizes : shapes()) {
        const Tensor x = numbers(sizes, dtype), y = numbers(sizes, dtype), z = numbers(sizes, dtype);
        for (const auto& [what, program] : programs) {
          EXPECT_GT(chained_in(program, {{x, y}, {y, z}, {z, z}}), 1)
              << what << ' ' << name(dtype) << ' ' << sizes.str() << ' ' << threads;
        }
      }
    }
  }
}

TEST_F(CaptureChains, ComputeIntegersAndBools) {
  const NoGrad no_grad;
  for (const DType dtype : {i64, i32, i8, u8}) {
    const Tensor x = numbers({3, 17, 701}, dtype), y = numbers({3, 17, 701}, dtype);
    EXPECT_GT(chained_in(
                  [](const Tensor& a, const Tensor& b) -> Tensors {
                    return {bitwise_xor(a * b, bitwise_not(a)) + remainder(a, b), eq(a, b), (a - b).to(f32) * 0.5};
                  },
                  {{x, y}, {y, x}}),
              5)
        << name(dtype);
  }
  const Tensor x = numbers({50000}, boolean), y = numbers({50000}, boolean);
  EXPECT_EQ(chained_in(
                [](const Tensor& a, const Tensor& b) -> Tensors {
                  return {logical_xor(logical_not(a), b), logical_or(a, b).to(i64)};
                },
                {{x, y}, {y, x}}),
            4);
}

TEST_F(CaptureChains, FollowTheOrderOfMemory) {
  const NoGrad no_grad;
  const auto program = [](const Tensor& a, const Tensor& b) -> Tensors { return {relu(a * b) + a, (a - b) * b}; };
  const auto image = [] { return randn({2, 16, 45, 47}).contiguous(MemoryFormat::channels_last); };
  EXPECT_EQ(chained_in(program, {{image(), image()}, {image(), image()}}), 5);
  const auto turned = [] { return randn({300, 200}).transpose(0, 1); };
  EXPECT_EQ(chained_in(program, {{turned(), turned()}, {turned(), turned()}}), 5);
  // Two orders, and gaps: what has them runs by itself.
  chained_in(program, {{randn({200, 300}), turned()}});
  EXPECT_EQ(chained_in([](const Tensor& a, const Tensor& b) -> Tensors { return {a * b + a}; },
                       {{randn({200, 400}).narrow(1, 0, 300), randn({200, 400}).narrow(1, 50, 300)}}),
            0);
}

TEST_F(CaptureChains, EndAtWhatIsNotTheSameElements) {
  const NoGrad no_grad;
  // A row for all rows.
  const Tensor row = randn({300});
  EXPECT_EQ(chained_in([&](const Tensor& a, const Tensor& b) -> Tensors { return {relu(a + row) * b}; },
                       {{randn({200, 300}), randn({200, 300})}}),
            2);
  // Another number of elements, or few.
  EXPECT_EQ(chained_in(
                [](const Tensor& a, const Tensor& b) -> Tensors {
                  return {relu(a), relu(b)};
                },
                {{randn({40000}), randn({50000})}}),
            0);
  EXPECT_EQ(chained_in([](const Tensor& a, const Tensor& b) -> Tensors { return {relu(a) * b + a}; },
                       {{randn({1000}), randn({1000})}}),
            0);
  // One of the numbers that the chain computes.
  EXPECT_EQ(chained_in(
                [](const Tensor& a, const Tensor& b) -> Tensors {
                  const Tensor t = relu(a) * b + a;
                  return {t * t.narrow(0, 39999, 1)};
                },
                {{randn({40000}), randn({40000})}}),
            3);
  // Nothing in common.
  EXPECT_EQ(chained_in(
                [](const Tensor& a, const Tensor& b) -> Tensors {
                  return {relu(a), exp(b)};
                },
                {{randn({40000}), randn({40000})}}),
            0);
}

TEST_F(CaptureChains, KeepToTheOrderOfOverlappingWrites) {
  const NoGrad no_grad;
  constexpr std::int64_t kN = 40000;
  for (const int threads : {1, 2}) {
    const test::ThreadsGuard set(threads);
    for (const std::int64_t shift : {0, 1, 64, 5000}) {
      // Each way has memory of its own.
      const Tensor start = randn({kN + shift});
      const auto program = [start, shift](std::shared_ptr<Tensor> all) {
        return [all, shift](const Tensor& x, const Tensor& y) -> Tensors {
          Tensor a = all->narrow(0, 0, kN), b = all->narrow(0, shift, kN);
          const Tensor before = a * 2;
          b.mul_(0.5).add_(x);
          a.add_(y * before);
          return {a + b, before};
        };
      };
      std::vector<std::string> ends;
      const Tensor x = randn({kN}), y = randn({kN});
      for (int way = 0; way < 3; ++way) {
        const auto all = std::make_shared<Tensor>(start.clone());
        const auto step = program(all);
        auto captured = capture(step, {.chains = way == 2});
        std::string end;
        for (int i = 0; i < 5; ++i) {
          for (const Tensor& t : way == 0 ? step(x, y) : captured(x, y)) end += bits(t);
        }
        if (way > 0) {
          EXPECT_TRUE(captured.replayed()) << captured.why_not();
        }
        if (way == 2) {
          EXPECT_GT(captured.stats().chained, 0);
        }
        ends.push_back(end + bits(*all));
      }
      EXPECT_TRUE(ends[0] == ends[1]) << shift;
      EXPECT_TRUE(ends[0] == ends[2]) << shift;
    }
  }
}

// What is an input in one call may lie in what the step writes in the next.
TEST_F(CaptureChains, LookWhereInputsLie) {
  const NoGrad no_grad;
  constexpr std::int64_t kN = 40000;
  std::vector<std::string> ends;
  std::vector<std::uint64_t> chained;
  for (int way = 0; way < 3; ++way) {
    manual_seed(9);
    const Tensor all = randn({kN + 100}), other = randn({kN});
    const auto step = [p = all.narrow(0, 0, kN)](const Tensor& x) {
      Tensor to = p;
      to.mul_(0.5).add_(x);
      return x * to;
    };
    auto captured = capture(step, {.chains = way == 2});
    std::string end;
    for (const Tensor& x : {other, other, other, all.narrow(0, 100, kN), all.narrow(0, 0, kN), other}) {
      end += bits(way == 0 ? step(x) : captured(x));
      chained.push_back(captured.stats().chained);
    }
    if (way > 0) {
      EXPECT_EQ(captured.stats().replayed, 4) << captured.why_not();
    }
    ends.push_back(end + bits(all));
  }
  EXPECT_TRUE(ends[0] == ends[1]);
  EXPECT_TRUE(ends[0] == ends[2]);
  const std::vector<std::uint64_t> last(chained.end() - 6, chained.end());
  EXPECT_EQ(last, (std::vector<std::uint64_t>{0, 0, 3, 3, 6, 9}));
}

TEST_F(CaptureChains, DrawTheSameRandomNumbers) {
  const NoGrad no_grad;
  for (const int threads : {1, 3}) {
    const test::ThreadsGuard set(threads);
    for (const DType dtype : {f32, f16, bf16, f64}) {
      for (const std::int64_t n : {32768, 40001, 100003}) {
        const Tensor x = randn({n}).to(dtype), y = randn({n}).to(dtype);
        EXPECT_EQ(chained_in(
                      [](const Tensor& a, const Tensor& b) -> Tensors {
                        return {dropout(a, 0.3) * b + a, dropout(b, 0.5)};
                      },
                      {{x, y}}),
                  3)
            << name(dtype) << ' ' << n;
      }
    }
  }
}

TEST_F(CaptureChains, NameTheCallThatFails) {
  const NoGrad no_grad;
  auto step = capture([](const Tensor& a, const Tensor& b) { return floor_divide(a * 2, b) + a; }, {.chains = true});
  const Tensor x = randint(1, 50, {40000}), y = randint(1, 50, {40000});
  for (int i = 0; i < 3; ++i) step(x, y);
  EXPECT_EQ(step.stats().chained, 3);
  Tensor zero = y.clone();
  zero.narrow(0, 39999, 1).fill_(0);
  EXPECT_EQ(test::error_of<Error>([&] { step(x, zero); }),
            "floor_divide: an integer was divided by zero, in the replay of a captured step");
  EXPECT_EQ(bits(step(x, y)), bits(floor_divide(x * 2, y) + x));
}

// Programs drawn by chance: results live for different times, so that memory is used again in many ways.
TEST_F(CaptureChains, RunRandomProgramsToTheSameBits) {
  const NoGrad no_grad;
  std::uint64_t chained = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    const test::ThreadsGuard set(1 + static_cast<int>(seed % 3));
    const Program program = [seed](const Tensor& x, const Tensor& y) -> Tensors {
      std::mt19937 random(seed);
      const auto draw = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
      Tensors pool{x, y, x.to(bf16)};
      for (int i = 0; i < 40; ++i) {
        const Tensor a = pool[draw(pool.size())];
        const Tensor b = pool[draw(pool.size())];
        Tensor made;
        switch (draw(12)) {
          case 0:
            made = a + b;
            break;
          case 1:
            made = a * b;
            break;
          case 2:
            made = tanh(a);
            break;
          case 3:
            made = a.to(draw(2) ? f32 : bf16);
            break;
          case 4:
            made = where(gt(a, b), a, b.to(a.dtype()));
            break;
          case 5:
            made = dropout(a, 0.25);
            break;
          case 6:
            made = a * sum(b);
            break;
          case 7:
            made = masked_fill(a, le(b, 0), 0.5);
            break;
          case 8:
            made = a.to(f64).to(f16) - b;
            break;
          case 9:
            made = a.clone();
            made.add_(b, 0.5);
            break;
          case 10:
            made = a - 0.25;
            break;
          default:
            made = relu(a);
            break;
        }
        if (pool.size() < 8) {
          pool.push_back(tanh(made));
        } else {
          pool[draw(pool.size())] = made;
        }
        if (draw(4) == 0) pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(draw(pool.size() - 1)));
      }
      Tensors results;
      for (const Tensor& t : pool) results.push_back(t + 0.5);
      return results;
    };
    const std::int64_t n = 32768 + static_cast<std::int64_t>(seed % 7) * 1001;
    chained += chained_in(program, {{randn({n}), randn({n})}, {randn({n}), randn({n})}});
    if (testing::Test::HasFailure()) FAIL() << "program " << seed;
  }
  EXPECT_GT(chained, 600);
}

struct Net : nn::Module<Net> {
  nn::Linear up = child("up", nn::Linear{{.in = 24, .out = 96}});
  nn::Linear down = child("down", nn::Linear{{.in = 96, .out = 24}});
  nn::Linear head = child("head", nn::Linear{{.in = 24, .out = 5}});
  Tensor forward(const Tensor& x) const {
    const Tensor h = up(x);
    const Tensor activated = h * 0.5 * (tanh((h + h * h * h * 0.044715) * 0.7978845608) + 1);
    const Tensor y = x + dropout(down(activated), 0.1, is_training());
    return head(y / (abs(y) + 1));
  }
};

TEST_F(CaptureChains, TrainToTheSameBits) {
  const Net start;
  const Tensor x = randn({1500, 24}), y = randint(0, 5, {1500});
  for (const std::optional<DType> low : {std::optional<DType>{}, {f16}, {bf16}}) {
    std::vector<std::string> ends;
    for (int way = 0; way < 3; ++way) {
      manual_seed(5);
      const Net net = nn::clone(start);
      optim::Adam optimizer(net.parameters(), {.lr = 1e-2});
      amp::GradScaler scaler({.init_scale = 1 << 20, .enabled = low == f16});
      const auto step = [&](const Tensor& in, const Tensor& target) {
        optimizer.zero_grad();
        Tensor loss;
        {
          const amp::Autocast region({.dtype = low.value_or(f16), .enabled = low.has_value()});
          loss = cross_entropy(net(in), target);
        }
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        return loss;
      };
      auto captured = capture(step, {.chains = way == 2});
      std::string end;
      for (int i = 0; i < 12; ++i) end += bits(way == 0 ? step(x, y) : captured(x, y));
      for (const auto& t : net.state_dict()) end += bits(t.tensor);
      if (way > 0) {
        EXPECT_GT(captured.stats().replayed, 7) << captured.why_not();
      }
      if (way == 2) {
        EXPECT_GT(captured.stats().chained, 10 * captured.stats().replayed);
      }
      ends.push_back(end);
    }
    EXPECT_TRUE(ends[0] == ends[1]);
    EXPECT_TRUE(ends[0] == ends[2]);
  }
}

}  // namespace
}  // namespace halfstep
