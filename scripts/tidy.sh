#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/tidy.sh BUILD_DIR              clang-tidy on the library and the program, several files at a time
#        scripts/tidy.sh BUILD_DIR --changed    on the files changed since the branch left main; on main itself, since
#                                               ten commits ago. After TIDY_SECONDS (600) no further file is begun, and
#                                               how many were left is said.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
# CPU kernels are compiled once for every instruction set by including themselves, which clang-tidy can't follow.
mapfile -t files < <(find halfstep cli -name '*.cpp' -not -path '*/backends/*' | sort)
if [ "${2:-}" = --changed ]; then
  head=$(git rev-parse HEAD)
  base=$(git merge-base HEAD main 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null || echo "$head")
  if [ "$base" = "$head" ]; then  # this is main, or a checkout of one commit without its history
    base=$(git rev-list --first-parent --max-count=11 HEAD | tail -n 1)
  fi
  # A header is checked with the source beside it.
  mapfile -t changed < <({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } |
    sed -n 's/\.h$/.cpp/; /\.cpp$/p' | sort -u)
  mapfile -t files < <(comm -12 <(printf '%s\n' "${files[@]}") <(printf '%s\n' "${changed[@]}"))
fi
if [ ${#files[@]} = 0 ]; then
  echo "tidy: no file to look at has changed"
  exit
fi
left=$(mktemp)
trap 'rm -f "$left"' EXIT
deadline=0
[ "${2:-}" = --changed ] && deadline=$(($(date +%s) + ${TIDY_SECONDS:-600}))
# shellcheck disable=SC2016  # expanded by the shell of each file
printf '%s\0' "${files[@]}" | xargs -0 -n 2 -P "$(nproc)" sh -c '
  deadline=$1 left=$2 build=$3
  shift 3
  if [ "$deadline" != 0 ] && [ "$(date +%s)" -ge "$deadline" ]; then
    printf "%s\n" "$@" >>"$left"
    exit
  fi
  exec clang-tidy-19 -p "$build" --quiet --warnings-as-errors="*" "$@"' tidy "$deadline" "$left" "$build"
unseen=$(wc -l <"$left")
if [ "$unseen" != 0 ]; then
  echo "tidy: no findings in $((${#files[@]} - unseen)) files; out of time for $unseen more (make tidy looks at all)"
else
  echo "tidy: no findings in ${#files[@]} files"
fi
