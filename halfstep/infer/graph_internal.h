// SPDX-License-Identifier: Apache-2.0
// Internal: a network as a list of calls for inference, made from the trace of a run (nn/trace.h), and how it is run.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/nn/trace.h"
#include "halfstep/ops/int8.h"
#include "halfstep/ops/op.h"

namespace halfstep::infer::detail {

/// A number in a call's attributes that is `times` the number of samples.
struct Patch {
  std::size_t offset = 0;  ///< in bytes
  double times = 0;
  bool floating = false;  ///< a double, else an int64
};

/// A call of an op, or of a function.
struct Node {
  /// Tensors from tensors, for all that is no single op.
  using Function = std::function<std::vector<Tensor>(std::span<const Tensor> inputs)>;
  std::string name = {};    ///< of the op or function
  std::string module = {};  ///< path of the module whose forward() called it
  const Op* op = nullptr;   ///< null: `function` is called
  Function function = {};
  std::vector<int> inputs = {};  ///< values; -1: none
  std::vector<int> outputs = {};
  std::vector<unsigned char> attributes = {};
  std::vector<Patch> patches = {};
  bool in_place = false;          ///< the result may be written over the first input, where nobody else reads that
  std::vector<int> last = {};     ///< values that no later call reads
  std::vector<Tensor> held = {};  ///< constants of the function, to be counted
  std::string layer = {};         ///< of a conversion to integers: what it stands for, such as `layer1.0.bn1`

  /// `conv2d in module layer1.conv`, for messages.
  std::string place() const { return module.empty() ? name : name + " in module " + module; }
};

/// A tensor of the graph.
struct Value {
  Tensor constant = {};         ///< undefined: an input, or computed
  std::vector<int> batch = {};  ///< a constant's dimensions that are times[i] the number of samples, of size 1 here
  std::vector<double> times = {};
  int traced = -1;                    ///< number of the trace's value that it stands for; -1: none
  std::optional<Int8Grid> grid = {};  ///< of integers
};

struct Graph {
  std::vector<Value> values = {};
  std::vector<Node> nodes = {};
  std::vector<int> inputs = {}, outputs = {};

  int add(Value value) {
    values.push_back(std::move(value));
    return static_cast<int>(values.size()) - 1;
  }
  /// Drops calls that no output depends on and constants that nobody reads, and says what is read last where.
  void finish();
};

/// What a graph is made from: a run of the network on two samples, and one on three that tells which sizes follow their
/// number; only one, of the example as it is, for a fixed batch.
struct Source {
  std::string who = {};  ///< for messages
  nn::Trace trace = {};
  std::optional<nn::Trace> other = {};
  std::int64_t samples() const { return trace.values[static_cast<std::size_t>(trace.inputs[0])].tensor.sizes()[0]; }
  std::int64_t other_samples() const {
    return other->values[static_cast<std::size_t>(other->inputs[0])].tensor.sizes()[0];
  }
};

/// Runs a network once: nn::trace, or with its quantization left out.
using TraceFunction = std::function<nn::Trace(std::vector<Tensor> inputs)>;
/// Throws Error where the runs differ in what they call.
Source make_source(std::string_view who, const TraceFunction& trace, std::span<const Tensor> example,
                   bool dynamic_batch);

/// Makes graphs call by call. Values of the trace become values of the graph when they are first asked for.
class GraphMaker {
 public:
  explicit GraphMaker(const Source& source);

