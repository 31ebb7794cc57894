// SPDX-License-Identifier: Apache-2.0
// The parts of check_device() for training steps: gradient scaling, optimizers, two networks; and for queues, events
// and pinned memory.
#include <cmath>
#include <limits>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/conformance/device_check_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::conformance::detail {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Parameters of several shapes with these values in a dtype, on a device.
NamedTensors parameters(const Tensors& values, DType dtype, Device device) {
  NamedTensors result;
  for (const Tensor& v : values) {
    Tensor p = v.to(dtype).to(device).clone();
    result.push_back({fmt::format("p{}", result.size()), p.requires_grad_()});
  }
  return result;
}

// What is to be made wrong in a gradient.
struct Planted {
  std::size_t gradient;
  std::int64_t element;
  double value;
};

struct ScaledStep {
  Tensors gradients, parameters;
  Tensor norm;
  bool ran = true;
  std::vector<std::string> overflows;
};

// One step on given gradients; those of every third parameter are float32, the others of its dtype.
ScaledStep scaled_step(const Tensors& values, const Tensors& gradients, DType dtype, Device device,
                       const std::vector<Planted>& planted, bool unscale) {
  const NamedTensors all = parameters(values, dtype, device);
  optim::SGD sgd{all, {.lr = 0.125, .momentum = 0.5}};
  amp::GradScaler scaler{amp::GradScalerOptions{.init_scale = 1024}};
  scaler.scale(ones({}, {.device = device}));
  for (std::size_t i = 0; i < all.size(); ++i) {
    Tensor g = gradients[i].to(dtype);
    for (const Planted& p : planted) {
      if (p.gradient == i) g.view({-1}).select(0, p.element).fill_(p.value);
    }
    all[i].tensor.set_grad(g.to(device));
  }
  ScaledStep result;
  if (unscale) result.norm = scaler.unscale_(sgd, {.norm = true});
  const amp::StepResult step = scaler.step(sgd);
  result.ran = step.ran();
  result.overflows = step.overflows();
  for (const auto& [name, p] : all) {
    result.parameters.push_back(p.detach());
    result.gradients.push_back(p.grad());
  }
  return result;
}

}  // namespace

void check_scaling(Checker& c) {
  const std::vector<Shape> shapes = {{37, 19}, {1}, {c.size(1000003, 4099)}, {8, 3, 3, 3}, {65}};
  Tensors values, gradients;
  for (const Shape& s : shapes) {
    values.push_back(c.normal(s));
    gradients.push_back(c.normal(s, 64));
  }
  const std::int64_t last = shapes[2][0] - 1;
  const std::vector<std::pair<const char*, std::vector<Planted>>> cases = {
      {"all finite", {}},
      {"an infinity at the end", {{2, last, kInfinity}}},
      {"a NaN at the beginning", {{0, 0, kNaN}}},
      {"-infinity in one element", {{1, 0, -kInfinity}}},
      {"in the middle", {{2, last / 2, kNaN}}},
      {"in several", {{0, 702, kInfinity}, {3, 100, kNaN}, {4, 64, -kInfinity}}}};
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    c.line("unscale, check and skip", name(dtype), [&] {
      for (const auto& [what, planted] : cases) {
        for (const bool unscale : {true, false}) {
          c.one(fmt::format("{}, {}", what, unscale ? "unscaled before" : "in the step"), [&, &planted = planted] {
            const ScaledStep here = scaled_step(values, gradients, dtype, Device{}, planted, unscale);
            const ScaledStep there = scaled_step(values, gradients, dtype, c.device, planted, unscale);
            if (here.ran != planted.empty()) c.problem("the CPU itself is wrong");
            if (there.ran != here.ran) c.problem(there.ran ? "the step was made" : "the step was skipped");
            if (there.overflows != here.overflows) c.problem("other gradients are named");
            for (std::size_t i = 0; i < shapes.size(); ++i) {
              // The scale is a power of two: unscaling loses nothing. A step in float32 rounds a few times.
              c.same(there.gradients[i], here.gradients[i], fmt::format("gradient {}", i));
              if (planted.empty()) {
                c.near(there.parameters[i], here.parameters[i].to(DType::f64), {},
                       {.rounded = dtype == f32 ? 1.0 : 2.0, .summed = 8, .of = Of::largest},
                       fmt::format("parameter {}", i));
              } else {
                c.same(there.parameters[i], values[i].to(dtype), fmt::format("parameter {}", i));
              }
            }
            if (unscale && planted.empty()) {
              c.near(there.norm, here.norm.to(DType::f64), {},
                     {.summed = 2 * (2 * std::sqrt(static_cast<double>(last)) + 16)}, "norm");
            }
          });
        }
      }
    });
  }
  c.line("the scale's way", "", [&] {
    const auto way = [&](Device device, const amp::LossScalePolicy& policy) {
      amp::LossScale scale(policy);
      scale.start(device);
      std::vector<double> seen;
      for (int i = 0; i < 40; ++i) {
        const bool overflow = i % 7 == 3 || (i > 20 && i < 25);
        scale.update({full({1}, overflow ? 1.0 : 0.0, {.device = device})});
        seen.push_back(scale.value());
        seen.push_back(scale.growth_tracker());
      }
      return seen;
    };
    const std::pair<const char*, amp::LossScalePolicy> policies[] = {
        {"torch", amp::LossScalePolicy::torch({.init_scale = 1024, .growth_interval = 2})},
        {"mindspore", amp::LossScalePolicy::mindspore(16, 2, 3)},
        {"megatron", amp::LossScalePolicy::megatron({.initial_scale = 1024, .growth_interval = 3, .hysteresis = 2})},
        {"deepspeed",
         amp::LossScalePolicy::deepspeed({.init_scale = 1024, .scale_window = 3, .raise_error_at_min_scale = false})},
        {"fixed", amp::LossScalePolicy::fixed(512)}};
    for (const auto& [name, policy] : policies) {
      c.one(name, [&, &policy = policy] {
        if (way(c.device, policy) != way(Device{}, policy)) c.problem("another scale or count");
        c.measured(0, Bound::exact().str(f32), "scale");
      });
    }
  });
}

