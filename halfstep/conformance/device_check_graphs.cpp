// SPDX-License-Identifier: Apache-2.0
// The part of check_device() for graphs: a step that the device has recorded gives, replay after replay, the bits of
// the step itself, and a graph that is given up leaves its queue as it was.
#include <exception>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/capture.h"
#include "halfstep/conformance/device_check_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::conformance::detail {
namespace {

// A product, sums and copies, and a sum that grows from step to step: a kernel that is left out, repeated or computed
// before its time shows in one of them.
struct Work {
  explicit Work(const Tensor& weight, const Tensor& bias)
      : weight(weight), bias(bias), total(bias.clone()), kept(bias.clone()) {}
  Tensor step(const Tensor& x) const {
    const NoGrad no_grad;
    const Tensor y = mm(x, weight) + bias;
    Tensor sum = total, copy = kept;
    copy.copy_(sum);
    sum.add_(y);
    return y.clone() + copy;
  }
  Tensor weight, bias, total, kept;
};

class GraphCheck {
 public:
  GraphCheck(Checker& checker, DeviceBackend& backend, DType dtype) : c_(checker), backend_(backend) {
    const std::int64_t n = c_.size(96, 33);
    weight_ = c_.normal({n, n}, 0.1).to(dtype).to(c_.device);
    bias_ = c_.normal({n, n}).to(dtype).to(c_.device);
    for (int i = 0; i < kReplays; ++i) inputs_.push_back(c_.normal({n, n}).to(dtype).to(c_.device));
  }

  // Through capture(), as training does. `alternating`: by two graphs in turns on one queue.
  void replays(bool alternating) {
    const Work plain(weight_, bias_), one(weight_, bias_), two(weight_, bias_);
    auto first = capture([&](const Tensor& x) { return one.step(x); });
    auto second = capture([&](const Tensor& x) { return two.step(x); });
    Tensors expected, got, also;
    // Each from another place, and then all from one, whose contents change.
    const Tensor place = inputs_[0].clone();
    for (int i = 0; i < 2 * kReplays; ++i) {
      Tensor x = inputs_[static_cast<std::size_t>(i % kReplays)];
      expected.push_back(plain.step(x));
      if (i >= kReplays) {
        Tensor to = place;
        to.copy_(x);
        x = place;
      }
      // Nobody waits in between.
      got.push_back(first(x));
      if (alternating) also.push_back(second(x));
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      c_.same(got[i], expected[i], fmt::format("step {}", i + 1));
      if (alternating) c_.same(also[i], expected[i], fmt::format("step {} of the other", i + 1));
    }
    c_.same(one.total, plain.total, "what the steps add up");
    c_.same(one.kept, plain.kept, "what the steps copy");
    if (first.stats().replayed == 0) {
      c_.problem(fmt::format("the steps were not replayed: {}", first.why_not()));
    } else if (first.stats().graphs == 0) {
      c_.problem("the steps were replayed kernel by kernel: the plug-in made no graph of them (HALFSTEP_LOG=debug)");
    }
  }

  // What Halfstep does when a kernel refuses to be recorded: the graph is ended and destroyed, and was never launched.
  // False if the plug-in makes no graphs of this.
  bool given_up(bool empty) {
    const Work plain(weight_, bias_), own(weight_, bias_);
    const Tensor before = own.step(inputs_[0]);  // kernels make what they need at their first call
    plain.step(inputs_[0]);
    auto* const queue = static_cast<halfstep_queue*>(Queue::current(c_.device).native());
    const halfstep_plugin_table& table = backend_.table;
    if (!succeeds(table.graph_begin(queue), "graph_begin")) return false;
    std::exception_ptr refused;
    try {
      const NoGrad no_grad;
      Tensor sum = own.total;
      if (!empty) sum.add_(before).add_(bias_);
    } catch (...) {
      refused = std::current_exception();  // the recording has to end in any case
    }
    halfstep_graph* graph = nullptr;
    const halfstep_status end = table.graph_end(queue, &graph);
    // A graph of nothing need not be one.
    const bool ended = end == HALFSTEP_OK || (empty && end == HALFSTEP_FAILED) || succeeds(end, "graph_end");
    if (end == HALFSTEP_OK && !empty && !graph) c_.problem("graph_end: expected a graph, got none");
    if (graph) succeeds(table.graph_destroy(graph), "graph_destroy");
    if (refused) std::rethrow_exception(refused);
    c_.same(own.total, plain.total, "what only the graph would have written");
    for (int i = 1; i < 3; ++i) {
      const Tensor& x = inputs_[static_cast<std::size_t>(i)];
      c_.same(own.step(x), plain.step(x), fmt::format("step {} afterwards", i));
    }
    c_.same(own.total, plain.total, "what the steps add up afterwards");
    return ended;
  }

 private:
  // What a plug-in doesn't support on this machine is no fault of it.
  bool succeeds(halfstep_status status, const char* entry) {
    if (status == HALFSTEP_OK) return true;
    halfstep_error error{};
    error.size = sizeof(error);
    backend_.table.error(&error);
    error.text[sizeof(error.text) - 1] = '\0';
    const std::string text = fmt::format("{}: {}", entry, static_cast<const char*>(error.text));
    if (status == HALFSTEP_UNSUPPORTED) {
      c_.note(text);
    } else {
      c_.problem(text);
    }
    return false;
  }

  static constexpr int kReplays = 5;
  Checker& c_;
  DeviceBackend& backend_;
  Tensor weight_, bias_;
  Tensors inputs_;
};

}  // namespace

void check_graphs(Checker& c) {
  if (c.device.is_cpu() || c.lost()) return;
  DeviceBackend& backend = backend_for(c.device, "check");
  const char* const name = "captured steps, by graphs";
  const auto left_out = [&](const std::string& why) { c.line(name, "", [&] { c.note(why); }); };
  if (!backend.has_graphs()) return left_out("the plug-in has no graphs: replays enqueue kernel by kernel");
  if (synchronous()) return left_out("not checked: each op waits until it is done (HALFSTEP_SYNC)");
  for (const DType dtype : {f32, f16, bf16}) {
    std::string missing;
    for (const char* op : {"mm", "add", "clone", "copy"}) {
      if (!op_support(c.device, op, dtype).native) missing += fmt::format(" {}", op);
    }
    c.line(name, halfstep::name(dtype), [&] {
      if (!missing.empty()) return c.note("not checked, since the device has no kernels of its own for" + missing);
      GraphCheck check(c, backend, dtype);
      bool can = false;
      c.one("given up before the first kernel", [&] { can = check.given_up(true); });
      if (!can) return;
      c.one("given up", [&] { can = check.given_up(false); });
      if (!can) return;
      c.one("replayed", [&] { check.replays(false); });
      c.one("two in turns", [&] { check.replays(true); });
    });
  }
}

}  // namespace halfstep::conformance::detail
