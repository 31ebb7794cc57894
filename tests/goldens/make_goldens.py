#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/goldens/*.json with PyTorch: expected values that come from outside the code. See README.md.

usage: make_goldens.py [ops] [policy] [scaler] [optim] [layers] [training] [pooling] [conv] [detection] [models] [quantize]
                       [int8] [gpt]
       (default: all)
Run it with the Python of scripts/peer_env.sh, on one thread, so that the files don't depend on the number of cores.
"""
import importlib
import sys

import torch

PARTS = ("ops", "policy", "scaler", "optim", "layers", "training", "pooling", "conv", "detection", "models", "quantize",
         "int8", "gpt")


def main():
    parts = sys.argv[1:] or PARTS
    for part in parts:
        if part not in PARTS:
            sys.exit(f"make_goldens: unknown part {part}; the parts are {' '.join(PARTS)}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for part in parts:
        importlib.import_module(f"make_{part}").make()


if __name__ == "__main__":
    main()
