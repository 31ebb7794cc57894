// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/gradcheck.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

// What messages call things: gradgradcheck checks a function of its own making.
struct Names {
  const char* check;
  std::vector<std::string> inputs;
  std::function<std::string(std::size_t)> output;

  std::string input(std::size_t i) const { return i < inputs.size() ? inputs[i] : fmt::format("input {}", i); }
};

// Whether two elements may share memory. Only ever too strict for strides that interleave.
bool overlaps(const Shape& sizes, const Shape& strides) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;
  for (int i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;  // offset of the last element of the inner dimensions
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

Tensor copy_with_strides(const Tensor& t) {
  Tensor copy = empty_strided(t.sizes(), t.strides(), {.dtype = t.dtype(), .device = t.device()});
  copy.copy_(t);
  return copy;
}

std::string place(const Shape& sizes, std::int64_t flat) {
  Shape at = Shape::filled(sizes.size(), 0);
  for (int d = sizes.size() - 1; d >= 0; --d) {
    at[d] = flat % sizes[d];
    flat /= sizes[d];
  }
  return at.str();
}

// Writes row-major element `flat` of an f64 tensor.
void write(const Tensor& t, std::int64_t flat, double value) {
  const NoGrad no_grad;
  if (!t.device().is_cpu()) {
    auto values = t.to_vector<double>();
    values[static_cast<std::size_t>(flat)] = value;
    Tensor to = t;
    to.copy_(tensor(values, t.sizes(), {.dtype = f64}).to(t.device()));
    return;
  }
  std::int64_t offset = 0;
  for (int d = t.dim() - 1; d >= 0; --d) {
    offset += flat % t.sizes()[d] * t.strides()[d];
    flat /= t.sizes()[d];
  }
  write_data<double>(t)[offset] = value;
}

// Random numbers whose memory lies in the opposite order of dimensions: what backward passes meet behind a transpose.
Tensor random_strided(const Tensor& like, RandomStream& stream) {
  Shape sizes;
  for (int d = like.dim() - 1; d >= 0; --d) sizes.push_back(like.sizes()[d]);
  std::vector<double> values(static_cast<std::size_t>(like.numel()));
  for (double& v : values) v = stream.normal();
  const Tensor reversed = tensor(values, sizes, {.dtype = f64}).to(like.device());
  Shape order;
  for (int d = like.dim() - 1; d >= 0; --d) order.push_back(d);
  return like.dim() > 1 ? reversed.permute(order).detach() : reversed;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

class Check {
 public:
  Check(const TensorFunction& function, const std::vector<Tensor>& given, const GradcheckOptions& options, Names names)
      : function_(function), options_(options), names_(std::move(names)) {
    const NoGrad no_grad;
    for (std::size_t i = 0; i < given.size(); ++i) {
      const Tensor& t = given[i];
      const bool checked = t.defined() && t.requires_grad();
      if (checked) {
        if (t.dtype() != f64) {
          fail<DTypeError>("{}: expected f64 for {}, which requires grad, got {}; differences need its digits",
                           names_.check, names_.input(i), name(t.dtype()));
        }
        if (overlaps(t.sizes(), t.strides())) {
          fail<Error>(
              "{}: expected a tensor without overlapping elements for {}, got strides {} for {}; expand it "
              "inside the function",
              names_.check, names_.input(i), t.strides().str(), t.sizes().str());
        }
        checked_.push_back(i);
      }
      inputs_.push_back(checked ? copy_with_strides(t).requires_grad_() : t);
      // The graph of the first call keeps its inputs: others are moved.
      moved_.push_back(checked ? copy_with_strides(t).requires_grad_() : t);
    }
    if (checked_.empty()) fail<Error>("{}: expected an input that requires grad, got none", names_.check);
  }

  void run() {
    const EnableGrad on;
    const std::vector<Tensor> outputs = function_(inputs_);
    examine(outputs);
    if (options_.check_determinism) compare_runs(outputs);
    const auto numerical = differences(outputs);
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      if (counts(outputs[o])) compare(outputs[o], o, numerical);
    }
  }

 private:
  // Values of one output for each element of each checked input: [checked input][element][output element].
  using Jacobian = std::vector<std::vector<std::vector<double>>>;

  static bool counts(const Tensor& output) { return output.is_floating(); }

  void examine(const std::vector<Tensor>& outputs) const {
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      if (!outputs[o].defined()) fail<Error>("{}: {} is undefined", names_.check, names_.output(o));
      if (counts(outputs[o]) && outputs[o].dtype() != f64) {
        fail<DTypeError>("{}: expected f64 for {}, got {}", names_.check, names_.output(o), name(outputs[o].dtype()));
      }
    }
  }

  void compare_runs(const std::vector<Tensor>& outputs) const {
    const std::vector<Tensor> again = function_(inputs_);
    bool same = again.size() == outputs.size();
    for (std::size_t o = 0; same && o < outputs.size(); ++o) {
      same = again[o].sizes() == outputs[o].sizes() &&
             same_bits(again[o].to_vector<double>(), outputs[o].to_vector<double>());
      if (!same) {
        fail<AutogradError>(
            "{}: {} differs between two runs on the same inputs; seed the generator inside the function", names_.check,
            names_.output(o));
      }
    }
    if (!same) {
      fail<AutogradError>("{}: the function returned {} outputs, then {}", names_.check, outputs.size(), again.size());
    }
  }

  // [output][checked input][element][output element]
  std::vector<Jacobian> differences(const std::vector<Tensor>& outputs) const {
    std::vector<Jacobian> result(outputs.size());
    for (auto& jacobian : result) jacobian.resize(checked_.size());
    for (std::size_t c = 0; c < checked_.size(); ++c) {
      const Tensor& x = moved_[checked_[c]];
      const auto values = x.to_vector<double>();
      for (std::int64_t e = 0; e < x.numel(); ++e) {
        const double value = values[static_cast<std::size_t>(e)];
        const double up = value + options_.eps, down = value - options_.eps;
        write(x, e, up);
        const auto above = evaluate(outputs.size());
        write(x, e, down);
        const auto below = evaluate(outputs.size());
        write(x, e, value);
        for (std::size_t o = 0; o < outputs.size(); ++o) {
          auto& column = result[o][c].emplace_back(above[o].size());
          for (std::size_t k = 0; k < column.size(); ++k) column[k] = (above[o][k] - below[o][k]) / (up - down);
        }
      }
    }
    return result;
  }

  std::vector<std::vector<double>> evaluate(std::size_t n) const {
    const auto outputs = function_(moved_);
    if (outputs.size() != n) {
      fail<AutogradError>("{}: the function returned {} outputs, then {}", names_.check, n, outputs.size());
    }
    std::vector<std::vector<double>> result;
    for (const Tensor& t : outputs) result.push_back(t.detach().to_vector<double>());
    return result;
  }

  // The gradients of one output, weighted by `weights`, for each checked input.
  std::vector<std::vector<double>> analytical(const Tensor& output, const Tensor& weights, std::size_t o) const {
    std::vector<std::vector<double>> result;
    std::vector<Tensor> wanted;
    for (std::size_t c : checked_) wanted.push_back(inputs_[c]);
    std::vector<Tensor> grads(wanted.size());
    if (output.requires_grad()) {
      grads = grad({output}, wanted, {.grad_outputs = {weights}, .retain_graph = true, .allow_unused = true});
    }
    for (std::size_t c = 0; c < wanted.size(); ++c) {
      if (!grads[c].defined()) {
        result.emplace_back(static_cast<std::size_t>(wanted[c].numel()), 0.0);
        continue;
      }
      if (grads[c].sizes() != wanted[c].sizes() || grads[c].dtype() != f64) {
        fail<AutogradError>("{}: expected a gradient f64 {} of {} for {}, got {} {}", names_.check,
                            wanted[c].sizes().str(), names_.output(o), names_.input(checked_[c]),
                            name(grads[c].dtype()), grads[c].sizes().str());
      }
      result.push_back(grads[c].to_vector<double>());
    }
    return result;
  }

  bool close(double analytical, double numerical) const {
    if (std::isnan(analytical) || std::isnan(numerical)) return false;
    if (analytical == numerical) return true;
    return std::abs(analytical - numerical) <= options_.atol + options_.rtol * std::abs(numerical);
  }

  void compare(const Tensor& output, std::size_t o, const std::vector<Jacobian>& numerical) const {
    RandomStream stream(options_.seed, std::uint64_t{1} << 32);
    const Tensor weights = random_strided(output, stream);
    const auto weight_values = weights.to_vector<double>();
    std::vector<std::vector<double>> expected;  // of the weighted backward pass
    std::vector<std::vector<double>> magnitude;
    for (std::size_t c : checked_) {
      expected.emplace_back(static_cast<std::size_t>(inputs_[c].numel()), 0.0);
      magnitude.push_back(expected.back());
    }
    for (std::int64_t k = 0; k < output.numel(); ++k) {
      Tensor single = zeros(output.sizes(), {.dtype = f64, .device = output.device()});
      write(single, k, 1);
      const auto rows = analytical(output, single, o);
      for (std::size_t c = 0; c < rows.size(); ++c) {
        for (std::size_t e = 0; e < rows[c].size(); ++e) {
          const double n = numerical[o][c][e][static_cast<std::size_t>(k)];
          if (!close(rows[c][e], n)) mismatch(output, o, k, checked_[c], static_cast<std::int64_t>(e), n, rows[c][e]);
          expected[c][e] += weight_values[static_cast<std::size_t>(k)] * rows[c][e];
          magnitude[c][e] += std::abs(weight_values[static_cast<std::size_t>(k)] * rows[c][e]);
        }
      }
    }
    const auto weighted = analytical(output, weights, o);
    if (!same_bits(weights.to_vector<double>(), weight_values)) {
      fail<AutogradError>("{}: the backward pass of {} changed the gradient it was given", names_.check,
                          names_.output(o));
    }
    for (std::size_t c = 0; c < weighted.size(); ++c) {
      for (std::size_t e = 0; e < weighted[c].size(); ++e) {
        // Two sums of the same products in another order: far closer than differences are.
        if (std::abs(weighted[c][e] - expected[c][e]) <= 1e-9 * magnitude[c][e] + 1e-300) continue;
        fail<AutogradError>(
            "{}: the backward pass of {} isn't linear in its gradient, or misreads a strided one: for {} at {}, "
            "expected {} (from single elements), got {}",
            names_.check, names_.output(o), names_.input(checked_[c]),
            place(inputs_[checked_[c]].sizes(), static_cast<std::int64_t>(e)), expected[c][e], weighted[c][e]);
      }
    }
    if (!options_.check_determinism) return;
    const auto again = analytical(output, weights, o);
    for (std::size_t c = 0; c < again.size(); ++c) {
      if (same_bits(again[c], weighted[c])) continue;
      fail<AutogradError>("{}: the gradient of {} for {} differs between two backward passes", names_.check,
                          names_.output(o), names_.input(checked_[c]));
    }
  }

  [[noreturn]] void mismatch(const Tensor& output, std::size_t o, std::int64_t k, std::size_t input, std::int64_t e,
                             double numerical, double analytical) const {
    fail<AutogradError>(
        "{}: the gradient of {} at {} for {} at {} is wrong: numerical {}, analytical {}; sizes {} and {}",
        names_.check, names_.output(o), place(output.sizes(), k), names_.input(input), place(inputs_[input].sizes(), e),
        numerical, analytical, output.sizes().str(), inputs_[input].sizes().str());
  }

  const TensorFunction& function_;
  const GradcheckOptions& options_;
  Names names_;
  std::vector<Tensor> inputs_, moved_;
  std::vector<std::size_t> checked_;
};

}  // namespace

