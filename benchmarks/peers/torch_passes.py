# SPDX-License-Identifier: Apache-2.0
"""Ops that do little with each element, forward and backward, as benchmarks/server/passes.cpp has them."""
import functools
import types

import torch
import torch.nn.functional as F

ROWS, WIDTH, CHANNELS = 2048, 1024, 64
LAST = ("group_norm", "max_pool2d", "avg_pool2d")  # images with the channels last; _rows: row by row


def _operands(dtype):
    """What an op takes beside its leaf."""
    return types.SimpleNamespace(
        weight=torch.ones(WIDTH, dtype=dtype), bias=torch.zeros(WIDTH, dtype=dtype),
        target=torch.rand(ROWS, WIDTH).to(dtype), rows=torch.randint(0, ROWS, (ROWS,)),
        columns=torch.randint(0, WIDTH, (WIDTH,)), index=torch.randint(0, WIDTH, (ROWS, WIDTH)),
        mask=torch.rand(ROWS, WIDTH) > 0.5, classes=torch.randint(0, CHANNELS, (16, 56, 56)))


# The ops of a leaf x and of _operands() o.
OPS = {
    "layer_norm": lambda x, o: F.layer_norm(x, (WIDTH,), o.weight, o.bias),
    "rms_norm": lambda x, o: F.rms_norm(x, (WIDTH,), o.weight),
    "group_norm": lambda x, o: F.group_norm(x, 32),
    "softmax": lambda x, o: torch.softmax(x, 1),
    "softmax_down": lambda x, o: torch.softmax(x, 0),
    "log_softmax": lambda x, o: torch.log_softmax(x, 1),
    "gelu": lambda x, o: F.gelu(x),
    "silu": lambda x, o: F.silu(x),
    "logsumexp": lambda x, o: torch.logsumexp(x, 1),
    "amax_down": lambda x, o: torch.amax(x, 0),
    "bce_with_logits": lambda x, o: F.binary_cross_entropy_with_logits(x, o.target),
    "transpose": lambda x, o: x.t().contiguous(),
    "cumsum": lambda x, o: torch.cumsum(x, 1),
    "index_select": lambda x, o: torch.index_select(x, 0, o.rows),
    "max_pool2d": lambda x, o: F.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x, o: F.avg_pool2d(x, 2),
    "index_select_last": lambda x, o: torch.index_select(x, 1, o.columns),
    "gather": lambda x, o: torch.gather(x, 1, o.index),
    "masked_select": lambda x, o: torch.masked_select(x, o.mask),
    "flip": lambda x, o: torch.flip(x, (1,)),
    "cumsum_down": lambda x, o: torch.cumsum(x, 0),
    "topk": lambda x, o: torch.topk(x, 10, 1).values,
    "max": lambda x, o: torch.max(x, 1).values,
    "logsumexp_down": lambda x, o: torch.logsumexp(x, 0),
    "smooth_l1": lambda x, o: F.smooth_l1_loss(x, o.target),
    "cross_entropy_rows": lambda x, o: F.cross_entropy(x, o.classes),
    "sin": lambda x, o: torch.sin(x),
    "pow": lambda x, o: torch.pow(torch.abs(x), 1.7),
    "max_pool2d_rows": lambda x, o: F.max_pool2d(x, 3, 2, 1),
    "avg_pool2d_rows": lambda x, o: F.avg_pool2d(x, 2),
    "mean_rows": lambda x, o: F.adaptive_avg_pool2d(x, 1),
    "bilinear_rows": lambda x, o: F.interpolate(x, scale_factor=2, mode="bilinear"),
}


def _prepare(name, dtype):
    torch.manual_seed(1)
    image = name in LAST or name.endswith("_rows")
    x = torch.randn(16, CHANNELS, 56, 56) if image else torch.randn(ROWS, WIDTH)
    x = x.to(dtype)
    if name in LAST:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    op, operands = OPS[name], _operands(dtype)
    gradient = torch.ones_like(op(x, operands))
    return lambda: torch.autograd.grad(op(x, operands), x, gradient)


def cases(dtypes):
    return {f"pass/{name}/{label}": functools.partial(_prepare, name, dtypes[label])
            for name in OPS for label in ("f32", "bf16")}
