// SPDX-License-Identifier: Apache-2.0
#include "halfstep/autograd/engine.h"

#include <algorithm>
#include <queue>
#include <unordered_map>
#include <utility>

#include "halfstep/autograd/engine_internal.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/autograd/gradient_slices_internal.h"
#include "halfstep/autograd/node.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

// Gradients that have come in for a node so far.
struct Incoming {
  std::vector<Tensor> grads;
  std::vector<bool> own;               // made here by an addition, so the next one can be added in place
  std::vector<GradientSlices> slices;  // still to be added to `grads`; none where no slice came in
  Tensor more;                         // still to be added to grads[0], by the node itself if nothing else comes
  int waiting = 0;                     // edges into the node that have not run yet
  bool needed = true;
};

// Tells observers whose gradient is computed.
class BackwardOf {
 public:
  explicit BackwardOf(const Node& node) : name_(node.name()), outer_(call_origin()) {
    call_origin().backward_of = name_.c_str();
    call_origin().backward_module = node.module;
  }
  ~BackwardOf() { call_origin() = outer_; }
  BackwardOf(const BackwardOf&) = delete;
  BackwardOf& operator=(const BackwardOf&) = delete;

 private:
  std::string name_;
  CallOrigin outer_;
};

struct Capture {
  std::uint32_t index;
  std::size_t input;
};

class Run {
 public:
  Run(bool create_graph, bool keep_graph) : create_graph_(create_graph), keep_graph_(keep_graph) {}

  // Restricts the run to what leads to these edges and keeps what comes in there.
  void capture(const std::vector<Edge>& edges) {
    for (std::size_t i = 0; i < edges.size(); ++i) captures_[edges[i].node.get()].push_back({edges[i].index, i});
    results_.resize(edges.size());
    only_captures_ = true;
  }

  void start(const Edge& edge, Tensor gradient) {
    Node* node = edge.node.get();
    if (roots_.empty() || std::find(roots_.begin(), roots_.end(), node) == roots_.end()) roots_.push_back(node);
    initial_.emplace_back(edge, std::move(gradient));
  }

  std::vector<Tensor> run() {
    find_dependencies();
    for (auto& [edge, gradient] : initial_) receive(edge, gradient);
    for (Node* root : roots_) {
      if (state(root).waiting == 0) ready_.push(Ref<Node>::share(root));
    }
    while (!ready_.empty()) {
      const Ref<Node> node = ready_.top();
      ready_.pop();
      step(node);
    }
    return std::move(results_);
  }

 private:
  struct Later {
    bool operator()(const Ref<Node>& a, const Ref<Node>& b) const { return a->sequence < b->sequence; }
  };

  Incoming& state(Node* node) { return states_[node]; }

  void find_dependencies() {
    std::vector<Node*> stack(roots_), order;
    for (Node* root : roots_) state(root);
    while (!stack.empty()) {
      Node* node = stack.back();
      stack.pop_back();
      order.push_back(node);
      for (const Edge& edge : node->edges) {
        if (!edge.node) continue;
        const auto [it, fresh] = states_.try_emplace(edge.node.get());
        ++it->second.waiting;
        if (fresh) stack.push_back(edge.node.get());
      }
    }
    if (!only_captures_) return;
    // What is needed leads to a captured edge. Edges go to earlier nodes, leaves last: by rising sequence, successors
    // come first.
    std::sort(order.begin(), order.end(), [](const Node* a, const Node* b) {
      // Sinks have the highest number of all but lie at the end of the graph.
      return (a->edges.empty() ? 0 : a->sequence + 1) < (b->edges.empty() ? 0 : b->sequence + 1);
    });
    for (Node* node : order) {
      bool needed = captures_.contains(node);
      for (const Edge& edge : node->edges) needed |= edge.node && state(edge.node.get()).needed;
      state(node).needed = needed;
    }
  }

  static void make_room(Incoming& to, const Node& node) {
    if (to.grads.size() >= node.outputs.size()) return;
    to.grads.resize(node.outputs.size());
    to.own.resize(node.outputs.size());
  }

