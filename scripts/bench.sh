#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/bench.sh BUILD_DIR [OPTION...]    the table beside PyTorch and JAX; the options are those of benchmarks/run.py
#        scripts/bench.sh --kernels BUILD_DIR      the Google Benchmark programs, kernel by kernel
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$1" != --kernels ]; then
  build=$1
  shift
  exec python3 benchmarks/run.py --server "$build/bin/bench_server" "$@"
fi
for program in "$2"/benchmarks/*_bench; do
  [ -x "$program" ] || { echo "bench: no programs in $2/benchmarks: was Google Benchmark there when it was configured?" >&2; exit 1; }
  echo "== $(basename "$program")"
  "$program"
done
