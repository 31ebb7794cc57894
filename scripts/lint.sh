#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The checks of the sources that need no build. With --fix it rewrites the format instead of checking it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t sources < <(find halfstep cli examples tests benchmarks fuzz -name '*.h' -o -name '*.c' -o -name '*.cpp' \
  -o -name '*.cu' -o -name '*.cuh' | sort)
if [ "${1:-}" = --fix ]; then
  clang-format -i "${sources[@]}"
  exit
fi
status=0
unformatted=()
python3 scripts/check_layers.py || status=1
python3 scripts/check_links.py || status=1
python3 scripts/api_index.py || status=1
python3 scripts/check_figures.py || status=1
for source in "${sources[@]}"; do
  clang-format --dry-run -Werror "$source" 2>/dev/null || unformatted+=("$source")
done
if [ ${#unformatted[@]} != 0 ]; then
  printf '%s: the format differs from .clang-format\n' "${unformatted[@]}"
  echo "lint: \`make format\` rewrites these files ($(clang-format --version))" >&2
  status=1
fi
[ $status != 0 ] || echo "lint: ${#sources[@]} files are in order"
exit $status
