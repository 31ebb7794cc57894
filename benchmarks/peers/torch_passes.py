# SPDX-License-Identifier: Apache-2.0
"""Ops that do little with each element, forward and backward, as benchmarks/server/passes.cpp has them."""
import functools

import torch
import torch.nn.functional as F

ROWS, WIDTH, CHANNELS = 2048, 1024, 64
NAMES = ("layer_norm", "rms_norm", "group_norm", "softmax", "softmax_down", "log_softmax", "gelu", "silu", "logsumexp",
         "amax_down", "bce_with_logits", "transpose", "cumsum", "index_select", "index_select_last", "gather",
         "masked_select", "flip", "cumsum_down", "topk", "max", "logsumexp_down", "smooth_l1", "cross_entropy_rows",
         "sin", "pow", "max_pool2d", "avg_pool2d", "max_pool2d_rows", "avg_pool2d_rows", "mean_rows", "bilinear_rows")
LAST = ("group_norm", "max_pool2d", "avg_pool2d")  # images with the channels last; _rows: row by row


def _ops(dtype):
    weight, bias = torch.ones(WIDTH, dtype=dtype), torch.zeros(WIDTH, dtype=dtype)
    target, rows = torch.rand(ROWS, WIDTH).to(dtype), torch.randint(0, ROWS, (ROWS,))
    columns, index = torch.randint(0, WIDTH, (WIDTH,)), torch.randint(0, WIDTH, (ROWS, WIDTH))
    mask, classes = torch.rand(ROWS, WIDTH) > 0.5, torch.randint(0, CHANNELS, (16, 56, 56))
    return {
        "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), weight, bias),
        "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), weight),
        "group_norm": lambda x: F.group_norm(x, 32),
        "softmax": lambda x: torch.softmax(x, 1),
        "softmax_down": lambda x: torch.softmax(x, 0),
        "log_softmax": lambda x: torch.log_softmax(x, 1),
        "gelu": F.gelu,
        "silu": F.silu,
        "logsumexp": lambda x: torch.logsumexp(x, 1),
        "amax_down": lambda x: torch.amax(x, 0),
        "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, target),
        "transpose": lambda x: x.t().contiguous(),
        "cumsum": lambda x: torch.cumsum(x, 1),
        "index_select": lambda x: torch.index_select(x, 0, rows),
        "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "index_select_last": lambda x: torch.index_select(x, 1, columns),
        "gather": lambda x: torch.gather(x, 1, index),
        "masked_select": lambda x: torch.masked_select(x, mask),
        "flip": lambda x: torch.flip(x, (1,)),
        "cumsum_down": lambda x: torch.cumsum(x, 0),
        "topk": lambda x: torch.topk(x, 10, 1).values,
        "max": lambda x: torch.max(x, 1).values,
        "logsumexp_down": lambda x: torch.logsumexp(x, 0),
        "smooth_l1": lambda x: F.smooth_l1_loss(x, target),
        "cross_entropy_rows": lambda x: F.cross_entropy(x, classes),
        "sin": torch.sin,
        "pow": lambda x: torch.pow(torch.abs(x), 1.7),
        "max_pool2d_rows": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool2d_rows": lambda x: F.avg_pool2d(x, 2),
        "mean_rows": lambda x: F.adaptive_avg_pool2d(x, 1),
        "bilinear_rows": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    }


def _prepare(name, dtype):
    torch.manual_seed(1)
    image = name in LAST or name.endswith("_rows")
    x = torch.randn(16, CHANNELS, 56, 56) if image else torch.randn(ROWS, WIDTH)
    x = x.to(dtype)
    if name in LAST:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    op = _ops(dtype)[name]
    gradient = torch.ones_like(op(x))
    return lambda: torch.autograd.grad(op(x), x, gradient)


def cases(dtypes):
    return {f"pass/{name}/{label}": functools.partial(_prepare, name, dtypes[label])
            for name in NAMES for label in ("f32", "bf16")}