  const nn::TracedCall& call(int c) const { return source_.trace.calls[static_cast<std::size_t>(c)]; }
  const nn::TracedValue& traced(int v) const { return source_.trace.values[static_cast<std::size_t>(v)]; }
  int calls() const { return static_cast<int>(source_.trace.calls.size()); }
  /// The calls that read the value; the call that makes it, or -1.
  const std::vector<int>& readers(int v) const { return readers_[static_cast<std::size_t>(v)]; }
  int maker(int v) const { return makers_[static_cast<std::size_t>(v)]; }
  bool is_output(int v) const { return is_output_[static_cast<std::size_t>(v)]; }
  /// Known before any input is: parameters, and what is computed of them.
  bool is_constant(int v) const { return constant_[static_cast<std::size_t>(v)]; }
  bool is_constant_call(int c) const;
  /// The contents of a constant. Throws where they have been written over.
  Tensor constant(int v, const nn::TracedCall& reader) const;
  /// The one call that reads the result of `c`; -1: none, several, or it is an output of the network.
  int only_reader(int c) const;
  /// Whether the call is a batch norm with constant statistics.
  bool is_constant_norm(int c) const;
  /// The product (convolution or linear layer) whose result the batch norm `c` reads alone, views of sequences as
  /// images aside; -1: none.
  int product_of_norm(int c) const;

  /// The graph's value for the trace's.
  int value(int v, const nn::TracedCall& reader);
  /// The same if there is one already, else -1.
  int known_value(int v) const { return values_[static_cast<std::size_t>(v)]; }
  void set_value(int v, int value) { values_[static_cast<std::size_t>(v)] = value; }
  int add_constant(Tensor tensor);
  /// Adds the call as it is, on the graph's values of its inputs, or on `inputs`.
  void add_call(int c);
  void add_call(int c, std::vector<int> inputs);
  /// Adds a function; the number of its first result.
  int add_function(std::string name, std::string module, Node::Function function, std::vector<int> inputs, int traced,
                   int results = 1);
  /// Weight and bias of a product as constants of the graph, in the layout that convolutions want.
  int add_weight(const Tensor& weight);
  Graph finish();

  Graph graph;

 private:
  std::vector<Patch> patches_of(int c) const;
  [[noreturn]] void refuse(const nn::TracedCall& call, const std::string& why) const;

  const Source& source_;
  std::vector<std::vector<int>> readers_;
  std::vector<int> makers_;
  std::vector<bool> is_output_, constant_;
  std::vector<int> values_;  // of the trace, as numbers of the graph's; -1: none yet
};

/// Numbers by channel, or one for all.
struct PictureNumbers {
  std::vector<float> mean, std;
};
/// The same as tensors [1, C or 1, 1, 1] for the network's only input. Throws Error, in the name of `who`, where that
/// is no floating [N, C, H, W].
struct PictureTensors {
  Tensor mean, std;
  DType dtype;
  /// (p / 255 - mean) / std, each step rounded to float32.
  Tensor operator()(const Tensor& pictures) const;
};
PictureTensors picture_tensors(const GraphMaker& maker, const PictureNumbers& numbers, std::string_view who);
/// Puts that conversion before the network's input.
void add_pictures(GraphMaker& maker, const PictureNumbers& numbers, std::string_view who);

/// The network in floating point: batch norms are folded, and constants computed. `dtype`: 16 bits by the policy of
/// autocast, whose weights are converted here.
Graph float_graph(const Source& source, std::optional<DType> dtype, const std::optional<PictureNumbers>& pictures = {});
/// Weights of ops that compute in 16 bits by the policy of autocast, converted here, once.
void lower_constants(Graph& graph, DType dtype);
/// Bytes of the graph's constants and of those that its functions hold, each once.
std::uint64_t constant_bytes(const Graph& graph);
/// Whether the call is one of a product with a weight: a convolution or a linear layer.
bool is_product(std::string_view op);

/// Sees values as they are computed.
using Watcher = std::function<void(const Node& node, std::span<const Tensor> results)>;
/// Runs the graph in the calling thread's mode. Results are row-major and share no memory with inputs or constants.
std::vector<Tensor> run_graph(const Graph& graph, std::span<const Tensor> inputs, const Watcher& watcher = {});
/// Runs one call of it.
std::vector<Tensor> run_node(const Node& node, std::span<const Tensor> inputs, std::int64_t samples);

}  // namespace halfstep::infer::detail
