// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/profiler.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>

#include "halfstep/amp/autocast.h"
#include "halfstep/data/loader.h"
#include "halfstep/ops/reduce.h"
#include "tests/debug/nets.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

using debug::Profiler;
using debug::ProfileRow;
using nlohmann::json;

const ProfileRow* find(const std::vector<ProfileRow>& rows, const std::string& name, const std::string& dtype = "") {
  for (const ProfileRow& r : rows) {
    if (r.name == name && (dtype.empty() || r.dtype == dtype)) return &r;
  }
  return nullptr;
}

TEST(Profiler, CountsCallsAndBytesOfEachOp) {
  const Tensor x = ones({8, 4}), row = ones({1, 4});
  Profiler profiler;
  relu(x);
  relu(x);
  add(x, row.expand({8, 4}));
  relu(x.to(f16));
  profiler.stop();
  relu(x);  // after it
  const auto rows = profiler.ops();
  const ProfileRow* relus = find(rows, "relu", "f32");
  ASSERT_TRUE(relus);
  EXPECT_EQ(relus->calls, 2u);
  EXPECT_EQ(relus->bytes, 2u * (128 + 128));
  EXPECT_EQ(relus->casts, 0u);
  EXPECT_EQ(relus->self_ns, relus->total_ns);
  EXPECT_EQ(relus->backward_ns, 0u);
  const ProfileRow* half = find(rows, "relu", "f16");
  ASSERT_TRUE(half);
  EXPECT_EQ(half->calls, 1u);
  EXPECT_EQ(half->bytes, 64u + 64);
  const ProfileRow* sums = find(rows, "add");
  ASSERT_TRUE(sums);
  EXPECT_EQ(sums->bytes, 128u + 16 + 128);  // the row that is repeated is read once
  const ProfileRow* cast = find(rows, "to", "f16");
  ASSERT_TRUE(cast);
  EXPECT_EQ(cast->calls, 1u);
  EXPECT_EQ(cast->casts, 1u);
  EXPECT_EQ(cast->bytes, 128u + 64);
  const ProfileRow* view = find(rows, "expand");
  ASSERT_TRUE(view);
  EXPECT_EQ(view->bytes, 0u);
  EXPECT_EQ(view->total_ns, 0u);
  std::uint64_t total = 0;
  for (const ProfileRow& r : rows) total += r.self_ns;
  EXPECT_GT(total, 0u);
  EXPECT_LE(total, profiler.duration_ns());
}

// An op that runs another inside of it has the other's time in its total only.
TEST(Profiler, KeepsOwnTimeApart) {
  const Tensor x = ones({2});
  const Tensor* in = &x;
  const auto call = [&](const char* name) {
    return ObservedCall{
        .name = name, .op = nullptr, .inputs = {&in, 1}, .outputs = {&in, 1}, .attributes = nullptr, .device = {}};
  };
  Profiler profiler;
  const auto outer_call = call("outer"), inner_call = call("inner");
  {
    detail::Observation outer(outer_call);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    {
      detail::Observation inner(inner_call);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      inner.done(ExecutionPath::native);
    }
    outer.done(ExecutionPath::native);
  }
  try {
    const detail::Observation failed(outer_call);
    throw Error("of the kernel");
  } catch (const Error&) {
  }
  const auto rows = profiler.ops();
  const ProfileRow *outer = find(rows, "outer"), *inner = find(rows, "inner");
  ASSERT_TRUE(outer && inner);
  EXPECT_EQ(outer->calls, 1u);
  EXPECT_GE(inner->self_ns, 5'000'000u);
  EXPECT_GE(outer->self_ns, 2'000'000u);
  EXPECT_EQ(outer->total_ns, outer->self_ns + inner->total_ns);
}

struct Outer : nn::Module<Outer> {
  test::Small body = child("body", test::Small{});
  Tensor forward(const Tensor& x) const { return exp(body(x)); }
};
struct Whole : nn::Module<Whole> {
  Outer head = child("head", Outer{});
  Tensor forward(const Tensor& x) const { return head(x); }
};

