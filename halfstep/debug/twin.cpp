// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/twin.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/debug/replay_internal.h"

namespace halfstep::debug {
namespace {

constexpr double kIncomparable = std::numeric_limits<double>::infinity();
// Sums of a thousand terms in float32.
constexpr double kFloat32Limit = 0x1p-14;
// How far apart partners may be: what one run calls and the other doesn't.
constexpr std::size_t kWindow = 256;

// What makes a call the same in both runs.
struct Key {
  std::string op, module, backward_of;
  Shape sizes;
  friend bool operator==(const Key&, const Key&) = default;
};

Key key_of(const ObservedCall& call) {
  const CallSite site = call_site(call, 0);
  return {site.op, site.module, site.backward_of, call.outputs[0]->sizes()};
}

// Casts have no partner; kernels that run by themselves belong to optimizers.
bool counts(const ObservedCall& call) {
  return call.op && !call.op->view && call.path != ExecutionPath::view && call.path != ExecutionPath::transfer &&
         !detail::is_conversion(call) && !call.outputs.empty() && call.outputs[0]->defined();
}

struct Distance {
  double sums = 0;            // relative, in sums of magnitudes
  double squares = 0;         // in roots of sums of squares
  std::int64_t lost = 0;      // zeros where the other is none
  std::int64_t infinite = 0;  // no finite numbers where the other is one
  double both() const { return std::max(sums, squares); }
};

Distance distance(const Tensor& tested, const Tensor& reference) {
  std::vector<double> a;
  detail::for_each_value(tested, [&](double v) { a.push_back(v); });
  Distance d;
  std::size_t i = 0;
  double sum = 0, sum_of = 0, square = 0, square_of = 0;
  detail::for_each_value(reference, [&](double b) {
    const double v = a[i++];
    if (!std::isfinite(b)) return;
    sum_of += std::fabs(b);
    square_of += b * b;
    if (!std::isfinite(v)) {
      ++d.infinite;
      return;
    }
    sum += std::fabs(v - b);
    square += (v - b) * (v - b);
    if (v == 0 && b != 0) ++d.lost;
  });
  if (d.infinite > 0) {
    d.sums = d.squares = kIncomparable;
  } else if (sum > 0) {
    d.sums = sum_of > 0 ? sum / sum_of : kIncomparable;
    d.squares = square_of > 0 ? std::sqrt(square / square_of) : kIncomparable;
  }
  return d;
}

class Reference final : public detail::CallObserver {
 public:
  struct Call {
    Key key;
    std::vector<Tensor> outputs;
  };
  Reference() : CallObserver(false, false) {}
  void seen(const ObservedCall& call, std::uint64_t, std::span<const Tensor>) override {
    if (!counts(call)) return;
    Call c{.key = key_of(call), .outputs = {}};
    const detail::Unrecorded unrecorded;
    for (const Tensor* t : call.outputs) {
      low |= t->defined() && is_low_precision(t->dtype());
      // A copy: what comes later may write into it.
      c.outputs.push_back(t->defined() ? detail::on_host(t->clone()) : *t);
    }
    calls.push_back(std::move(c));
  }
  std::vector<Call> calls;
  bool low = false;
};

class Tested final : public detail::CallObserver {
 public:
  Tested(const Reference& reference, const TwinOptions& options)
      : CallObserver(false, true), reference_(reference), options_(options), unit_(finfo(options.dtype).eps / 2) {}

  void seen(const ObservedCall& call, std::uint64_t number, std::span<const Tensor> inputs) override {
    if (call.path == ExecutionPath::view || call.path == ExecutionPath::transfer || call.outputs.empty()) return;
    double brought = 0;
    for (const Tensor& t : inputs) brought += t.defined() ? error_of(t) : 0;
    if (detail::is_conversion(call)) {
      conversion(call, number, inputs, brought);
      return;
    }
    if (!counts(call)) return;
    const Reference::Call* partner = find(key_of(call));
    if (!partner) {
      ++report.only_tested;
      for (const Tensor* t : call.outputs) remember(*t, brought + unit_);
      return;
    }
    const detail::Replay again = detail::replay(call, inputs, DType::f64);
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      const Tensor& result = *call.outputs[i];
      if (!result.defined() || i >= partner->outputs.size()) continue;
      if (!result.is_floating() || result.sizes() != partner->outputs[i].sizes()) continue;
      const Distance total = distance(result, partner->outputs[i]);
      const Distance own = i < again.outputs.size() ? distance(result, again.outputs[i]) : Distance{};
      remember(result, total.both());
      judge(call, number, result.dtype(), total, own, brought);
    }
  }

  TwinReport report;
  std::size_t next() const { return next_; }
  std::uint64_t matched() const { return matched_; }

 private:
  double error_of(const Tensor& t) const {
    const auto it = errors_.find(t.storage()->id());
    return it == errors_.end() ? 0 : it->second;
  }
  void remember(const Tensor& t, double error) {
    if (t.defined()) errors_[t.storage()->id()] = error;
  }

  const Reference::Call* find(const Key& key) {
    for (std::size_t i = next_; i < std::min(reference_.calls.size(), next_ + kWindow); ++i) {
      if (reference_.calls[i].key != key) continue;
      next_ = i + 1;
      ++matched_;
      return &reference_.calls[i];
    }
    return nullptr;
  }

