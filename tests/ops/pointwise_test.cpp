// SPDX-License-Identifier: Apache-2.0
// Every elementwise function: values and gradients against PyTorch, derivatives against differences, accuracy in each
// dtype, layouts.
#include "halfstep/ops/pointwise.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/gradcheck.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "tests/support/pointwise_table.h"

namespace halfstep {
namespace {

using test::GoldenEntry;
using test::GoldenTensor;
using test::Inputs;
using Values = std::vector<double>;

const std::vector<GoldenEntry>& goldens() {
  static const auto entries = test::read_goldens("ops_f64.json");
  return entries;
}

// Rounding in another order over a few operations: tests/goldens/README.md.
void expect_close(const Tensor& ours, const GoldenTensor& golden, const std::string& what) {
  // PyTorch's gradient of hardsigmoid multiplies by 1/6 rounded to float32.
  const double relative = what.starts_with("hardsigmoid") ? 0x1p-24 : 1e-11;
  EXPECT_EQ(ours.sizes(), Shape(golden.shape)) << what;
  EXPECT_EQ(name(ours.dtype()), golden.dtype) << what;
  const Values values = ours.to_vector<double>();
  ASSERT_EQ(values.size(), golden.data.size()) << what;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double want = golden.data[i];
    if (what == "silu/1" && i == 5) {
      EXPECT_EQ(values[i], 0) << "the limit at -infinity, where PyTorch has NaN";
    } else if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(values[i])) << what << " [" << i << "]";
    } else if (std::isinf(want)) {
      EXPECT_EQ(values[i], want) << what << " [" << i << "]";
    } else {
      EXPECT_NEAR(values[i], want, 1e-12 + relative * std::fabs(want)) << what << " [" << i << "]";
    }
  }
}

Inputs golden_inputs(const GoldenEntry& e) {
  Inputs inputs;
  for (std::size_t i = 0; i < e.inputs.size(); ++i) {
    inputs.push_back(test::to_tensor(e.inputs[i], i < e.grads.size() && e.grads[i].has_value()));
  }
  return inputs;
}

TEST(PointwiseGoldens, ValuesAndGradientsArePyTorchs) {
  std::set<std::string> seen;
  for (const GoldenEntry& e : goldens()) {
    const auto f = test::pointwise_functions().find(e.op);
    if (f == test::pointwise_functions().end()) continue;
    seen.insert(e.op);
    const Inputs inputs = golden_inputs(e);
    const Tensor out = f->second(e, inputs);
    expect_close(out, e.outputs.at(0), e.name);
    if (e.cotangents.empty() || !e.cotangents[0]) continue;
    Inputs wanted;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < e.grads.size(); ++i) {
      if (!e.grads[i]) continue;
      wanted.push_back(inputs[i]);
      places.push_back(i);
    }
    if (wanted.empty()) continue;
    // Once with the fused gradients and once with the recorded formulas.
    for (const bool record : {true, false}) {
      const auto grads =
          grad({out}, wanted, {.grad_outputs = {test::to_tensor(*e.cotangents[0])}, .create_graph = record});
      for (std::size_t i = 0; i < grads.size(); ++i) {
        expect_close(grads[i], *e.grads[places[i]], e.name + " gradient " + std::to_string(places[i]));
      }
    }
  }
  for (const auto& [name, f] : test::pointwise_functions())
    EXPECT_TRUE(seen.contains(name)) << name << " has no golden";
}

