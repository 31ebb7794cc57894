// SPDX-License-Identifier: Apache-2.0
#include "halfstep/optim/lbfgs.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"

namespace halfstep::optim {
namespace {

// Vectors are dense on the host, in f32 or f64.
template <class F>
auto with_data(const Tensor& t, F&& f) {
  return t.dtype() == DType::f64 ? f(t.data<const double>()) : f(t.data<const float>());
}

double dot(const Tensor& a, const Tensor& b) {
  return with_data(a, [&](const auto* x) {
    const auto* y = static_cast<decltype(x)>(b.const_raw_data());
    double sum = 0;
    for (std::int64_t i = 0; i < a.numel(); ++i) sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
    return sum;
  });
}

double largest(const Tensor& a) {
  return with_data(a, [&](const auto* x) {
    double top = 0;
    for (std::int64_t i = 0; i < a.numel(); ++i) top = std::max(top, std::abs(static_cast<double>(x[i])));
    return top;
  });
}

double absolute_sum(const Tensor& a) {
  return with_data(a, [&](const auto* x) {
    double sum = 0;
    for (std::int64_t i = 0; i < a.numel(); ++i) sum += std::abs(static_cast<double>(x[i]));
    return sum;
  });
}

// alpha a + beta b
Tensor combine(double alpha, const Tensor& a, double beta, const Tensor& b) {
  Tensor result = empty_like(a);
  with_data(a, [&](const auto* x) {
    using T = std::remove_cvref_t<decltype(*x)>;
    const auto* y = b.data<const T>();
    auto* r = write_data<T>(result);
    for (std::int64_t i = 0; i < a.numel(); ++i) {
      r[i] = static_cast<T>(alpha * static_cast<double>(x[i]) + beta * static_cast<double>(y[i]));
    }
  });
  return result;
}

// Where the cubic through two points with these values and slopes is lowest, within [low, high].
double cubic_minimum(double x1, double f1, double s1, double x2, double f2, double s2, double low, double high) {
  const double d1 = s1 + s2 - 3 * (f1 - f2) / (x1 - x2);
  const double square = d1 * d1 - s1 * s2;
  if (!(square >= 0)) return (low + high) / 2;
  const double d2 = std::sqrt(square);
  const double at = x1 <= x2 ? x2 - (x2 - x1) * ((s2 + d2 - d1) / (s2 - s1 + 2 * d2))
                             : x1 - (x1 - x2) * ((s1 + d2 - d1) / (s1 - s2 + 2 * d2));
  return std::min(std::max(at, low), high);
}

constexpr double kDecrease = 1e-4, kCurvature = 0.9, kBracketTolerance = 1e-9;

}  // namespace

LBFGS::LBFGS(const NamedTensors& parameters, const LBFGSOptions& options)
    : Optimizer(LowPrecision::master_weights), options_(options) {
  if (options.max_iter < 1) fail<Error>("LBFGS: expected max_iter of at least 1, got {}", options.max_iter);
  if (options.max_eval < 0) fail<Error>("LBFGS: expected max_eval of at least 0, got {}", options.max_eval);
  if (options.history_size < 1) {
    fail<Error>("LBFGS: expected history_size of at least 1, got {}", options.history_size);
  }
  add_group(parameters, options.lr);
}

LBFGS::~LBFGS() = default;

DType LBFGS::dtype() const {
  return std::any_of(all_.begin(), all_.end(), [](const NamedTensor& p) { return p.tensor.dtype() == DType::f64; })
             ? DType::f64
             : DType::f32;
}

Tensor LBFGS::gather(bool gradients) const {
  std::int64_t total = 0;
  for (const NamedTensor& p : all_) total += p.tensor.numel();
  Tensor flat = zeros({total}, {.dtype = dtype(), .device = Device{}});
  std::int64_t at = 0;
  for (const NamedTensor& p : all_) {
    const Tensor from = gradients ? p.tensor.grad() : p.tensor;
    const std::int64_t n = p.tensor.numel();
    Tensor part = flat.narrow(0, at, n).view(p.tensor.sizes());
    if (from.defined()) copy_unrecorded(part, from);
    at += n;
  }
  return flat;
}

// The weights that a step starts from: the master weights, where the parameters are still their rounding.
Tensor LBFGS::start() const {
  Tensor now = gather(false);
  if (!state_.weights.defined()) return now;
  std::int64_t at = 0;
  for (const NamedTensor& p : all_) {
    const std::int64_t n = p.tensor.numel();
    if (is_low_precision(p.tensor.dtype())) {
      const Tensor master = state_.weights.narrow(0, at, n);
      const auto rounded = cast_unrecorded(master, p.tensor.dtype()).to_vector<double>();
      const auto current = now.narrow(0, at, n).to_vector<double>();
      Tensor part = now.narrow(0, at, n);
      if (rounded == current) copy_unrecorded(part, master);
    }
    at += n;
  }
  return now;
}

void LBFGS::write(const Tensor& weights) const {
  const NoGrad no_grad;
  std::int64_t at = 0;
  for (const NamedTensor& p : all_) {
    Tensor to = p.tensor;
    to.copy_(weights.narrow(0, at, to.numel()).view(to.sizes()));
    at += to.numel();
  }
}

void LBFGS::step_unless(const Tensor&, const Tensor&) {
  fail<Error>(
      "LBFGS: expected step(closure), or scaler.step(optimizer, closure): it evaluates the loss several times a step");
}
void LBFGS::update(const std::vector<Tensor>&, const Tensor& unless) { step_unless(unless, {}); }

Tensor LBFGS::step_closure(const std::function<Tensor()>& closure) {
  State s = state_;
  Tensor weights;
  {
    const NoGrad no_grad;
    weights = start();
  }
  const Tensor before = gather(false);
  Tensor first_loss;
  const auto evaluate = [&] {
    Tensor loss;
    {
      const EnableGrad on;
      loss = closure();
    }
    if (!loss.defined() || loss.numel() != 1) fail<Error>("LBFGS: expected the closure to return the loss, a number");
    if (!first_loss.defined()) first_loss = loss;
    ++s.evaluations;
    const NoGrad no_grad;
    return Point{.loss = loss.item<double>(), .gradient = gather(true), .slope = 0};
  };
  try {
    const std::int64_t max_eval = options_.max_eval > 0 ? options_.max_eval : options_.max_iter * 5 / 4;
    const std::int64_t evaluations_before = s.evaluations;
    Point here = evaluate();
    bool converged = largest(here.gradient) <= options_.tolerance_grad;
    for (std::int64_t n = 1; n <= options_.max_iter && !converged; ++n) {
      const NoGrad no_grad;
      ++s.iterations;
      if (s.iterations == 1) {
        s.direction = combine(-1, here.gradient, 0, here.gradient);
      } else {
        const Tensor change = combine(1, here.gradient, -1, s.gradient);
        const Tensor step = combine(s.length, s.direction, 0, s.direction);
        if (const double product = dot(change, step); product > 1e-10) {
          if (static_cast<std::int64_t>(s.steps.size()) == options_.history_size) {
            s.steps.erase(s.steps.begin());
            s.changes.erase(s.changes.begin());
          }
          s.steps.push_back(step);
          s.changes.push_back(change);
          s.scale = product / dot(change, change);
        }
        // The two loops of the recursion: the inverse Hessian's product with the gradient.
        const std::size_t pairs = s.steps.size();
        std::vector<double> alpha(pairs), inverse(pairs);
        Tensor q = combine(-1, here.gradient, 0, here.gradient);
        for (std::size_t i = pairs; i-- > 0;) {
          inverse[i] = 1 / dot(s.changes[i], s.steps[i]);
          alpha[i] = dot(s.steps[i], q) * inverse[i];
          q = combine(1, q, -alpha[i], s.changes[i]);
        }
        q = combine(s.scale, q, 0, q);
        for (std::size_t i = 0; i < pairs; ++i) {
          q = combine(1, q, alpha[i] - dot(s.changes[i], q) * inverse[i], s.steps[i]);
        }
        s.direction = q;
      }
      s.gradient = here.gradient;
      s.loss = here.loss;
      s.length = s.iterations == 1 ? std::min(1.0, 1 / absolute_sum(here.gradient)) * lr() : lr();
      here.slope = dot(here.gradient, s.direction);
      if (here.slope > -options_.tolerance_change) break;
      if (options_.line_search == LineSearch::strong_wolfe) {
        const auto at = [&](double length) {
          write(combine(1, weights, length, s.direction));
          Point p = evaluate();
          p.slope = dot(p.gradient, s.direction);
          return p;
        };
        // The search shares the step's evaluations: it stops where they run out, on the best point so far.
        here = search(at, s.direction, here, max_eval - (s.evaluations - evaluations_before), &s.length);
        weights = combine(1, weights, s.length, s.direction);
        write(weights);
        converged = largest(here.gradient) <= options_.tolerance_grad;
      } else {
        weights = combine(1, weights, s.length, s.direction);
        write(weights);
        // After the last iteration nobody asks for the loss.
        if (n == options_.max_iter) break;
        here = evaluate();
        converged = largest(here.gradient) <= options_.tolerance_grad;
      }
      if (s.evaluations - evaluations_before >= max_eval) break;
      if (largest(s.direction) * std::abs(s.length) <= options_.tolerance_change) break;
      if (std::abs(here.loss - s.loss) < options_.tolerance_change) break;
    }
  } catch (...) {
    write(before);
    throw;
  }
  if (std::any_of(all_.begin(), all_.end(), [](const NamedTensor& p) { return is_low_precision(p.tensor.dtype()); })) {
    s.weights = weights;
  }
  state_ = std::move(s);
  return first_loss;
}

// Nocedal and Wright, algorithms 3.5 and 3.6, with the safeguards of PyTorch's: first a bracket that holds a good
// length, then the bracket made smaller.
LBFGS::Point LBFGS::search(const std::function<Point(double)>& at, const Tensor& direction, const Point& start,
                           std::int64_t limit, double* length) const {
  struct Trial {
    double length;
    Point point;
  };
  const double extent = largest(direction);
  double t = *length;
  Trial previous{0, start};
  Trial now{t, at(t)};
  std::vector<Trial> bracket;
  bool done = false;
  std::int64_t iteration = 0;
  const auto too_high = [&](const Trial& x) { return x.point.loss > start.loss + kDecrease * x.length * start.slope; };
  const auto flat = [&](const Trial& x) { return std::abs(x.point.slope) <= -kCurvature * start.slope; };
  for (; iteration < limit; ++iteration) {
    if (too_high(now) || (iteration > 1 && now.point.loss >= previous.point.loss)) {
      bracket = {previous, now};
      break;
    }
    if (flat(now)) {
      bracket = {now};
      done = true;
      break;
    }
    if (now.point.slope >= 0) {
      bracket = {previous, now};
      break;
    }
    const double next =
        cubic_minimum(previous.length, previous.point.loss, previous.point.slope, now.length, now.point.loss,
                      now.point.slope, now.length + 0.01 * (now.length - previous.length), now.length * 10);
    previous = now;
    now = {next, at(next)};
  }
  if (bracket.empty()) bracket = {{0, start}, now};
  bool stuck = false;
  std::size_t low = bracket.front().point.loss <= bracket.back().point.loss ? 0 : 1;
  while (!done && iteration < limit) {
    const double left = std::min(bracket[0].length, bracket[1].length);
    const double right = std::max(bracket[0].length, bracket[1].length);
    if ((right - left) * extent < kBracketTolerance) break;
    t = cubic_minimum(bracket[0].length, bracket[0].point.loss, bracket[0].point.slope, bracket[1].length,
                      bracket[1].point.loss, bracket[1].point.slope, left, right);
    // Two lengths in a row close to an end: one is put further inside.
    const double margin = 0.1 * (right - left);
    if (std::min(right - t, t - left) < margin) {
      if (stuck || t >= right || t <= left) {
        t = std::abs(t - right) < std::abs(t - left) ? right - margin : left + margin;
        stuck = false;
      } else {
        stuck = true;
      }
    } else {
      stuck = false;
    }
    const Trial trial{t, at(t)};
    ++iteration;
    const std::size_t high = 1 - low;
    if (too_high(trial) || trial.point.loss >= bracket[low].point.loss) {
      bracket[high] = trial;
      low = bracket[0].point.loss <= bracket[1].point.loss ? 0 : 1;
    } else {
      if (flat(trial)) {
        done = true;
      } else if (trial.point.slope * (bracket[high].length - bracket[low].length) >= 0) {
        bracket[high] = bracket[low];
      }
      bracket[low] = trial;
    }
  }
  const Trial& best = bracket.size() == 1 ? bracket[0] : bracket[low];
  *length = best.length;
  return best.point;
}

OptimizerState LBFGS::state_dict() const {
  OptimizerState state;
  state.numbers = numbers(0);
  const auto add = [&](const std::string& name, const Tensor& t) {
    if (t.defined()) state.tensors.push_back({name, t});
  };
  add("direction", state_.direction);
  add("gradient", state_.gradient);
  add("weights", state_.weights);
  for (std::size_t i = 0; i < state_.steps.size(); ++i) {
    add(fmt::format("step{}", i), state_.steps[i]);
    add(fmt::format("change{}", i), state_.changes[i]);
  }
  return state;
}

void LBFGS::load_state_dict(const OptimizerState& state) {
  const std::int64_t total = gather(false).numel();
  std::map<std::string, Tensor> given;
  for (const NamedTensor& t : state.tensors) {
    if (t.tensor.numel() != total) {
      fail<ShapeError>("LBFGS: expected {} [{}], got {}", t.name, total, t.tensor.sizes().str());
    }
    given[t.name] = t.tensor.dtype() == dtype() ? t.tensor.clone() : cast_unrecorded(t.tensor, dtype());
  }
  const auto take = [&](const std::string& name, bool needed) {
    const auto it = given.find(name);
    if (it == given.end()) {
      if (needed) fail<Error>("LBFGS: the state has no '{}'; is it of another optimizer?", name);
      return Tensor();
    }
    Tensor t = it->second;
    given.erase(it);
    return t;
  };
  const auto get = [&](const char* key) {
    const auto it = state.numbers.find(key);
    if (it == state.numbers.end()) fail<Error>("LBFGS: the state has no '{}'; is it of another optimizer?", key);
    return it->second;
  };
  State s;
  const double lr = get("group0.lr");
  s.iterations = static_cast<std::int64_t>(get("iterations"));
  s.evaluations = static_cast<std::int64_t>(get("evaluations"));
  s.loss = get("loss");
  s.length = get("length");
  s.scale = get("scale");
  s.direction = take("direction", s.iterations > 0);
  s.gradient = take("gradient", s.iterations > 0);
  s.weights = take("weights", false);
  for (std::size_t i = 0; given.contains(fmt::format("step{}", i)); ++i) {
    s.steps.push_back(take(fmt::format("step{}", i), true));
    s.changes.push_back(take(fmt::format("change{}", i), true));
  }
  if (!given.empty()) fail<Error>("LBFGS: the state has '{}', which is not part of it", given.begin()->first);
  set_lr(lr);
  state_ = std::move(s);
}

std::map<std::string, double> LBFGS::numbers(int) const {
  return {{"group0.lr", lr()},
          {"iterations", static_cast<double>(state_.iterations)},
          {"evaluations", static_cast<double>(state_.evaluations)},
          {"loss", state_.loss},
          {"length", state_.length},
          {"scale", state_.scale}};
}

// What a pass over all parameters would need: there is none here.
std::vector<std::string> LBFGS::state_names(int) const { return {}; }
const KernelTable* LBFGS::kernel() const { fail<InternalError>("LBFGS: has no kernel"); }
const char* LBFGS::kernel_name() const { return "none"; }
std::span<const std::byte> LBFGS::attributes(int) { return {}; }
void LBFGS::load_numbers(int, const std::map<std::string, double>&) {}

}  // namespace halfstep::optim
