// SPDX-License-Identifier: Apache-2.0
#include "graphs.h"

#include <memory>
#include <utility>
#include <vector>

#include "kernel.h"
#include "sim.h"

namespace sim::graphs {
namespace {

Graph* graph_of(halfstep_graph* graph) { return reinterpret_cast<Graph*>(graph); }

halfstep_status refuse_as_ordered(const FaultPlan& plan) {
  if (plan.refuse) return fail(HALFSTEP_FAILED, 0, "refused, as ordered");
  if (plan.unsupported) return fail(HALFSTEP_UNSUPPORTED, 0, "not supported, as ordered");
  return HALFSTEP_OK;
}

halfstep_status graph_begin(halfstep_queue* handle) {
  return guarded([&]() -> halfstep_status {
    Queue& queue = *queue_of(handle);
    if (queue.device().lost()) return queue.device().present();
    if (const auto status = refuse_while_recording(queue, "graph_begin")) return status;
    if (const auto status = refuse_as_ordered(machine().faults.next_entry("graph_begin"))) return status;
    queue.capture = std::make_unique<Graph>();
    queue.capture->device = queue.device().index;
    return HALFSTEP_OK;
  });
}

halfstep_status graph_end(halfstep_queue* handle, halfstep_graph** graph) {
  Queue& queue = *queue_of(handle);
  *graph = nullptr;
  if (!queue.capture) return fail(HALFSTEP_FAILED, 0, "no graph was begun on the queue");
  std::unique_ptr<Graph> made = std::move(queue.capture);
  if (const auto status = refuse_as_ordered(machine().faults.next_entry("graph_end"))) return status;
  *graph = reinterpret_cast<halfstep_graph*>(made.release());
  return queue.device().present();
}

halfstep_status graph_launch(halfstep_graph* handle, halfstep_queue* queue_handle) {
  return guarded([&]() -> halfstep_status {
    const Graph& graph = *graph_of(handle);
    Queue& queue = *queue_of(queue_handle);
    Device& device = queue.device();
    if (device.lost()) return device.present();
    if (graph.device != device.index) return fail(HALFSTEP_FAILED, 0, "a graph of another device");
    if (const auto status = refuse_while_recording(queue, "graph_launch")) return status;
    const FaultPlan ordered = machine().faults.next_entry("graph_launch");
    if (const auto status = refuse_as_ordered(ordered)) return status;
    // All or nothing: what is refused at the call is found before anything is queued.
    std::vector<FaultPlan> plans;
    for (const auto& work : graph.work) {
      plans.push_back(work->kind == Work::Kind::kernel ? machine().faults.next_kernel(work->op()) : FaultPlan{});
      if (plans.back().lost) {
        device.lose();
        return fail(HALFSTEP_LOST, work->call, "the device was lost, as ordered");
      }
      if (plans.back().refuse || plans.back().unsupported) {
        const bool refuse = plans.back().refuse;
        return fail(refuse ? HALFSTEP_FAILED : HALFSTEP_UNSUPPORTED, work->call, "%s, as ordered",
                    refuse ? "refused" : "not supported");
      }
    }
    if (!plans.empty()) {
      FaultPlan& last = plans.back();
      last.fail |= ordered.fail;
      last.corrupt |= ordered.corrupt;
      last.delay += ordered.delay;
    }
    for (std::size_t i = 0; i < plans.size(); ++i) queue.push(graph.work[i], plans[i]);
    machine().graph_launches.fetch_add(1, std::memory_order_relaxed);
    return HALFSTEP_OK;
  });
}

halfstep_status graph_destroy(halfstep_graph* graph) {
  const Device* device = machine().device(graph_of(graph)->device);
  delete graph_of(graph);
  return device->present();
}

}  // namespace

void fill(halfstep_plugin_table& table) {
  table.graph_begin = graph_begin;
  table.graph_end = graph_end;
  table.graph_launch = graph_launch;
  table.graph_destroy = graph_destroy;
}

}  // namespace sim::graphs
