// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/plan_parallel.h"
#include "cli/suggest.h"
#include "cli/verbs.h"

namespace halfstep::cli {
namespace {

// Of a data sheet's bandwidth; all_reduce_perf of NVIDIA's nccl-tests mostly reports seven to nine tenths.
constexpr double kReached = 0.8;
// Before a collective's first message: NCCL's base latency of rings (src/graph/tuning.cc).
constexpr double kStart = 8.4e-6;

// Latencies are those of a ring's step by which NCCL chooses its algorithm (src/graph/tuning.cc: NVLink 3.4 us, PCI
// 5.7 us, network 9.6 us). Links in one direction: V100 6 of 25 GB/s, A100 12 of 25, H100 18 of 25, P100 4 of 20
// (NVIDIA's architecture papers), PCI Express 3 x16 15.75. Networks: DGX-1 4 cards of 100 Gbit/s, DGX A100 8 of 200,
// DGX H100 8 of 400 (data sheets).
constexpr const char* kExamples = "NVIDIA/DeepLearningExamples, PyTorch ResNet50 v1.5, container 21.03";
constexpr const char* kTensorFlow = "TensorFlow's benchmarks of 2017, ResNet-50, batch 64, DGX-1 with P100";
constexpr PlanSystem kSystems[] = {
    {"dgx-a100", "8 A100 with NVLink, 8 x 200 Gbit/s", 8, 300, 200, 3.4, 9.6, 938, 2470, kExamples},
    {"dgx1-v100", "8 V100 with NVLink, 4 x 100 Gbit/s", 8, 150, 50, 3.4, 9.6, 367, 1200, kExamples},
    {"v100-100g", "8 V100 with NVLink, 100 Gbit/s, as AWS p3dn.24xlarge", 8, 150, 12.5, 3.4, 9.6, 367, 1200, kExamples},
    {"v100-25g", "8 V100 with NVLink, 25 Gbit/s", 8, 150, 3.125, 3.4, 9.6, 367, 1200, kExamples},
    {"v100-10g", "8 V100 with NVLink, 10 Gbit/s", 8, 150, 1.25, 3.4, 9.6, 367, 1200, kExamples},
    {"p100-50g", "8 P100 with NVLink, 50 Gbit/s, as Facebook's Big Basin", 8, 80, 6.25, 3.4, 9.6, 219, 0, kTensorFlow},
    {"p100-25g", "4 P100 on PCI Express, 25 Gbit/s, as Horovod's", 4, 15.75, 3.125, 5.7, 9.6, 219, 0, kTensorFlow},
    {"dgx-h100", "8 H100 with NVLink, 8 x 400 Gbit/s; the speed is to be given", 8, 450, 400, 3.4, 9.6, 0, 0, ""},
};

}  // namespace

std::span<const PlanSystem> plan_systems() { return kSystems; }

const PlanSystem& plan_system(const std::string& name) {
  std::vector<std::string> names;
  for (const PlanSystem& s : kSystems) {
    if (name == s.name) return s;
    names.emplace_back(s.name);
  }
  throw UsageError(
      fmt::format("--system: expected one of {}, got '{}'{}", fmt::join(names, ", "), name, did_you_mean(name, names)));
}

dist::ClusterCost cluster_of(const PlanSystem& s) {
  return {.ranks_per_machine = s.ranks_per_machine,
          .inside = {.latency = s.inside_us * 1e-6, .bandwidth = s.inside_gbs * 1e9 * kReached},
          .between = {.latency = s.between_us * 1e-6, .bandwidth = s.between_gbs * 1e9 * kReached},
          .start = kStart};
}

}  // namespace halfstep::cli
