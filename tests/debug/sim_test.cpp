// SPDX-License-Identifier: Apache-2.0
// The observers on a device whose memory the host can't read, and whose work is done later.
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "halfstep/debug/compare.h"
#include "halfstep/debug/dump.h"
#include "halfstep/debug/nonfinite.h"
#include "halfstep/debug/profiler.h"
#include "halfstep/io/safetensors.h"
#include "halfstep/ops/reduce.h"
#include "tests/debug/nets.h"
#include "tests/runtime/on_sim.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

class DebugOnSim : public test::OnSim {
 protected:
  Tensor on_sim(const std::vector<double>& values, DType dtype = f32) {
    return tensor(values, {static_cast<std::int64_t>(values.size())}, {.device = Device{}}).to(sim, dtype);
  }
  test::TemporaryDir temporary_;
};

TEST_F(DebugOnSim, TensorsPrint) {
  const Tensor x = on_sim({1, -2.5});
  const std::string text = mul(x, 2).str();
  EXPECT_NE(text.find("2"), std::string::npos);
  EXPECT_NE(text.find("-5"), std::string::npos) << text;
  EXPECT_NE(text.find("sim"), std::string::npos) << text;
}

TEST_F(DebugOnSim, NonFiniteNamesTheDevice) {
  Tensor x = on_sim({60000, 1}, f16);
  debug::NonFinite watch{{.action = debug::OnNonFinite::collect}};
  relu(x);
  x.mul_(on_sim({4, 4}, f16));
  ASSERT_EQ(watch.count(), 1u);
  const debug::NonFiniteFinding f = watch.findings()[0];
  EXPECT_EQ(f.site.op, "mul");
  EXPECT_EQ(f.site.device, sim);
  EXPECT_EQ(f.inputs.at(0).max, 60000);
  EXPECT_EQ(f.exact, 240000);
  EXPECT_NE(f.str().find("on sim:0"), std::string::npos) << f.str();
}

TEST_F(DebugOnSim, DumpReadsItsMemory) {
  const Tensor x = on_sim({1, -2, 3});
  {
    debug::Dump dump{{.folder = temporary_.path() / "dump", .level = debug::DumpLevel::whole, .ops = {"relu"}}};
    relu(x);
  }
  const auto call = temporary_.path() / "dump/000001_relu";
  nlohmann::json json;
  std::ifstream(call / "call.json") >> json;
  EXPECT_EQ(json["device"], "sim:0");
  EXPECT_EQ(json["inputs"][0]["device"], "sim:0");
  EXPECT_EQ(json["outputs"][0]["first"], (std::vector<double>{1, 0, 3}));
  EXPECT_EQ(io::load_safetensors(call / "tensors.safetensors").tensors[0].tensor.to_vector<double>(),
            (std::vector<double>{1, -2, 3}));
}

TEST_F(DebugOnSim, CompareHasTheHostsReference) {
  const Tensor x = on_sim({0.1, 0.2, 0.3}, f16);
  debug::Compare compare;
  mul(x, x);
  exp(x);
  ASSERT_EQ(compare.compared(), 2u) << compare.report();
  for (const debug::Comparison& c : compare.worst()) {
    EXPECT_LE(c.max_ulp, 0.51) << c.site.op;
    EXPECT_EQ(c.site.device, sim);
  }
}

TEST_F(DebugOnSim, CompareFindsACorruptedValue) {
  const Tensor x = on_sim({0.5, 1, 2});
  add(x, x);
  synchronize(sim);
  test::order_fault("corrupt:add:1");
  debug::Compare compare;
  mul(x, x);
  add(x, x);
  ASSERT_EQ(compare.compared(), 2u);
  EXPECT_EQ(compare.worst()[0].site.op, "add");
  EXPECT_GT(compare.worst()[0].max_ulp, 0);
  EXPECT_EQ(compare.worst()[1].max_ulp, 0);
}

// A kernel that begins 30 ms after the host has enqueued it.
TEST_F(DebugOnSim, ProfilerHasTheDevicesTime) {
  const Tensor x = on_sim({1, 2, 3});
  add(x, x);  // the kernel is looked up
  synchronize(sim);
  test::order_fault("delay:add:1:30ms");
  debug::Profiler profiler;
  add(x, x);
  mul(x, x);
  profiler.stop();
  const auto rows = profiler.ops();
  ASSERT_EQ(rows.size(), 2u);
  const auto trace = nlohmann::json::parse(profiler.trace_json());
  std::map<std::string, nlohmann::json> kernels, calls;
  std::set<std::string> tracks;
  for (const auto& e : trace["traceEvents"]) {
    if (e["ph"] == "X") (e["pid"] == 1 ? calls : kernels)[e["name"]] = e;
    if (e["ph"] == "M") tracks.insert(e["args"]["name"]);
  }
  ASSERT_EQ(kernels.size(), 2u);
  for (const debug::ProfileRow& row : rows) {
    const auto& kernel = kernels.at(row.name);
    const auto& call = calls.at(row.name);
    EXPECT_EQ(kernel["args"]["call"], call["args"]["call"]);
    EXPECT_NEAR(kernel["dur"].get<double>() * 1e3, static_cast<double>(row.device_ns), 1);
    EXPECT_EQ(call["args"]["device"], "sim:0");
  }
  EXPECT_GE(kernels.at("add")["ts"].get<double>() - calls.at("add")["ts"].get<double>(), 30'000);
  EXPECT_GE(kernels.at("mul")["ts"], kernels.at("add")["ts"]);
  EXPECT_TRUE(tracks.contains("sim:0") && tracks.contains("host"));
}

}  // namespace
}  // namespace halfstep
