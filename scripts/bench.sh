#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/bench.sh BUILD_DIR    every benchmark: the Google Benchmark programs, then whole training steps
set -euo pipefail
build=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for program in "$build"/benchmarks/*; do
  [ -f "$program" ] && [ -x "$program" ] || continue
  echo "== $(basename "$program")"
  "$program"
done
if [ -f benchmarks/run.py ]; then
  python3 benchmarks/run.py --program "$build/bin/halfstep"
fi
