// SPDX-License-Identifier: Apache-2.0
// The self-check of a device: it passes on one that computes rightly and names what is wrong on one that doesn't.
#include "halfstep/conformance/device_check.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "halfstep/conformance/device_record.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/float32_precision.h"
#include "tests/runtime/on_sim.h"
#include "tests/support/test_data.h"

namespace halfstep::conformance {
namespace {

using DeviceCheck = test::OnSim;

std::map<std::string, DeviceCheckLine> failed(const DeviceCheckReport& report) {
  std::map<std::string, DeviceCheckLine> lines;
  for (const DeviceCheckLine& l : report.lines) {
    if (!l.passed()) lines[l.name + (l.dtype.empty() ? "" : " " + l.dtype)] = l;
  }
  return lines;
}
bool mentions(const DeviceCheckLine& line, const std::string& text) {
  for (const std::string& p : line.problems) {
    if (p.find(text) != std::string::npos) return true;
  }
  return false;
}

TEST_F(DeviceCheck, PassesOnADeviceThatComputesRightly) {
  std::size_t told = 0;
  const DeviceCheckReport report =
      check_device(sim, {.quick = true, .on_line = [&](const DeviceCheckLine&) { ++told; }});
  for (const auto& [name, line] : failed(report)) ADD_FAILURE() << name << ": " << line.problems[0];
  EXPECT_TRUE(report.passed());
  EXPECT_FALSE(report.lost);
  EXPECT_EQ(told, report.lines.size());
  EXPECT_GT(report.lines.size(), 60u);
  bool native = false, on_cpu = false;
  for (const DeviceCheckLine& l : report.lines) {
    EXPECT_LE(l.worst, 1) << l.name;
    EXPECT_GT(l.cases, 0) << l.name;
    EXPECT_FALSE(l.bound.empty()) << l.name;
    if (l.name == "optimizers" && l.on_cpu.empty()) native = true;
    if (l.name == "softmax" && !l.on_cpu.empty()) on_cpu = true;
  }
  EXPECT_TRUE(native);
  EXPECT_TRUE(on_cpu);
}

TEST_F(DeviceCheck, FindsOneWrongValueAndSaysWhere) {
  // The kernels' values are wrong by half; nobody else tells.
  test::order_fault(
      "corrupt:mm:9;corrupt:adam_step:2;corrupt:cross_entropy_backward:1;corrupt:to:3;corrupt:relu:2;corrupt:sum:1");
  std::vector<std::string> wrong;
  for (const auto& [name, line] : failed(check_device(sim, {.quick = true}))) {
    wrong.push_back(name);
    EXPECT_GT(line.worst, 1) << name;
  }
  EXPECT_EQ(wrong, (std::vector<std::string>{"casts, every pattern f16", "functions of one tensor f16",
                                             "functions of two tensors f32", "losses f32", "matrix products f32",
                                             "optimizers f32"}));
}

TEST_F(DeviceCheck, FindsWrongCollectives) {
  test::order_fault("corrupt:all_to_all:1;corrupt:all_reduce:1;corrupt:reduce_scatter:11");
  auto wrong = failed(check_device(sim, {.quick = true}));
  std::vector<std::string> names;
  for (const auto& [name, line] : wrong) names.push_back(name);
  // Of 2 ranks, whose ten calls of reduce_scatter are those of five reductions in f32.
  EXPECT_EQ(names, (std::vector<std::string>{"collectives, 2 ranks", "reductions between 2 ranks f16",
                                             "reductions between 2 ranks f32"}));
  EXPECT_TRUE(mentions(wrong["collectives, 2 ranks"], "all_to_all of 1: rank "));
  // A rank whose call fails: the other one learns of it, and the group is used no more.
  test::order_fault("refuse:send_receive:1");
  const DeviceCheckReport report = check_device(sim, {.quick = true});
  wrong = failed(report);
  ASSERT_EQ(wrong.size(), 1U);
  const DeviceCheckLine& line = wrong["collectives, 2 ranks"];
  EXPECT_TRUE(mentions(line, "refused, as ordered"));
  EXPECT_TRUE(mentions(line, "has given up"));
  for (const DeviceCheckLine& l : report.lines) EXPECT_EQ(l.name.find("reductions between"), std::string::npos);
}

TEST_F(DeviceCheck, FindsWrongGraphs) {
  const auto wrong_with = [&](const std::string& orders) {
    test::order_fault("clear;" + orders);
    auto wrong = failed(check_device(sim, {.quick = true}));
    EXPECT_EQ(wrong.size(), 1U) << orders;
    return wrong["captured steps, by graphs f32"];
  };
  // The third launch leaves one wrong value: steps one to three ran before there was a graph.
  DeviceCheckLine line = wrong_with("corrupt:graph_launch:3");
  EXPECT_TRUE(mentions(line, "replayed: step 6: 1 of "));
  EXPECT_EQ(line.cases, 4);
  line = wrong_with("refuse:graph_launch:1");
  EXPECT_TRUE(mentions(line, "replayed: ") && mentions(line, "refused, as ordered"));
  line = wrong_with("fail:graph_launch:2");
  EXPECT_TRUE(mentions(line, "a failure was ordered"));
  // Of the graphs of f32; one that can't be made is asked for no more.
  line = wrong_with("refuse:graph_end:2");
  EXPECT_TRUE(mentions(line, "given up: graph_end: refused, as ordered"));
  EXPECT_EQ(line.cases, 2);
  line = wrong_with("refuse:graph_begin:1");
  EXPECT_TRUE(mentions(line, "given up before the first kernel: graph_begin: refused, as ordered"));
  // The plug-in made graphs in the first cases, and none of the step.
  line = wrong_with("refuse:graph_end:3");
  EXPECT_TRUE(mentions(line, "replayed: the steps were replayed kernel by kernel"));
}

TEST_F(DeviceCheck, LeavesOutGraphsThatAreNotSupported) {
  const auto graphs_of = [&] {
    std::vector<DeviceCheckLine> lines;
    for (const DeviceCheckLine& l : check_device(sim, {.quick = true}).lines) {
      if (l.name == "captured steps, by graphs") lines.push_back(l);
    }
    return lines;
  };
  test::order_fault("unsupported:graph_begin:1:always");
  std::vector<DeviceCheckLine> lines = graphs_of();
  ASSERT_EQ(lines.size(), 3U);
  for (const DeviceCheckLine& l : lines) {
    EXPECT_TRUE(l.passed()) << l.problems[0];
    EXPECT_EQ(l.note, "graph_begin: not supported, as ordered");
  }
  test::order_fault("clear");
  // Whatever the program has said of graphs, they are checked, and what it has said stays.
  set_device_graphs(false);
  const std::uint64_t before = test::sim_stats().graph_launches;
  lines = graphs_of();
  EXPECT_GT(test::sim_stats().graph_launches, before);
  EXPECT_FALSE(device_graphs());
  set_device_graphs(true);
}

TEST_F(DeviceCheck, GoesOnAfterAnErrorAndNamesTheOp) {
  test::order_fault("fail:linear:1");
  const DeviceCheckReport report = check_device(sim, {.quick = true});
  const auto wrong = failed(report);
  ASSERT_EQ(wrong.size(), 1u);
  EXPECT_EQ(wrong.begin()->first, "matrix products f32");
  EXPECT_TRUE(mentions(wrong.begin()->second, "linear"));
  EXPECT_EQ(report.lines.back().name, "queues, events, pinned memory");
}

TEST_F(DeviceCheck, EndsWhereTheDeviceIsLost) {
  test::order_fault("lost:2000");
  const DeviceCheckReport report = check_device(sim, {.quick = true});
  EXPECT_TRUE(report.lost);
  EXPECT_FALSE(report.passed());
  EXPECT_TRUE(mentions(report.lines.back(), "lost"));
}

TEST_F(DeviceCheck, PutsBackWhatItChanges) {
  set_fallback_options({.missing = false, .failing = false});
  set_float32_precision(Float32Precision::high);
  manual_seed(3);
  const PhiloxState before = default_generator().state();
  const Device device = default_device();
  check_device(sim, {.quick = true});
  EXPECT_FALSE(fallback_options().missing);
  EXPECT_EQ(float32_precision(), Float32Precision::high);
  EXPECT_EQ(default_generator().state().seed, before.seed);
  EXPECT_EQ(default_generator().state().offset, before.offset);
  EXPECT_EQ(default_device(), device);
  set_float32_precision(Float32Precision::highest);
}

TEST_F(DeviceCheck, RefusesADeviceThatIsNotThere) { EXPECT_THROW(check_device(Device(sim.type, 40)), DeviceError); }

class DeviceRecords : public test::OnSim {
 protected:
  const test::TemporaryDir temporary;
  const std::filesystem::path folder = temporary.path() / "records";
};

TEST_F(DeviceRecords, AreKeptByKindAndHardware) {
  const DeviceInfo info = device_info(sim);
  EXPECT_FALSE(load_device_record(info, folder).has_value());
  const DeviceRecord record = make_device_record(info, 12.4);
  EXPECT_EQ(record.kind, "sim");
  EXPECT_EQ(record.hardware, info.name);
  EXPECT_EQ(record.version, info.version);
  EXPECT_EQ(record.seconds, "12");
  EXPECT_EQ(record.date.size(), 10u);
  save_device_record(record, folder / "deep" / "down");
  const auto found = load_device_record(info, folder / "deep" / "down");
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->date, record.date);
  EXPECT_EQ(found->halfstep, record.halfstep);
  EXPECT_TRUE(is_current(*found, info));
  DeviceInfo newer = info;
  newer.version += ".1";
  EXPECT_FALSE(is_current(*load_device_record(newer, folder / "deep" / "down"), newer));
  DeviceInfo other = info;
  other.name = "Another accelerator";
  EXPECT_FALSE(load_device_record(other, folder / "deep" / "down").has_value());
  // A name that comes to the same file is no proof either.
  other.name = info.name + " !";
  EXPECT_FALSE(load_device_record(other, folder / "deep" / "down").has_value());
}

TEST_F(DeviceRecords, ThatAreDamagedCountAsNone) {
  const DeviceInfo info = device_info(sim);
  save_device_record(make_device_record(info, 1), folder);
  const auto file = std::filesystem::directory_iterator(folder)->path();
  for (const char* text : {"", "{", "[]", "{\"kind\": 7}", "{\"kind\": \"sim\"}"}) {
    std::ofstream(file) << text;
    EXPECT_FALSE(load_device_record(info, folder).has_value()) << text;
  }
}

TEST_F(DeviceRecords, CantBeWrittenWhereAFileStands) {
  std::ofstream(folder) << "in the way";
  EXPECT_THROW(save_device_record(make_device_record(device_info(sim), 1), folder / "x"), IoError);
  EXPECT_THROW(save_device_record(make_device_record(device_info(sim), 1), {}), IoError);
}

TEST_F(DeviceRecords, AreOnlyAskedForByPluginsThatSaySo) {
  EXPECT_FALSE(needs_check(sim));
  EXPECT_FALSE(needs_check(Device{}));
  EXPECT_EQ(kind_of(Device("sim:1")), "sim");
}

}  // namespace
}  // namespace halfstep::conformance