void gradcheck(const TensorFunction& function, const std::vector<Tensor>& inputs, const GradcheckOptions& options) {
  Check(function, inputs, options, {"gradcheck", {}, [](std::size_t o) { return fmt::format("output {}", o); }}).run();
}

void gradgradcheck(const TensorFunction& function, const std::vector<Tensor>& inputs, const GradcheckOptions& options) {
  const EnableGrad on;
  const std::vector<Tensor> outputs = function(inputs);
  RandomStream stream(options.seed);
  std::vector<Tensor> all = inputs;
  std::vector<std::size_t> checked, weighted;
  Names names{"gradgradcheck", {}, {}};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    names.inputs.push_back(fmt::format("input {}", i));
    if (inputs[i].defined() && inputs[i].requires_grad()) checked.push_back(i);
  }
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    if (!outputs[o].defined() || !outputs[o].requires_grad()) continue;
    weighted.push_back(o);
    all.push_back(random_strided(outputs[o], stream).requires_grad_());
    names.inputs.push_back(fmt::format("the gradient of output {}", o));
  }
  if (weighted.empty()) fail<AutogradError>("gradgradcheck: no output requires grad");
  names.output = [&](std::size_t o) { return fmt::format("the gradient for input {}", checked[o]); };
  const std::size_t n = inputs.size();
  const TensorFunction gradients = [&](const std::vector<Tensor>& at) {
    const std::vector<Tensor> out = function({at.begin(), at.begin() + static_cast<std::ptrdiff_t>(n)});
    std::vector<Tensor> from, weights, wanted;
    for (std::size_t w = 0; w < weighted.size(); ++w) {
      from.push_back(out[weighted[w]]);
      weights.push_back(at[n + w]);
    }
    for (std::size_t c : checked) wanted.push_back(at[c]);
    auto result = grad(from, wanted, {.grad_outputs = weights, .create_graph = true, .allow_unused = true});
    for (std::size_t c = 0; c < result.size(); ++c) {
      if (!result[c].defined()) result[c] = zeros_like(wanted[c].detach());
    }
    return result;
  };
  Check(gradients, all, options, std::move(names)).run();
}

}  // namespace halfstep
