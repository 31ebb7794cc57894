// SPDX-License-Identifier: Apache-2.0
// Non-maximum suppression behind a detector's predictions.
#include "halfstep/core/fail.h"
#include "halfstep/io/onnx_internal.h"
#include "halfstep/ops/create.h"

namespace halfstep::io::detail {
namespace {

using Ints = std::vector<std::int64_t>;

class Nms {
 public:
  explicit Nms(OnnxGraph& graph) : graph_(graph) {}

  void add(const OnnxNms& o, const std::string& output) {
    const OnnxPort decoded = graph_.outputs[0];
    const std::int64_t numbers = decoded.dims[2].fixed;
    // The operator takes float32 only; numbers of pictures need it too.
    const std::string all =
        decoded.type == kOnnxFloat ? decoded.name : node("Cast", {decoded.name}, {{"to", std::int64_t{kOnnxFloat}}});
    const std::string boxes = slice(all, 0, 4, 2);
    const std::string rows = node("Mul", {slice(all, 4, 5, 2), slice(all, 5, numbers, 2)});
    const std::string scores = node("Transpose", {rows}, {{"perm", Ints{0, 2, 1}}});
    // [found, 3]: picture, class, box.
    const std::string found =
        node("NonMaxSuppression", {boxes, scores, ints({o.limit}), number(o.overlap), number(o.score)},
             {{"center_point_box", std::int64_t{1}}});
    const auto columns = [&](const Ints& which) {
      return node("Gather", {found, ints(which)}, {{"axis", std::int64_t{1}}});
    };
    const std::string names = node("Cast", {columns({0, 1})}, {{"to", std::int64_t{kOnnxFloat}}});
    const std::string score = node("Unsqueeze", {node("GatherND", {scores, found}), ints({1})});
    const std::string box = node("GatherND", {boxes, columns({0, 2})});
    const std::string centre = slice(box, 0, 2, 1), half = node("Mul", {slice(box, 2, 4, 1), number(0.5)});
    const std::string first = node("Sub", {centre, half}), last = node("Add", {centre, half});
    graph_.nodes.push_back(
        {"Concat", "nms/Concat", {names, score, first, last}, {output}, {{"axis", std::int64_t{1}}}});
    graph_.outputs[0] = {output, kOnnxFloat, {{.symbol = "detections"}, {.fixed = 7}}};
  }

 private:
  // Parameters' names don't begin so: modules' names have no slash, and the builder's own begin with the module's path.
  std::string named(std::string_view kind) { return fmt::format("nms/{}_{}", kind, ++count_); }
  std::string node(std::string_view op, std::vector<std::string> inputs, OnnxAttributes attributes = {}) {
    const std::string name = named(op);
    graph_.nodes.push_back({std::string(op), name, std::move(inputs), {name}, std::move(attributes)});
    return name;
  }
  std::string slice(const std::string& x, std::int64_t from, std::int64_t to, std::int64_t axis) {
    return node("Slice", {x, ints({from}), ints({to}), ints({axis})});
  }
  std::string ints(const Ints& values) {
    const auto n = static_cast<std::int64_t>(values.size());
    graph_.initializers.push_back({named("constant"), kOnnxInt64, {n}, tensor(values, {n})});
    return graph_.initializers.back().name;
  }
  std::string number(double value) {
    graph_.initializers.push_back(
        {named("constant"), kOnnxFloat, {1}, tensor(std::vector<double>{value}, {1}, {.dtype = DType::f32})});
    return graph_.initializers.back().name;
  }

  OnnxGraph& graph_;
  int count_ = 0;
};

}  // namespace

void check_nms(const OnnxNms& o) {
  if (!(o.score >= 0 && o.score <= 1) || !(o.overlap >= 0 && o.overlap <= 1) || o.limit < 1) {
    fail<Error>(
        "export_onnx: nms: expected a score and an overlap from 0 to 1 and a limit of at least 1, got {}, {} and "
        "{}",
        o.score, o.overlap, o.limit);
  }
}

void add_nms(OnnxGraph& graph, const OnnxNms& options, const std::string& output) {
  const bool one = graph.outputs.size() == 1;
  const OnnxDims& dims = graph.outputs[0].dims;
  const bool floating = graph.outputs[0].type == kOnnxFloat || graph.outputs[0].type == kOnnxFloat16;
  if (!one || !floating || dims.size() != 3 || dims[2].per_batch != 0 || dims[2].fixed < 6) {
    std::string got = fmt::format("{} outputs", graph.outputs.size());
    if (one) {
      std::vector<std::string> sizes;
      for (const OnnxDim& d : dims) sizes.push_back(d.per_batch ? "batch" : fmt::format("{}", d.fixed));
      got = fmt::format("[{}]", fmt::join(sizes, ", "));
    }
    fail<Error>("export_onnx: nms: expected one floating output [N, predictions, 5 + classes], got {}", got);
  }
  for (const OnnxPort& p : graph.inputs) {
    if (p.name == output) fail<Error>("export_onnx: two inputs or outputs are called '{}'", output);
  }
  Nms(graph).add(options, output);
}

}  // namespace halfstep::io::detail
