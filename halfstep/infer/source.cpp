// SPDX-License-Identifier: Apache-2.0
// Runs of a network on several numbers of samples, and what of its calls follows that number.
#include <algorithm>
#include <cstring>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/infer/graph_internal.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"

namespace halfstep::infer::detail {
namespace {

// `n` samples, from the first again where there are fewer. Copied on the CPU, since devices may have no index_select.
Tensor some_samples(const Tensor& example, std::int64_t n) {
  Tensor rows = empty({n}, {.dtype = DType::i64, .device = Device{}});
  std::int64_t* row = write_data<std::int64_t>(rows);
  for (std::int64_t i = 0; i < n; ++i) row[i] = i % example.sizes()[0];
  return index_select(example.to(Device{}), 0, rows).to(example.device());
}

void check_example(std::string_view who, std::span<const Tensor> example, bool dynamic_batch) {
  if (example.empty()) fail<Error>("{}: expected at least one input in the example, got none", who);
  for (const Tensor& t : example) {
    if (!t.defined()) fail<Error>("{}: expected defined inputs in the example, got an undefined one", who);
    if (t.numel() == 0)
      fail<ShapeError>("{}: expected inputs with elements in the example, got {}", who, t.sizes().str());
    if (t.device() != example[0].device()) {
      fail<DeviceError>("{}: expected the example's inputs on one device, got {} and {}", who,
                        example[0].device().str(), t.device().str());
    }
    if (!dynamic_batch) continue;
    if (t.dim() == 0 || example[0].dim() == 0 || t.sizes()[0] != example[0].sizes()[0]) {
      fail<ShapeError>(
          "{}: expected the example's inputs with the samples in dimension 0, got {} and {}; set dynamic_batch = false "
          "for a network that has none",
          who, example[0].sizes().str(), t.sizes().str());
    }
  }
}

void compare_calls(std::string_view who, const nn::Trace& a, const nn::Trace& b) {
  for (std::size_t i = 0; i < std::min(a.calls.size(), b.calls.size()); ++i) {
    const nn::TracedCall &x = a.calls[i], &y = b.calls[i];
    if (x.op == y.op && x.module == y.module && x.inputs == y.inputs && x.outputs == y.outputs) continue;
    fail<Error>("{}: {}: what the network calls follows the number of samples; set dynamic_batch = false", who,
                x.place());
  }
  if (a.calls.size() == b.calls.size() && a.values.size() == b.values.size() && a.outputs == b.outputs) return;
  fail<Error>("{}: what the network calls follows the number of samples; set dynamic_batch = false", who);
}

}  // namespace

Source make_source(std::string_view who, const TraceFunction& trace, std::span<const Tensor> example,
                   bool dynamic_batch) {
  check_example(who, example, dynamic_batch);
  const NoGrad no_grad;
  const AutocastOff autocast_off;
  std::vector<Tensor> first, second;
  for (const Tensor& t : example) {
    first.push_back(dynamic_batch ? some_samples(t, 2) : t.detach().clone());
    if (dynamic_batch) second.push_back(some_samples(t, 3));
  }
  Source source{.who = std::string(who), .trace = trace(std::move(first)), .other = {}};
  if (dynamic_batch) {
    source.other = trace(std::move(second));
    compare_calls(who, source.trace, *source.other);
  }
  return source;
}

}  // namespace halfstep::infer::detail
