// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/profiler.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>

#include "halfstep/core/fail.h"
#include "halfstep/debug/call_site.h"
#include "halfstep/debug/files_internal.h"
#include "halfstep/debug/profile_internal.h"
#include "halfstep/debug/replay_internal.h"
#include "halfstep/runtime/device_backend.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::debug {
namespace {

using detail::ProfileEvent;
using detail::Recording;

// Calls of this thread that have begun, innermost last: a call's own time is without that of the calls inside it.
struct Open {
  const void* profiler;
  const ObservedCall* call;
  std::uint64_t start_ns;
  std::uint64_t inside_ns;
};
std::vector<Open>& open_calls() {
  thread_local std::vector<Open> calls;
  return calls;
}

std::uint64_t touched_bytes(const Tensor& t) {
  if (!t.defined()) return 0;
  std::uint64_t n = t.item_size();
  for (int d = 0; d < t.dim(); ++d) {
    if (t.strides()[d] != 0) n *= static_cast<std::uint64_t>(t.sizes()[d]);
    if (t.sizes()[d] == 0) return 0;
  }
  return n;
}

bool is_cast(const ObservedCall& call) {
  return detail::is_conversion(call) && call.inputs.size() == 1 && call.outputs.size() == 1 &&
         call.inputs[0]->defined() && call.outputs[0]->defined() && call.inputs[0]->dtype() != call.outputs[0]->dtype();
}

}  // namespace

struct Profiler::Impl final : OpObserver, TraceListener {
  explicit Impl(const ProfilerOptions& o) : options(o) {
    for (DeviceBackend* b : backends()) {
      if (!b->has_profile()) continue;
      for (int i = 0; i < b->count; ++i) {
        synchronize(b->device(i));
        if (b->table.profile_start(i) == HALFSTEP_OK) profiled.push_back(b->device(i));
      }
    }
    data.start_ns = trace_clock_ns();
    add_observer(this);
    add_trace_listener(this);
  }
  ~Impl() override {
    if (recording) end_observing();
  }

  bool takes_fused() const override { return true; }  // a profile is of the program as it runs otherwise

  void before_call(const ObservedCall& call) override {
    open_calls().push_back({.profiler = this, .call = &call, .start_ns = trace_clock_ns(), .inside_ns = 0});
  }

  void after_call(const ObservedCall& call) override {
    const std::uint64_t now = trace_clock_ns();
    ProfileEvent event{.start_ns = now, .end_ns = now};
    if (call.path != ExecutionPath::view) {
      std::uint64_t inside_ns = 0;
      // A view that ran before this object was there has no entry, nor has a call that began then.
      if (!close(call, event.start_ns, inside_ns)) return;
      event.self_ns = now - event.start_ns - std::min(inside_ns, now - event.start_ns);
      if (Open* outer = innermost()) outer->inside_ns += now - event.start_ns;
      for (const Tensor* t : call.inputs) event.bytes += touched_bytes(*t);
      for (const Tensor* t : call.outputs) event.bytes += touched_bytes(*t);
    }
    const CallSite site = call_site(call, 0);
    event.view = call.path == ExecutionPath::view;
    event.cast = is_cast(call);
    event.backward = !site.backward_of.empty();
    event.path = call.path;
    event.device = call.device;
    event.number = call.number;
    if (!call.outputs.empty() && call.outputs[0]->defined()) event.dtype = call.outputs[0]->dtype();
    const std::lock_guard lock(mutex);
    if (data.events.size() >= options.most_events) {
      ++data.left_out;
      return;
    }
    event.name = data.text(site.op);
    event.module = data.text(site.module);
    event.backward_of = data.text(site.backward_of);
    event.thread = thread_number("");
    data.events.push_back(event);
  }

  void failed_call(const ObservedCall& call) override {
    std::uint64_t start = 0, inside_ns = 0;
    close(call, start, inside_ns);
  }