void check_optimizers(Checker& c) {
  constexpr int kSteps = 5;
  const std::vector<Shape> shapes = {{67, 33}, {c.size(200003, 1025)}, {1}, {16, 8, 3, 3}, {130}};
  Tensors values;
  std::vector<Tensors> gradients(kSteps);
  for (const Shape& s : shapes) {
    values.push_back(c.normal(s));
    // Away from 0, also with the decay added: Adam divides by their size, and a gradient that cancels has no digits
    // left.
    for (Tensors& g : gradients) {
      g.push_back(c.uniform(s, 0.1, 0.3) * (c.integers(2, s).to(DType::f64) * 2.0 - 1.0));
    }
  }
  using Maker = std::function<std::unique_ptr<optim::Optimizer>(const NamedTensors&)>;
  const std::pair<const char*, Maker> kinds[] = {
      {"SGD", [](const NamedTensors& p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions{.lr = 0.1}); }},
      {"SGD, Nesterov, decay",
       [](const NamedTensors& p) {
         return std::make_unique<optim::SGD>(
             p, optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 1e-2, .nesterov = true});
       }},
      {"Adam", [](const NamedTensors& p) { return std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 0.01}); }},
      {"Adam, AMSGrad, decay",
       [](const NamedTensors& p) {
         return std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 0.01, .weight_decay = 1e-2, .amsgrad = true});
       }},
      {"AdamW",
       [](const NamedTensors& p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 0.01}); }}};
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    c.line(dtype == f32 ? "optimizers" : "optimizers, master weights", name(dtype), [&] {
      for (const auto& [what, make] : kinds) {
        c.one(what, [&, &make = make] {
          const auto trained = [&](DType of, Device device) {
            Tensors rounded;
            for (const Tensor& v : values) rounded.push_back(v.to(dtype));
            const NamedTensors all = parameters(rounded, of, device);
            const auto optimizer = make(all);
            for (const Tensors& step : gradients) {
              Tensors given;
              for (const Tensor& g : step) given.push_back(g.to(dtype).to(of).to(device));
              optimizer->step(given);
            }
            // Parameters, then moments and the like, which are float32 for 16-bit parameters; not the master weights,
            // of which the parameters are the rounding.
            std::map<std::string, Tensor> result;
            for (const auto& [name, p] : all) result[name] = p.detach();
            const optim::OptimizerState state = optimizer->state_dict();
            for (const auto& [name, t] : state.tensors) {
              if (!name.ends_with("master")) result[name] = t.detach();
            }
            for (const auto& [name, number] : state.numbers)
              result[name] = scalar_tensor(number, {.dtype = DType::f64});
            return result;
          };
          const auto exact = trained(DType::f64, Device{}), got = trained(dtype, c.device);
          if (got.size() != exact.size()) c.problem("another state");
          for (const auto& [name, t] : got) {
            const auto it = exact.find(name);
            if (it == exact.end()) {
              c.problem(fmt::format("unexpected state {}", name));
            } else if (!t.is_floating()) {
              c.same(t, it->second, name);
            } else {
              // Some 20 operations an element and step in float32, of numbers no larger than the largest.
              c.near(t, it->second, {}, {.summed = 20 * kSteps, .of = Of::largest}, name);
            }
          }
        });
      }
    });
  }
  c.line("clipping by the norm", "f32", [&] {
    c.one("clip_grad_norm_", [&] {
      const auto clipped = [&](Device device) {
        const NamedTensors all = parameters(values, f32, device);
        for (std::size_t i = 0; i < all.size(); ++i) all[i].tensor.set_grad(gradients[0][i].to(f32).to(device));
        optim::clip_grad_norm_(all, 1.0);
        Tensors result;
        for (const auto& [name, p] : all) result.push_back(p.grad());
        return result;
      };
      const Tensors here = clipped(Device{}), there = clipped(c.device);
      const double n = static_cast<double>(shapes[1][0]);
      for (std::size_t i = 0; i < here.size(); ++i) {
        c.near(there[i], here[i].to(DType::f64), {}, {.summed = 2 * (2 * std::sqrt(n) + 16)},
               fmt::format("gradient {}", i));
      }
    });
  });
}

