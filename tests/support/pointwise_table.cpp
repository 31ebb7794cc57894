// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pointwise_table.h"

#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "tests/support/op_cases.h"

namespace halfstep::test {
namespace {

using Entry = GoldenEntry;
using Unary = Tensor (*)(const Tensor&);
using Binary = Tensor (*)(const Tensor&, const Tensor&);

PointwiseFunction unary(Unary f) {
  return [f](const Entry&, const Inputs& in) { return f(in[0]); };
}
PointwiseFunction binary(Binary f) {
  return [f](const Entry&, const Inputs& in) { return f(in[0], in[1]); };
}
std::optional<Scalar> bound(const Entry& e, const char* name) {
  if (!e.has(name)) return std::nullopt;
  return Scalar(e.real(name));
}
// Most functions of one tensor are in the table of op cases already.
std::map<std::string, PointwiseFunction> with_op_cases(std::map<std::string, PointwiseFunction> table) {
  for (const OpCase& c : unary_cases()) {
    if (c.function) table.emplace(c.op, unary(c.function));
  }
  return table;
}

}  // namespace

const std::map<std::string, PointwiseFunction>& pointwise_functions() {
  static const std::map<std::string, PointwiseFunction> table = with_op_cases({
      {"add", [](const Entry& e, const Inputs& in) { return add(in[0], in[1], Scalar(e.real("alpha", 1.0))); }},
      {"sub", [](const Entry& e, const Inputs& in) { return sub(in[0], in[1], Scalar(e.real("alpha", 1.0))); }},
      {"mul", binary(mul)},
      {"div", binary(div)},
      {"maximum", binary(maximum)},
      {"minimum", binary(minimum)},
      {"atan2", binary(atan2)},
      {"pow",
       [](const Entry& e, const Inputs& in) {
         return e.has("exponent") ? pow(in[0], Scalar(e.real("exponent"))) : pow(in[0], in[1]);
       }},
      {"fmod", binary(fmod)},
      {"remainder", binary(remainder)},
      {"floor_divide", binary(floor_divide)},
      {"softplus", [](const Entry& e,
                      const Inputs& in) { return softplus(in[0], e.real("beta", 1.0), e.real("threshold", 20.0)); }},
      {"relu6", unary(relu6)},
      {"elu", [](const Entry& e, const Inputs& in) { return elu(in[0], e.real("alpha", 1.0)); }},
      {"selu", unary(selu)},
      {"hardtanh", [](const Entry&, const Inputs& in) { return hardtanh(in[0]); }},
      {"gelu",
       [](const Entry& e, const Inputs& in) {
         return gelu(in[0], e.text("approximate", "none") == "tanh" ? GeluForm::tanh : GeluForm::exact);
       }},
      {"leaky_relu",
       [](const Entry& e, const Inputs& in) { return leaky_relu(in[0], e.real("negative_slope", 0.01)); }},
      {"prelu", binary(prelu)},
      {"clamp", [](const Entry& e, const Inputs& in) { return clamp(in[0], bound(e, "min"), bound(e, "max")); }},
      {"where", [](const Entry&, const Inputs& in) { return where(in[0], in[1], in[2]); }},
      {"masked_fill",
       [](const Entry& e, const Inputs& in) { return masked_fill(in[0], in[1], Scalar(e.real("value"))); }},
      {"addcmul",
       [](const Entry& e, const Inputs& in) { return addcmul(in[0], in[1], in[2], Scalar(e.real("value", 1.0))); }},
      {"addcdiv",
       [](const Entry& e, const Inputs& in) { return addcdiv(in[0], in[1], in[2], Scalar(e.real("value", 1.0))); }},
      {"lerp", [](const Entry& e, const Inputs& in) { return lerp(in[0], in[1], e.real("weight")); }},
      {"eq", binary(eq)},
      {"ne", binary(ne)},
      {"lt", binary(lt)},
      {"le", binary(le)},
      {"gt", binary(gt)},
      {"ge", binary(ge)},
      {"isnan", unary(isnan)},
      {"isinf", unary(isinf)},
      {"isfinite", unary(isfinite)},
  });
  return table;
}

}  // namespace halfstep::test