  void receive(const Edge& edge, const Tensor& gradient) {
    Node& node = *edge.node;
    Incoming& to = state(&node);
    if (!to.needed) return;
    make_room(to, node);
    Tensor& sum = to.grads[edge.index];
    if (!sum.defined()) {
      sum = gradient;
    } else if (edge.index == 0 && leaves_sum(node, to, gradient)) {
      to.more = gradient;
    } else {
      if (edge.index == 0) join(node, to);
      add(node, to, edge.index, gradient);
    }
  }

  // Whether a node is to add a second gradient to its first: where nobody else sees the sum.
  bool leaves_sum(Node& node, const Incoming& to, const Tensor& gradient) const {
    const Tensor& first = to.grads[0];
    return node.adds_gradients && !create_graph_ && !to.more.defined() && to.slices.empty() && node.hooks.empty() &&
           node.retained.empty() && !observed() && !captures_.contains(&node) && first.dtype() == gradient.dtype() &&
           first.dtype() == node.outputs[0].dtype && first.sizes() == gradient.sizes() &&
           first.sizes() == node.outputs[0].sizes && first.strides() == gradient.strides();
  }
  void join(Node& node, Incoming& to) {
    if (to.more.defined()) add(node, to, 0, std::exchange(to.more, Tensor()));
  }

  void add(const Node& node, Incoming& to, std::size_t index, const Tensor& gradient) {
    Tensor& sum = to.grads[index];
    if (node.accepts_float32 && sum.dtype() != DType::f32) {
      // Several uses of one cast weight add up in float32.
      sum = sum.to(DType::f32) + gradient;
      to.own[index] = true;
    } else if (!create_graph_ && to.own[index] && sum.sizes() == gradient.sizes()) {
      sum.add_(gradient);
    } else {
      sum = sum + gradient;
      to.own[index] = true;
    }
  }

  void receive_slice(const Edge& edge, Tensor gradient, const GradSlice& place, const Ref<Node>& source) {
    Node& node = *edge.node;
    Incoming& to = state(&node);
    if (!to.needed) return;
    make_room(to, node);
    join(node, to);
    if (to.slices.empty()) to.slices.resize(node.outputs.size());
    const OutputMeta& meta = node.outputs[edge.index];
    gradient = fit_gradient(gradient, gradient.sizes(), meta.dtype, node.accepts_float32, source->name());
    to.slices[edge.index].add(std::move(gradient), place, source);
    // Slices that overlap much would hold more memory than their sum.
    if (to.slices[edge.index].numel() > meta.sizes.numel()) add_slices(node, to, edge.index);
  }

  void add_slices(Node& node, Incoming& to, std::size_t index) {
    Tensor& sum = to.grads[index];
    GradientSlices& slices = to.slices[index];
    const OutputMeta& meta = node.outputs[index];
    const DType dtype = node.accepts_float32 ? DType::f32 : meta.dtype;
    const auto add = [&] {
      if (sum.defined() && sum.dtype() != dtype) {
        sum = sum.to(dtype);
        to.own[index] = true;
      }
      sum = slices.add_to(sum, to.own[index], meta, dtype);
      to.own[index] = true;
    };
    if (observed()) [[unlikely]] {
      const BackwardOf of(slices.source());
      add();
    } else {
      add();
    }
  }

  void run_hooks(Node& node, Incoming& in) {
    std::vector<Node::Hook> hooks;
    std::vector<std::pair<std::uint32_t, Tensor>> retained;
    {
      std::lock_guard lock(node.mutex);
      hooks = node.hooks;
      for (const Node::Retained& r : node.retained) {
        if (r.tensor->try_retain()) retained.emplace_back(r.index, Tensor(Ref<TensorImpl>::adopt(r.tensor)));
      }
    }
    if (CaptureSink* sink = capture_sink()) [[unlikely]]
      sink->refuse("gradient hooks, or gradients kept of results, are functions of the host");
    for (const Node::Hook& hook : hooks) {
      Tensor& g = in.grads[hook.index];
      if (!g.defined()) continue;
      const Tensor other = hook.function(g);
      if (!other.defined()) continue;
      if (other.sizes() != g.sizes() || other.device() != g.device()) {
        fail<AutogradError>("hook on {}: expected a gradient of {}, got {}", node.name(), g.sizes().str(),
                            other.sizes().str());
      }
      g = other;
    }
    for (auto& [index, tensor] : retained) {
      if (!in.grads[index].defined()) continue;
      AutogradMeta& meta = autograd_meta(tensor);
      const Tensor g = fit_gradient(in.grads[index], tensor.sizes(), tensor.dtype(), false, node.name());
      meta.grad = meta.grad.defined() ? meta.grad + g : create_graph_ ? g : g.detach().clone();
    }
  }