  void conversion(const ObservedCall& call, std::uint64_t number, std::span<const Tensor> inputs, double brought) {
    const Tensor& result = *call.outputs[0];
    if (inputs.size() != 1 || !inputs[0].defined() || !result.defined() || result.numel() != inputs[0].numel() ||
        !result.is_floating()) {
      return;
    }
    if (result.dtype() == inputs[0].dtype() || result.sizes() != inputs[0].sizes()) {
      remember(result, brought);
      return;
    }
    const Distance own = distance(result, inputs[0]);
    remember(result, brought + own.both());
    if (!is_low_precision(result.dtype())) return;
    Distance total = own;
    total.sums = brought + own.sums;
    judge(call, number, result.dtype(), total, own, brought);
  }

  void judge(const ObservedCall& call, std::uint64_t number, DType dtype, const Distance& total, const Distance& own,
             double brought) {
    TwinCall c{.site = call_site(call, number),
               .dtype = dtype,
               .error = total.sums,
               .own_error = own.sums,
               .input_error = brought};
    const double limit = is_low_precision(dtype) ? options_.slack * finfo(dtype).eps / 2 : kFloat32Limit;
    if (own.sums > limit) {
      c.departs = true;
      if (own.infinite > 0) {
        c.reason = fmt::format("{} overflow: {} values that are finite in float64 became infinite or NaN", name(dtype),
                               own.infinite);
      } else if (own.lost > 0 && is_low_precision(dtype)) {
        c.reason = fmt::format("{} underflow: {} values became 0, and {:.3g} of the sum of magnitudes was lost",
                               name(dtype), own.lost, own.sums);
      } else {
        c.reason = fmt::format(
            "its own error is {:.3g} of the sum of magnitudes, rounding explains {:.3g}: many subnormal results, or a "
            "wrong kernel",
            own.sums, limit);
      }
    } else if (total.sums > options_.amplification * brought + std::max(limit, options_.slack * unit_)) {
      c.departs = true;
      c.reason =
          fmt::format("its inputs have an error of {:.3g} and its result of {:.3g}, {} times that: ill-conditioned",
                      brought, total.sums, brought > 0 ? fmt::format("{:.0f}", total.sums / brought) : "many");
    }
    report.calls.push_back(std::move(c));
  }

  const Reference& reference_;
  const TwinOptions& options_;
  double unit_;
  std::size_t next_ = 0;
  std::uint64_t matched_ = 0;
  std::unordered_map<std::uint64_t, double> errors_;  // by storage, of what was written last
};

// Random numbers come again, and the state of the region.
class Again {
 public:
  Again() : random_(default_generator().state()), autocast_(thread_state().autocast) {}
  ~Again() {
    default_generator().set_state(random_);
    thread_state().autocast = std::move(autocast_);
  }
  Again(const Again&) = delete;
  Again& operator=(const Again&) = delete;

 private:
  PhiloxState random_;
  AutocastState autocast_;
};

void run(detail::CallObserver& observer, const std::function<void()>& step) {
  const Observing observing(&observer);
  step();
}

TwinReport compare(const Reference& first, const std::function<void()>& tested, const TwinOptions& options) {
  Tested second(first, options);
  run(second, tested);
  second.report.dtype = options.dtype;
  second.report.only_reference = first.calls.size() - second.matched();
  return std::move(second.report);
}

void check(const TwinOptions& options) {
  if (!is_low_precision(options.dtype)) fail<AmpError>("twin: expected f16 or bf16, got {}", name(options.dtype));
}

}  // namespace

const TwinCall* TwinReport::first() const {
  const auto it = std::find_if(calls.begin(), calls.end(), [](const TwinCall& c) { return c.departs; });
  return it == calls.end() ? nullptr : &*it;
}

std::string TwinReport::str(std::size_t rows) const {
  std::string text;
  if (const TwinCall* c = first()) {
    text =
        fmt::format("first departure: {}, {}, call {}: {}\n", c->site.str(), c->site.pass(), c->site.number, c->reason);
  } else {
    text = fmt::format("no op departs beyond what the rounding of {} explains\n", name(dtype));
  }
  std::vector<const TwinCall*> order;
  for (const TwinCall& c : calls) order.push_back(&c);
  std::stable_sort(order.begin(), order.end(),
                   [](const TwinCall* a, const TwinCall* b) { return a->error > b->error; });
  text += fmt::format("{} calls and casts compared; {} only in float32's run, {} only in the other\n", calls.size(),
                      only_reference, only_tested);
  for (std::size_t i = 0; i < std::min(rows, order.size()); ++i) {
    const TwinCall& c = *order[i];
    text += fmt::format("{:>9.3g} error  {:>9.3g} own  {:>9.3g} of inputs  {} {}, call {}{}\n", c.error, c.own_error,
                        c.input_error, name(c.dtype), c.site.str(), c.site.number, c.departs ? "  departs" : "");
  }
  return text;
}

TwinReport twin(const std::function<void()>& step, const TwinOptions& options) {
  check(options);
  Reference first;
  {
    const Again again;
    thread_state().autocast.enabled = false;
    run(first, step);
  }
  if (first.low) {
    fail<Error>(
        "twin: the run that was to be in float32 has 16-bit results; leave the region out of the step, and weights in "
        "float32 (or pass two functions)");
  }
  const Again again;
  AutocastState& state = thread_state().autocast;
  state.enabled = true;
  state.dtype = options.dtype;
  return compare(first, step, options);
}

TwinReport twin(const std::function<void()>& reference, const std::function<void()>& tested,
                const TwinOptions& options) {
  check(options);
  Reference first;
  {
    const Again again;
    run(first, reference);
  }
  const Again again;
  return compare(first, tested, options);
}

}  // namespace halfstep::debug
