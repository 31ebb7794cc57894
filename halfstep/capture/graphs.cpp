// SPDX-License-Identifier: Apache-2.0
// Replays through the graph entries of a plug-in (runtime/plugin.h). A recorded step becomes segments. In each, the
// host first does its own work and copies its numbers to the device, and then launches one graph of all the kernels.
// Segments end where the host waits for the device: at copies to it and from it, for ops that run on the CPU, and at
// exchanges with other ranks.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "halfstep/capture/replay_internal.h"
#include "halfstep/core/error.h"
#include "halfstep/runtime/device_wait_internal.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/transfer.h"

namespace halfstep::detail {
namespace {

constexpr const char* kName = "captured step";

// Bytes from the first element to the end of the last.
std::size_t extent(const Shape& sizes, const Shape& strides, DType dtype) {
  std::int64_t last = 0;
  for (int d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return static_cast<std::size_t>(last + 1) * item_size(dtype);
}

// Takes the plug-in's reason, so that it isn't given for a later call.
std::string reason_of(const DeviceBackend& backend) {
  halfstep_error error{};
  error.size = sizeof(error);
  backend.table.error(&error);
  error.text[sizeof(error.text) - 1] = '\0';
  return error.text;
}

}  // namespace

bool Recording::can_have_graphs() const {
  // In the first replay kernels take the scratch and make the plans that they need, which they can't in a graph.
  return backend_ && backend_->has_graphs() && device_graphs() && !no_graphs_ && replays_ > 0;
}

void Recording::run_with_graphs(Context& context, std::span<const Tensor> inputs) {
  if (!graphs_made_) make_graphs(context, inputs);
  for (const Buffer& b : buffers_) {
    copy_memory(b.data, device_, inputs[b.input].impl()->data(), device_, b.bytes);
  }
  std::size_t at = 0;
  bool good = true;
  for (const Segment& segment : segments_) {
    for (; at < segment.first; ++at) run(steps_[at], context, inputs);
    good = run_segment(segment, context, inputs) && good;
    used_graphs_ = true;
    at = segment.last;
  }
  for (; at < steps_.size(); ++at) run(steps_[at], context, inputs);
  if (!good) drop_graphs();
}

// False when attributes have changed: graphs are to be made again.
bool Recording::run_segment(const Segment& segment, Context& context, std::span<const Tensor> inputs) {
  const auto in_graph = [](const Step& step) { return step.on_device(); };
  for (std::size_t i = segment.first; i < segment.last; ++i) {
    Step& step = steps_[i];
    if (!in_graph(step)) {
      run(step, context, inputs);
      continue;
    }
    if (step.live_bytes > 0 && std::memcmp(step.baked.data(), step.attributes, step.live_bytes) != 0) {
      // Work of the host that follows may change them once more: kernels are enqueued in their order.
      step.alone = true;
      for (std::size_t k = segment.first; k < i; ++k) {
        if (in_graph(steps_[k])) launch(steps_[k], context);
      }
      for (; i < segment.last; ++i) run(steps_[i], context, inputs);
      return false;
    }
    wrote(step, inputs);
  }
  backend_->check_alive(kName, device_.index);
  backend_->begin_call(kName, device_.index);
  const halfstep_status status =
      backend_->table.graph_launch(segment.graph, static_cast<halfstep_queue*>(queue_->native()));
  if (status == HALFSTEP_UNSUPPORTED) {
    reason_of(*backend_);
    for (std::size_t i = segment.first; i < segment.last; ++i) {
      if (in_graph(steps_[i])) launch(steps_[i], context);
    }
    return true;
  }
  backend_->check(status, kName, device_.index);
  return true;
}

void Recording::make_graphs(Context& context, std::span<const Tensor> inputs) {
  graphs_made_ = true;
  // What a segment can hold.
  const auto continues = [](const Step& step) {
    if (step.kind == Step::Kind::copy) return step.early;
    if (step.kind == Step::Kind::host) return !step.ordered;
    return !step.on_device() || !step.alone;
  };
  std::vector<std::pair<std::size_t, std::size_t>> ranges;
  for (std::size_t first = 0, at = 0; at <= steps_.size(); ++at) {
    if (at < steps_.size() && continues(steps_[at])) continue;
    const auto kernels = std::count_if(steps_.begin() + static_cast<std::ptrdiff_t>(first),
                                       steps_.begin() + static_cast<std::ptrdiff_t>(at),
                                       [](const Step& step) { return step.on_device(); });
    if (kernels > 1) ranges.emplace_back(first, at);
    first = at + 1;
  }
  bool good = false;
  try {
    good = find_buffers(ranges, inputs);
  } catch (const OutOfMemoryError&) {
  }
  for (std::size_t i = 0; good && i < ranges.size(); ++i) {
    good = add_segment(ranges[i].first, ranges[i].second, context);
  }
  relocate(inputs);
  if (good) return;
  no_graphs_ = true;
  drop_graphs();
}

// Inputs lie elsewhere in every call, and graphs read one place.
bool Recording::find_buffers(const std::vector<std::pair<std::size_t, std::size_t>>& ranges,
                             std::span<const Tensor> inputs) {
  // What is written to a copy isn't written to the input, and what a step outside of the graphs writes to the input
  // isn't in the copy.
  if (std::any_of(steps_.begin(), steps_.end(), [](const Step& s) { return !s.written_inputs.empty(); })) return false;
  std::vector<bool> read(views_.size());
  for (const auto& [first, last] : ranges) {
    for (std::size_t i = first; i < last; ++i) {
      const Step& step = steps_[i];
      if (!step.on_device()) continue;
      const auto begin = read.begin() + static_cast<std::ptrdiff_t>(step.first_view);
      std::fill_n(begin, step.inputs + step.outputs, true);
    }
  }
  for (const Relocation& r : relocations_) {
    if (!read[r.view]) continue;
    TensorView& view = views_[r.view];
    const TensorImpl& input = *inputs[r.input].impl();
    const std::size_t bytes = extent(input.sizes, input.strides, input.dtype);
    const std::size_t seen = extent(Shape(std::span(view.sizes, static_cast<std::size_t>(view.ndim))),
                                    Shape(std::span(view.strides, static_cast<std::size_t>(view.ndim))), view.dtype);
    if (seen == 0) continue;
    if (r.offset < 0 || static_cast<std::size_t>(r.offset) + seen > bytes) return false;
    auto buffer = std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.input == r.input; });
    if (buffer == buffers_.end()) {
      buffers_.reserve(buffers_.size() + 1);
      buffers_.push_back({r.input, allocator_for(device_).allocate(bytes), bytes});
      buffer = std::prev(buffers_.end());
    }
    view.data = static_cast<char*>(buffer->data) + r.offset;
  }
  return true;
}

