// SPDX-License-Identifier: Apache-2.0
// Every row of the policy table whose op exists, as PyTorch's CUDA list has it: dtypes exactly, values against float64
// within the bounds of tests/goldens/README.md, and the same bits as casts made by hand with autocast off.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/policy.h"
#include "halfstep/ops/op.h"
#include "tests/support/golden_calls.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using Tensors = std::vector<Tensor>;

DType region_of(const GoldenEntry& e) { return e.text("region") == "f16" ? f16 : bf16; }

// What the policy makes of the inputs, by hand; nothing for results whose dtype alone is set.
std::optional<Tensors> cast_by_hand(const GoldenEntry& e, const Tensors& inputs) {
  const std::string policy = e.text("policy");
  const auto eligible = [](const Tensor& t) { return t.dtype() == f32 || t.dtype() == f16 || t.dtype() == bf16; };
  std::optional<DType> to;
  if (policy == "lower") to = region_of(e);
  if (policy == "fp32") to = f32;
  if (policy == "fp32_dtype" || policy == "low_output") return std::nullopt;
  if (policy == "promote") {
    for (const Tensor& t : inputs) {
      if (eligible(t)) to = !to || *to == t.dtype() ? t.dtype() : f32;
    }
  }
  Tensors result = inputs;
  if (to) {
    for (Tensor& t : result) {
      if (eligible(t)) t = t.to(*to);
    }
  }
  return result;
}

double half_unit(DType d) { return d == f64 ? 0x1p-53 : d == f16 ? 0x1p-11 : d == bf16 ? 0x1p-8 : 0x1p-24; }

void check_values(const GoldenEntry& e, const Tensor& ours, std::size_t i) {
  ASSERT_EQ(std::string(name(ours.dtype())), e.outputs[i].dtype);
  ASSERT_EQ(ours.sizes(), Shape(e.outputs[i].shape));
  const auto values = ours.to_vector<double>();
  if (!ours.is_floating()) {
    EXPECT_EQ(values, e.outputs[i].data);
    return;
  }
  const auto& exact = e.exact.at(i).data;
  double scale = 0;
  for (const double v : exact) scale = std::isfinite(v) ? std::max(scale, std::abs(v)) : scale;
  const double u32 = 0x1p-24, terms = e.has("terms") ? e.real("terms") : 0;
  for (std::size_t k = 0; k < values.size(); ++k) {
    if (!std::isfinite(exact[k]) || !std::isfinite(e.outputs[i].data[k])) {
      EXPECT_EQ(std::isnan(values[k]), std::isnan(e.outputs[i].data[k])) << k;
      if (!std::isnan(values[k])) {
        EXPECT_EQ(values[k], e.outputs[i].data[k]) << k;
      }
      continue;
    }
    const double room = e.tensors.contains("magnitude")
                            ? terms * u32 / (1 - terms * u32) * e.tensor("magnitude").data[k]
                            : 16 * u32 * scale;
    EXPECT_NEAR(values[k], exact[k],
                half_unit(ours.dtype()) * std::abs(exact[k]) + room + (ours.dtype() == f16 ? 0x1p-25 : 0))
        << k;
  }
}

// Goldens of ops that later parts of the library bring, each with the reason; the list can only shrink: an op that
// exists must be called.
const std::map<std::string, std::string> kLater = {};

TEST(PolicyOps, MatchPyTorchsListInDtypesAndValues) {
  std::set<std::string> missing;
  int run = 0;
  for (const GoldenEntry& e : test::read_goldens("policy_ops.json")) {
    const auto found = test::golden_calls().find(e.op);
    if (found == test::golden_calls().end()) {
      if (!kLater.contains(e.op) || find_op(e.op)) missing.insert(e.op);
      continue;
    }
    SCOPED_TRACE(e.name);
    ++run;
    Tensors inputs;
    for (const test::GoldenTensor& t : e.inputs) inputs.push_back(test::to_tensor(t));
    if (e.flag("throws", false) && e.text("policy") == "banned") {
      const amp::Autocast region{{.dtype = region_of(e)}};
      EXPECT_THROW(found->second(e, inputs), AmpError);
      continue;
    }
    const Tensors ours = [&] {
      const amp::Autocast region{{.dtype = region_of(e)}};
      return found->second(e, inputs);
    }();
    if (e.flag("throws", false)) {
      // PyTorch throws for the half type that isn't the region's, in an order of arguments of its choice; here the
      // widest dtype holds whatever the order.
      EXPECT_EQ(ours[0].dtype(), f32);
    } else {
      ASSERT_EQ(ours.size(), e.outputs.size());
      for (std::size_t i = 0; i < ours.size(); ++i) check_values(e, ours[i], i);
    }
    if (const auto cast = cast_by_hand(e, inputs)) {
      const Tensors by_hand = found->second(e, *cast);
      for (std::size_t i = 0; i < ours.size(); ++i) {
        EXPECT_EQ(ours[i].dtype(), by_hand[i].dtype());
        const auto a = ours[i].to_vector<double>(), b = by_hand[i].to_vector<double>();
        EXPECT_TRUE(a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0) << "other bits";
      }
    }
  }
  EXPECT_GT(run, 500);
  std::string list;
  for (const std::string& op : missing) list += op + " ";
  EXPECT_TRUE(missing.empty()) << "goldens of ops that tests/support/golden_calls.cpp doesn't call: " << list;
}

// What a row changes about a call is compared with PyTorch's: rows that only let inputs pass are left to the op's
// tests.
TEST(PolicyOps, EveryRowThatChangesDtypesHasAGolden) {
  std::set<std::string> golden;
  for (const GoldenEntry& e : test::read_goldens("policy_ops.json")) golden.insert(e.op);
  // Forms of one function, which chooses between them by its arguments, and of a layer by what its weights are.
  const std::map<std::string, std::string> forms = {
      {"pow_scalar", "pow"}, {"scalar_pow", "pow"}, {"linear_weight_only", "linear"}};
  for (const amp::PolicyRow& row : amp::policy_table()) {
    if (row.policy == amp::Policy::pass_through || row.op.starts_with("test_")) continue;
    const auto form = forms.find(row.op);
    EXPECT_TRUE(golden.contains(form == forms.end() ? row.op : form->second)) << row.op << " has no policy golden";
  }
}

}  // namespace
}  // namespace halfstep