  void step(const Ref<Node>& node) {
    // Taken out, so that gradients are freed as they are used up.
    Incoming in = std::move(state(node.get()));
    state(node.get()).grads.clear();
    for (std::size_t i = 0; i < in.slices.size(); ++i) {
      if (!in.slices[i].empty()) add_slices(*node, in, i);
    }
    bool any = false;
    for (const Tensor& g : in.grads) any |= g.defined();
    std::vector<Tensor> results(node->edges.size());
    if (any) {
      if (!node->hooks.empty() || !node->retained.empty()) {
        join(*node, in);  // they came in the meantime
        run_hooks(*node, in);
      }
      if (in.more.defined()) in.grads.push_back(std::move(in.more));
      bool last = false;
      if (only_captures_) {
        if (auto it = captures_.find(node.get()); it != captures_.end()) {
          last = true;
          for (const Capture& c : it->second) {
            Tensor g = in.grads[c.index];
            const OutputMeta& meta = node->outputs[c.index];
            if (g.defined()) g = fit_gradient(g, meta.sizes, meta.dtype, false, node->name());
            results_[c.input] = create_graph_ || !g.defined() ? g : g.detach();
          }
          for (const Edge& edge : node->edges) last &= !(edge.node && state(edge.node.get()).needed);
        }
        if (node->edges.empty()) last = true;  // a leaf that nobody asked for stays as it is
      }
      if (!last) {
        if (const auto place = create_graph_ ? std::nullopt : node->slice()) {
          // Where its gradient belongs is all that there is to compute.
          if (node->edges[0].node) receive_slice(node->edges[0], std::move(in.grads[0]), *place, node);
        } else if (observed()) [[unlikely]] {
          const BackwardOf of(*node);
          node->apply(in.grads, results, create_graph_);
        } else {
          node->apply(in.grads, results, create_graph_);
        }
        if (!keep_graph_) node->release_saved();
      }
    }
    in.grads.clear();
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Edge& edge = node->edges[i];
      if (!edge.node) continue;
      if (results[i].defined()) receive(edge, results[i]);
      results[i] = Tensor();
      Incoming& next = state(edge.node.get());
      if (--next.waiting == 0 && next.needed) ready_.push(edge.node);
      if (next.waiting == 0 && !next.needed) skip(edge.node.get());
    }
  }

  // A part of the graph that isn't needed still counts as run for what lies behind it.
  void skip(Node* first) {
    std::vector<Node*> stack{first};
    while (!stack.empty()) {
      Node* node = stack.back();
      stack.pop_back();
      for (const Edge& edge : node->edges) {
        if (!edge.node) continue;
        Incoming& next = state(edge.node.get());
        if (--next.waiting == 0) {
          if (next.needed) {
            ready_.push(edge.node);
          } else {
            stack.push_back(edge.node.get());
          }
        }
      }
    }
  }

  bool create_graph_;
  bool keep_graph_;
  bool only_captures_ = false;
  std::vector<Node*> roots_;
  std::vector<std::pair<Edge, Tensor>> initial_;
  std::unordered_map<Node*, Incoming> states_;
  std::unordered_map<Node*, std::vector<Capture>> captures_;
  std::vector<Tensor> results_;
  std::priority_queue<Ref<Node>, std::vector<Ref<Node>>, Later> ready_;
};