bool Recording::add_segment(std::size_t first, std::size_t last, Context& context) {
  const halfstep_plugin_table& table = backend_->table;
  auto* const queue = static_cast<halfstep_queue*>(queue_->native());
  std::string why;
  if (table.graph_begin(queue) != HALFSTEP_OK) {
    why = reason_of(*backend_);
  } else {
    building_ = true;
    bool good = true;
    try {
      for (std::size_t i = first; good && i < last; ++i) {
        Step& step = steps_[i];
        if (!step.on_device()) continue;
        const auto* attributes = static_cast<const unsigned char*>(step.attributes);
        step.baked.assign(attributes, attributes + step.live_bytes);
        good = call(step, context) == Status::ok;
        if (!good) why = fmt::format("{}: {}", step.name, context.error);
      }
      segments_.reserve(segments_.size() + 1);
    } catch (const std::exception& e) {
      good = false;
      why = e.what();
    }
    building_ = false;
    halfstep_graph* graph = nullptr;
    const halfstep_status status = table.graph_end(queue, &graph);
    if (status == HALFSTEP_OK && good) {
      segments_.push_back({first, last, graph});
      return true;
    }
    if (graph) table.graph_destroy(graph);
    const std::string said = reason_of(*backend_);
    if (why.empty()) why = said;
  }
  log(LogLevel::debug, fmt::format("capture: {} makes no graph of the step, whose kernels are enqueued one by one: {}",
                                   device_.str(), why));
  return false;
}

void Recording::drop_graphs() noexcept {
  graphs_made_ = false;
  if (!backend_) return;
  if (!segments_.empty() && !backend_->ended()) {
    // They may still run.
    const DeviceWait waiting;
    backend_->defer(backend_->table.queue_synchronize(static_cast<halfstep_queue*>(queue_->native())), device_.index);
    for (const Segment& segment : segments_) backend_->table.graph_destroy(segment.graph);
  }
  segments_.clear();
  for (const Buffer& b : buffers_) allocator_for(device_).deallocate(b.data, b.bytes);
  buffers_.clear();
}

}  // namespace halfstep::detail
