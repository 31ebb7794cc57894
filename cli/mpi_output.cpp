// SPDX-License-Identifier: Apache-2.0
#include "cli/mpi_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "cli/launch_rank.h"

namespace halfstep::cli {
namespace {

// Of /proc: `PID (NAME) STATE PARENT ...`, with any letters in the name.
long parent_of(long pid, std::string& name) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text, '\0');
  const std::size_t begin = text.find('('), end = text.rfind(')');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return 0;
  name = text.substr(begin + 1, end - begin - 1);
  std::istringstream rest(text.substr(end + 1));
  char state = 0;
  long parent = 0;
  return rest >> state >> parent ? parent : 0;
}

// The process of Open MPI that started this one, at whatever distance; 0: none is found.
long process_of_mpi() {
  constexpr int kFarthest = 64;
  std::string name;
  long pid = ::getppid();
  for (int i = 0; i < kFarthest && pid > 0; ++i) {
    const long parent = parent_of(pid, name);
    for (const char* known : {"mpirun", "mpiexec", "orterun", "orted", "prte"}) {
      if (name.starts_with(known)) return pid;
    }
    pid = parent;
  }
  return 0;
}

bool writes_to_terminal(long pid) {
  const std::string file = fmt::format("/proc/{}/fd/1", pid);
  struct stat info {};
  // To open a pipe would make it one that somebody reads.
  if (::stat(file.c_str(), &info) != 0 || !S_ISCHR(info.st_mode)) return false;
  const int opened = ::open(file.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (opened < 0) return false;
  const bool terminal = ::isatty(opened) == 1;
  ::close(opened);
  return terminal;
}

}  // namespace

bool mpi_shows_output() {
  if (!std::getenv("OMPI_COMM_WORLD_RANK") || std::getenv(kOutputVariable)) return true;
  const long mpi = process_of_mpi();
  return mpi > 0 && writes_to_terminal(mpi);
}

}  // namespace halfstep::cli
