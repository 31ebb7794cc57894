#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Decides whether the plug-in for NVIDIA GPUs is built, and for which of them.
#   scripts/cuda_options.sh MODE ARCHITECTURES QUICK FILE
# MODE: auto (where an NVIDIA driver and nvcc are found), 1 (in any case) or 0 (not at all). ARCHITECTURES: empty (the
# GPUs of this machine; without one all), all, or compute capabilities such as "80 90". QUICK: 1 to compile kernels quickly,
# for code that is slow; else 0. FILE: the answer, an initial cache for cmake -C; written only when the answer is another one
# than before, and said then. Looks at CUDACXX, PATH and
# CUDA_HOME (/usr/local/cuda) for nvcc. HALFSTEP_CUDA_DRIVER=0 or 1: as if there were no driver, or one.
set -euo pipefail
[ $# = 4 ] || { echo "usage: scripts/cuda_options.sh auto|1|0 ARCHITECTURES 0|1 FILE" >&2; exit 2; }
mode=$1 architectures=$2 quick=$3 file=$4

say() { printf 'CUDA plug-in: %s\n' "$*" >&2; }

find_nvcc() {
  if [ -n "${CUDACXX:-}" ]; then
    command -v "$CUDACXX"
  else
    command -v nvcc || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
  fi
}

# The kernel's module, or the driver's library as the loader finds it.
have_driver() {
  case ${HALFSTEP_CUDA_DRIVER:-} in
    0) return 1 ;;
    1) return 0 ;;
  esac
  [ -e /proc/driver/nvidia/version ] && return 0
  nvidia-smi -L >/dev/null 2>&1 && return 0
  { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -q 'libcuda\.so\.1 '
}

# All that there is code for, as in halfstep/backends/cuda/CMakeLists.txt: CUDA knows Blackwell from 12.8 on.
every() {
  local release
  release=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1 \2/p' || true)
  set -- ${release:-99 0}
  if [ $((100 * $1 + $2)) -lt 1208 ]; then printf '80-real;89-real;90-real;90-virtual'
  else printf '80-real;89-real;90-real;100-real;100-virtual'; fi
}

# Capabilities of the GPUs here, such as "90", once each.
here() {
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' .' | grep -E '^[0-9]+$' | sort -u || true
}

# "80 90" to "80-real;90-real"; what has a suffix keeps it.
as_list() {
  local list="" word
  for word in ${1//[,;]/ }; do
    [[ $word =~ ^[0-9]{2,3}[af]?(-real|-virtual)?$ ]] || {
      say "CUDA_ARCHITECTURES: expected 'all' or compute capabilities such as '80 90', got '$1'"
      exit 2
    }
    [[ $word == *-* ]] || word=$word-real
    list+=${list:+;}$word
  done
  printf '%s' "$list"
}

answer=OFF text="" nvcc=""
case $mode in
  0) ;;
  1)
    nvcc=$(find_nvcc) || {
      say "CUDA=1 was asked for, but there is no nvcc in PATH, \$CUDACXX or ${CUDA_HOME:-/usr/local/cuda}/bin."
      say "Install NVIDIA's CUDA toolkit 12.4 or later (https://developer.nvidia.com/cuda-downloads); it needs no GPU."
      exit 1
    }
    answer=ON
    ;;
  auto)
    if ! have_driver; then
      text="left out: no NVIDIA driver was found (make CUDA=1 builds it without one)"
    elif ! nvcc=$(find_nvcc); then
      text="left out: an NVIDIA driver is here, but no nvcc; install CUDA 12.4 or later and run make again"
    else
      answer=ON
    fi
    ;;
  *) say "CUDA: expected auto, 1 or 0, got '$mode'"; exit 2 ;;
esac
if [ $answer = ON ]; then
  case $architectures in
    "") list=$(as_list "$(here)"); list=${list:-$(every)} ;;
    all) list=$(every) ;;
    *) list=$(as_list "$architectures") ;;
  esac
  text="built by $nvcc for $list"
fi

content="# Written by scripts/cuda_options.sh.
set(HALFSTEP_CUDA $answer CACHE BOOL \"\" FORCE)"
if [ $answer = ON ]; then
  content+="
set(HALFSTEP_CUDA_ARCHITECTURES \"$list\" CACHE STRING \"\" FORCE)
set(HALFSTEP_CUDA_QUICK $([ "$quick" = 1 ] && echo ON || echo OFF) CACHE BOOL \"\" FORCE)
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER \"$nvcc\" CACHE FILEPATH \"\")
endif()"
fi
if [ ! -e "$file" ] || [ "$(cat "$file")" != "$content" ]; then
  mkdir -p "$(dirname "$file")"
  printf '%s\n' "$content" >"$file"
  [ -z "$text" ] || say "$text"
fi
