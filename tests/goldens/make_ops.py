# SPDX-License-Identifier: Apache-2.0
"""ops_f64.json: forward results and input gradients of every op in float64; promotion.json: result types."""
import itertools
import warnings

import torch
import torch.nn.functional as F
from golden_format import BY_NAME, DTYPES, GoldenFile, values

INF = float("inf")


class Ops:
    def __init__(self, file, seed):
        self.file = file
        self.generator = torch.Generator().manual_seed(seed)
        self.counts = {}

    def values(self, *shape, **options):
        return values(self.generator, *shape, **options)

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator)

    def distinct(self, *shape):
        """Values with no two equal, at least 0.05 apart: for ops whose gradient depends on an order."""
        count = torch.Size(shape).numel()
        order = torch.randperm(count, generator=self.generator)
        return ((order.to(torch.float64) - count / 2) * 0.0625 + 0.03125).reshape(shape)

    def add(self, op, function, inputs, torch_name="", fixed=(), **attributes):
        """Runs function on inputs; those that are floating and not in `fixed` get gradients."""
        leaves = [x.clone().requires_grad_(x.dtype.is_floating_point and i not in fixed) for i, x in enumerate(inputs)]
        results = function(*leaves)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        active = [r for r in results if r.requires_grad]
        cotangents = [self.values(*r.shape) if r.requires_grad else None for r in results]
        wanted = [x for x in leaves if x.requires_grad]
        grads = []
        if active and wanted:
            found = torch.autograd.grad(active, wanted, [c for c in cotangents if c is not None], allow_unused=True)
            by_id = {id(x): g for x, g in zip(wanted, found)}
            grads = [by_id.get(id(x)) for x in leaves]
        else:
            cotangents = []
        self.counts[op] = self.counts.get(op, -1) + 1
        self.file.add(f"{op}/{self.counts[op]}", op, torch_name or op, attributes, inputs, cotangents, results, grads)