// The gradient that a run starts with at one output.
Tensor first_gradient(const Tensor& output, const Tensor& given, const char* what) {
  if (!given.defined()) {
    if (output.numel() != 1) {
      fail<AutogradError>("{}: expected a gradient for {} {}, which has more than one element; pass one or reduce it",
                          what, name(output.dtype()), output.sizes().str());
    }
    return ones_like(output.detach());
  }
  if (given.sizes() != output.sizes()) {
    fail<ShapeError>("{}: expected a gradient of {}, got {}", what, output.sizes().str(), given.sizes().str());
  }
  if (given.device() != output.device()) {
    fail<DeviceError>("{}: expected a gradient on {}, got {}", what, output.device().str(), given.device().str());
  }
  return given.dtype() == output.dtype() ? given : given.to(output.dtype());
}

void start_all(Run& run, const std::vector<Tensor>& outputs, const std::vector<Tensor>& gradients, const char* what) {
  if (!gradients.empty() && gradients.size() != outputs.size()) {
    fail<AutogradError>("{}: expected {} gradients, one for each output, got {}", what, outputs.size(),
                        gradients.size());
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_defined(outputs[i], what, "an output");
    const Edge edge = gradient_edge(outputs[i]);
    if (!edge.node) {
      fail<AutogradError>("{}: {} {} does not require grad: nothing it was made from does, or recording was off", what,
                          name(outputs[i].dtype()), outputs[i].sizes().str());
    }
    run.start(edge, first_gradient(outputs[i], gradients.empty() ? Tensor() : gradients[i], what));
  }
}

// The backward pass runs in the dtypes of the forward pass, whatever region the caller is in.
class BackwardMode {
 public:
  explicit BackwardMode(bool create_graph) : mode_(create_graph) { ++detail::backward_depth(); }
  ~BackwardMode() { --detail::backward_depth(); }
  BackwardMode(const BackwardMode&) = delete;
  BackwardMode& operator=(const BackwardMode&) = delete;

 private:
  GradMode mode_;
  AutocastOff autocast_;
};

}  // namespace

int& detail::backward_depth() {
  thread_local int depth = 0;
  return depth;
}

namespace {

std::vector<std::function<void()>>& work_at_end() {
  thread_local std::vector<std::function<void()>> work;
  return work;
}

}  // namespace

void detail::at_end_of_backward(std::function<void()> work) { work_at_end().push_back(std::move(work)); }

void backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& gradients,
              const BackwardOptions& options) {
  const BackwardMode mode(options.create_graph);
  const bool outermost = detail::backward_depth() == 1;
  // A pass that throws drops the work at once: destroying it tells its waiters that it will not run.
  struct Drop {
    bool on;
    ~Drop() {
      if (on) work_at_end().clear();
    }
  } const drop{outermost};
  if (outermost) work_at_end().clear();  // of a backward pass inside of grad()
  Run run(options.create_graph, options.retain_graph || options.create_graph);
  start_all(run, outputs, gradients, "backward");
  run.run();
  if (!outermost) return;
  const auto work = std::exchange(work_at_end(), {});
  for (const auto& w : work) w();
}

std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const GradOptions& options) {
  const BackwardMode mode(options.create_graph);
  Run run(options.create_graph, options.retain_graph || options.create_graph);
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_defined(inputs[i], "grad", "an input");
    edges.push_back(gradient_edge(inputs[i]));
    if (!edges.back().node) {
      fail<AutogradError>("grad: input {}, {} {}, does not require grad", i, name(inputs[i].dtype()),
                          inputs[i].sizes().str());
    }
  }
  start_all(run, outputs, options.grad_outputs, "grad");
  run.capture(edges);
  std::vector<Tensor> results = run.run();
  if (!options.allow_unused) {
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (results[i].defined()) continue;
      fail<AutogradError>(
          "grad: the outputs don't depend on input {}, {} {}; pass {{.allow_unused = true}} to get none", i,
          name(inputs[i].dtype()), inputs[i].sizes().str());
    }
  }
  return results;
}

}  // namespace halfstep
