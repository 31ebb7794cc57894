#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: scripts/demo.sh PROGRAM    train a small convolutional network in 16 bits, then in float32, and compare
set -euo pipefail
program=$1
epochs=${DEMO_EPOCHS:-2}
samples=${DEMO_SAMPLES:-8000}
out=$(dirname "$program")/../demo
mkdir -p "$out"
out=$(cd "$out" && pwd)
out=${out#"$PWD"/}
# What an earlier version of this script made goes too.
rm -rf "$out"/f16 "$out"/bf16 "$out"/float32 "$out"/comparison.png

# The 16-bit dtype that this processor multiplies natively: bf16, which has float32's range, before f16. If there is none,
# f16, which is widened block by block.
amp=f16
how="stored in 16 bits and computed in float32, block by block: this processor has no 16-bit units"
machine=$("$program" devices cpu)
for dtype in bf16 f16; do
  if grep -Eq "^ *$dtype: +native" <<<"$machine"; then
    amp=$dtype
    how="which this processor multiplies natively"
    break
  fi
done

train() {
  "$program" train cnn --epochs "$epochs" --limit "$samples" --batch-size 96 --lr 0.5 --out "$out/$1" "${@:2}"
}

echo
echo "== Three convolutions learn to read $samples drawn digits, in $amp"
echo "   ($how)"
scale=()
if [ "$amp" = f16 ]; then
  echo "   The loss scale begins too high on purpose: steps that overflow are skipped until it fits."
  scale=(--loss-scale dynamic:16777216)
fi
train "$amp" --amp "$amp" "${scale[@]}"
echo
echo "== The same network in float32"
train float32
echo
echo "== $amp beside float32"
echo
"$program" compare "$out/$amp" "$out/float32" --brief --figure "$out/comparison.png"
echo
echo "Look at  $out/comparison.png        both runs in one figure"
echo "         $out/$amp/predictions.png  its predictions for digits it hasn't seen"
echo "         $out/$amp/curves.svg       its loss, accuracy and rate; results.csv has the numbers"
echo "Try      $program predict --weights $out/$amp --index 100,101,102"
echo "         $program summary cnn --amp $amp"
echo "         $program train --help"