TEST(PointwiseGradients, FirstAndSecondAreDifferences) {
  for (const GoldenEntry& e : goldens()) {
    const auto f = test::pointwise_functions().find(e.op);
    if (f == test::pointwise_functions().end() || e.grads.empty()) continue;
    // Entries that hold a kink or a singular point are for the test above.
    bool smooth = true;
    for (std::size_t i = 0; i < e.inputs.size(); ++i) {
      for (const double v : e.inputs[i].data) {
        smooth = smooth && std::isfinite(v) && (e.inputs[i].dtype == "bool" || std::fabs(v) < 30) && v != 0;
        for (const double kink : {0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 6.0})
          smooth = smooth && std::fabs(std::fabs(v) - kink) > 1e-4;
      }
    }
    const bool steps = e.op == "sign" || e.op == "floor" || e.op == "ceil" || e.op == "round" || e.op == "trunc";
    bool bools = false;
    for (const auto& t : e.inputs) bools = bools || t.dtype == "bool";
    if (!smooth && !bools) continue;
    const auto function = [&](const std::vector<Tensor>& in) { return f->second(e, in); };
    EXPECT_NO_THROW(gradcheck(function, golden_inputs(e))) << e.name;
    if (steps) continue;
    EXPECT_NO_THROW(gradgradcheck(function, golden_inputs(e))) << e.name;
  }
}

TEST(PointwiseGradients, FormsWithoutGoldens) {
  const auto leaf = [](const Values& v) { return tensor(v, {.dtype = f64, .requires_grad = true}); };
  const Tensor x = leaf({0.3, 1.7, 2.2}), y = leaf({-0.4, 0.9, 1.3}), w = leaf({0.2, 0.6, 0.9});
  const auto check = [](auto f, const Inputs& in) {
    gradcheck(f, in);
    gradgradcheck(f, in);
  };
  check([](const Inputs& in) { return hypot(in[0], in[1]); }, {x, y});
  check([](const Inputs& in) { return lerp(in[0], in[1], in[2]); }, {x, y, w});
  check([](const Inputs& in) { return pow(2.5, in[0]); }, {y});
  check([](const Inputs& in) { return 3.5 / in[0]; }, {x});
  check([](const Inputs& in) { return in[0] / 3.5; }, {x});
  check([](const Inputs& in) { return 3.5 - in[0]; }, {x});
  check([](const Inputs& in) { return clamp(in[0], in[1], in[2]); }, {x, y, w});
  check([](const Inputs& in) { return nan_to_num(in[0]); }, {x});
  check([](const Inputs& in) { return threshold(in[0], 1.0, 20.0); }, {x});
  check([](const Inputs& in) { return fmod(in[0], 0.7); }, {x});
}

TEST(PointwiseGradients, ClampAtItsBounds) {
  const auto leaf = [](const Values& v) { return tensor(v, {.dtype = f64, .requires_grad = true}); };
  const Tensor x = leaf({-1, 0, 1, 0.5});
  const Tensor g = full({4}, 1.0, {.dtype = f64});
  EXPECT_EQ(grad({clamp(x, 0, 1)}, {x}, {.grad_outputs = {g}})[0].to_vector<double>(), (Values{0, 0, 0, 1}));
  const Tensor low = leaf({0, 0, 0, 0}), high = leaf({1, 1, 1, 1});
  const auto grads = grad({clamp(x, low, high)}, {x, low, high}, {.grad_outputs = {g}});
  EXPECT_EQ(grads[0].to_vector<double>(), (Values{0, 0.5, 0.5, 1}));
  EXPECT_EQ(grads[1].to_vector<double>(), (Values{1, 0.5, 0, 0}));
  EXPECT_EQ(grads[2].to_vector<double>(), (Values{0, 0, 0.5, 0}));
}

// --- accuracy: against the same op in f64, whose values the goldens hold

// Half the distance between two values of the dtype around v.
double half_unit(double v, DType dtype) {
  const FloatInfo& info = finfo(dtype);
  const double magnitude = std::max(std::fabs(v), info.smallest_normal);
  return std::ldexp(info.eps, std::ilogb(magnitude)) / 2;
}

