// SPDX-License-Identifier: Apache-2.0
// usage: bench_server [--threads N] [--device NAME [--small] | --ranks | --write-onnx FOLDER]
// benchmarks/run.py starts it, and on a device benchmarks/gpu.py; the protocol is that of peers/bench_server.py.
#include "benchmarks/server/server.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::bench {
namespace {

using Json = nlohmann::ordered_json;

double seconds_of(const Prepared& prepared, int times) {
  if (prepared.begin) prepared.begin();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) prepared.run();
  if (prepared.finish) prepared.finish();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return prepared.elapsed ? prepared.elapsed(seconds) : seconds;
}

struct Ready {
  Prepared prepared;
  int times;            // of run() in a repetition
  double before_bytes;  // that this program had before it
};

// Bytes of memory that this program has now; 0 where the system doesn't say.
double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double whole = 0, resident = 0;
  file >> whole >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// Sets the case up, warms it up, and finds how often it runs in a repetition of at least `min_ms`.
Ready make_ready(const Case& c, double min_ms) {
  const double before_bytes = resident_bytes();
  Ready ready{c.prepare(), 1, before_bytes};
  double elapsed = 0, total = 0;
  for (int i = 0; i < 5 && (i < 2 || total < 0.5); ++i) {
    elapsed = seconds_of(ready.prepared, 1);
    total += elapsed;
  }
  while (elapsed * 1e3 < min_ms && ready.times < 1'000'000) {
    const double wanted = ready.times * 1.2 * min_ms / std::max(elapsed * 1e3, 1e-3);
    ready.times = std::max(ready.times + 1, static_cast<int>(std::min(wanted, ready.times * 10.0)));
    elapsed = seconds_of(ready.prepared, ready.times);
  }
  return ready;
}

Json measure(const Case& c, const Ready& ready, int repetitions) {
  std::vector<double> ms;
  const std::int64_t calls = std::int64_t{ready.times} * ready.prepared.calls;
  for (int i = 0; i < repetitions; ++i)
    ms.push_back(seconds_of(ready.prepared, ready.times) * 1e3 / static_cast<double>(calls));
  std::vector<double> sorted = ms;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t middle = sorted.size() / 2;
  const double median = sorted.size() % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  return {{"case", c.name},      {"calls", calls},           {"times_ms", ms},
          {"median_ms", median}, {"min_ms", sorted.front()}, {"operations", c.operations},
          {"bytes", c.bytes}};
}

// The most memory that this program ever had, before what finding out more may add to it.
Json facts(const Case& c, const Ready& ready) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  Json facts = {{"before_bytes", ready.before_bytes}, {"peak_bytes", static_cast<double>(usage.ru_maxrss) * 1024}};
  if (ready.prepared.facts) {
    for (const auto& [name, value] : ready.prepared.facts()) facts[name] = value;
  }
  return {{"case", c.name}, {"facts", facts}};
}

std::string family(const std::string& name) { return name.substr(0, name.find('/')); }

}  // namespace

void serve(const std::vector<Case>& cases, const ReadLine& read, bool speaks) {
  const auto say = [speaks](const Json& answer) {
    if (speaks) std::cout << answer.dump() << std::endl;
  };
  std::map<std::string, const Case*> by_name;
  Json names = Json::array();
  for (const Case& c : cases) {
    by_name[c.name] = &c;
    names.push_back(c.name);
  }
  const MachineInfo info = machine();
  const Device device = default_device();
  const DeviceInfo where = device_info(device);
  say({{"peer", "halfstep"},
       {"version", HALFSTEP_BENCH_VERSION},
       {"threads", info.threads},
       {"cpu", info.cpu},
       {"isa", info.isa},
       {"bf16_units", info.bf16_units},
       {"f16_units", info.f16_units},
       {"device", device.str()},
       {"hardware", where.name},
       {"driver", where.version},
       {"cases", names}});
  std::map<std::string, Ready> ready;
  for (std::string line; read(line);) {
    std::istringstream words(line);
    std::string name;
    if (!(words >> name)) continue;
    if (name == "quit") return;
    int repetitions = 5;
    double min_ms = 20;
    const bool wants_facts = name == "facts" && words >> name;
    if (words >> repetitions) words >> min_ms;
    try {
      const auto found = by_name.find(name);
      if (found == by_name.end()) throw std::invalid_argument("no such case");
      if (repetitions < 1 || repetitions > 100'000) throw std::invalid_argument("expected 1 to 100000 repetitions");
      if (!ready.contains(name)) {
        // Only one family is kept; of the optimizers, each of some hundred MB, only one, and on an accelerator too.
        std::erase_if(ready, [&](const auto& entry) {
          return family(entry.first) == "optimizer" || family(entry.first) == "gpu" ||
                 family(entry.first) != family(name);
        });
        ready[name] = make_ready(*found->second, min_ms);
      }
      say(wants_facts ? facts(*found->second, ready[name]) : measure(*found->second, ready[name], repetitions));
    } catch (const std::exception& e) {  // the driver goes on with the other cases
      const std::string why = e.what();
      say({{"case", name}, {"error", why.substr(0, why.find('\n'))}});
    }
  }
}

}  // namespace halfstep::bench

int main(int argc, char** argv) {
  try {
    std::vector<halfstep::bench::Case> cases;
    halfstep::Device device;
    bool small = false, ranks = false;
    const halfstep::bench::ReadLine read = [](std::string& line) { return bool(std::getline(std::cin, line)); };
    for (int i = 1; i < argc; ++i) {
      const std::string_view flag = argv[i];
      if (flag == "--threads" && i + 1 < argc) {
        halfstep::set_num_threads(std::atoi(argv[++i]));
      } else if (flag == "--device" && i + 1 < argc) {
        device = halfstep::Device(argv[++i]);
      } else if (flag == "--small") {
        small = true;
      } else if (flag == "--write-onnx" && i + 1 < argc) {
        halfstep::bench::write_onnx_files(argv[++i]);
        return 0;
      } else if (flag == "--ranks") {
        ranks = true;
      } else {
        std::fprintf(stderr, "usage: %s [--threads N] [--device NAME [--small] | --ranks | --write-onnx FOLDER]\n",
                     argv[0]);
        return 2;
      }
    }
    if (ranks) {
      halfstep::bench::serve_ranks();
      return 0;
    }
    if (!device.is_cpu()) {
      halfstep::set_default_device(device);
      halfstep::bench::add_device_cases(cases, device, small);
      halfstep::bench::serve(cases, read);
      return 0;
    }
    halfstep::bench::add_machine_cases(cases);
    halfstep::bench::add_step_cases(cases);
    halfstep::bench::add_op_cases(cases);
    halfstep::bench::add_pass_cases(cases);
    halfstep::bench::add_network_cases(cases);
    halfstep::bench::add_inference_cases(cases);
    halfstep::bench::add_loader_cases(cases);
    halfstep::bench::serve(cases, read);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_server: %s\n", e.what());
    return 1;
  }
  return 0;
}
