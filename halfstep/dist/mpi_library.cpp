// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/mpi_library_internal.h"
#include "halfstep/dist/process_group.h"

namespace halfstep::dist::detail {
namespace {

std::filesystem::path mpi_module_folder() {
  if (const char* folder = std::getenv("HALFSTEP_MPI_DIR")) return folder;
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&open_mpi_module), &info) || !info.dli_fname) return {};
  std::error_code error;
  const auto library = std::filesystem::canonical(info.dli_fname, error);
  return error ? std::filesystem::path() : library.parent_path() / "halfstep" / "mpi";
}

}  // namespace

const halfstep_mpi_table& open_mpi_module(const std::string& name) {
  const std::filesystem::path path = mpi_module_folder() / ("libhalfstep_mpi_" + name + ".so");
  const char* const package = name == "openmpi" ? "libopenmpi-dev" : "libmpich-dev";
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    fail<DistError>(
        "ProcessGroup::init: this Halfstep was built without {}: there is no {}; install {} and build again, or start "
        "the program with the other MPI's mpirun",
        name, shown_path(path), package);
  }
  // Global: Open MPI's components, which it opens itself, look for its symbols there.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    const char* why = dlerror();
    fail<DistError>("ProcessGroup::init: {} can't be opened: {}", shown_path(path), why ? why : "unknown reason");
  }
  const auto entry = reinterpret_cast<halfstep_mpi_module_fn>(dlsym(library, HALFSTEP_MPI_SYMBOL));
  const halfstep_mpi_table* table = entry ? entry() : nullptr;
  if (!table || table->version != HALFSTEP_MPI_TABLE_VERSION || table->size < sizeof(halfstep_mpi_table)) {
    fail<DistError>("ProcessGroup::init: {} is no MPI module of this version of Halfstep", shown_path(path));
  }
  return *table;
}

void check_mpi(const halfstep_mpi_table& mpi, int code, const std::string& what) {
  if (code == 0) return;
  char text[1024] = "";
  mpi.error(code, text, sizeof(text));
  fail<DistError>("{}: MPI reports an error: {}", what, printable(text));
}

}  // namespace halfstep::dist::detail