struct Case {
  const char* name;
  Tensor (*f)(const Tensor&);
  double low, high;
  double units = 2;  ///< allowed error in float32, in units of its last place
};
const Case kCases[] = {
    {"exp", exp, -100, 88},
    {"exp2", exp2, -140, 127},
    {"expm1", expm1, -20, 88},
    {"log", log, 0, 1e30},
    {"log2", log2, 0, 1e30},
    {"log10", log10, 0, 1e30, 2.5},
    {"log1p", log1p, -1, 1e3},
    {"sqrt", sqrt, 0, 1e30},
    {"rsqrt", rsqrt, 0, 1e30},
    {"sin", sin, -50, 50},
    {"cos", cos, -50, 50},
    {"tan", tan, -1.5, 1.5},
    {"asin", asin, -1, 1},
    {"acos", acos, -1, 1},
    {"atan", atan, -50, 50},
    {"sinh", sinh, -80, 80},
    {"cosh", cosh, -80, 80},
    {"asinh", asinh, -1e4, 1e4},
    {"acosh", acosh, 1, 1e4},
    {"atanh", atanh, -1, 1},
    {"tanh", tanh, -12, 12},
    {"erf", erf, -5, 5},
    {"erfc", erfc, -5, 9},
    {"erfinv", erfinv, -1, 1},
    {"sigmoid", sigmoid, -105, 30},
    {"logsigmoid", logsigmoid, -90, 30},
    {"silu", silu, -110, 80, 2.5},
    {"mish", mish, -80, 80, 6},
    {"gelu", [](const Tensor& x) { return gelu(x); }, -14.5, 14.5},
    {"reciprocal", reciprocal, -1e30, 1e30},
    {"softplus", [](const Tensor& x) { return softplus(x); }, -80, 60},
};

TEST(PointwiseAccuracy, EachDtypeIsRoundedFromFloat32) {
  for (const Case& c : kCases) {
    // Some thousands of points: spread evenly, and on a logarithmic scale around 0 (or the lower end).
    Values points;
    RandomStream random(7);
    for (int i = 0; i < 3000; ++i) points.push_back(random.uniform(c.low, c.high));
    for (int i = 0; i < 3000; ++i) {
      const double m = std::exp2(random.uniform(-40, std::log2(c.high)));
      points.push_back(c.low < 0 && i % 2 ? std::fmax(-m, c.low) : m);
    }
    for (const DType dtype : {f32, f16, bf16}) {
      const Tensor x = tensor(points, {.dtype = dtype});
      const Tensor got = c.f(x);
      ASSERT_EQ(got.dtype(), dtype);
      const Values in = x.to_vector<double>(), out = got.to_vector<double>(),
                   exact = c.f(x.to(f64)).to_vector<double>();
      for (std::size_t i = 0; i < in.size(); ++i) {
        if (std::isnan(exact[i]) || std::fabs(exact[i]) > 0.999 * finfo(dtype).max) continue;
        const double f32_error = 2 * c.units * half_unit(exact[i], f32);
        const double bound = dtype == f32 ? f32_error : half_unit(exact[i], dtype) + f32_error;
        ASSERT_NEAR(out[i], exact[i], bound) << c.name << " " << name(dtype) << " of " << in[i];
      }
    }
  }
}

// The CPU computes these in float64; of another device's, what CUDA's programming guide says of its functions holds.
double units_of(double elsewhere) { return default_device().is_cpu() ? 0.51 : elsewhere; }

// The functions with a vector form, on floats of every magnitude: each 16381st bit pattern.
TEST(PointwiseAccuracy, VectorFormsStayWithinTheirUnits) {
  Values points;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 16381) {
    const float v = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isfinite(v)) points.push_back(v);
  }
  const Tensor x = tensor(points), wide = x.to(f64);
  const Case cases[] = {
      {"exp", exp, 0, 0, 1.1},
      {"expm1", expm1, 0, 0, 1.5},
      {"log", log, 0, 0, 1},
      {"log1p", log1p, 0, 0, 1},
      {"tanh", tanh, 0, 0, 1.5},
      {"erf", erf, 0, 0, 1.5},
      {"sigmoid", sigmoid, 0, 0, 1.5},
      {"silu", silu, 0, 0, 2.5},
      {"sin", sin, 0, 0, units_of(2)},
      {"cos", cos, 0, 0, units_of(2)},
      {"tan", tan, 0, 0, units_of(4)},
      {"erfc", erfc, 0, 0, std::max(0.57, units_of(4))},
      {"erfinv", erfinv, 0, 0, units_of(4)},
      {"gelu", [](const Tensor& t) { return gelu(t); }, 0, 0},
  };
  for (const Case& c : cases) {
    const Values got = c.f(x).to_vector<double>(), exact = c.f(wide).to_vector<double>();
    for (std::size_t i = 0; i < points.size(); ++i) {
      if (std::isnan(exact[i]) || std::fabs(exact[i]) > finfo(f32).max) continue;
      ASSERT_NEAR(got[i], exact[i], 2 * c.units * half_unit(exact[i], f32)) << c.name << " of " << points[i];
    }
  }
}

