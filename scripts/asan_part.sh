#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/asan_part.sh BUILD_DIR JOBS    builds and runs one part of the tests under the address sanitizer
# The parts take turns by the day, so that a week's runs cover every test program of tests/DIR; ASAN_PART=N takes the
# N-th (0 to 6). The tests of tests/ranks, which mpirun launches, those of tests/cli/*_test.py, the examples, the code of
# the docs, the fuzz targets' files and the runs on the simulated device are in no part: `make asan` has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
parts=("core runtime" "ops" "autograd amp optim" "nn models debug quant" "data io cli" "train infer conformance" "backends dist")
day=$(($(date +%s) / 86400))
part=${ASAN_PART:-$((day % ${#parts[@]}))}
case $part in [0-6]) ;; *) echo "asan_part.sh: ASAN_PART: expected 0 to 6, got '$part'" >&2; exit 2 ;; esac
read -ra dirs <<<"${parts[$part]}"
echo "address sanitizer, part $part of 0 to $((${#parts[@]} - 1)): ${dirs[*]}"
cmake --build "$1" -j "$2" --target "${dirs[@]/#/test_}"
alternatives=$(IFS='|'; echo "${dirs[*]}")
ctest --test-dir "$1" -j "$2" --no-tests=error -R "^($alternatives)\\." -E '^cli\.[a-z_]+_test\.' \
  -LE 'slow|lint|package|nosan'
