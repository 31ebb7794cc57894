// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/verbs.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/control.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cli {
namespace {

// What rank 0 prints is the run's output.
void silence() {
  std::fflush(stdout);
  const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere < 0) return;
  ::dup2(nowhere, STDOUT_FILENO);
  ::close(nowhere);
}

void share_processors(const TrainOptions& o, int ranks) {
  const auto given = [](const char* name) {
    const char* value = std::getenv(name);
    return value && *value != '\0';
  };
  if (o.threads > 0 || given("HALFSTEP_THREADS") || given("OMP_NUM_THREADS")) return;
  // A launcher that binds processes to processors has divided them already.
  const int all = num_threads();
  if (all * ranks > static_cast<int>(std::thread::hardware_concurrency())) set_num_threads(std::max(1, all / ranks));
}

void take_device(Device& device, const dist::ProcessGroup& group) {
  if (device.is_cpu() || group.local_size() == 1) return;
  int count = 0;
  for (const DeviceInfo& d : devices()) count += d.device.type == device.type ? 1 : 0;
  if (group.local_size() > count) {
    throw UsageError(
        fmt::format("--device: {} ranks on this machine, which has {} device{} of the kind {}; a device takes one rank",
                    group.local_size(), count, count == 1 ? "" : "s", device.str()));
  }
  if (device.index > 0) {
    throw UsageError(
        fmt::format("--device: {} is one device, and each of {} ranks on this machine takes its own; "
                    "without the number they take the first {}",
                    device.str(), group.local_size(), group.local_size()));
  }
  device.index = static_cast<decltype(device.index)>(group.local_rank());
}

}  // namespace

void join_ranks(TrainOptions& o) {
  if (!one_of_several("train")) return;
  training::TrainConfig& c = o.config;
  try {
    if (!dist::ProcessGroup::launched()) {
      refuse_many_processes("train", " that no launcher of MPI started; use mpirun or `halfstep launch`");
    }
    c.group = dist::ProcessGroup::init(
        {.reduction = o.reduce == "rank-order" ? dist::Reduction::rank_order : dist::Reduction::library,
         .watch = true,
         .stop = &g_stop});
  } catch (const dist::DistError& e) {
    refuse_many_processes("train", (std::string(": ") + e.what()).c_str());
  }
  if (c.group.size() == 1) return;
  if (c.group.rank() > 0) {
    g_rank = c.group.rank();
    silence();
    o.quiet = o.no_out = true;
    c.out.clear();
    c.log_json.clear();
    c.tensorboard = c.overwrite = false;
  }
  take_device(c.device, c.group);
  share_processors(o, c.group.local_size());
}

bool prepared_on_all(dist::ProcessGroup& group, const std::function<void()>& prepare) {
  if (group.size() == 1) {
    prepare();
    return true;
  }
  std::exception_ptr own;
  std::string text;
  dist::ProcessGroup::working("its preparation");  // a rank that reads its data more slowly is not lost
  try {
    prepare();
  } catch (const std::exception& e) {
    own = std::current_exception();
    text = e.what();
    if (text.empty()) text = "an error without a text";
  }
  const std::vector<std::string> all = group.all_gather_text(text);
  const auto first = std::find_if(all.begin(), all.end(), [](const std::string& t) { return !t.empty(); });
  if (first == all.end()) return true;
  dist::expect_end();
  const auto failed = static_cast<int>(first - all.begin());
  if (own && failed == group.rank()) std::rethrow_exception(own);
  if (group.rank() == 0) complain(fmt::format("rank {} ({}) can't begin: {}", failed, group.host(failed), *first));
  return false;
}

bool same_on_all(TrainOptions& o) {
  training::TrainConfig& c = o.config;
  nlohmann::json own = nlohmann::json::object();
  for (const Flag& row : training::flags(c)) {
    // Each rank has its own device, and its copy of the data may be at another path.
    const bool own_place = row.key() == "device" || row.key() == "data";
    if (row.resume != training::FlagResume::free && !own_place) own[row.name()] = printable(row.saved());
  }
  for (const auto& [part, checksum] : c.data_checksums) own[part + " data"] = "of checksum " + printable(checksum);
  const std::vector<std::string> all = c.group.all_gather_text(own.dump());
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    dist::expect_end();
    if (c.group.rank() != 0) return false;
    const nlohmann::json other = nlohmann::json::parse(all[r], nullptr, false);
    for (const auto& [name, value] : own.items()) {
      const std::string there = other.is_object() ? other.value(name, "") : "";
      const auto here = value.get<std::string>();
      if (there == here) continue;
      complain(fmt::format("train: rank {} ({}) has {} {}, rank 0 has {}; all ranks do the same run", r,
                           c.group.host(static_cast<int>(r)), name, there.empty() ? "of nothing" : there, here));
      return false;
    }
    complain(fmt::format("train: rank {} ({}) does another run than rank 0", r, c.group.host(static_cast<int>(r))));
    return false;
  }
  return true;
}

}  // namespace halfstep::cli