// Floats next to multiples of pi / 2, where few digits of the argument remain, and those with the largest count of
// quarter turns that the vector form takes.
TEST(PointwiseAccuracy, SinesNextToQuarterTurns) {
  Values points;
  for (std::int64_t n = 1; n < (std::int64_t{1} << 31); n = n * 5 / 4 + 1) {
    const auto at = static_cast<float>(static_cast<double>(n) * 1.57079632679489661923);
    for (const float v : {std::nextafterf(at, 0), at, std::nextafterf(at, HUGE_VALF), -at}) points.push_back(v);
  }
  for (const float v : {0x1p30f, std::nextafterf(0x1p30f, 0), std::nextafterf(0x1p30f, HUGE_VALF)}) points.push_back(v);
  const Tensor x = tensor(points);
  const auto check = [&](const char* name, const Tensor& got, double (*f)(double)) {
    const Values y = got.to_vector<double>();
    for (std::size_t i = 0; i < points.size(); ++i) {
      const double exact = f(points[i]);
      ASSERT_NEAR(y[i], exact, 2 * units_of(4) * half_unit(exact, f32)) << name << " of " << points[i];
    }
  };
  check("sin", sin(x), std::sin);
  check("cos", cos(x), std::cos);
  check("tan", tan(x), std::tan);
}

// As the C library has it in float64, rounded once: two tensors, a number as exponent and one as base.
TEST(PointwiseAccuracy, PowersAreRoundedOnce) {
  const double inf = INFINITY;
  const auto expect_power = [](double got, double x, double y) {
    const double exact = std::pow(x, y);
    if (std::isnan(exact)) {
      EXPECT_TRUE(std::isnan(got)) << x << " ^ " << y << ": " << got;
    } else if (std::fabs(exact) >= 0x1.ffffffp127) {  // from halfway between the largest float and 2^128
      EXPECT_EQ(got, std::copysign(HUGE_VAL, exact)) << x << " ^ " << y;
    } else {
      ASSERT_NEAR(got, exact, 2 * units_of(4) * half_unit(exact, f32)) << x << " ^ " << y;
      EXPECT_EQ(std::signbit(got), std::signbit(exact)) << x << " ^ " << y;
    }
  };
  const Values special = {0.0,      -0.0,     1,    -1,    inf,   -inf,   NAN,       2,         -2,   3,
                          -3,       0.5,      -0.5, 2.5,   -2.5,  127,    128,       -126,      -149, -150,
                          16777216, 16777217, 1e30, -1e30, 1e-40, -1e-40, 0.9999999, 1.0000001, 3e38};
  Values bases, exponents;
  for (const double x : special) {
    for (const double y : special) bases.push_back(static_cast<float>(x)), exponents.push_back(static_cast<float>(y));
  }
  RandomStream random(11);
  for (int i = 0; i < 20000; ++i) {
    const double x = std::exp2(random.uniform(-149, 128)), t = random.uniform(-160, 140);
    bases.push_back(static_cast<float>(i % 2 ? x : random.uniform(0.9, 1.1)));
    exponents.push_back(static_cast<float>(t / std::log2(bases.back())));
  }
  const Values got = pow(tensor(bases), tensor(exponents)).to_vector<double>();
  for (std::size_t i = 0; i < got.size(); ++i) expect_power(got[i], bases[i], exponents[i]);
  for (const double e : {1.7, -0.3, 4.0, 7.0, -5.0, inf}) {
    const auto number = static_cast<double>(static_cast<float>(e));
    const Values by_number = pow(tensor(bases), e).to_vector<double>(), of = pow(e, tensor(bases)).to_vector<double>();
    for (std::size_t i = 0; i < bases.size(); ++i) {
      expect_power(by_number[i], bases[i], number);
      expect_power(of[i], number, bases[i]);
    }
  }
}