namespace {

struct Net {
  nn::Sequential net;
  bool images = false;
};
Net make_mlp() {
  manual_seed(5);
  return {nn::Sequential{nn::Linear{{.in = 64, .out = 96}}, nn::ReLU{}, nn::Linear{{.in = 96, .out = 48}}, nn::ReLU{},
                         nn::Linear{{.in = 48, .out = 10}}}};
}
struct Pool : nn::Module<Pool> {
  Tensor forward(const Tensor& x) const { return flatten(adaptive_avg_pool2d(max_pool2d(x, {2}), {1}), 1); }
};
Net make_images() {
  manual_seed(6);
  return {nn::Sequential{nn::Conv2d{{.in = 3, .out = 16, .kernel = {3}, .padding = 1, .bias = false}},
                         nn::BatchNorm2d{{.channels = 16}}, nn::ReLU{},
                         nn::Conv2d{{.in = 16, .out = 24, .kernel = {3}, .stride = {2}, .padding = 1}},
                         nn::BatchNorm2d{{.channels = 24}}, nn::ReLU{}, Pool{}, nn::Linear{{.in = 24, .out = 10}}},
          true};
}

struct Trained {
  std::vector<double> values;  // losses, then parameters and buffers
  std::size_t losses = 0;
  std::vector<bool> ran;
  double scale = 0;
};

// A few steps of SGD with momentum under a scaler; the loss of step 3 is made infinite, so that it is skipped.
Trained train_net(Net (*make)(), const Tensor& x, const Tensor& y, DType weights, std::optional<DType> region,
                  Device device) {
  constexpr int kSteps = 6, kOverflow = 3;
  const Net made = make();
  const nn::Sequential& net = made.net;
  net.to(weights);
  net.to(device);
  if (made.images) net.to(MemoryFormat::channels_last);
  const NamedTensors all = net.parameters();
  optim::SGD sgd{all, {.lr = 0.05, .momentum = 0.9}};
  amp::GradScaler scaler{amp::GradScalerOptions{.init_scale = 256, .growth_interval = 2}};
  Trained result;
  Tensor input = x.to(weights).to(device);
  if (made.images) input = input.contiguous(MemoryFormat::channels_last);
  const Tensor target = y.to(device);
  std::vector<amp::StepResult> steps;
  Tensors losses;
  for (int s = 0; s < kSteps; ++s) {
    sgd.zero_grad();
    Tensor loss;
    {
      const amp::Autocast autocast{{.dtype = region.value_or(DType::f16), .enabled = region.has_value()}};
      loss = cross_entropy(net(input), target);
    }
    losses.push_back(loss.detach());
    if (s == kOverflow) loss = loss * kInfinity;
    scaler.scale(loss).backward();
    steps.push_back(scaler.step(sgd));
    scaler.update();
  }
  const auto append = [&](const Tensor& t) {
    for (double v : t.detach().to(Device{}).to_vector<double>()) result.values.push_back(v);
  };
  for (const Tensor& l : losses) append(l);
  result.losses = result.values.size();
  for (const auto& [name, p] : all) append(p);
  for (const auto& [name, b] : net.buffers()) append(b);
  for (const amp::StepResult& s : steps) result.ran.push_back(s.ran());
  result.scale = scaler.get_scale();
  return result;
}

// Root of the mean squared difference over [first, last).
double distance(const Trained& a, const Trained& b, std::size_t first, std::size_t last) {
  double total = 0;
  for (std::size_t i = first; i < last; ++i) total += (a.values[i] - b.values[i]) * (a.values[i] - b.values[i]);
  return std::sqrt(total / static_cast<double>(last - first));
}

}  // namespace

