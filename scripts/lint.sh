#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The checks of the sources that need no build. With --fix it rewrites the format instead of checking it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t sources < <(find halfstep cli examples tests benchmarks fuzz -name '*.h' -o -name '*.cpp' | sort)
if [ "${1:-}" = --fix ]; then
  clang-format -i "${sources[@]}"
  exit
fi
status=0
python3 scripts/check_layers.py || status=1
clang-format --dry-run -Werror "${sources[@]}" || {
  echo "lint: the format differs from .clang-format ($(clang-format --version)); run: make format" >&2
  status=1
}
[ $status != 0 ] || echo "lint: ${#sources[@]} files are in order"
exit $status