TEST(PointwiseAccuracy, SpecialValues) {
  const double inf = INFINITY, nan = NAN;
  const Tensor x = tensor(Values{-inf, -0.0, 0.0, inf, nan}, {.dtype = f32});
  const auto check = [&](const Tensor& y, const Values& want) {
    const Values got = y.to_vector<double>();
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(want[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << i << ": " << got[i];
      } else {
        EXPECT_EQ(got[i], want[i]) << i;
        EXPECT_EQ(std::signbit(got[i]), std::signbit(want[i])) << i;
      }
    }
  };
  for (const DType dtype : {f32, f16, bf16, f64}) {
    SCOPED_TRACE(name(dtype));
    const Tensor v = x.to(dtype);
    check(exp(v), {0.0, 1, 1, inf, nan});
    check(expm1(v), {-1, -0.0, 0.0, inf, nan});
    check(log(v), {nan, -inf, -inf, inf, nan});
    check(log1p(v), {nan, -0.0, 0.0, inf, nan});
    check(tanh(v), {-1, -0.0, 0.0, 1, nan});
    check(erf(v), {-1, -0.0, 0.0, 1, nan});
    check(sin(v), {nan, -0.0, 0.0, nan, nan});
    check(cos(v), {nan, 1, 1, nan, nan});
    check(tan(v), {nan, -0.0, 0.0, nan, nan});
    check(sigmoid(v), {0.0, 0.5, 0.5, 1, nan});
    check(relu(v), {0.0, 0.0, 0.0, inf, nan});
    check(abs(v), {inf, 0.0, 0.0, inf, nan});
    check(sqrt(v), {nan, -0.0, 0.0, inf, nan});
    check(reciprocal(v), {-0.0, -inf, inf, 0.0, nan});
    check(round(v), {-inf, -0.0, 0.0, inf, nan});
    for (const auto f : {silu, mish}) {
      const Values got = f(v).to_vector<double>();
      EXPECT_EQ(got[0], 0);
      EXPECT_EQ(got[3], inf);
      EXPECT_TRUE(std::isnan(got[4]));
    }
    const Values g = gelu(v).to_vector<double>();
    EXPECT_EQ(g[0], 0);
    EXPECT_EQ(g[3], inf);
    EXPECT_TRUE(std::isnan(g[4]));
    EXPECT_TRUE(std::isnan(maximum(v, zeros({5}, {.dtype = dtype})).to_vector<double>()[4]));
    EXPECT_TRUE(std::isnan(minimum(zeros({5}, {.dtype = dtype}), v).to_vector<double>()[4]));
    EXPECT_TRUE(std::isnan(clamp(v, -1, 1).to_vector<double>()[4]));
  }
  EXPECT_EQ(round(tensor(Values{0.5, 1.5, 2.5, -0.5, -1.5})).to_vector<double>(), (Values{0, 2, 2, 0, -2}));
}

// --- layouts: the same values whatever the strides