  void range(std::string_view name, std::string_view category, std::uint64_t start_ns, std::uint64_t end_ns) override {
    if (start_ns < data.start_ns) return;  // it began before the recording did
    const std::lock_guard lock(mutex);
    if (data.events.size() >= options.most_events) {
      ++data.left_out;
      return;
    }
    data.events.push_back({.name = data.text(std::string(name)),
                           .category = data.text(std::string(category)),
                           .thread = thread_number(category),
                           .range = true,
                           .start_ns = start_ns,
                           .end_ns = end_ns});
  }

  Open* innermost() {
    auto& calls = open_calls();
    for (auto it = calls.rbegin(); it != calls.rend(); ++it) {
      if (it->profiler == this) return &*it;
    }
    return nullptr;
  }

  bool close(const ObservedCall& call, std::uint64_t& start_ns, std::uint64_t& inside_ns) {
    auto& calls = open_calls();
    for (auto it = calls.rbegin(); it != calls.rend(); ++it) {
      if (it->profiler != this || it->call != &call) continue;
      start_ns = it->start_ns;
      inside_ns = it->inside_ns;
      calls.erase(std::next(it).base());
      return true;
    }
    return false;
  }

  // A thread is called by what it did first: a loader's makes batches before all else.
  std::uint32_t thread_number(std::string_view category) {
    const auto id = std::this_thread::get_id();
    const auto it = threads.find(id);
    if (it != threads.end()) return it->second;
    const auto number = static_cast<std::uint32_t>(data.threads.size());
    const bool loader = category == "loader" && id != maker;
    int same = 0;
    for (const std::string& name : data.threads) same += name.starts_with(loader ? "loader" : "host") ? 1 : 0;
    data.threads.push_back(fmt::format("{} {}", loader ? "loader" : "host", same));
    threads.emplace(id, number);
    return number;
  }

  void end_observing() {
    remove_observer(this);
    remove_trace_listener(this);
    recording = false;
    data.end_ns = trace_clock_ns();
  }

  void stop() {
    if (!recording) return;
    end_observing();
    for (const Device device : profiled) read_records(device);
    data.assign_device_times();
    data.assign_ranges();
  }

  void read_records(Device device) {
    DeviceBackend& backend = backend_for(device, "Profiler");
    synchronize(device);
    if (backend.table.profile_stop(device.index) != HALFSTEP_OK) {
      log(LogLevel::warning, fmt::format("Profiler: {} gives no records", device.str()));
      return;
    }
    std::vector<halfstep_record> records(4096);
    while (true) {
      std::uint64_t count = 0;
      if (backend.table.profile_read(device.index, records.data(), records.size(), &count) != HALFSTEP_OK) return;
      for (std::uint64_t i = 0; i < std::min<std::uint64_t>(count, records.size()); ++i) {
        const halfstep_record& r = records[i];
        if (r.end_ns < r.start_ns || r.end_ns < data.start_ns) continue;
        const char* name = r.call ? backend.call_name(r.call, device.index) : "copy";
        data.records.push_back({.device = device,
                                .queue = r.queue,
                                .number = r.call,
                                .name = data.text(name ? name : "unknown"),
                                .start_ns = std::max(r.start_ns, data.start_ns),
                                .end_ns = r.end_ns});
      }
      if (count == 0) return;
    }
  }

  ProfilerOptions options;
  std::mutex mutex;
  Recording data;
  std::map<std::thread::id, std::uint32_t> threads;
  const std::thread::id maker = std::this_thread::get_id();
  std::vector<Device> profiled;
  bool recording = true;
};

