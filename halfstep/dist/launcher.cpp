// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/launcher_internal.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist::detail {
namespace {

using GetVariable = std::function<const char*(const char*)>;

int number_in(const GetVariable& get, const char* variable) {
  const char* text = get(variable);
  if (!text) return -1;
  const std::string_view view = text;
  int value = -1;
  const auto [end, error] = std::from_chars(view.begin(), view.end(), value);
  if (error != std::errc() || end != view.end() || value < 0) {
    fail<DistError>("{}: expected a number that a launcher of MPI sets, got '{}'", variable, printable(view));
  }
  return value;
}

// The first of the variables that is set.
int first_number(const GetVariable& get, std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    if (get(variable)) return number_in(get, variable);
  }
  return -1;
}

Launch find_launcher(const GetVariable& get) {
  Launch l;
  if (get("OMPI_COMM_WORLD_SIZE")) {
    l = {.mpi = "openmpi", .launcher = "mpirun of Open MPI", .size_variable = "OMPI_COMM_WORLD_SIZE"};
    l.rank = number_in(get, "OMPI_COMM_WORLD_RANK");
    l.local_rank = number_in(get, "OMPI_COMM_WORLD_LOCAL_RANK");
    l.local_size = number_in(get, "OMPI_COMM_WORLD_LOCAL_SIZE");
  } else if (get("PMI_SIZE")) {
    l = {.mpi = "mpich", .launcher = "mpirun of MPICH, or srun --mpi=pmi2", .size_variable = "PMI_SIZE"};
    l.rank = number_in(get, "PMI_RANK");
    l.local_rank = first_number(get, {"MPI_LOCALRANKID", "SLURM_LOCALID"});
    l.local_size = number_in(get, "MPI_LOCALNRANKS");
  } else if (get("PMIX_RANK")) {
    // srun --mpi=pmix, or the launcher of a PMIx runtime, which tells its size to MPI only.
    l = {.mpi = "openmpi", .launcher = "srun --mpi=pmix", .size_variable = "SLURM_STEP_NUM_TASKS"};
    if (!get("SLURM_STEP_NUM_TASKS")) l.size_variable = get("SLURM_NTASKS") ? "SLURM_NTASKS" : "";
    l.rank = first_number(get, {"SLURM_PROCID", "PMIX_RANK"});
    l.local_rank = number_in(get, "SLURM_LOCALID");
  } else if (const int tasks = number_in(get, "SLURM_STEP_NUM_TASKS"); tasks > 1) {
    // A batch script has SLURM_NTASKS as well, but only what srun started is in a step of that many tasks.
    fail<DistError>(
        "srun started {} processes that can't find each other: expected it to be called with --mpi=pmix (Open MPI) or "
        "--mpi=pmi2 (MPICH)",
        tasks);
  }
  if (!l.size_variable.empty()) l.size = number_in(get, l.size_variable.c_str());
  return l;
}

}  // namespace

Launch find_launch(const std::function<const char*(const char*)>& get) {
  Launch l = find_launcher(get);
  const char* chosen = get("HALFSTEP_MPI");
  if (chosen && *chosen) {
    const std::string_view name = chosen;
    if (name != "openmpi" && name != "mpich") {
      fail<DistError>("HALFSTEP_MPI: expected openmpi or mpich, got '{}'", printable(name));
    }
    l.mpi = name;
    l.by_user = true;
  }
  return l;
}

Launch find_launch() {
  return find_launch([](const char* variable) -> const char* { return std::getenv(variable); });
}

}  // namespace halfstep::dist::detail