TEST(PointwiseLayouts, StridedTransposedExpandedEmptyAndScalar) {
  RandomStream random(3);
  for (const DType dtype : {f32, f64, f16, bf16}) {
    Values v(6 * 5 * 70);
    for (double& d : v) d = random.uniform(0.1, 0.9);
    const Tensor base = tensor(v, {6, 5, 70}, {.dtype = dtype});
    const Tensor views[] = {base.transpose(0, 2),    base.slice(2, 1, 70, 3),
                            base.permute({1, 2, 0}), base.select(1, 2),
                            base.slice(0, 0, 6, 2),  base.select(1, 0).unsqueeze(1).expand({6, 9, 70}),
                            base.slice(2, 3, 3),     base.select(0, 0).select(0, 0).select(0, 7)};
    for (const Tensor& view : views) {
      const Tensor dense = view.contiguous();
      for (const auto f : {exp, sqrt, sin, sigmoid, relu, neg, square}) {
        EXPECT_EQ(f(view).to_vector<double>(), f(dense).to_vector<double>());
      }
      EXPECT_EQ((view * dense).to_vector<double>(), (dense * dense).to_vector<double>());
      EXPECT_EQ(maximum(dense, view * 0.5).to_vector<double>(), dense.to_vector<double>());
      EXPECT_EQ(addcmul(view, dense, view).to_vector<double>(), addcmul(dense, dense, dense).to_vector<double>());
    }
    // Rows, columns and single values against the sum over an expanded copy.
    const Tensor row = base.select(0, 0).select(0, 0), column = base.select(2, 0).unsqueeze(2);
    for (const Tensor& other : {row, column, row.select(0, 3)}) {
      const Tensor wide = other.expand({6, 5, 70}).contiguous();
      EXPECT_EQ((base - other).to_vector<double>(), (base - wide).to_vector<double>());
      EXPECT_EQ((other - base).to_vector<double>(), (wide - base).to_vector<double>());
      EXPECT_EQ(pow(base, other).to_vector<double>(), pow(base, wide).to_vector<double>());
    }
  }
  EXPECT_EQ(exp(zeros({0, 3})).sizes(), (Shape{0, 3}));
  const Tensor image = empty_strided({2, 3, 4, 5}, channels_last_strides({2, 3, 4, 5}));
  EXPECT_TRUE(relu(image).is_contiguous(MemoryFormat::channels_last));
  EXPECT_TRUE((image + image).is_contiguous(MemoryFormat::channels_last));
}

// Rows, columns and channels beside runs that vectors divide, and that they don't, from aligned and other places.
TEST(PointwiseLayouts, BroadcastsBesideLongAndOddRuns) {
  RandomStream random(5);
  const auto numbers = [&](const Shape& shape, DType dtype) {
    Values v(static_cast<std::size_t>(shape.numel()));
    for (double& d : v) d = random.uniform(-2, 2);
    return tensor(v, shape, {.dtype = dtype});
  };
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const std::int64_t n : {1, 7, 64, 90, 144}) {
      const Tensor x = numbers({9, 6, n}, dtype);
      const Tensor others[] = {numbers({n}, dtype),
                               numbers({6, 1}, dtype),
                               numbers({9, 1, n}, dtype),
                               numbers({1}, dtype),
                               numbers({9, 6, 1}, dtype),
                               numbers({9, 6, n + 3}, dtype).slice(2, 3, n + 3),
                               numbers({9, n, 6}, dtype).transpose(1, 2),
                               numbers({18, 6, n}, dtype).slice(0, 0, 18, 2)};
      for (const Tensor& other : others) {
        const Tensor wide = other.expand({9, 6, n}).contiguous();
        EXPECT_EQ((x + other).to_vector<double>(), (x + wide).to_vector<double>()) << n;
        EXPECT_EQ((other - x).to_vector<double>(), (wide - x).to_vector<double>()) << n;
        EXPECT_EQ(lt(x, other).to_vector<double>(), lt(x, wide).to_vector<double>()) << n;
        EXPECT_EQ(where(lt(x, other), other, x).to_vector<double>(), where(lt(x, wide), wide, x).to_vector<double>());
        Tensor in_place = x.clone();
        in_place.mul_(other);
        EXPECT_EQ(in_place.to_vector<double>(), (x * wide).to_vector<double>()) << n;
      }
      const Tensor image = numbers({2, n, 3, 5}, dtype), bias = numbers({n, 1, 1}, dtype);
      const Tensor last = image.contiguous(MemoryFormat::channels_last);
      EXPECT_EQ((last + bias).to_vector<double>(), (image + bias).to_vector<double>()) << n;
      EXPECT_EQ((image + bias).to_vector<double>(),
                (image + bias.expand({2, n, 3, 5}).contiguous()).to_vector<double>());
      EXPECT_EQ((last * image).to_vector<double>(), (image * image).to_vector<double>()) << n;
    }
  }
}