def binary_and_unary(o):
    v = o.values
    for op, function in (("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div),
                         ("maximum", torch.maximum), ("minimum", torch.minimum), ("atan2", torch.atan2)):
        o.add(op, function, [v(2, 3), v(2, 3)])
        o.add(op, function, [v(2, 1, 3), v(4, 1)])
        o.add(op, function, [v(3), v()])
    o.add("add", lambda a, b: torch.add(a, b, alpha=2.5), [v(2, 3), v(3)], alpha=2.5)
    o.add("sub", lambda a, b: torch.sub(a, b, alpha=-0.5), [v(2, 3), v(3)], alpha=-0.5)
    o.add("pow", torch.pow, [v(2, 3, low=0.2, high=3), v(3, low=-2, high=2)])
    for exponent in (2.0, 3.0, 0.5, -1.0, 0.0, 1.0, 2.5):
        x = v(5, low=0.2, high=3) if exponent in (0.5, 2.5) else v(5)
        o.add("pow", lambda a, e=exponent: torch.pow(a, e), [x], "pow(tensor, scalar)", exponent=exponent)
    o.add("pow", lambda a: torch.pow(a, 2.0), [torch.tensor([0.0, -1.5, 2.0], dtype=torch.float64)], "pow(tensor, scalar)",
          exponent=2.0)
    for op in ("fmod", "remainder", "floor_divide"):
        function = getattr(torch, op)
        o.add(op, function, [torch.tensor([5.5, -5.5, 5.5, -5.5, 0.0], dtype=torch.float64),
                             torch.tensor([2.0, 2.0, -2.0, -2.0, 3.0], dtype=torch.float64)], fixed=(0, 1))
    for op in ("exp", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh", "sigmoid", "relu", "silu", "abs", "neg",
               "square", "erf", "atan", "softplus", "sign", "floor", "ceil", "round", "trunc", "mish", "hardswish",
               "relu6", "elu", "selu", "logsigmoid", "asinh", "erfc", "exp2", "hardsigmoid", "hardtanh"):
        function = getattr(torch, op, None) or getattr(F, op)
        o.add(op, function, [v(11, low=-4, high=4)])
    for op in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"):
        o.add(op, getattr(torch, op), [v(9, low=0.1, high=5)])
    for op in ("asin", "acos", "erfinv", "atanh"):
        o.add(op, getattr(torch, op), [v(9, low=-0.95, high=0.95)])
    o.add("acosh", torch.acosh, [v(5, low=1.1, high=5)])
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, float("nan"), 1e300, -1e300, 5e-324], dtype=torch.float64)
    for op in ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "relu", "silu", "log1p", "expm1", "abs",
               "sign", "softplus", "sin", "round", "erf"):
        function = getattr(torch, op, None) or getattr(F, op)
        o.add(op, function, [special], fixed=(0,))
    for approximate in ("none", "tanh"):
        o.add("gelu", lambda x, a=approximate: F.gelu(x, approximate=a), [v(13, low=-5, high=5)], approximate=approximate)
    for slope in (0.01, 0.2):
        o.add("leaky_relu", lambda x, s=slope: F.leaky_relu(x, s), [v(7)], negative_slope=slope)
    o.add("prelu", F.prelu, [v(2, 3, 4), v(3)])
    o.add("prelu", F.prelu, [v(2, 5), v(1)])
    o.add("softplus", lambda x: F.softplus(x, beta=2.0, threshold=3.0), [v(9, low=-4, high=4)], beta=2.0, threshold=3.0)
    x = o.distinct(2, 5)
    o.add("clamp", lambda a: torch.clamp(a, -0.2, 0.2), [x], min=-0.2, max=0.2)
    o.add("clamp", lambda a: torch.clamp(a, min=0.1), [x], min=0.1)
    o.add("clamp", lambda a: torch.clamp(a, max=-0.1), [x], max=-0.1)
    mask = o.integers(0, 2, 2, 3).bool()
    o.add("where", torch.where, [mask, v(2, 3), v(3)])
    o.add("where", torch.where, [mask, v(2, 1), v()])
    o.add("masked_fill", lambda a, m: a.masked_fill(m, -2.5), [v(2, 3), mask], value=-2.5)
    o.add("masked_fill", lambda a, m: a.masked_fill(m, 7.0), [v(4, 2, 3), mask], value=7.0)
    o.add("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), [v(2, 3), v(2, 3), v(3)], value=0.5)
    o.add("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=-2.0), [v(2, 3), v(3), v(2, 3, low=0.5, high=2)], value=-2.0)
    o.add("lerp", lambda a, b: torch.lerp(a, b, 0.3), [v(2, 3), v(2, 3)], weight=0.3)
    a, b = o.integers(-2, 3, 2, 4).double(), o.integers(-2, 3, 4).double()
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        o.add(op, getattr(torch, op), [a, b], fixed=(0, 1))
    for op in ("isnan", "isinf", "isfinite"):
        o.add(op, getattr(torch, op), [special], fixed=(0,))


def reductions(o):
    v = o.values
    whole = v(2, 3, 4)
    for op in ("sum", "mean", "logsumexp", "prod", "amax", "amin"):
        function = getattr(torch, op)
        x = o.distinct(2, 3, 4) if op in ("amax", "amin") else whole
        if op != "logsumexp":
            o.add(op, lambda a, f=function: f(a), [x])
        for dim, keepdim in ((0, False), (-1, True), (1, True)):
            o.add(op, lambda a, f=function, d=dim, k=keepdim: f(a, dim=d, keepdim=k), [x], dim=dim, keepdim=keepdim)
        if op != "prod":
            o.add(op, lambda a, f=function: f(a, dim=(0, 2)), [x], dim=[0, 2], keepdim=False)
    tied = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    o.add("amax", lambda a: torch.amax(a, dim=1), [tied], dim=1, keepdim=False)
    o.add("amin", lambda a: torch.amin(a, dim=(0, 1)), [tied], dim=[0, 1], keepdim=False)
    o.add("max", lambda a: torch.max(a), [tied])
    for op in ("max", "min"):
        o.add(op, lambda a, f=getattr(torch, op): f(a, dim=1), [o.distinct(3, 4)], f"{op}(dim): values, indices", dim=1,
              keepdim=False)
    zeros = v(3, 4)
    zeros[0, 1] = zeros[1, 0] = zeros[1, 2] = 0
    o.add("prod", lambda a: torch.prod(a, dim=1), [zeros], dim=1, keepdim=False)
    o.add("prod", torch.prod, [zeros])
    one_zero = v(4)
    one_zero[2] = 0
    o.add("prod", torch.prod, [one_zero])
    o.add("logsumexp", lambda a: torch.logsumexp(a, 1), [torch.tensor([[1000.0, 1000.5], [-1000.0, -999.0]], dtype=torch.float64)],
          dim=1, keepdim=False)
    o.add("logsumexp", lambda a: torch.logsumexp(a, 1), [torch.tensor([[-INF, 0.5], [-INF, -INF]], dtype=torch.float64)],
          fixed=(0,), dim=1, keepdim=False)
    for op in ("var", "std"):
        function = getattr(torch, op)
        o.add(op, lambda a, f=function: f(a), [whole], correction=1)
        for dim, correction in ((1, 1), (2, 0), ((0, 2), 1), (-1, 2)):
            o.add(op, lambda a, f=function, d=dim, c=correction: f(a, dim=d, correction=c), [whole],
                  dim=list(dim) if isinstance(dim, tuple) else dim, correction=correction, keepdim=False)
    for p in (2.0, 1.0, 3.0, INF, -INF, 0.0, 0.5):
        x = o.distinct(3, 4)
        o.add("norm", lambda a, p=p: torch.linalg.vector_norm(a, p), [x], "linalg.vector_norm", p=p)
        o.add("norm", lambda a, p=p: torch.linalg.vector_norm(a, p, dim=1, keepdim=True), [x], "linalg.vector_norm", p=p, dim=1,
              keepdim=True)
    o.add("norm", lambda a: torch.linalg.vector_norm(a, 2.0, dim=1),
          [torch.tensor([[0.0, 0.0], [3.0, -4.0]], dtype=torch.float64)], "linalg.vector_norm", p=2.0, dim=1, keepdim=False)
    for op in ("argmax", "argmin"):
        function = getattr(torch, op)
        o.add(op, function, [o.distinct(3, 4)], fixed=(0,))
        o.add(op, lambda a, f=function: f(a, dim=0), [o.distinct(3, 4)], fixed=(0,), dim=0, keepdim=False)
        o.add(op, lambda a, f=function: f(a, dim=-1, keepdim=True), [o.distinct(3, 4)], fixed=(0,), dim=-1, keepdim=True)
    flags = o.integers(0, 2, 3, 4).bool()
    o.add("any", torch.any, [flags])
    o.add("all", lambda a: torch.all(a, dim=1), [flags], dim=1, keepdim=False)
    o.add("any", lambda a: torch.any(a, dim=1), [flags], dim=1, keepdim=False)
    for op in ("cumsum", "cumprod"):
        for dim in (0, -1):
            o.add(op, lambda a, f=getattr(torch, op), d=dim: f(a, d), [v(3, 4)], dim=dim)
    o.add("cumprod", lambda a: torch.cumprod(a, 1), [zeros], dim=1)
    for op, k, dim, largest in (("topk", 2, -1, True), ("topk", 3, 0, False), ("topk", 4, 1, True)):
        o.add(op, lambda a, k=k, d=dim, g=largest: torch.topk(a, k, d, g, True), [o.distinct(4, 4)],
              "topk: values, indices", k=k, dim=dim, largest=largest, sorted=True)
    for dim, descending in ((-1, False), (0, True)):
        o.add("sort", lambda a, d=dim, e=descending: torch.sort(a, dim=d, descending=e), [o.distinct(3, 4)],
              "sort: values, indices", dim=dim, descending=descending, stable=False)
    o.add("sort", lambda a: torch.sort(a, stable=True, dim=1), [torch.tensor([[2.0, 1.0, 2.0, float("nan"), 1.0, -INF]], dtype=torch.float64)],
          "sort: values, indices", fixed=(0,), dim=1, descending=False, stable=True)
    o.add("sort", lambda a: torch.sort(a, stable=True, dim=1, descending=True),
          [torch.tensor([[2.0, 1.0, 2.0, float("nan"), 1.0, -INF]], dtype=torch.float64)],
          "sort: values, indices", fixed=(0,), dim=1, descending=True, stable=True)
    for op in ("softmax", "log_softmax"):
        for dim in (0, 1, -1):
            o.add(op, lambda a, f=getattr(F, op), d=dim: f(a, d), [v(2, 3, 4)], dim=dim)
        o.add(op, lambda a, f=getattr(F, op): f(a, 1), [torch.tensor([[1000.0, 999.0, -INF]], dtype=torch.float64)], fixed=(0,), dim=1)


def products(o):
    v = o.values
    o.add("mm", torch.mm, [v(3, 4), v(4, 5)])
    o.add("mv", torch.mv, [v(3, 4), v(4)])
    o.add("dot", torch.dot, [v(5), v(5)])
    o.add("outer", torch.outer, [v(3), v(4)])
    o.add("bmm", torch.bmm, [v(2, 3, 4), v(2, 4, 2)])
    for a, b in (((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 3)), ((3, 4), (4, 2)), ((2, 3, 4), (4,)), ((2, 3, 4), (4, 2)),
                 ((4,), (2, 4, 3)), ((2, 3, 4), (2, 4, 2)), ((2, 1, 3, 4), (3, 4, 2))):
        o.add("matmul", torch.matmul, [v(*a), v(*b)])
    o.add("addmm", lambda c, a, b: torch.addmm(c, a, b), [v(3, 2), v(3, 4), v(4, 2)], beta=1.0, alpha=1.0)
    o.add("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2.0), [v(2), v(3, 4), v(4, 2)], beta=0.5, alpha=-2.0)
    o.add("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), [v(2, 3, 2), v(2, 3, 4), v(2, 4, 2)],
          beta=0.5, alpha=2.0)
    o.add("addmv", lambda c, a, b: torch.addmv(c, a, b, beta=1.5, alpha=0.5), [v(3), v(3, 4), v(4)], beta=1.5, alpha=0.5)
    o.add("linear", F.linear, [v(3, 4), v(2, 4), v(2)])
    o.add("linear", F.linear, [v(2, 3, 4), v(5, 4)])
    o.add("linear", F.linear, [v(4), v(2, 4), v(2)])
    for equation, shapes in (("ij,jk->ik", ((2, 3), (3, 4))), ("bij,bjk->bik", ((2, 2, 3), (2, 3, 2))), ("ij->ji", ((2, 3),)),
                             ("ii->i", ((3, 3),)), ("ii", ((3, 3),)), ("ij->", ((2, 3),)), ("i,j->ij", ((2,), (3,))),
                             ("bhqd,bhkd->bhqk", ((1, 2, 2, 3), (1, 2, 3, 3))), ("ij,j", ((2, 3), (3,))),
                             ("...ij,...jk->...ik", ((2, 2, 3), (3, 2))), ("ij,jk,kl->il", ((2, 2), (2, 3), (3, 2))),
                             ("bn,anm,bm->ba", ((2, 3), (2, 3, 2), (2, 2))), ("b...,b...->b", ((2, 2, 3), (2, 2, 3)))):
        o.add("einsum", lambda *t, e=equation: torch.einsum(e, *t), [v(*s) for s in shapes], equation=equation)
    q, k, w = v(1, 2, 3, 4), v(1, 2, 5, 4), v(1, 2, 5, 3)
    o.add("scaled_dot_product_attention", F.scaled_dot_product_attention, [q, k, w], is_causal=False)
    o.add("scaled_dot_product_attention", lambda a, b, c: F.scaled_dot_product_attention(a, b, c, scale=0.3), [q, k, w],
          is_causal=False, scale=0.3)
    o.add("scaled_dot_product_attention", lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True),
          [v(2, 4, 3), v(2, 4, 3), v(2, 4, 2)], is_causal=True)
    o.add("scaled_dot_product_attention", lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True), [q, k, w],
          is_causal=True)
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[0, 2:] = keep[1, 0] = keep[2, 4] = False
    o.add("scaled_dot_product_attention", lambda a, b, c, m: F.scaled_dot_product_attention(a, b, c, attn_mask=m),
          [q, k, w, keep], is_causal=False, mask="bool")
    o.add("scaled_dot_product_attention", lambda a, b, c, m: F.scaled_dot_product_attention(a, b, c, attn_mask=m),
          [q, k, w, v(3, 5)], fixed=(3,), is_causal=False, mask="additive")
    o.add("cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim=1, eps=1e-8), [v(3, 4), v(3, 4)], dim=1, eps=1e-8)


def shapes(o):
    v = o.values
    x = v(2, 3, 4)
    o.add("reshape", lambda a: a.reshape(4, 6), [x], shape=[4, 6])
    o.add("flatten", lambda a: a.flatten(1), [x], start_dim=1, end_dim=-1)
    o.add("transpose", lambda a: a.transpose(0, 2), [x], dim0=0, dim1=2)
    o.add("permute", lambda a: a.permute(2, 0, 1), [x], dims=[2, 0, 1])
    o.add("squeeze", lambda a: a.squeeze(1), [v(2, 1, 3)], dim=1)
    o.add("unsqueeze", lambda a: a.unsqueeze(-1), [v(2, 3)], dim=-1)
    o.add("expand", lambda a: a.expand(2, 3, 4), [v(3, 1)], shape=[2, 3, 4])
    o.add("narrow", lambda a: a.narrow(1, 1, 2), [x], dim=1, start=1, length=2)
    o.add("slice", lambda a: a[:, :, 0:4:2], [x], "tensor[:, :, start:end:step]", dim=2, start=0, end=4, step=2)
    o.add("select", lambda a: a.select(2, -1), [x], dim=2, index=-1)
    o.add("flip", lambda a: a.flip((0, 2)), [x], dims=[0, 2])
    o.add("roll", lambda a: a.roll(2, 1), [x], shifts=2, dim=1)
    o.add("repeat", lambda a: a.repeat(2, 1, 2), [v(2, 2)], repeats=[2, 1, 2])
    o.add("diagonal", lambda a: a.diagonal(1), [v(3, 4)], offset=1, dim1=0, dim2=1)
    o.add("cat", lambda *t: torch.cat(t, 1), [v(2, 1), v(2, 3), v(2, 2)], dim=1)
    o.add("stack", lambda *t: torch.stack(t, -1), [v(2, 3), v(2, 3)], dim=-1)
    o.add("split", lambda a: torch.split(a, 2, 2), [v(2, 1, 5)], size=2, dim=2)
    o.add("split", lambda a: torch.split(a, [1, 4], 2), [v(2, 1, 5)], sizes=[1, 4], dim=2)
    o.add("chunk", lambda a: torch.chunk(a, 3, 0), [v(7, 2)], chunks=3, dim=0)
    o.add("unbind", lambda a: torch.unbind(a, 1), [v(2, 3)], dim=1)
    for op in ("tril", "triu"):
        for diagonal in (0, 1, -2):
            o.add(op, lambda a, f=getattr(torch, op), d=diagonal: f(a, d), [v(2, 3, 4)], diagonal=diagonal)
    index = o.integers(0, 3, 2, 2, 4)
    o.add("gather", lambda a, i: torch.gather(a, 1, i), [x, index], dim=1)
    o.add("gather", lambda a, i: torch.gather(a, -1, i), [v(2, 3), torch.tensor([[2, 2, 0, 1], [0, 0, 0, 0]])], dim=-1)
    o.add("scatter_add", lambda a, i, s: torch.scatter_add(a, 1, i, s), [x, index, v(2, 2, 4)], dim=1)
    o.add("scatter_add", lambda a, i, s: torch.scatter_add(a, 0, i, s), [v(3, 2), torch.tensor([[0, 1], [0, 2], [0, 1]]), v(3, 2)], dim=0)
    o.add("scatter", lambda a, i, s: torch.scatter(a, 1, i, s), [v(2, 4), torch.tensor([[3, 0], [1, 2]]), v(2, 2)], dim=1)
    rows = torch.tensor([2, 0, 2, 1])
    o.add("index_select", lambda a, i: torch.index_select(a, 1, i), [x, rows], dim=1)
    o.add("index_add", lambda a, i, s: torch.index_add(a, 0, i, s, alpha=0.5), [v(3, 2), rows, v(4, 2)], dim=0, alpha=0.5)
    o.add("index_put", lambda a, i, s: torch.index_put(a, (i,), s, accumulate=True), [v(3, 2), rows, v(4, 2)], accumulate=True)
    o.add("index_put", lambda a, i, s: torch.index_put(a, (i,), s, accumulate=False), [v(5, 2), torch.tensor([4, 0, 2]), v(3, 2)],
          accumulate=False)
    o.add("embedding", lambda w, i: F.embedding(i, w), [v(5, 3), torch.tensor([[1, 4, 1], [0, 2, 2]])], "embedding(weight, indices)")
    o.add("embedding", lambda w, i: F.embedding(i, w, padding_idx=2), [v(5, 3), torch.tensor([[1, 4, 1], [0, 2, 2]])],
          "embedding(weight, indices)", padding_idx=2)
    o.add("one_hot", lambda i: F.one_hot(i, 4), [torch.tensor([[0, 3], [2, 2]])], num_classes=4)


def norms(o):
    v = o.values
    w, b = v(4), v(4)
    o.add("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-5), [v(2, 3, 4), w, b], normalized_shape=[4], eps=1e-5)
    o.add("layer_norm", lambda x: F.layer_norm(x, (3, 4), eps=1e-3), [v(2, 3, 4)], normalized_shape=[3, 4], eps=1e-3)
    o.add("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-6), [v(2, 3, 4), w], normalized_shape=[4], eps=1e-6)
    o.add("rms_norm", lambda x: F.rms_norm(x, (3, 4), eps=1e-2), [v(2, 3, 4)], normalized_shape=[3, 4], eps=1e-2)
    o.add("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b, 1e-5), [v(2, 4, 3), w, b], num_groups=2, eps=1e-5)
    o.add("group_norm", lambda x: F.group_norm(x, 4, eps=1e-4), [v(2, 4, 2, 2)], num_groups=4, eps=1e-4)
    for shape in ((5, 4), (2, 4, 3), (2, 4, 2, 3)):
        for training in (True, False):
            mean, var = v(4), v(4, low=0.5, high=2)
            held_mean, held_var = mean.clone(), var.clone()
            o.add("batch_norm", lambda x, w, b, *_, m=held_mean, s=held_var, t=training:
                  (F.batch_norm(x, m, s, w, b, t, 0.1, 1e-5), m.clone(), s.clone()),
                  [v(*shape), w, b, mean, var], "batch_norm: output, running_mean, running_var after the call", fixed=(3, 4),
                  training=training, momentum=0.1, eps=1e-5)


def losses(o):
    v = o.values
    reductions_ = ("mean", "sum", "none")
    for reduction in reductions_:
        x, y = v(3, 4), v(3, 4)
        o.add("mse_loss", lambda a, b, r=reduction: F.mse_loss(a, b, reduction=r), [x, y], reduction=reduction)
        o.add("l1_loss", lambda a, b, r=reduction: F.l1_loss(a, b, reduction=r), [x, y], reduction=reduction)
        o.add("kl_div", lambda a, b, r=reduction: F.kl_div(a, b, reduction=r), [F.log_softmax(x, 1), F.softmax(y, 1)],
              reduction=reduction, log_target=False)
    for reduction in ("batchmean", "mean"):
        o.add("kl_div", lambda a, b, r=reduction: F.kl_div(a, b, reduction=r, log_target=True),
              [F.log_softmax(x, 1), F.log_softmax(y, 1)], reduction=reduction, log_target=True)
    target_with_zero = torch.tensor([[0.0, 0.25, 0.75, 0.0]], dtype=torch.float64)
    o.add("kl_div", lambda a, b: F.kl_div(a, b, reduction="sum"), [F.log_softmax(v(1, 4), 1), target_with_zero], fixed=(1,),
          reduction="sum", log_target=False)
    for beta in (1.0, 0.3, 0.0):
        o.add("smooth_l1_loss", lambda a, b, t=beta: F.smooth_l1_loss(a, b, beta=t), [v(3, 4), v(3, 4)], reduction="mean", beta=beta)
    for delta in (1.0, 0.3, 2.0):
        o.add("huber_loss", lambda a, b, d=delta: F.huber_loss(a, b, delta=d), [v(3, 4), v(3, 4)], reduction="mean", delta=delta)
    o.add("smooth_l1_loss", lambda a, b: F.smooth_l1_loss(a, b, reduction="none"), [v(3, 4), v(3, 4)], reduction="none", beta=1.0)
    o.add("huber_loss", lambda a, b: F.huber_loss(a, b, reduction="sum"), [v(3, 4), v(3, 4)], reduction="sum", delta=1.0)
    logits, labels, soft = v(4, 5), torch.tensor([1, 0, 4, 2]), torch.softmax(v(4, 5), 1)
    weight = v(5, low=0.2, high=2)
    for reduction in reductions_:
        for smoothing in (0.0, 0.1):
            o.add("cross_entropy", lambda a, t, r=reduction, s=smoothing: F.cross_entropy(a, t, reduction=r, label_smoothing=s),
                  [logits, labels], reduction=reduction, label_smoothing=smoothing, ignore_index=-100)
            o.add("cross_entropy", lambda a, t, w, r=reduction, s=smoothing:
                  F.cross_entropy(a, t, w, reduction=r, label_smoothing=s, ignore_index=4),
                  [logits, labels, weight], fixed=(2,), reduction=reduction, label_smoothing=smoothing, ignore_index=4, weighted=True)
        o.add("cross_entropy", lambda a, t, r=reduction: F.cross_entropy(a, t, reduction=r), [logits, soft], fixed=(1,),
              reduction=reduction, label_smoothing=0.0, target="probabilities")
        o.add("nll_loss", lambda a, t, r=reduction: F.nll_loss(a, t, reduction=r), [F.log_softmax(logits, 1), labels],
              reduction=reduction, ignore_index=-100)
        o.add("nll_loss", lambda a, t, w, r=reduction: F.nll_loss(a, t, w, reduction=r, ignore_index=0),
              [F.log_softmax(logits, 1), labels, weight], fixed=(2,), reduction=reduction, ignore_index=0, weighted=True)
        o.add("binary_cross_entropy_with_logits", lambda a, t, r=reduction: F.binary_cross_entropy_with_logits(a, t, reduction=r),
              [v(3, 4), v(3, 4, low=0, high=1)], reduction=reduction)
        o.add("binary_cross_entropy", lambda a, t, r=reduction: F.binary_cross_entropy(a, t, reduction=r),
              [v(3, 4, low=0.05, high=0.95), v(3, 4, low=0, high=1)], fixed=(1,), reduction=reduction)
    o.add("cross_entropy", lambda a, t, w: F.cross_entropy(a, t, w, label_smoothing=0.2), [logits, soft, weight], fixed=(1, 2),
          reduction="mean", label_smoothing=0.2, target="probabilities", weighted=True)
    o.add("cross_entropy", lambda a, t: F.cross_entropy(a, t), [v(2, 3, 4), o.integers(0, 3, 2, 4)], reduction="mean",
          label_smoothing=0.0, ignore_index=-100)
    o.add("cross_entropy", lambda a, t: F.cross_entropy(a, t), [logits, torch.full((4,), -100)], fixed=(0,), reduction="mean",
          label_smoothing=0.0, ignore_index=-100)
    o.add("cross_entropy", lambda a, t: F.cross_entropy(a, t), [v(5), torch.tensor(3)], reduction="mean", label_smoothing=0.0,
          ignore_index=-100)
    o.add("binary_cross_entropy_with_logits", lambda a, t, w, p: F.binary_cross_entropy_with_logits(a, t, w, pos_weight=p),
          [v(3, 4, low=-30, high=30), v(3, 4, low=0, high=1), v(4, low=0.5, high=2), v(4, low=0.5, high=2)], fixed=(2, 3),
          reduction="mean", weighted=True, pos_weighted=True)
    o.add("binary_cross_entropy", lambda a, t, w: F.binary_cross_entropy(a, t, w),
          [torch.tensor([0.0, 1.0, 0.5, 1.0], dtype=torch.float64), torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64),
           v(4, low=0.5, high=2)], fixed=(1, 2), reduction="mean", weighted=True)
    o.add("cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim=0), [v(4, 2), v(4, 2)], dim=0, eps=1e-8)


def further(o):
    """Added later: at the end, so that the others keep their numbers."""
    v = o.values
    attend = F.scaled_dot_product_attention
    name = "scaled_dot_product_attention"
    o.add(name, lambda a, b, c: attend(a, b, c, is_causal=True), [v(1, 2, 5, 3), v(1, 2, 2, 3), v(1, 2, 2, 4)], is_causal=True)
    o.add(name, lambda a, b, c: attend(a, b, c, enable_gqa=True), [v(2, 4, 3, 2), v(2, 2, 5, 2), v(2, 2, 5, 3)],
          is_causal=False, enable_gqa=True)
    o.add(name, lambda a, b, c: attend(a, b, c, enable_gqa=True, is_causal=True), [v(6, 3, 2), v(2, 3, 2), v(3, 3, 3)],
          is_causal=True, enable_gqa=True)
    blind = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    blind[0, 0, 1] = blind[1, 0, 0, :2] = False
    o.add(name, lambda a, b, c, m: attend(a, b, c, attn_mask=m), [v(2, 2, 3, 2), v(2, 2, 4, 2), v(2, 2, 4, 3), blind],
          is_causal=False, mask="bool")
    o.add(name, lambda a, b, c, m: attend(a, b, c, attn_mask=m), [v(2, 3, 2, 2), v(2, 3, 4, 2), v(2, 3, 4, 3), v(3, 1, 4)],
          is_causal=False, mask="additive")
    o.add(name, attend, [v(3, 2), v(4, 2), v(4, 3)], is_causal=False)
    o.add(name, attend, [v(2, 1, 3, 2), v(1, 3, 4, 2), v(2, 3, 4, 1)], is_causal=False)
    o.add(name, attend, [v(2, 3, 1, 2, 2), v(3, 2, 3, 2), v(2, 1, 2, 3, 2)], is_causal=False)
    o.add("addr", lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=2.0), [v(3, 2), v(3), v(2)], beta=0.5, alpha=2.0)
    o.add("addbmm", lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2.0), [v(3, 2), v(2, 3, 4), v(2, 4, 2)],
          beta=0.5, alpha=2.0)


def edges(o):
    """Where functions have a kink, a tie or a pole: the gradient there is a convention."""
    nan = float("nan")

    def t(*numbers):
        return torch.tensor(numbers, dtype=torch.float64)

    o.add("clamp", lambda x: torch.clamp(x, -0.5, 0.5), [t(-0.5, 0.0, 0.5, 1.0, nan)], min=-0.5, max=0.5)
    o.add("clamp", lambda x: torch.clamp(x, 0.5, -0.5), [t(-1.0, 0.0, 1.0)], min=0.5, max=-0.5)
    o.add("hardtanh", F.hardtanh, [t(-1.0, 0.0, 1.0)])
    o.add("relu6", F.relu6, [t(0.0, 6.0, 3.0)])
    o.add("relu", F.relu, [t(0.0, -0.0, -1.0, 1.0, nan, INF, -INF)])
    o.add("leaky_relu", lambda x: F.leaky_relu(x, 0.1), [t(0.0, -1.0, 1.0)], negative_slope=0.1)
    o.add("hardsigmoid", F.hardsigmoid, [t(-3.0, 3.0, -3.5, 3.5)])
    o.add("hardswish", F.hardswish, [t(-3.0, 3.0, -3.5, 3.5, 0.0)])
    o.add("elu", F.elu, [t(0.0, -0.0, -1.0, 1.0, -INF)])
    o.add("prelu", F.prelu, [t(0.0, -1.0, 1.0), t(0.25)])
    o.add("maximum", torch.maximum, [t(1.0, 2.0, nan, 1.0), t(1.0, 1.0, 1.0, nan)])
    o.add("minimum", torch.minimum, [t(1.0, 2.0, nan, 1.0), t(1.0, 1.0, 1.0, nan)])
    for op, function in (("abs", torch.abs), ("sign", torch.sign)):
        o.add(op, function, [t(0.0, -0.0, -1.0, INF)])
    o.add("sqrt", torch.sqrt, [t(0.0, 4.0, INF)])
    o.add("rsqrt", torch.rsqrt, [t(0.0, 4.0, INF)])
    o.add("reciprocal", torch.reciprocal, [t(0.0, -0.0, 4.0, INF)])
    o.add("log", torch.log, [t(0.0, 1.0, INF, -1.0)])
    o.add("round", torch.round, [t(0.5, 1.5, 2.5, -0.5, -1.5)])
    o.add("erfinv", torch.erfinv, [t(0.0, 1.0, -1.0)])
    o.add("logsigmoid", F.logsigmoid, [t(0.0, 100.0, -100.0, -1000.0)])
    o.add("silu", F.silu, [t(0.0, 100.0, -100.0)])
    o.add("sigmoid", torch.sigmoid, [t(0.0, 40.0, -40.0, -800.0, INF, -INF)])
    o.add("tanh", torch.tanh, [t(0.0, 40.0, -40.0, INF, -INF)])
    o.add("softplus", lambda x: F.softplus(x, 1, 2), [t(2.0, 2.5, 1.5, -50.0)], beta=1.0, threshold=2.0)
    o.add("gelu", F.gelu, [t(0.0, 10.0, -10.0)], approximate="none")
    o.add("gelu", lambda x: F.gelu(x, approximate="tanh"), [t(0.0, 10.0, -10.0)], approximate="tanh")
    o.add("pow", lambda x: torch.pow(x, 0.0), [t(0.0, 2.0)], exponent=0.0)
    o.add("pow", lambda x: torch.pow(x, 0.5), [t(0.0, 4.0)], exponent=0.5)
    o.add("pow", lambda x: torch.pow(x, 2.0), [t(0.0, -4.0)], exponent=2.0)
    o.add("pow", torch.pow, [t(0.0, 0.0, 2.0), t(0.0, 2.0, 0.0)])
    o.add("atan2", torch.atan2, [t(0.0, 1.0, -1.0), t(0.0, 0.0, 0.0)])
    o.add("fmod", torch.fmod, [t(5.0, -5.0, 5.0, -5.0, 6.0), t(3.0, 3.0, -3.0, -3.0, 3.0)])
    o.add("remainder", torch.remainder, [t(5.0, -5.0, 5.0, -5.0, 6.0), t(3.0, 3.0, -3.0, -3.0, 3.0)])
    zero, tie = t(0.0, 0.0, 0.0), t(1.0, -1.0, 0.5)
    for p in (0.5, 1.0, 2.0, 3.0, INF, -INF, 0.0):
        name = {INF: "inf", -INF: "-inf"}.get(p, p)
        for x in (zero, tie):
            o.add("norm", lambda x, p=p: torch.linalg.vector_norm(x, p), [x], "linalg.vector_norm", p=name)
    o.add("std", lambda x: torch.std(x, correction=1), [t(1.0, 1.0, 1.0)], correction=1)
    o.add("amax", torch.amax, [t(1.0, 1.0, 0.0)])
    o.add("amin", torch.amin, [t(1.0, 1.0, 1.0)])
    # PyTorch's gradient is NaN for all three here, ours goes to the NaN as that of torch.max does.
    o.add("amax", torch.amax, [t(1.0, nan, 2.0)], fixed=(0,))
    o.add("max", torch.max, [t(1.0, 1.0, 0.0)])
    o.add("max", lambda x: tuple(torch.max(x, 0)), [t(0.0, 1.0, 1.0)], "max(dim): values, indices", dim=0, keepdim=False)
    o.add("min", lambda x: tuple(torch.min(x, 0)), [t(0.0, nan, -1.0)], "min(dim): values, indices", dim=0, keepdim=False)
    o.add("argmax", torch.argmax, [t(0.0, 1.0, 1.0)])
    o.add("argmin", torch.argmin, [t(0.0, 0.0, nan)])
    o.add("prod", torch.prod, [t(0.0, 2.0, 3.0)])
    o.add("prod", torch.prod, [t(0.0, 2.0, 0.0)])
    o.add("cumprod", lambda x: torch.cumprod(x, 0), [t(2.0, 0.0, 3.0, 0.0, 4.0)], dim=0)
    o.add("logsumexp", lambda x: torch.logsumexp(x, 0), [t(-INF, 0.0, 1.0)], dim=0, keepdim=False)
    o.add("logsumexp", lambda x: torch.logsumexp(x, 0), [t(1000.0, 999.0, -1000.0)], dim=0, keepdim=False)
    o.add("softmax", lambda x: torch.softmax(x, 0), [t(-INF, 0.0, 1000.0, 999.0)], dim=0)
    o.add("log_softmax", lambda x: torch.log_softmax(x, 0), [t(-1000.0, 0.0, 1000.0, 999.0)], dim=0)
    o.add("sort", lambda x: tuple(torch.sort(x, dim=0, stable=True)), [t(1.0, nan, -0.0, 0.0, -INF, INF, 1.0)],
          "sort: values, indices", dim=0, descending=False, stable=True)
    o.add("sort", lambda x: tuple(torch.sort(x, dim=0, descending=True, stable=True)), [t(1.0, nan, 0.0, -INF, INF, 1.0)],
          "sort: values, indices", dim=0, descending=True, stable=True)
    o.add("smooth_l1_loss", lambda a, b: F.smooth_l1_loss(a, b, reduction="sum", beta=1.0), [t(1.0, 2.0, 0.0, -1.0), t(0.0, 0.0, 0.0, 0.0)],
          reduction="sum", beta=1.0)
    o.add("huber_loss", lambda a, b: F.huber_loss(a, b, reduction="sum", delta=1.0), [t(1.0, 2.0, 0.0, -1.0), t(0.0, 0.0, 0.0, 0.0)],
          reduction="sum", delta=1.0)
    o.add("l1_loss", lambda a, b: F.l1_loss(a, b, reduction="sum"), [t(1.0, 0.0), t(1.0, 1.0)], reduction="sum")
    o.add("binary_cross_entropy_with_logits", lambda a, b: F.binary_cross_entropy_with_logits(a, b, reduction="sum"),
          [t(1000.0, -1000.0, 0.0), t(0.0, 1.0, 1.0)], reduction="sum")


def promotion():
    """Result types: operands and results are lists of names; result[i * n + j] is of operand i on the left, j on the right."""
    file = GoldenFile("promotion.json")
    names = ["f32", "f64", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "i8", "u8", "bool"]
    result_names = DTYPES | {torch.int16: "i16"}  # of i8 with u8

    def result(function, *operands):
        try:
            return result_names[function(*operands).dtype]
        except (RuntimeError, TypeError, NotImplementedError):
            return "error"

    def tensor(name, dims):
        return torch.ones((2,) * dims, dtype=torch.float32).to(BY_NAME[name])

    functions = {"add": torch.add, "mul": torch.mul, "sub": torch.sub, "div": torch.div, "pow": torch.pow, "maximum": torch.maximum,
                 "eq": torch.eq, "lt": torch.lt, "atan2": torch.atan2, "floor_divide": torch.floor_divide, "remainder": torch.remainder}
    for op, function in functions.items():
        for left, right in itertools.product((1, 0), (1, 0)):
            table = [result(function, tensor(a, left), tensor(b, right)) for a in names for b in names]
            file.add(f"{op}/{left}d_{right}d", op, op, {"left_dims": left, "right_dims": right, "operands": names, "result": table})
    for dims in (1, 0):
        for left, right in itertools.product((dims,), (1, 0)):
            table = [result_names[torch.result_type(tensor(a, left), tensor(b, right))] if not {a[:2], b[:2]} & {"f8"} or a == b else "error"
                     for a in names for b in names]
            file.add(f"result_type/{left}d_{right}d", "result_type", "result_type",
                     {"left_dims": left, "right_dims": right, "operands": names, "result": table})
    for op in ("add", "mul", "div", "pow", "lt"):
        for kind, scalar in (("int", 2), ("float", 2.5), ("bool", True)):
            for dims in (1, 0):
                file.add(f"{op}/{dims}d_{kind}", op, op,
                         {"left_dims": dims, "scalar": kind, "operands": names,
                          "result": [result(functions[op], tensor(a, dims), scalar) for a in names]})
    unary = {"exp": torch.exp, "sqrt": torch.sqrt, "sigmoid": torch.sigmoid, "neg": torch.neg, "abs": torch.abs, "sum": torch.sum,
             "prod": torch.prod, "mean": torch.mean, "cumsum": lambda x: torch.cumsum(x, 0), "relu": torch.relu, "argmax": torch.argmax,
             "isnan": torch.isnan, "square": torch.square, "reciprocal": torch.reciprocal, "round": torch.round, "sign": torch.sign,
             "any": torch.any, "var": torch.var, "amax": torch.amax, "log_softmax": lambda x: F.log_softmax(x, 0)}
    for op, function in unary.items():
        file.add(f"{op}/unary", op, op, {"operands": names, "result": [result(function, tensor(a, 1)) for a in names]})
    file.write()


def make():
    warnings.filterwarnings("ignore", message="reduction: 'mean' divides")  # kl_div's own wish for 'batchmean'
    file = GoldenFile("ops_f64.json")
    o = Ops(file, 20261)
    for part in (binary_and_unary, reductions, products, shapes, norms, losses, further, edges):
        part(o)
    file.write()
    promotion()
