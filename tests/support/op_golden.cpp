// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/ops/create.h"

namespace halfstep::test {
namespace {

DType dtype_named(const std::string& text) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (text == name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw std::invalid_argument("golden of dtype " + text);
}

void expect_close(const std::vector<double>& ours, const GoldenTensor& golden, const std::string& what) {
  ASSERT_EQ(ours.size(), golden.data.size()) << what;
  const bool exact = golden.dtype[0] != 'f' && golden.dtype[0] != 'b';
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double want = golden.data[i];
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(ours[i])) << what << " element " << i << ": " << ours[i];
    } else if (exact || std::isinf(want)) {
      EXPECT_EQ(ours[i], want) << what << " element " << i;
    } else {
      EXPECT_NEAR(ours[i], want, 1e-12 + 1e-11 * std::abs(want)) << what << " element " << i;
    }
  }
}

// Read once a program: many tests ask for the few entries of one op.
const std::vector<GoldenEntry>& entries_of(const std::string& file) {
  static std::map<std::string, std::vector<GoldenEntry>> files;
  const auto known = files.find(file);
  return known != files.end() ? known->second : files.emplace(file, read_goldens(file)).first->second;
}

}  // namespace

Tensor to_tensor(const GoldenTensor& golden, bool requires_grad) {
  Tensor t = tensor(golden.data, Shape(golden.shape), {.dtype = dtype_named(golden.dtype)});
  if (requires_grad) t.requires_grad_();
  return t;
}

Shape golden_dims(const GoldenEntry& entry) { return entry.has("dim") ? Shape(entry.integers("dim")) : Shape{}; }

void check_op_goldens(const std::string& op, const GoldenCall& call, const std::string& file) {
  int found = 0;
  for (const GoldenEntry& entry : entries_of(file)) {
    if (entry.op != op) continue;
    ++found;
    SCOPED_TRACE(entry.name);
    std::vector<Tensor> inputs;
    for (std::size_t i = 0; i < entry.inputs.size(); ++i) {
      inputs.push_back(to_tensor(entry.inputs[i], i < entry.grads.size() && entry.grads[i]));
    }
    const std::vector<Tensor> outputs = call(entry, inputs);
    ASSERT_EQ(outputs.size(), entry.outputs.size());
    std::vector<Tensor> roots, cotangents;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_EQ(outputs[i].sizes(), Shape(entry.outputs[i].shape));
      EXPECT_EQ(name(outputs[i].dtype()), entry.outputs[i].dtype);
      expect_close(outputs[i].to_vector<double>(), entry.outputs[i], "output " + std::to_string(i));
      if (i < entry.cotangents.size() && entry.cotangents[i]) {
        roots.push_back(outputs[i]);
        cotangents.push_back(to_tensor(*entry.cotangents[i]));
      }
    }
    const bool differentiable =
        std::any_of(entry.grads.begin(), entry.grads.end(), [](const auto& g) { return g.has_value(); });
    if (roots.empty() || !differentiable) continue;
    backward(roots, cotangents);
    for (std::size_t i = 0; i < inputs.size() && i < entry.grads.size(); ++i) {
      if (!entry.grads[i]) continue;
      ASSERT_TRUE(inputs[i].grad().defined()) << "gradient " << i;
      expect_close(inputs[i].grad().to_vector<double>(), *entry.grads[i], "gradient " + std::to_string(i));
    }
  }
  EXPECT_GT(found, 0) << op << " has no goldens";
}

void check_policy_goldens(const std::string& op, const GoldenCall& call) {
  int found = 0;
  const double u32 = std::ldexp(1.0, -24);
  for (const GoldenEntry& entry : entries_of("policy_ops.json")) {
    if (entry.op != op) continue;
    ++found;
    SCOPED_TRACE(entry.name);
    std::vector<Tensor> inputs;
    for (const GoldenTensor& t : entry.inputs) inputs.push_back(to_tensor(t));
    std::vector<Tensor> outputs;
    {
      amp::Autocast region{{.dtype = dtype_named(entry.text("region"))}};
      if (entry.flag("throws", false)) {
        EXPECT_THROW(call(entry, inputs), Error);
        continue;
      }
      outputs = call(entry, inputs);
    }
    ASSERT_EQ(outputs.size(), entry.outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_EQ(name(outputs[i].dtype()), entry.outputs[i].dtype) << "output " << i;
      const std::vector<double>& exact = entry.exact.at(i).data;
      const std::vector<double> ours = outputs[i].to_vector<double>();
      ASSERT_EQ(ours.size(), exact.size());
      double scale = 0;
      for (double v : exact) scale = std::max(scale, std::abs(v));
      const DType d = outputs[i].dtype();
      const double u = d == f64 ? 0x1p-53 : d == f16 ? 0x1p-11 : d == bf16 ? 0x1p-8 : u32;
      for (std::size_t j = 0; j < ours.size(); ++j) {
        const double bound = u * std::abs(exact[j]) + 16 * u32 * scale + (d == f16 ? 0x1p-25 : 0.0);
        EXPECT_NEAR(ours[j], exact[j], bound) << "output " << i << " element " << j;
      }
    }
  }
  EXPECT_GT(found, 0) << op << " has no policy goldens";
}

}  // namespace halfstep::test
