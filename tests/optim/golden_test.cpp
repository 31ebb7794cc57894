// SPDX-License-Identifier: Apache-2.0
// Trajectories of PyTorch's optimizers (tests/goldens/make_optim.py).
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "halfstep/ops/create.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/sgd.h"
#include "tests/optim/optim_golden.h"

namespace halfstep {

using test::GoldenEntry;
using test::GoldenTensor;

Tensor tensor_of(const GoldenTensor& golden) {
  return tensor(golden.data, Shape(golden.shape), {.dtype = golden.dtype == "f64" ? f64 : f32});
}

std::vector<double> row_of(const GoldenTensor& golden, std::int64_t step) {
  const auto width = static_cast<std::ptrdiff_t>(golden.data.size()) / golden.shape.at(0);
  return {golden.data.begin() + step * width, golden.data.begin() + (step + 1) * width};
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected, double bound,
                 const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(expected[i]) || std::isinf(expected[i])) {
      EXPECT_EQ(std::isnan(got[i]), std::isnan(expected[i])) << what << " element " << i;
      EXPECT_EQ(std::isinf(got[i]), std::isinf(expected[i])) << what << " element " << i;
    } else {
      EXPECT_LE(std::abs(got[i] - expected[i]), bound)
          << what << " element " << i << ": " << got[i] << ", expected " << expected[i];
    }
  }
}

double drift_bound(const GoldenEntry& entry, std::int64_t steps) {
  double largest = 1;
  for (const auto& list : {entry.inputs, entry.outputs}) {
    for (const GoldenTensor& t : list) {
      for (double v : t.data) {
        if (std::isfinite(v)) largest = std::max(largest, std::abs(v));
      }
    }
  }
  if (entry.inputs.at(0).dtype == "f64") return 1e-12 * largest;
  return 10 * static_cast<double>(steps) * 0x1p-24 * largest;
}

std::vector<GoldenEntry> goldens_of(const std::vector<std::string>& ops) {
  static const auto all = test::read_goldens("optim.json");
  std::vector<GoldenEntry> result;
  for (const GoldenEntry& e : all) {
    if (std::find(ops.begin(), ops.end(), e.op) != ops.end()) result.push_back(e);
  }
  EXPECT_FALSE(result.empty());
  return result;
}

namespace {

// An option of a group, else of all.
double option(const GoldenEntry& e, int group, const std::string& name, double otherwise) {
  const std::string own = "group" + std::to_string(group) + "." + name;
  return e.has(own) ? e.real(own) : e.real(name, otherwise);
}

optim::SGDOptions sgd_options(const GoldenEntry& e, int group) {
  return {.lr = option(e, group, "lr", 1e-3),
          .momentum = option(e, group, "momentum", 0),
          .dampening = option(e, group, "dampening", 0),
          .weight_decay = option(e, group, "weight_decay", 0),
          .nesterov = e.flag("nesterov", false),
          .maximize = e.flag("maximize", false)};
}

template <class Options>
Options adam_options(const GoldenEntry& e, int group) {
  Options o;
  o.lr = option(e, group, "lr", o.lr);
  o.weight_decay = option(e, group, "weight_decay", o.weight_decay);
  o.eps = e.real("eps", o.eps);
  o.amsgrad = e.flag("amsgrad", false);
  o.maximize = e.flag("maximize", false);
  if (e.has("betas")) o.beta1 = e.reals("betas").at(0), o.beta2 = e.reals("betas").at(1);
  return o;
}

template <class O, class Make>
std::unique_ptr<optim::Optimizer> in_groups(const std::vector<NamedTensors>& groups, const Make& options) {
  auto result = std::make_unique<O>(groups[0], options(0));
  for (std::size_t g = 1; g < groups.size(); ++g) result->add_param_group(groups[g], options(static_cast<int>(g)));
  return result;
}

std::unique_ptr<optim::Optimizer> make(const GoldenEntry& e, const std::vector<NamedTensors>& groups) {
  if (e.op == "SGD") return in_groups<optim::SGD>(groups, [&](int g) { return sgd_options(e, g); });
  if (e.op == "Adam") {
    return in_groups<optim::Adam>(groups, [&](int g) { return adam_options<optim::AdamOptions>(e, g); });
  }
  return in_groups<optim::AdamW>(groups, [&](int g) { return adam_options<optim::AdamWOptions>(e, g); });
}

TEST(OptimGolden, Trajectories) {
  for (const GoldenEntry& e : goldens_of({"SGD", "Adam", "AdamW"})) {
    if (e.has("case")) continue;
    std::vector<Tensor> parameters;
    for (const GoldenTensor& t : e.inputs) parameters.push_back(tensor_of(t).requires_grad_());
    std::vector<NamedTensors> groups;
    for (std::int64_t g = 0; g < e.integer("groups", 1); ++g) {
      std::vector<std::int64_t> members{0, 1, 2};
      if (e.has("groups")) members = e.integers("group" + std::to_string(g) + ".params");
      groups.emplace_back();
      for (std::int64_t i : members) {
        groups.back().push_back({"p" + std::to_string(i), parameters[static_cast<std::size_t>(i)]});
      }
    }
    const auto optimizer = make(e, groups);
    const std::int64_t steps = e.integer("steps");
    const double bound = drift_bound(e, steps);
    for (std::int64_t s = 0; s < steps; ++s) {
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const GoldenTensor& all = e.tensor("grad" + std::to_string(i));
        parameters[i].set_grad(tensor(row_of(all, s), parameters[i].sizes(), {.dtype = parameters[i].dtype()}));
      }
      optimizer->step();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        expect_near(parameters[i].to_vector<double>(), row_of(e.outputs[i], s), bound,
                    e.name + " step " + std::to_string(s) + " parameter " + std::to_string(i));
      }
    }
    // The states too: a checkpoint's numbers mean what PyTorch's mean.
    std::size_t compared = 0;
    for (const NamedTensor& t : optimizer->state_dict().tensors) {
      const auto dot = t.name.find('.');
      if (t.name.starts_with("group")) continue;
      expect_near(t.tensor.to_vector<double>(), e.tensor(t.name.substr(dot + 1) + t.name.substr(1, dot - 1)).data,
                  10 * bound, e.name + " " + t.name);
      ++compared;
    }
    EXPECT_EQ(compared == 0, e.op == "SGD" && e.real("momentum", 0) == 0) << e.name;
  }
}

