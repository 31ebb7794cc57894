#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/tidy.sh BUILD_DIR    clang-tidy on the library and the program, several files at a time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# CPU kernels are compiled once for every instruction set by including themselves, which clang-tidy can't follow.
find halfstep cli -name '*.cpp' -not -path '*/backends/*' -print0 |
  xargs -0 -n 4 -P "$(nproc)" clang-tidy-19 -p "$1" --quiet --warnings-as-errors='*'
echo "tidy: no findings"
