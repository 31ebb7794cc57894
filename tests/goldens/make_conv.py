# SPDX-License-Identifier: Apache-2.0
"""conv.json: convolutions of one and two dimensions and their transposed forms in float64, with all gradients."""
import torch.nn.functional as F
from golden_format import GoldenFile
from make_ops import Ops


def add(o, op, shape, weight, bias=0, **options):
    function = getattr(F, op)
    inputs = [o.values(*shape), o.values(*weight)] + ([o.values(bias)] if bias else [])

    def call(x, w, b=None):
        return function(x, w, b, **options)
    o.add(op, call, inputs, **options)


def make():
    file = GoldenFile("conv.json")
    o = Ops(file, 20276)
    add(o, "conv2d", (2, 3, 6, 5), (4, 3, 3, 2), 4)
    add(o, "conv2d", (2, 3, 7, 6), (2, 3, 3, 3), stride=[2, 1], padding=[1, 2])
    add(o, "conv2d", (1, 4, 7, 8), (6, 2, 3, 2), 6, dilation=[2, 3], groups=2, padding=[2, 1])
    add(o, "conv2d", (2, 3, 6, 6), (6, 1, 3, 3), 6, stride=[2, 2], padding=[1, 1], groups=3)
    add(o, "conv2d", (2, 4, 5, 5), (3, 4, 1, 1), stride=[2, 2])
    add(o, "conv2d", (3, 5, 4), (2, 3, 2, 2), 2)
    add(o, "conv1d", (2, 3, 9), (4, 3, 3), 4, stride=[2], padding=[1])
    add(o, "conv1d", (4, 8), (4, 2, 3), groups=2, dilation=[2])
    add(o, "conv_transpose2d", (2, 3, 3, 4), (3, 2, 3, 2), 2)
    add(o, "conv_transpose2d", (1, 4, 3, 3), (4, 3, 3, 3), 6, stride=[2, 3], padding=[1, 0], output_padding=[1, 2], groups=2)
    add(o, "conv_transpose2d", (1, 2, 3, 3), (2, 2, 2, 3), dilation=[3, 2], output_padding=[2, 1])
    add(o, "conv_transpose2d", (3, 3, 2), (3, 2, 2, 2), 2, stride=[2, 2])
    add(o, "conv_transpose1d", (2, 3, 4), (3, 2, 3), 2, stride=[2], output_padding=[1], padding=[1])
    add(o, "conv_transpose1d", (3, 4), (3, 2, 3), dilation=[2])
    file.write()