TEST(OptimGolden, ParametersWithoutGradientsAreLeft) {
  for (const GoldenEntry& e : goldens_of({"SGD", "Adam"})) {
    if (!e.has("case")) continue;
    NamedTensors parameters;
    for (const GoldenTensor& t : e.inputs) {
      parameters.push_back({"p" + std::to_string(parameters.size()), tensor_of(t).requires_grad_()});
    }
    const auto optimizer = make(e, {parameters});
    for (std::int64_t s = 0; s < 6; ++s) {
      const Tensor g = tensor(row_of(e.tensor("grad"), s), {.dtype = f64});
      parameters[0].tensor.set_grad(g.clone());
      parameters[1].tensor.set_grad(s % 2 ? g.clone() : Tensor());
      parameters[2].tensor.set_grad(zeros({3}, {.dtype = f64}));
      optimizer->step();
      for (std::size_t i = 0; i < 3; ++i) {
        expect_near(parameters[i].tensor.to_vector<double>(), row_of(e.outputs[i], s), drift_bound(e, 6),
                    e.name + " step " + std::to_string(s) + " parameter " + std::to_string(i));
      }
    }
  }
}

TEST(OptimGolden, Clipping) {
  for (const GoldenEntry& e : goldens_of({"clip_grad_norm_", "clip_grad_value_"})) {
    NamedTensors parameters;
    for (const GoldenTensor& t : e.inputs) {
      Tensor p = zeros(Shape(t.shape), {.dtype = t.dtype == "f64" ? f64 : f32, .requires_grad = true});
      p.set_grad(tensor_of(t));
      parameters.push_back({"p" + std::to_string(parameters.size()), p});
    }
    const double bound = drift_bound(e, 1);
    if (e.op == "clip_grad_value_") {
      optim::clip_grad_value_(parameters, e.real("clip_value"));
    } else {
      const bool largest = std::holds_alternative<std::string>(e.attributes.at("norm_type"));
      const double type = largest ? INFINITY : e.real("norm_type");
      const Tensor norm = optim::clip_grad_norm_(parameters, e.real("max_norm"), {.norm_type = type});
      EXPECT_EQ(norm.dtype(), e.inputs[0].dtype == "f64" ? f64 : f32);
      expect_near(norm.to_vector<double>(), e.tensor("norm").data, bound, e.name);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      expect_near(parameters[i].tensor.grad().to_vector<double>(), e.outputs[i].data, bound, e.name);
    }
  }
}

}  // namespace
}  // namespace halfstep