TEST(PointwiseInPlace, WritesTheDestinationAndKeepsGradients) {
  Tensor a = tensor(Values{1, 4, 9}, {.dtype = f16});
  sqrt_(a);
  EXPECT_EQ(a.dtype(), f16);
  EXPECT_EQ(a.to_vector<double>(), (Values{1, 2, 3}));
  lerp_(a, full({3}, 5.0, {.dtype = f16}), 0.5);
  EXPECT_EQ(a.to_vector<double>(), (Values{3, 3.5, 4}));
  for (const auto f : {+[](Tensor& t) -> Tensor& { return square_(t); }, +[](Tensor& t) -> Tensor& { return exp_(t); },
                       +[](Tensor& t) -> Tensor& { return silu_(t); }, +[](Tensor& t) -> Tensor& { return relu_(t); },
                       +[](Tensor& t) -> Tensor& { return leaky_relu_(t); },
                       +[](Tensor& t) -> Tensor& { return clamp_(t, -0.5, 0.5); }}) {
    const Tensor x = tensor(Values{-1.25, 0.3, 2}, {.dtype = f64, .requires_grad = true});
    gradcheck(
        [f](const Inputs& in) {
          Tensor t = in[0] * 1;
          f(t);
          return t;
        },
        {x});
  }
  Tensor i = tensor(std::vector<std::int64_t>{1, 2}, {2}, {.dtype = i64});
  EXPECT_THROW(exp_(i), DTypeError);
  Tensor out = zeros({3}, {.dtype = f32});
  maximum_out(out, tensor(Values{1, 5, 2}), tensor(Values{3, 3, 3}));
  EXPECT_EQ(out.to_vector<double>(), (Values{3, 5, 3}));
}

// At weights 0 and 1 the ends themselves, however far apart they are.
TEST(PointwiseLerp, GivesItsEndsExactly) {
  for (const DType dtype : {f32, f64, f16, bf16}) {
    const Tensor a = tensor(Values{10000, -0.1, 3}, {3}, {.dtype = dtype});
    const Tensor b = tensor(Values{0.1, 20000, 0.3}, {3}, {.dtype = dtype});
    EXPECT_EQ(lerp(a, b, 1.0).to_vector<double>(), b.to_vector<double>()) << name(dtype);
    EXPECT_EQ(lerp(a, b, 0.0).to_vector<double>(), a.to_vector<double>()) << name(dtype);
    EXPECT_EQ(lerp(a, b, ones({3}, {.dtype = dtype})).to_vector<double>(), b.to_vector<double>()) << name(dtype);
  }
}

