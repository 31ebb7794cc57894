#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what building Halfstep needs and this machine lacks.
#   scripts/setup.sh [build|docs|lint|tidy|fuzz|peers...]   Debian packages (default: build); quick when all are there
#   scripts/setup.sh onednn PREFIX                     oneDNN from PyPI into PREFIX, when it isn't there
# As root, or with a sudo that asks for no password, it installs; otherwise it prints the command to run and exits with 1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf '%s\n' "$*" >&2; }

# One group of packages a purpose.
packages_of() {
  case $1 in
    build) echo g++ cmake ninja-build zlib1g-dev libfmt-dev libhwy-dev nlohmann-json3-dev libcli11-dev libgtest-dev \
                librapidcheck-dev libbenchmark-dev libjpeg62-turbo-dev libpng-dev libcairo2-dev libarchive-dev libprotobuf-dev \
                protobuf-compiler libpugixml-dev libyaml-cpp-dev libcurl4-openssl-dev libssl-dev pkg-config \
                libopenmpi-dev openmpi-bin libmpich-dev mpich libasio-dev ;;
    docs) echo doxygen ;;
    lint) echo clang-format ;;
    tidy) echo clang-tidy-19 libomp-19-dev ;;
    fuzz) echo clang-19 libclang-rt-19-dev llvm-19 ;;
    peers) echo python3-venv ;;
    *) say "setup.sh: unknown group '$1': build, docs, lint, tidy, fuzz, peers or 'onednn PREFIX'"; exit 2 ;;
  esac
}

# The names of those of the packages given that are not installed.
missing_of() {
  local installed package
  installed=" $(dpkg-query -W -f='${db:Status-Abbrev}${Package} ' "$@" 2>/dev/null | tr '\n' ' ') " || true
  for package in "$@"; do
    [[ $installed == *" ii $package "* || $installed == *"ii  $package "* ]] || printf '%s ' "$package"
  done
}

apt() {
  if [ "$(id -u)" = 0 ]; then
    env DEBIAN_FRONTEND=noninteractive apt-get "$@"
  else
    sudo -n env DEBIAN_FRONTEND=noninteractive apt-get "$@"
  fi
}

# Installs the packages given; without the right to do so prints the command.
install_packages() {
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    say "These packages are missing, and installing them needs root. Run:"
    say ""
    say "    sudo apt-get install --no-install-recommends -y $*"
    say ""
    exit 1
  fi
  say "Installing: $*"
  # An old or empty package list is the usual reason for a failure: fetch it only then.
  apt install --no-install-recommends -y -qq "$@" >/dev/null 2>&1 && return
  apt update -qq >/dev/null || say "setup.sh: apt-get update failed; trying with the lists that are there"
  apt install --no-install-recommends -y -qq "$@" >/dev/null || {
    say "setup.sh: apt-get could not install: $*"
    exit 1
  }
}

# Sets `pip` to a pip that can download: of the Python on the path, or of the system's.
find_pip() {
  local python
  for python in python3 /usr/bin/python3; do
    if "$python" -m pip --version >/dev/null 2>&1; then
      pip=("$python" -m pip)
      return
    fi
  done
  return 1
}

have_onednn() { [ -e "$1/lib/libdnnl.so.3" ] && [ -e "$1/include/dnnl.hpp" ]; }

setup_packages() {
  local group missing wanted=()
  for group in "$@"; do
    # shellcheck disable=SC2046  # package names hold no spaces
    wanted+=($(packages_of "$group"))
  done
  if ! command -v dpkg-query >/dev/null; then
    say "setup.sh: this isn't Debian; make sure that you have what these packages hold: ${wanted[*]}"
    return
  fi
  # pip is only needed to download oneDNN, and any Python's will do.
  if [[ " $* " == *" build "* ]] && ! have_onednn "${HALFSTEP_DEPS:-$here/../build/_deps}/onednn" && ! find_pip; then
    wanted+=(python3-pip)
  fi
  missing=$(missing_of "${wanted[@]}")
  # shellcheck disable=SC2086
  [ -z "$missing" ] || install_packages $missing
}

# The wheels hold the library three times over and split the tree in two: one prefix with one library is left.
setup_onednn() {
  local prefix=$1 work wheel file
  have_onednn "$prefix" && return
  mkdir -p "$(dirname "$prefix")"
  exec 8>"$prefix.lock"  # two builds may configure at once
  command -v flock >/dev/null && flock 8
  have_onednn "$prefix" && return
  if ! find_pip; then
    command -v dpkg-query >/dev/null || { say "setup.sh: oneDNN is downloaded with pip, and no python3 here has it"; exit 1; }
    install_packages python3-pip
    find_pip
  fi
  say "Downloading oneDNN 3.2 (39 MB) into $prefix"
  work=$(mktemp -d "$prefix.XXXXXX")
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  "${pip[@]}" download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    --dest "$work" --requirement "$here/onednn.txt" >&2 || {
    say "setup.sh: pip could not download the wheels named in scripts/onednn.txt"
    exit 1
  }
  mkdir "$work/prefix"
  for wheel in "$work"/*.whl; do
    "${pip[0]}" -m zipfile -e "$wheel" "$work/wheel"
    cp -r "$work"/wheel/*.data/data/. "$work/prefix/"
    rm -rf "$work/wheel"
  done
  for file in libdnnl.so libdnnl.so.3; do
    ln -sf libdnnl.so.3.2 "$work/prefix/lib/$file"
  done
  rm -rf "$prefix"
  mv "$work/prefix" "$prefix"
}

case ${1:-build} in
  onednn)
    [ $# = 2 ] || { say "usage: scripts/setup.sh onednn PREFIX"; exit 2; }
    setup_onednn "$2"
    ;;
  *) setup_packages "${@:-build}" ;;
esac
