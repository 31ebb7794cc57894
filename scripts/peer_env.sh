#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prepares the Python that the benchmark's peers (PyTorch for the CPU, JAX) and the golden maker run in.
#
# usage: scripts/peer_env.sh [FOLDER]        (default FOLDER: build/peer-venv)
#
# Prints the path of a Python that can import torch on standard output, everything else on standard error.
#   HALFSTEP_PEER_PYTHON  a Python that has torch (and jax, if it is to be measured): used as it is, nothing is installed
# Exit status: 0 ready; 3 can't be had here (the reason is said), for callers that go on without peers.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
top=$(dirname "$here")
folder=${1:-$top/build/peer-venv}
requirements=$top/benchmarks/peers/requirements.txt
say() { echo "peer_env: $*" >&2; }
skip() { say "$*; the peers are skipped"; exit 3; }
works() { OMP_NUM_THREADS=1 "$1" -c 'import torch; torch.ones(2).sum().item()' >/dev/null 2>&1; }

if [ -n "${HALFSTEP_PEER_PYTHON:-}" ]; then
  works "$HALFSTEP_PEER_PYTHON" || skip "HALFSTEP_PEER_PYTHON=$HALFSTEP_PEER_PYTHON can't import torch"
  echo "$HALFSTEP_PEER_PYTHON"
  exit 0
fi
python=$folder/bin/python
stamp=$folder/.halfstep-peers
if [ -f "$stamp" ] && cmp -s "$stamp" "$requirements" && works "$python"; then
  echo "$python"
  exit 0
fi

[ "$(uname -sm)" = "Linux x86_64" ] || skip "the pinned wheels are for x86-64 Linux, this is $(uname -sm)"
base=""
for candidate in python3 python3.13 python3.12 python3.11; do
  if command -v "$candidate" >/dev/null &&
     "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    base=$candidate
    break
  fi
done
[ -n "$base" ] || skip "needs Python 3.11, 3.12 or 3.13"
for tool in cc nm readelf; do command -v $tool >/dev/null || skip "needs $tool (Debian: apt-get install gcc binutils)"; done
megabytes=$(awk '{ sub(/.*#/, "") } /^ *[0-9.]+$/ { sum += $1 } END { printf "%.0f", sum }' "$requirements")
mkdir -p "$(dirname "$folder")"
free_mb=$(df -Pm "$(dirname "$folder")" | awk 'NR == 2 { print $4 }')
[ "$free_mb" -gt 4000 ] || skip "needs 4000 MB of disk, $free_mb MB are free"
say "installing PyTorch (CPU use) and JAX into $folder: about $megabytes MB to download, 1900 MB of disk"
rm -rf "$folder"
"$base" -m venv "$folder" >&2 || skip "$base -m venv failed (Debian: apt-get install python3-venv)"
log=$folder/pip.log
"$python" -m pip install --quiet --retries 2 --disable-pip-version-check --no-deps -r "$requirements" >"$log" 2>&1 ||
  skip "pip could not install the peers ($(grep -m1 ERROR "$log" || tail -n1 "$log"); all of it in $log)"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" "$here/torch_cpu_shims.py" "$site" || skip "PyTorch's GPU libraries could not be replaced"
works "$python" || { "$python" -c 'import torch' >&2 || true; skip "torch was installed but can't be imported"; }
"$python" -c 'import jax' 2>/dev/null || say "jax was installed but can't be imported; only PyTorch is measured"
cp "$requirements" "$stamp"
echo "$python"