TEST(PointwiseIntegers, DivisionPowersAndWrapping) {
  const auto ints = [](const std::vector<std::int64_t>& v, DType dtype) {
    return tensor(v, {static_cast<std::int64_t>(v.size())}, {.dtype = dtype});
  };
  for (const DType dtype : {i64, i32, i8}) {
    const Tensor a = ints({7, -7, 7, -7}, dtype), b = ints({2, 2, -2, -2}, dtype);
    EXPECT_EQ(floor_divide(a, b).to_vector<double>(), (Values{3, -4, -4, 3}));
    EXPECT_EQ(remainder(a, b).to_vector<double>(), (Values{1, 1, -1, -1}));
    EXPECT_EQ(fmod(a, b).to_vector<double>(), (Values{1, -1, 1, -1}));
    EXPECT_THROW(floor_divide(a, 0), Error);
    EXPECT_THROW(remainder(a, ints({1, 0, 1, 1}, dtype)), Error);
    EXPECT_THROW(fmod(a, 0), Error);
    EXPECT_EQ(pow(a, 3).to_vector<double>()[0], dtype == i8 ? 343 - 256 : 343);
    EXPECT_THROW(pow(a, -1), Error);
    EXPECT_EQ(pow(ints({2, 1, -1, -1}, dtype), ints({-1, -5, -2, -3}, dtype)).to_vector<double>(),
              (Values{0, 1, 1, -1}));
  }
  const std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  const Tensor low = ints({lowest}, i64), minus_one = ints({-1}, i64);
  EXPECT_EQ(floor_divide(low, minus_one).item<std::int64_t>(), lowest);
  EXPECT_EQ(remainder(low, minus_one).item<std::int64_t>(), 0);
  EXPECT_EQ(abs(low).item<std::int64_t>(), lowest);
  EXPECT_EQ((low + minus_one).item<std::int64_t>(), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(clamp(ints({-5, 5, 300}, i64), 0, 255).to_vector<double>(), (Values{0, 5, 255}));
  EXPECT_EQ(clamp(ints({0, 5, 200}, u8), -3, 1000).to_vector<double>(), (Values{0, 5, 200}));
  EXPECT_EQ(clamp(ints({0, 5}, i32), 0.5, 2.5).dtype(), f32);
}

// Quotients of eighths, by integers; numbers that only float32 has, and what has no quotient.
TEST(PointwiseAccuracy, QuotientsRoundedDown) {
  Values a, b, want;
  for (std::int64_t i = -40; i <= 40; ++i) {
    for (std::int64_t j = -20; j <= 20; ++j) {
      if (j == 0) continue;
      a.push_back(static_cast<double>(i) / 8);
      b.push_back(static_cast<double>(j) / 8);
      const std::int64_t q = i / j - (i % j != 0 && (i < 0) != (j < 0) ? 1 : 0);
      want.push_back(q == 0 ? std::copysign(0.0, a.back() / b.back()) : static_cast<double>(q));
    }
  }
  const double inf = INFINITY;
  const auto expect_quotients = [](const Tensor& got, const Values& expected, const Values& x, const Values& y) {
    const Values q = got.to_vector<double>();
    for (std::size_t i = 0; i < q.size(); ++i) {
      if (std::isnan(expected[i])) {
        EXPECT_TRUE(std::isnan(q[i])) << x[i] << " / " << y[i] << ": " << q[i];
      } else {
        EXPECT_EQ(q[i], expected[i]) << x[i] << " / " << y[i];
        EXPECT_EQ(std::signbit(q[i]), std::signbit(expected[i])) << x[i] << " / " << y[i];
      }
    }
  };
  for (const DType dtype : {f32, bf16, f16, f64}) {
    SCOPED_TRACE(name(dtype));
    expect_quotients(floor_divide(tensor(a, {.dtype = dtype}), tensor(b, {.dtype = dtype})), want, a, b);
  }
  // 1 - 2^-24 of a divisor, a quotient of 2^40 and a half, beyond 2^52, and what the C library is asked.
  const Values x{0x1.fffffep-1, -0x1.fffffep-1, 0x1p40, 0x1.8p0, 0x1p100, 1, -1, 0, -0.0, inf, 1, -1, NAN, 5};
  const Values y{1, 1, 1, 0x1p-40, 0x1p10, 0, 0, 0, 3, 2, inf, inf, 1, NAN};
  const Values of{0, -1, 0x1p40, 0x1.8p40, 0x1p90, inf, -inf, NAN, -0.0, NAN, 0, -1, NAN, NAN};
  expect_quotients(floor_divide(tensor(x), tensor(y)), of, x, y);
}

TEST(PointwiseErrors, NameTheOpAndWhatCame) {
  const auto message = [](auto f) {
    try {
      f();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_NE(message([] { exp(Tensor()); }).find("exp: expected a tensor"), std::string::npos);
  EXPECT_NE(message([] { maximum(zeros({2}), zeros({3})); }).find("maximum"), std::string::npos);
  EXPECT_NE(message([] { abs(zeros({2}, {.dtype = boolean})); }).find("abs: bool"), std::string::npos);
  EXPECT_NE(message([] { gelu(zeros({2}, {.dtype = i64})); }).find("gelu: expected f32"), std::string::npos);
  EXPECT_NE(message([] { clamp(zeros({2}), std::nullopt); }).find("clamp: expected min or max"), std::string::npos);
  EXPECT_NE(message([] { add(zeros({2}, {.dtype = i64}), zeros({2}, {.dtype = i64}), 0.5); }).find("integer alpha"),
            std::string::npos);
}

}  // namespace
}  // namespace halfstep
