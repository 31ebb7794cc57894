#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/demo.sh PROGRAM    train the digits network in f16, then in float32, and compare
set -euo pipefail
program=$1
epochs=${DEMO_EPOCHS:-3}
out=$(dirname "$program")/../demo
mkdir -p "$out"
out=$(cd "$out" && pwd)
out=${out#"$PWD"/}
rm -rf "$out"/f16 "$out"/float32

echo
echo "== A 784-512-512-10 network learns to read drawn digits, in mixed precision (f16 with a dynamic loss scale)"
echo "   The scale begins too high on purpose: steps whose gradients overflow are skipped, and it comes down by itself."
"$program" train mlp --epochs "$epochs" --amp f16 --loss-scale dynamic:16777216 --out "$out/f16"
echo
echo "== The same network in float32"
"$program" train mlp --epochs "$epochs" --amp off --out "$out/float32"
echo
echo "== Side by side"
"$program" compare "$out/f16" "$out/float32"
echo
echo "== What the f16 network says to digits that it hasn't seen"
"$program" predict mlp --weights "$out/f16"
echo
echo "Try: $program predict mlp --weights $out/f16 --index 100,101,102"
echo "     $program train mlp --help"