Profiler::Profiler(const ProfilerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Profiler::~Profiler() {
  try {
    stop();  // devices don't go on recording
  } catch (const std::exception& e) {
    log(LogLevel::warning, fmt::format("Profiler: {}", e.what()));
  }
}

void Profiler::stop() { impl_->stop(); }

std::uint64_t Profiler::duration_ns() {
  stop();
  return impl_->data.end_ns - impl_->data.start_ns;
}

std::vector<ProfileRow> Profiler::ops() {
  stop();
  const Recording& data = impl_->data;
  std::map<std::tuple<std::uint32_t, DType>, ProfileRow> rows;
  for (const ProfileEvent& e : data.events) {
    if (e.range) continue;
    ProfileRow& row = rows[{e.name, e.dtype}];
    if (row.calls == 0) {
      row.name = data.texts[e.name];
      row.dtype = name(e.dtype);
    }
    row.calls += 1;
    row.self_ns += e.self_ns;
    row.total_ns += e.end_ns - e.start_ns;
    row.device_ns += e.device_ns;
    row.bytes += e.bytes;
    row.casts += e.cast ? 1 : 0;
    row.backward_ns += e.backward ? e.self_ns : 0;
  }
  std::vector<ProfileRow> result;
  for (auto& [key, row] : rows) result.push_back(std::move(row));
  std::stable_sort(result.begin(), result.end(), [](const ProfileRow& a, const ProfileRow& b) {
    return std::tie(a.device_ns, a.self_ns) > std::tie(b.device_ns, b.self_ns);
  });
  return result;
}

std::vector<ProfileRow> Profiler::modules() {
  stop();
  const Recording& data = impl_->data;
  std::map<std::string, ProfileRow> own;
  for (const ProfileEvent& e : data.events) {
    if (e.range) continue;
    const std::string outside = e.inside == 0 ? "" : "(" + data.texts[e.inside] + ")";
    const std::string& path = e.module == 0 ? outside : data.texts[e.module];
    // The modules around it have a row too, though no op may run in them.
    for (std::size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1)) {
      own[path.substr(0, dot)];
    }
    ProfileRow& row = own[path];
    row.calls += 1;
    row.self_ns += e.self_ns;
    row.device_ns += e.device_ns;
    row.bytes += e.bytes;
    row.casts += e.cast ? 1 : 0;
    row.backward_ns += e.backward ? e.self_ns : 0;
  }
  std::vector<ProfileRow> result;
  for (const auto& [path, row] : own) {
    ProfileRow sum{.name = path, .self_ns = row.self_ns};
    for (const auto& [other, part] : own) {
      if (path.empty() || path[0] == '(' ? other != path : !in_module(other, path)) continue;
      sum.calls += part.calls;
      sum.total_ns += part.self_ns;
      sum.device_ns += part.device_ns;
      sum.bytes += part.bytes;
      sum.casts += part.casts;
      sum.backward_ns += part.backward_ns;
    }
    result.push_back(std::move(sum));
  }
  return result;
}

std::vector<ProfileRow> Profiler::ranges() {
  stop();
  const Recording& data = impl_->data;
  std::vector<const ProfileEvent*> spans;
  std::map<std::uint32_t, std::size_t> places;
  for (const ProfileEvent& e : data.events) {
    if (e.range && data.texts[e.category] != "loader") spans.push_back(&e);
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const ProfileEvent* a, const ProfileEvent* b) { return a->start_ns < b->start_ns; });
  std::vector<ProfileRow> result;
  for (const ProfileEvent* e : spans) {
    const auto [place, fresh] = places.try_emplace(e->name, result.size());
    if (fresh) result.push_back({.name = data.texts[e->name]});
    ProfileRow& row = result[place->second];
    row.count += 1;
    row.total_ns += e->end_ns - e->start_ns;
  }
  for (const ProfileEvent& e : data.events) {
    const auto place = e.range ? places.end() : places.find(e.inside);
    if (place == places.end()) continue;
    ProfileRow& row = result[place->second];
    row.calls += 1;
    row.self_ns += e.self_ns;
    row.device_ns += e.device_ns;
    row.bytes += e.bytes;
    row.casts += e.cast ? 1 : 0;
  }
  return result;
}

std::string Profiler::table(std::size_t rows) {
  const auto all = ops();
  return detail::profile_text(all, modules(), ranges(), duration_ns(), impl_->data.left_out, rows);
}

std::string Profiler::trace_json() {
  stop();
  return detail::chrome_trace(impl_->data);
}

void Profiler::write_trace(const std::filesystem::path& path) { detail::write_text(path, trace_json()); }

}  // namespace halfstep::debug