TEST(Profiler, SumsUpModules) {
  const Whole net;
  Profiler profiler;
  Tensor loss;
  {
    const amp::Autocast autocast{{.dtype = bf16}};
    loss = sum(net(ones({4, 3})));
  }
  loss.backward();
  const auto modules = profiler.modules(), ops = profiler.ops();
  std::vector<std::string> paths;
  for (const ProfileRow& m : modules) paths.push_back(m.name);
  EXPECT_EQ(paths, (std::vector<std::string>{"", "head", "head.body", "head.body.fc1", "head.body.fc2"}));
  const ProfileRow &outside = modules[0], &head = modules[1], &body = modules[2], &fc1 = modules[3], &fc2 = modules[4];
  EXPECT_EQ(head.total_ns, head.self_ns + body.total_ns);
  EXPECT_EQ(body.total_ns, body.self_ns + fc1.total_ns + fc2.total_ns);
  EXPECT_EQ(fc1.total_ns, fc1.self_ns);
  EXPECT_EQ(outside.total_ns, outside.self_ns);
  EXPECT_GT(head.self_ns, 0u);  // its exp
  EXPECT_GT(fc1.backward_ns, 0u);
  EXPECT_LT(fc1.backward_ns, fc1.total_ns);
  // Input, weight and bias.
  EXPECT_GE(fc1.casts, 3u);
  std::uint64_t self = 0, calls = 0, casts = 0;
  for (const ProfileRow& r : ops) self += r.self_ns, calls += r.calls, casts += r.casts;
  EXPECT_EQ(self, outside.total_ns + head.total_ns);
  EXPECT_EQ(calls, outside.calls + head.calls);
  EXPECT_EQ(casts, outside.casts + head.casts);
  const std::string text = profiler.table(2);
  for (const char* part : {"op ", "self ms", "rows more", "module", "(outside)", "head.body.fc2", "casts"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
}

TEST(Profiler, OpsAreInTheRangesOfTheProgram) {
  const Whole net;
  const Tensor x = ones({4, 3});
  Profiler profiler;
  for (int i = 0; i < 2; ++i) {
    const debug::Range step{"step"};
    Tensor loss;
    {
      const debug::Range forward{"forward"};
      loss = sum(net(x));
    }
    {
      const debug::Range backward{"backward"};
      loss.backward();
    }
    x + x;  // of the step itself
    x* x;
  }
  x - x;  // of none
  const auto ranges = profiler.ranges(), modules = profiler.modules(), ops = profiler.ops();
  ASSERT_EQ(ranges.size(), 3u);
  EXPECT_EQ(ranges[0].name, "step");
  EXPECT_EQ(ranges[1].name, "forward");
  EXPECT_EQ(ranges[2].name, "backward");
  for (const ProfileRow& r : ranges) EXPECT_EQ(r.count, 2u) << r.name;
  EXPECT_EQ(ranges[0].calls, 2u * 2u);
  EXPECT_GE(ranges[0].total_ns, ranges[1].total_ns + ranges[2].total_ns);
  std::uint64_t calls = 0, inside = 0;
  for (const ProfileRow& r : ops) calls += r.calls;
  for (const ProfileRow& r : ranges) inside += r.calls;
  EXPECT_EQ(calls, inside + 1);
  // What belongs to no module stands under its range.
  const auto row = [&](const std::string& name) {
    const auto it = std::find_if(modules.begin(), modules.end(), [&](const ProfileRow& r) { return r.name == name; });
    return it == modules.end() ? ProfileRow{} : *it;
  };
  EXPECT_EQ(row("(step)").calls, 4u);
  EXPECT_EQ(row("").calls, 1u);
  EXPECT_NE(profiler.table().find("range"), std::string::npos);
}

// Complete events of one track, as [start, end) in nanoseconds: each lies inside or outside of another, never across.
void expect_nested(const json& trace) {
  std::map<std::pair<int, int>, std::vector<std::pair<std::int64_t, std::int64_t>>> tracks;
  for (const json& e : trace["traceEvents"]) {
    if (e["ph"] != "X") continue;
    const auto ns = [&](const char* key) {
      return static_cast<std::int64_t>(std::llround(e[key].get<double>() * 1e3));
    };
    EXPECT_GE(ns("ts"), 0) << e;
    EXPECT_GE(ns("dur"), 0) << e;
    tracks[{e["pid"], e["tid"]}].emplace_back(ns("ts"), ns("ts") + ns("dur"));
  }
  for (auto& [track, spans] : tracks) {
    std::sort(spans.begin(), spans.end(),
              [](auto a, auto b) { return a.first != b.first ? a.first < b.first : a.second > b.second; });
    std::vector<std::int64_t> ends;
    for (const auto& [start, end] : spans) {
      while (!ends.empty() && ends.back() <= start) ends.pop_back();
      if (!ends.empty()) {
        EXPECT_LE(end, ends.back()) << track.first << ' ' << track.second;
      }
      ends.push_back(end);
    }
  }
}

TEST(Profiler, TraceHasHostAndLoaderTracks) {
  const test::TemporaryDir folder;
  const auto dataset = std::make_shared<data::TensorDataset>(ones({64, 3}), zeros({64}, {.dtype = i64}));
  Profiler profiler;
  {
    const test::Small net;
    data::DataLoader loader{dataset, {.batch_size = 16, .workers = 1}};
    for (const auto& [input, target] : loader) {
      const debug::Range step{"step \"one\""};
      sum(net(input)).backward();
    }
  }
  profiler.write_trace(folder.path() / "trace.json");
  json trace;
  std::ifstream(folder.path() / "trace.json") >> trace;
  expect_nested(trace);
  std::map<int, std::string> threads;
  std::map<std::string, int> spans;
  std::map<std::string, std::set<std::string>> where;
  for (const json& e : trace["traceEvents"]) {
    if (e["name"] == "thread_name") threads[e["tid"]] = e["args"]["name"];
  }
  for (const json& e : trace["traceEvents"]) {
    if (e["ph"] != "X") continue;
    ++spans[e["name"]];
    where[e["name"]].insert(threads.at(e["tid"]));
    if (e["name"] == "linear") {
      EXPECT_EQ(e["cat"], "forward");
      EXPECT_EQ(e["args"]["dtype"], "f32");
      EXPECT_TRUE(e["args"]["module"] == "fc1" || e["args"]["module"] == "fc2");
    }
    if (e["cat"] == "backward") {
      EXPECT_FALSE(e["args"]["backward_of"].get<std::string>().empty());
    }
  }
  EXPECT_EQ(spans["batch"], 4);
  EXPECT_EQ(spans["wait for batch"], 4);
  EXPECT_EQ(spans["step \"one\""], 4);
  EXPECT_EQ(spans["linear"], 8);
  EXPECT_EQ(where["batch"], std::set<std::string>{"loader 0"});
  EXPECT_EQ(where["wait for batch"], std::set<std::string>{"host 0"});
  EXPECT_EQ(where["linear"], std::set<std::string>{"host 0"});
}

TEST(Profiler, SeesAllThreads) {
  const Tensor x = ones({16});
  Profiler profiler;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&x] {
        const debug::Range range{"work"};
        for (int i = 0; i < 100; ++i) relu(x);
      });
    }
  }
  const auto rows = profiler.ops();
  ASSERT_TRUE(find(rows, "relu"));
  EXPECT_EQ(find(rows, "relu")->calls, 400u);
  const json trace = json::parse(profiler.trace_json());
  expect_nested(trace);
  std::map<int, int> calls;
  for (const json& e : trace["traceEvents"]) calls[e["tid"]] += e["name"] == "relu" ? 1 : 0;
  EXPECT_EQ(calls, (std::map<int, int>{{0, 100}, {1, 100}, {2, 100}, {3, 100}}));
}

TEST(Profiler, StopsAndLeavesOutWhatIsTooMuch) {
  std::optional<Profiler> profiler;
  {
    const Profiler other;  // so that the range is seen at all
    const debug::Range before{"began before"};
    profiler.emplace(debug::ProfilerOptions{.most_events = 2});
  }
  for (int i = 0; i < 5; ++i) relu(ones({1}));
  profiler->stop();
  EXPECT_FALSE(observed());
  const auto rows = profiler->ops();
  std::uint64_t calls = 0;
  for (const ProfileRow& r : rows) calls += r.calls;
  EXPECT_EQ(calls, 2u);
  EXPECT_NE(profiler->table().find("left out"), std::string::npos);
  EXPECT_EQ(profiler->trace_json().find("began before"), std::string::npos);
  EXPECT_THROW(profiler->write_trace("/nonexistent/trace.json"), IoError);
}

TEST(Profiler, CostsNothingOnceGone) {
  { const Profiler profiler; }
  EXPECT_FALSE(observed());
  EXPECT_EQ(detail::trace_listeners.load(), 0);
}

}  // namespace
}  // namespace halfstep
