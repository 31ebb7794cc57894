# SPDX-License-Identifier: Apache-2.0
"""pooling.json: pooling, resizing and padding in float64, with corner cases: results, indices and gradients."""
import torch
import torch.nn.functional as F
from golden_format import GoldenFile
from make_ops import Ops


def pooling(o):
    nan, inf = float("nan"), float("inf")

    def maximum(shape, kernel, **options):
        def call(x):
            return F.max_pool2d(x, kernel, return_indices=True, **options)
        o.add("max_pool2d", call, [o.distinct(*shape)], "max_pool2d: values, indices", kernel=kernel, **options)

    maximum((2, 3, 7, 6), [3, 3], stride=[2, 2], padding=[1, 1])
    maximum((1, 2, 7, 8), [2, 3])
    maximum((2, 2, 7, 8), [3, 2], stride=[2, 3], padding=[1, 0], ceil_mode=True)
    maximum((1, 2, 8, 9), [2, 3], stride=[1, 2], padding=[1, 1], dilation=[3, 2])
    maximum((1, 1, 9, 7), [3, 3], stride=[3, 2], padding=[1, 1], dilation=[2, 2], ceil_mode=True)
    maximum((3, 5, 5), [5, 5])
    maximum((1, 6, 6, 5), [1, 1], stride=[2, 2])
    maximum((1, 1, 18, 19), [17, 18], stride=[1, 1])
    tied = torch.tensor([[1.0, 1, 2, 2], [1, 1, 2, -inf], [nan, 0, -inf, -inf], [nan, 3, -inf, -inf]], dtype=torch.float64)
    o.add("max_pool2d", lambda x: F.max_pool2d(x, [2, 2], return_indices=True), [tied.reshape(1, 1, 4, 4)],
          "max_pool2d: values, indices", kernel=[2, 2])
    o.add("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1, 2, True), [o.distinct(2, 3, 9)], kernel=[3], stride=[2],
          padding=[1], dilation=[2], ceil_mode=True)
    o.add("max_pool1d", lambda x: F.max_pool1d(x, 2), [o.distinct(3, 7)], kernel=[2])

    def average(shape, kernel, **options):
        o.add("avg_pool2d", lambda x: F.avg_pool2d(x, kernel, **options), [o.values(*shape)], kernel=kernel, **options)

    average((2, 3, 6, 7), [2, 2])
    average((2, 2, 7, 6), [3, 3], stride=[2, 2], padding=[1, 1])
    average((1, 2, 7, 6), [3, 2], stride=[2, 1], padding=[1, 1], count_include_pad=False)
    average((1, 2, 7, 8), [3, 3], stride=[2, 2], padding=[1, 1], ceil_mode=True)
    average((1, 2, 8, 8), [3, 3], stride=[3, 2], padding=[0, 1], ceil_mode=True, count_include_pad=False)
    average((2, 5, 5), [4, 4], stride=[3, 3], padding=[2, 2], ceil_mode=True)
    average((1, 1, 5, 6), [2, 3], stride=[2, 2], divisor_override=5)
    average((1, 1, 5, 6), [3, 3], padding=[1, 1], divisor_override=-2)
    o.add("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), [o.values(2, 3, 8)], kernel=[3], stride=[2],
          padding=[1], ceil_mode=True, count_include_pad=False)
    o.add("avg_pool1d", lambda x: F.avg_pool1d(x, 4), [o.values(2, 9)], kernel=[4])

    for shape, size in (((2, 3, 7, 5), [1, 1]), ((1, 2, 7, 5), [3, 2]), ((1, 2, 4, 5), [7, 9]), ((2, 7, 10), [4, None]),
                        ((1, 1, 6, 6), [3, 6]), ((1, 1, 18, 17), [1, 1])):
        ours = [-1 if s is None else s for s in size]
        o.add("adaptive_avg_pool2d", lambda x, s=size: F.adaptive_avg_pool2d(x, s), [o.values(*shape)], size=ours)
        o.add("adaptive_max_pool2d", lambda x, s=size: F.adaptive_max_pool2d(x, s, return_indices=True),
              [o.distinct(*shape)], "adaptive_max_pool2d: values, indices", size=ours)
    o.add("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), [o.values(2, 3, 8)], size=[3])


def resampling(o):
    def by_size(shape, size, mode, align=None, channels_last=False):
        x = o.values(*shape)
        if channels_last:
            # PyTorch rounds coordinates in float32 here, and in float64 for row-major float64: the former holds for the
            # dtypes that networks use.
            x = x.contiguous(memory_format=torch.channels_last)
        o.add("interpolate", lambda t: F.interpolate(t, size=size, mode=mode, align_corners=align), [x], size=size,
              mode=mode, align_corners=align)

    for size in ([6, 10], [3, 5], [7, 3], [2, 13], [1, 1]):
        for mode in ("nearest", "nearest-exact"):
            by_size((1, 2, 3, 5), size, mode, channels_last=True)
        for align in (False, True):
            by_size((1, 1, 3, 5), size, "bilinear", align)
    # Sizes whose quotient float32 and float64 round to different sides of a pixel.
    by_size((1, 2, 29, 2), [47, 3], "nearest", channels_last=True)
    by_size((1, 2, 2, 15), [3, 41], "nearest-exact", channels_last=True)
    by_size((1, 2, 1, 1), [3, 4], "bilinear", True)
    by_size((1, 1, 4, 4), [4, 4], "bilinear", False)
    for factor in ([2.0, 2.0], [1.3, 0.7], [2.7, 1.1]):
        for recompute in (False, True):
            for mode, align in (("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True)):
                x = o.values(1, 2, 5, 4).contiguous(memory_format=torch.channels_last)
                o.add("interpolate", lambda t, f=factor, r=recompute, m=mode, a=align: F.interpolate(
                    t, scale_factor=tuple(f), mode=m, align_corners=a, recompute_scale_factor=r), [x], scale_factor=factor,
                    mode=mode, align_corners=align, recompute=recompute)


def padding(o):
    def add(shape, pads, mode="constant", value=0.0):
        extra = {"value": value} if mode == "constant" else {}
        o.add("pad", lambda x: F.pad(x, pads, mode=mode, **extra), [o.values(*shape)], pads=pads, mode=mode, **extra)

    add((2, 3, 4), [1, 2])
    add((2, 2, 3, 4), [1, 2, 0, 3], value=-1.5)
    add((2, 3, 4), [1, -2, -1, 2, 1, 0], value=2.0)
    add((3, 4), [-1, -1, -1, -2])
    add((2, 2, 2, 2), [0, 1, 1, 0, 2, 0, 0, 2])
    for mode in ("reflect", "replicate", "circular"):
        add((2, 3, 5), [2, 3], mode)
        add((2, 5), [1, 4], mode)
        add((1, 2, 4, 5), [1, 3, 2, 0], mode)
        add((1, 4, 5), [3, 4, 1, 2], mode)
        add((1, 1, 3, 4, 3), [1, 0, 2, 3, 1, 2], mode)
        add((1, 2, 4, 5), [-1, 2, 1, -2], mode)
        add((2, 2, 4), [2, -2], mode)
    add((1, 2, 3), [7, 5], "replicate")


def make():
    file = GoldenFile("pooling.json")
    o = Ops(file, 20275)
    for part in (pooling, resampling, padding):
        part(o)
    file.write()
