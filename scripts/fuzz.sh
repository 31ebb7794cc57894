#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/fuzz.sh FOLDER_OF_FUZZERS SECONDS    runs each fuzz target for that long, starting from its corpus
# New inputs are kept beside the programs, never in the repository; a crash leaves its input there and fails.
set -euo pipefail
programs=$1
seconds=$2
symbolizer=$(command -v llvm-symbolizer-19) && export ASAN_SYMBOLIZER_PATH=$symbolizer
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
status=0
for program in "$programs"/fuzz_*; do
  [ -x "$program" ] && [ -f "$program" ] || continue
  name=$(basename "$program")
  name=${name#fuzz_}
  found="$programs/found/$name"
  mkdir -p "$found"
  echo "fuzz: $name for $seconds s"
  "$program" -max_total_time="$seconds" -timeout=25 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="$found/" "$found" "$root/fuzz/corpus/$name" || {
    echo "fuzz: $name failed; the input is in $found" >&2
    status=1
  }
done
exit $status