void check_networks(Checker& c) {
  const Tensor digits = c.normal({64, 64}), pictures = c.normal({c.size(16, 8), 3, 16, 16});
  const std::tuple<const char*, Net (*)(), Tensor> nets[] = {
      {"training an MLP", make_mlp, digits}, {"training a convolutional network", make_images, pictures}};
  for (const auto& [what, make, x] : nets) {
    const Tensor y = c.integers(10, {x.size(0)});
    for (const std::optional<DType> region :
         {std::optional<DType>{}, std::optional(DType::f16), std::optional(DType::bf16)}) {
      c.line(what, region ? fmt::format("{} AMP", name(*region)) : "f32", [&, &make = make, &x = x] {
        c.one("6 steps", [&] {
          const Trained exact = train_net(make, x, y, DType::f64, {}, Device{});
          const Trained here = train_net(make, x, y, f32, region, Device{});
          const Trained there = train_net(make, x, y, f32, region, c.device);
          if (there.ran != exact.ran) c.problem("other steps were skipped");
          if (there.scale != exact.scale)
            c.problem(fmt::format("the scale is {}, expected {}", there.scale, exact.scale));
          const std::string bound = "4 times the CPU's own distance from float64, and 2^-21";
          // Of numbers of the size of 1: 8 roundings in float32 are allowed in any case.
          const auto compare = [&](std::size_t first, std::size_t last, const char* of) {
            c.measured(distance(there, exact, first, last) / (4 * distance(here, exact, first, last) + 0x1p-21), bound,
                       of);
          };
          compare(0, exact.losses, "losses");
          compare(exact.losses, exact.values.size(), "parameters");
        });
      });
    }
  }
}

void check_queues(Checker& c) {
  c.line("queues, events, pinned memory", "", [&] {
    const Tensor base = c.normal({c.size(3001, 301), 259}).to(f32);
    c.one("asynchronous copies", [&] {
      const Queue copies(c.device), back(c.device);
      Event arrived(c.device), computed(c.device);
      const Tensor pinned = base.pin_memory(c.device);
      Tensor there, result;
      {
        const QueueGuard guard(copies);
        there = pinned.to(c.device, {.non_blocking = true});
        arrived.record();
      }
      Queue::current(c.device).wait(arrived);
      result = there * 2.0;
      computed.record();
      Tensor got = empty(base.sizes(), {.dtype = f32, .device = Device{}}).pin_memory(c.device);
      back.wait(computed);
      {
        const QueueGuard guard(back);
        got = result.to(Device{}, {.non_blocking = true});
      }
      back.synchronize();
      c.same(got, base * 2.0, "result");
    });
    c.one("many queues", [&] {
      Tensor x = base.to(c.device);
      synchronize(c.device);
      std::vector<Queue> queues;
      for (int i = 0; i < 4; ++i) queues.emplace_back(c.device);
      for (int i = 0; i < 24; ++i) {
        const Queue& queue = queues[static_cast<std::size_t>(i % 4)];
        Event done(c.device);
        {
          const QueueGuard guard(queue);
          x = x * (i % 2 == 0 ? 2.0 : 0.5) + 0.0;
          done.record();
        }
        queues[static_cast<std::size_t>((i + 1) % 4)].wait(done);
        Queue::current(c.device).wait(done);
      }
      c.same(x, base, "result");
    });
    c.one("events", [&] {
      Event start(c.device, {.timing = true}), end(c.device, {.timing = true});
      start.record();
      Tensor x = base.to(c.device);
      for (int i = 0; i < 10; ++i) x = x * 1.0;
      end.record();
      end.synchronize();
      if (!start.query() || !end.query()) c.problem("an event that was waited for is not passed");
      const double ms = start.elapsed_ms(end);
      if (!(ms >= 0 && ms < 60000)) c.problem(fmt::format("ten products took {} ms by the device's clock", ms));
      if (!Queue::current(c.device).query()) {
        synchronize(c.device);
        if (!Queue::current(c.device).query()) c.problem("a queue that was waited for is not done");
      }
    });
    if (!c.device.is_cpu()) {
      std::vector<Device> others;
      for (const DeviceInfo& d : devices()) {
        if (d.device.type == c.device.type && d.device != c.device && !d.lost) others.push_back(d.device);
      }
      if (!others.empty()) {
        c.one(fmt::format("to {} and back", others[0].str()), [&] {
          const Tensor there = base.to(c.device).to(others[0]);
          c.same(there, base, "there");
          c.same((there + there).to(c.device), base + base, "back");
        });
      }
    }
  });
}

}  // namespace halfstep::conformance::detail
