// SPDX-License-Identifier: Apache-2.0
// A weight's 16-bit copy never outlives the weight's values, whoever writes them: through an address, through memory of
// the program's own, through DLPack or an alias; step by step, captured, and where an optimizer keeps the copy.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/cast_cache.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/core/dlpack.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"

namespace halfstep {
namespace {

using Floats = std::vector<float>;
constexpr std::int64_t kSide = 8;

/// A way to write a weight that the library isn't told of.
struct Writer {
  std::string name;
  /// The memory of the weight, if it isn't the library's.
  std::shared_ptr<Floats> memory = {};
  /// Called once before training, and what comes back with the new values.
  std::function<std::function<void(const Floats&)>(const Tensor& weight)> take;
};

void put(void* to, const Floats& from) { std::memcpy(to, from.data(), from.size() * sizeof(float)); }

std::vector<Writer> writers() {
  std::vector<Writer> list;
  list.push_back({.name = "data, taken when it is used",
                  .take = [](const Tensor& w) { return [w](const Floats& v) { put(w.data<float>(), v); }; }});
  list.push_back({.name = "data, taken before",
                  .take = [](const Tensor& w) { return [at = w.data<float>()](const Floats& v) { put(at, v); }; }});
  list.push_back({.name = "raw_data, taken before",
                  .take = [](const Tensor& w) { return [at = w.raw_data()](const Floats& v) { put(at, v); }; }});
  list.push_back({.name = "raw_data of detach()",
                  .take = [](const Tensor& w) { return [w](const Floats& v) { put(w.detach().raw_data(), v); }; }});
  list.push_back({.name = "data of a view", .take = [](const Tensor& w) {
                    return
                        [w](const Floats& v) { put(w.detach().view({kSide * kSide}).slice(0, 0, 8).data<float>(), v); };
                  }});
  auto memory = std::make_shared<Floats>(kSide * kSide);
  list.push_back({.name = "memory of from_blob", .memory = memory, .take = [memory](const Tensor&) {
                    return [memory](const Floats& v) { put(memory->data(), v); };
                  }});
  list.push_back({.name = "DLPack, held", .take = [](const Tensor& w) {
                    const Tensor import = from_dlpack(to_dlpack(w.detach()));
                    return [import](const Floats& v) {
                      Tensor(import).copy_(tensor(std::vector<double>(v.begin(), v.end()), import.sizes()));
                    };
                  }});
  list.push_back({.name = "DLPack, given back at once", .take = [](const Tensor& w) {
                    return [w](const Floats& v) {
                      Tensor import = from_dlpack(to_dlpack(w.detach()));
                      import.copy_(tensor(std::vector<double>(v.begin(), v.end()), import.sizes()));
                    };
                  }});
  list.push_back({.name = "copy_ into an alias", .take = [](const Tensor& w) {
                    return [w](const Floats& v) {
                      w.detach().copy_(tensor(std::vector<double>(v.begin(), v.end()), w.sizes()));
                    };
                  }});
  return list;
}

/// A weight whose address nobody has, but for the writer's own memory.
Tensor weight_for(const Writer& writer, double value = 1) {
  if (!writer.memory) return (full({kSide, kSide}, value) + 0).requires_grad_();
  std::fill(writer.memory->begin(), writer.memory->end(), static_cast<float>(value));
  return from_blob(writer.memory->data(), {kSide, kSide}).requires_grad_();
}

Tensor product(const Tensor& x, const Tensor& w, bool cache = true) {
  const amp::Autocast region{{.dtype = f16, .cache = cache}};
  return mm(x, w);
}

class StaleCopy : public testing::Test {
 protected:
  void SetUp() override {
    if (!default_device().is_cpu()) GTEST_SKIP() << "only the CPU's memory has addresses to write through";
  }
};

const Floats kNew = Floats(kSide * kSide, 3);

TEST_F(StaleCopy, NotInsideARegion) {
  for (const Writer& writer : writers()) {
    SCOPED_TRACE(writer.name);
    const Tensor w = weight_for(writer), x = ones({2, kSide});
    const auto write = writer.take(w);
    const amp::Autocast region;
    EXPECT_EQ(mm(x, w).to_vector<float>(), Floats(2 * kSide, kSide));
    write(kNew);
    EXPECT_EQ(mm(x, w).to_vector<float>(), Floats(2 * kSide, 3 * kSide));
    {
      const NoGrad no_grad;
      EXPECT_EQ(mm(x, w).to_vector<float>(), Floats(2 * kSide, 3 * kSide));
    }
    write(Floats(kSide * kSide, 5));
    EXPECT_EQ(mm(x, w).to_vector<float>(), Floats(2 * kSide, 5 * kSide));
  }
}

// The sequence that exposed it: the best weights are kept aside and put back, and an optimizer keeps the copies.
template <class Optimizer, class Options>
void best_weights_come_back(const Options& options) {
  for (const Writer& writer : writers()) {
    SCOPED_TRACE(writer.name);
    const Tensor w = weight_for(writer);
    const auto write = writer.take(w);
    manual_seed(2);
    const Tensor x = randn({4, kSide}) + 0;
    Optimizer optimizer(NamedTensors{{"w", w}}, options);
    amp::GradScaler scaler{{.init_scale = 1024}};
    const auto train = [&] {
      optimizer.zero_grad();
      Tensor loss;
      {
        const amp::Autocast region{{.dtype = f16}};
        loss = sum(mm(x, w));
      }
      scaler.scale(loss).backward();
      EXPECT_TRUE(scaler.step(optimizer).ran());
      scaler.update();
    };
    for (int i = 0; i < 3; ++i) train();
    const Floats best = w.to_vector<float>();
    for (int round = 0; round < 2; ++round) {
      for (int i = 0; i < 3; ++i) train();
      ASSERT_NE(w.to_vector<float>(), best);
      write(best);
      ASSERT_EQ(w.to_vector<float>(), best);
      EXPECT_EQ(product(x, w).to_vector<float>(), mm(x.to(f16), w.detach().to(f16)).to_vector<float>());
    }
    train();
    EXPECT_EQ(product(x, w).to_vector<float>(), mm(x.to(f16), w.detach().to(f16)).to_vector<float>());
  }
}

TEST_F(StaleCopy, NotOfBestWeightsThatComeBackUnderSgd) {
  best_weights_come_back<optim::SGD>(optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
}
TEST_F(StaleCopy, NotOfBestWeightsThatComeBackUnderAdam) {
  best_weights_come_back<optim::Adam>(optim::AdamOptions{.lr = 0.1});
}

TEST_F(StaleCopy, NotInACapturedStep) {
  for (const Writer& writer : writers()) {
    SCOPED_TRACE(writer.name);
    std::vector<Floats> results[2];
    for (const bool captured : {false, true}) {
      const Tensor w = weight_for(writer);
      const auto write = writer.take(w);
      manual_seed(2);
      const Tensor x = randn({4, kSide}) + 0;
      optim::SGD optimizer({{"w", w}}, {.lr = 0.1});
      amp::GradScaler scaler{{.init_scale = 1024}};
      const auto step = [&](const Tensor& in) {
        optimizer.zero_grad();
        Tensor y;
        {
          // Without the cache in the run that is compared with: each use casts.
          const amp::Autocast region{{.dtype = f16, .cache = captured}};
          y = mm(in, w) + mm(in, w);
        }
        scaler.scale(sum(y)).backward();
        scaler.step(optimizer);
        scaler.update();
        return y.detach();
      };
      auto fast = capture(step);
      for (int i = 0; i < 10; ++i) {
        if (i > 4 && i % 2 == 1) write(Floats(kSide * kSide, static_cast<float>(i)));
        results[captured].push_back((captured ? fast(x) : step(x)).to_vector<float>());
      }
      if (captured) {
        EXPECT_GE(fast.stats().replayed, 5u) << fast.why_not();
      }
      results[captured].push_back(w.to_vector<float>());
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

TEST_F(StaleCopy, NotAfterASkippedStep) {
  // The weight is written by an op between its use and a step that isn't made: the optimizer's pass leaves the copy.
  Tensor w = (full({kSide, kSide}, 1) + 0).requires_grad_();
  const Tensor x = ones({2, kSide});
  optim::SGD optimizer({{"w", w}}, {.lr = 1});
  amp::GradScaler scaler{{.init_scale = 1024}};
  scaler.scale(sum(product(x, w))).backward();
  w.grad().fill_(std::numeric_limits<double>::infinity());
  {
    const NoGrad no_grad;
    w.mul_(2);
  }
  EXPECT_FALSE(scaler.step(optimizer).ran());
  EXPECT_EQ(product(x, w).to_vector<float>(), Floats(2 * kSide, 2 * kSide));
}

// -------------------------------------------------------------------------------------------------- and not in vain

TEST_F(StaleCopy, ACopyIsKeptWhereNobodyCanWrite) {
  const Tensor w = (full({kSide, kSide}, 1) + 0).requires_grad_(), x = ones({2, kSide}, {.dtype = f16});
  optim::SGD optimizer({{"w", w}}, {.lr = 0.25});
  const auto train = [&] {
    optimizer.zero_grad();
    sum(product(x, w)).backward();
    optimizer.step();
  };
  train();
  const auto casts = [&] {
    amp::cast_stats() = {};
    train();
    return amp::cast_stats().casts;
  };
  EXPECT_EQ(casts(), 0u);
  // Reading gives no address away.
  (void)w.const_raw_data();
  (void)w.data<const float>()[0];
  (void)w.to_vector<float>();
  EXPECT_EQ(casts(), 0u);
  // Ops are seen; a lent address ends with its holder.
  w.detach().copy_(full({kSide, kSide}, 2));
  EXPECT_EQ(casts(), 1u);
  EXPECT_EQ(casts(), 0u);
  {
    const Tensor import = from_dlpack(to_dlpack(w.detach()));
    EXPECT_EQ(casts(), 1u);
    EXPECT_EQ(casts(), 1u);
  }
  EXPECT_EQ(casts(), 1u);
  EXPECT_EQ(casts(), 0u);
  // One that was given may be used for ever.
  (void)w.data<float>();
  EXPECT_EQ(casts(), 1u);
  EXPECT_EQ(casts(), 1u);
}

TEST_F(StaleCopy, GradientsOfHeldWeightsAddUpInFloat32Too) {
  const Tensor w = (full({kSide, kSide}, 1) + 0).requires_grad_();
  (void)w.data<float>();
  manual_seed(4);
  std::vector<Tensor> xs;
  for (int i = 0; i < 16; ++i) xs.push_back(randn({4, kSide}).to(bf16));
  Tensor loss, exact;
  const Tensor w64 = full({kSide, kSide}, 1, {.dtype = f64}).requires_grad_();
  {
    const amp::Autocast region{{.dtype = bf16}};
    for (const Tensor& x : xs) loss = loss.defined() ? loss + sum(mm(x, w)) : sum(mm(x, w));
  }
  for (const Tensor& x : xs) {
    const Tensor y = sum(mm(x.to(f64), w64));
    exact = exact.defined() ? exact + y : y;
  }
  loss.backward();
  exact.backward();
  const auto got = w.grad().to_vector<double>(), expected = w64.grad().to_vector<double>();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 2e-3 * 16) << i;
  EXPECT_EQ(w.grad().dtype(), f32);
}

}  // namespace
}  // namespace halfstep
