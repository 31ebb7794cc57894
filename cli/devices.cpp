// SPDX-License-Identifier: Apache-2.0
#include "halfstep/runtime/devices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/chosen_device.h"
#include "cli/devices_check.h"
#include "cli/devices_watch.h"
#include "cli/options.h"
#include "cli/placement.h"
#include "cli/suggest.h"
#include "cli/verbs.h"
#include "halfstep/ops/op.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/plugin_loader.h"

namespace halfstep::cli {
namespace {

struct DevicesOptions {
  std::string device;
  std::vector<std::string> ops;
  bool list_ops = false;
  bool check = false;
  bool watching = false;
  double watch = 1;  // seconds
  bool quick = false;
  PlacementOptions placement = {};
  std::string placement_flag;  // the first that was given but --model
};

constexpr DType kShown[] = {DType::f32, DType::f16, DType::bf16, DType::f64,    DType::i64,
                            DType::i32, DType::i8,  DType::u8,   DType::boolean};

std::string join_names(const std::vector<DType>& dtypes) {
  std::vector<std::string> names;
  for (DType d : dtypes) names.emplace_back(name(d));
  return fmt::format("{}", fmt::join(names, ", "));
}

void print_cpu() {
  const MachineInfo m = machine();
  fmt::print("cpu: {}, {} thread{}, {:.1f} GB of memory\n", m.cpu, m.threads, m.threads == 1 ? "" : "s",
             m.memory_bytes / 1e9);
  fmt::print("  instruction set: {}{}\n", m.isa, m.capped ? " (capped by HALFSTEP_ISA)" : "");
  fmt::print("  f32, f64: native\n");
  fmt::print("  bf16: {}\n",
             m.bf16_units ? "native matrix products" : "stored in 16 bits, computed in float32, rounded once an op");
  fmt::print("  f16:  {}\n",
             m.f16_units ? "native matrix products" : "stored in 16 bits, computed in float32, rounded once an op");
  fmt::print("  f8e4m3, f8e5m2: storage and conversion\n");
}

void print_device(const DeviceInfo& d) {
  if (d.lost) {
    fmt::print("{}: {}, lost\n", d.device.str(), d.name);
    return;
  }
  fmt::print("{}: {}, {:.1f} of {:.1f} GB of memory free\n", d.device.str(), d.name.empty() ? "unnamed" : d.name,
             static_cast<double>(d.memory_free) / 1e9, static_cast<double>(d.memory_total) / 1e9);
  if (!d.vendor.empty() || !d.version.empty()) {
    fmt::print("  plug-in: {}{}{}\n", d.vendor, d.vendor.empty() || d.version.empty() ? "" : ", ",
               d.version.empty() ? "" : "version " + d.version);
  }
  fmt::print("  dtypes: {}; matrix units: {}\n", join_names(d.dtypes),
             d.native_dtypes.empty() ? std::string("none named") : join_names(d.native_dtypes));
  std::vector<std::string> has;
  if (d.pinned) has.emplace_back("pinned memory");
  if (d.graphs) has.emplace_back("graphs");
  if (d.collectives) has.emplace_back("collectives");
  if (d.profile) has.emplace_back("profiling");
  has.push_back(fmt::format("{} priorit{} of queues", d.priorities, d.priorities == 1 ? "y" : "ies"));
  fmt::print("  has: {}\n", fmt::join(has, ", "));
  if (const std::string state = check_state(d); !state.empty()) fmt::print("  {}\n", state);
}

// One op on one device: in which dtypes its kernel is native, and why not in the others.
void print_op(const Op& op, Device device) {
  if (op.composite) {
    fmt::print("{:<30} composed of other ops\n", op.name);
    return;
  }
  if (op.view) {
    fmt::print("{:<30} a view, no kernel\n", op.name);
    return;
  }
  if (std::string_view(op.name) == "to_device") {
    fmt::print("{:<30} a copy, no kernel\n", op.name);
    return;
  }
  std::vector<std::string> native, strided;
  std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
  for (DType d : kShown) {
    // What the CPU can't either is no shortcoming of the device.
    const bool possible = op_support(Device{}, op.name, d).native;
    const OpSupport s = op_support(device, op.name, d);
    if (s.native) {
      native.emplace_back(name(d));
      if (s.strided) strided.emplace_back(name(d));
    } else if (possible) {
      const std::string why = s.reason.empty() ? "no kernel" : s.reason;
      auto it = std::find_if(reasons.begin(), reasons.end(), [&](const auto& r) { return r.first == why; });
      if (it == reasons.end()) it = reasons.insert(reasons.end(), {why, {}});
      it->second.emplace_back(name(d));
    }
  }
  std::string text;
  if (!native.empty()) {
    text = fmt::format("native: {}", fmt::join(native, " "));
    if (!device.is_cpu() && strided.size() != native.size()) {
      text += strided.empty() ? " (contiguous tensors)"
                              : fmt::format(" (contiguous tensors, but any in {})", fmt::join(strided, " "));
    }
  }
  for (const auto& [why, dtypes] : reasons) {
    if (!text.empty()) text += "; ";
    text += fmt::format("on the CPU: {} ({})", fmt::join(dtypes, " "), why);
  }
  fmt::print("{:<30} {}\n", op.name, text.empty() ? "no kernel" : text);
}

int run(const DevicesOptions& o) {
  std::vector<const char*> commands;
  if (o.check) commands.push_back("--check");
  if (o.watching) commands.push_back("--watch");
  if (!o.placement.model.empty()) commands.push_back("--model");
  if (o.list_ops) commands.push_back("--ops");
  if (commands.size() > 1) {
    throw UsageError(fmt::format("{}: {} is given too; each is a command of its own", commands.at(0), commands.at(1)));
  }
  if (!o.placement_flag.empty() && o.placement.model.empty()) {
    throw UsageError(fmt::format("{}: belongs to --model, which is not given", o.placement_flag));
  }
  if (o.quick && !o.check) throw UsageError("--quick: belongs to --check, which is not given");
  if (o.check) {
    if (o.device.empty()) throw UsageError("--check: expected the device to check, as NAME or NAME:INDEX");
    return run_check(o.device, o.quick);
  }
  if (o.watching) return watch_devices(o.device, o.watch);
  if (!o.placement.model.empty()) {
    if (o.device.empty()) throw UsageError("--model: expected the device to train on, as NAME or NAME:INDEX");
    return print_placement(o.device, o.placement);
  }
  std::vector<Device> chosen;
  if (!o.device.empty()) chosen.push_back(chosen_device(o.device, true, -1));
  for (const std::string& n : o.ops) {
    if (find_op(n)) continue;
    std::vector<std::string> names;
    for (const Op* op : all_ops()) names.emplace_back(op->name);
    throw UsageError(fmt::format("--ops: there is no op called '{}'{}", n, did_you_mean(n, names)));
  }
  std::vector<DeviceInfo> all = devices();
  if (chosen.empty() || chosen[0].is_cpu()) {
    print_cpu();
  }
  for (const DeviceInfo& d : all) {
    if (d.device.is_cpu() || (!chosen.empty() && chosen[0] != d.device)) continue;
    print_device(d);
  }
  for (const PluginReport& r : plugin_reports()) {
    if (!r.error.empty()) {
      fmt::print("not used: {}\n", r.error);
    } else if (r.devices == 0) {
      fmt::print("{}: its plug-in {} finds no device here\n", r.kind, r.path);
    }
  }
  if (!o.list_ops) return kDone;
  // Without a device named: the first that isn't the CPU.
  Device device = chosen.empty() ? Device{} : chosen[0];
  for (const DeviceInfo& d : all) {
    if (chosen.empty() && device.is_cpu()) device = d.device;
  }
  fmt::print("ops on {}:\n", device.str());
  for (const Op* op : all_ops()) {
    if (o.ops.empty() || std::find(o.ops.begin(), o.ops.end(), op->name) != o.ops.end()) print_op(*op, device);
  }
  return kDone;
}

}  // namespace

void add_devices(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "devices", "List the devices and what they compute with");
  auto o = std::make_shared<DevicesOptions>();
  verb.add_option("DEVICE", o->device, "Only this device, as NAME or NAME:INDEX").value("");
  verb.add_list("--ops", o->ops, "List the ops too (all, or those named): native, composed or on the CPU, and why")
      .values(0, 1024)
      .value("[NAME...]");
  verb.add_switch(
      "--check", o->check,
      "Compare DEVICE with the CPU: about a minute of ops and training steps; a record is kept if all passes");
  add_flag(verb, {.names = "--watch",
                  .field = &o->watch,
                  .help = "Show memory in use, the queues' share and lost devices every SECONDS (until Ctrl-C)",
                  .value = "[SECONDS=1]",
                  .standard = "1",
                  .given = [o] { o->watching = true; }});
  verb.add_switch("--quick", o->quick, "With --check: small tensors only, in seconds, without a record");
  add_word(verb, "--model", o->placement.model,
           "Take a training step of this network on DEVICE and list where each of its ops runs, and why");
  add_training_flag(verb, "--amp", &o->placement.amp, "With --model: off, bf16, f16, O0, O1, O2, O3 or auto");
  add_training_flag(verb, "--batch-size", &o->placement.batch_size, "With --model: samples of a batch");
  add_training_flag(verb, "--image-size", &o->placement.image_size,
                    "With --model: pixels of a side (default: the network's own, at most 64)");
  verb.run([o, verb, &status] {
    for (const char* flag : {"--amp", "--batch-size", "--image-size"}) {
      if (o->placement_flag.empty() && verb.count(flag) > 0) o->placement_flag = flag;
    }
    o->list_ops = verb.count("--ops") > 0;
    std::erase(o->ops, "");
    status = run(*o);
  });
}

}  // namespace halfstep::cli
