# SPDX-License-Identifier: Apache-2.0
"""policy_ops.json: calls inside an autocast region, for every row of the policy table whose op exists.

PyTorch's CPU build autocasts by another list than its CUDA build, whose list is the one that counts. So autocast stays off
here and the casts are made by hand as the CUDA list says.
"""
import torch
import torch.nn.functional as F
import torchvision.ops as tv
from golden_format import GoldenFile, values

LOW = {"f16": torch.float16, "bf16": torch.bfloat16}
F32, F64 = torch.float32, torch.float64


def eligible(x):
    return x is not None and x.dtype in (torch.float16, torch.bfloat16, F32)


def cast_all(inputs, dtype):
    return [x.to(dtype) if eligible(x) else x for x in inputs]


def widest(inputs):
    """None where two kinds of half meet without a float32: CUDA's list refuses those."""
    present = {x.dtype for x in inputs if eligible(x)}
    if F32 in present:
        return F32
    return present.pop() if len(present) == 1 else None


class Policy:
    def __init__(self, file, seed):
        self.file = file
        self.generator = torch.Generator().manual_seed(seed)
        self.counts = {}

    def values(self, *shape, **options):
        return values(self.generator, *shape, dtype=F32, **options)

    def add(self, policy, op, function, inputs, region, torch_name="", magnitude=None, terms=None, **attributes):
        low = LOW[region]
        if policy == "lower":
            cast = cast_all(inputs, low)
        elif policy == "fp32":
            cast = cast_all(inputs, F32)
        elif policy == "fp32_dtype":
            # Only the result's dtype is set, which widens the operand first: the same as a cast of the first input.
            cast = cast_all(inputs[:1], F32) + list(inputs[1:])
        elif policy == "promote":
            dtype = widest(inputs)
            # CUDA's list refuses the half type that is not the region's.
            other = any(eligible(x) and x.dtype not in (F32, low) for x in inputs)
            cast = None if dtype is None or other else cast_all(inputs, dtype)
        else:
            cast = list(inputs)
        self.counts[op] = self.counts.get(op, -1) + 1
        attributes = {"policy": policy, "region": region, **attributes}
        name = f"{op}/{region}/{self.counts[op]}"
        if cast is None or policy == "banned":
            self.file.add(name, op, torch_name or op, {**attributes, "throws": True}, inputs)
            return
        results = function(*cast)
        exact = function(*[x.to(F64) if x.dtype.is_floating_point else x for x in cast])
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        exact = list(exact) if isinstance(exact, (tuple, list)) else [exact]
        tensors = {}
        if magnitude is not None:
            tensors["magnitude"] = magnitude(*[x.to(F64) if x.dtype.is_floating_point else x for x in cast])
            attributes["terms"] = terms
        self.file.add(name, op, torch_name or op, attributes, inputs, outputs=results, exact=exact, tensors=tensors)


def absolute(function):
    return lambda *inputs: function(*[x.abs() if x.dtype.is_floating_point else x for x in inputs])


def lower(p, region):
    low, v = LOW[region], p.values

    def products(op, function, shapes, terms, torch_name="", **attributes):
        for pattern in ("all f32", "first low", "last low"):
            inputs = [v(*s) for s in shapes]
            if pattern == "first low":
                inputs[0] = inputs[0].to(low)
            if pattern == "last low":
                inputs[-1] = inputs[-1].to(low)
            p.add("lower", op, function, inputs, region, torch_name, absolute(function), terms, **attributes)

    products("matmul", torch.matmul, [(2, 3, 17), (17, 4)], 17)
    products("matmul", torch.matmul, [(9,), (9,)], 9)
    products("mm", torch.mm, [(4, 33), (33, 5)], 33)
    products("bmm", torch.bmm, [(2, 3, 8), (2, 8, 3)], 8)
    products("mv", torch.mv, [(5, 16), (16,)], 16)
    products("addmm", torch.addmm, [(4, 3), (4, 10), (10, 3)], 11, beta=1.0, alpha=1.0)
    products("linear", F.linear, [(3, 16), (5, 16), (5,)], 17)
    products("linear", F.linear, [(2, 2, 9), (4, 9)], 9)
    products("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 2, 7), (2, 7, 3)], 7, equation="bij,bjk->bik")
    products("baddbmm", torch.baddbmm, [(2, 3, 2), (2, 3, 5), (2, 5, 2)], 6, beta=1.0, alpha=1.0)
    products("addmv", torch.addmv, [(4,), (4, 6), (6,)], 7, beta=1.0, alpha=1.0)
    for causal in (False, True):
        q, k, w = v(1, 2, 4, 8), v(1, 2, 4, 8), v(1, 2, 4, 6)

        def attend(a, b, c, causal=causal):
            return F.scaled_dot_product_attention(a, b, c, is_causal=causal)

        def spread(a, b, c, attend=attend):
            # |error| <= error of the scores, carried through the softmax, and of the sum over keys.
            scores = (a.abs() @ b.abs().transpose(-1, -2)).amax() / a.shape[-1] ** 0.5
            return attend(a, b, c.abs()) * (2 + 2 * scores)

        p.add("lower", "scaled_dot_product_attention", attend, [q, k, w], region, "", spread, 12, is_causal=causal)
    p.add("lower", "prelu", F.prelu, [v(2, 3, 4), v(3)], region)
    p.add("lower", "prelu", F.prelu, [v(2, 3).to(low), v(1)], region)
    # float64 and integers are left alone.
    p.add("lower", "mm", torch.mm, [v(2, 3).to(F64), v(3, 2).to(F64)], region)


def fp32(p, region):
    low, v = LOW[region], p.values

    def both(op, function, inputs, torch_name="", **attributes):
        p.add("fp32", op, function, [x.to(low) if eligible(x) else x for x in inputs], region, torch_name, **attributes)
        p.add("fp32", op, function, inputs, region, torch_name, **attributes)

    for op, low_end, high_end in (("exp", -4, 12), ("expm1", -3, 11.5), ("log", 0.01, 50), ("log2", 0.01, 50), ("log10", 0.01, 50),
                                  ("log1p", -0.9, 20), ("reciprocal", 0.01, 3), ("rsqrt", 0.001, 30), ("acos", -0.95, 0.95),
                                  ("asin", -0.95, 0.95), ("cosh", -12, 12), ("sinh", -12, 12), ("tan", -1.4, 1.4), ("erfinv", -0.95, 0.95)):
        both(op, getattr(torch, op), [v(9, low=low_end, high=high_end)])
    both("reciprocal", torch.reciprocal, [torch.tensor([1e-5, 3e-5, 6e-6])])
    both("softplus", F.softplus, [v(9, low=-6, high=25)])
    both("pow", torch.pow, [v(6, low=0.5, high=20), v(6, low=-1, high=3)])
    both("pow", lambda x: torch.pow(x, 3.0), [v(6, low=-50, high=50)], "pow(tensor, scalar)", exponent=3.0)
    both("pow", lambda x: torch.pow(2.0, x), [v(6, low=-3, high=18)], "pow(scalar, tensor)", base=2.0)
    p.add("fp32", "pow", torch.pow, [v(4, low=0.5, high=20).to(low), v(4, low=-1, high=3)], region)
    w, b = v(6), v(6)
    both("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-5), [v(3, 6), w, b], normalized_shape=[6], eps=1e-5)
    both("rms_norm", lambda x, w: F.rms_norm(x, (6,), w, 1e-5), [v(3, 6), w], normalized_shape=[6], eps=1e-5)
    both("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5), [v(2, 6, 4), w, b], num_groups=3, eps=1e-5)
    p.add("fp32", "layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-5), [v(3, 6).to(low), w, b], region,
          normalized_shape=[6], eps=1e-5)
    both("logsumexp", lambda x: torch.logsumexp(x, 1), [v(3, 6, low=-8, high=8)], dim=1, keepdim=False)
    both("cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim=1), [v(3, 6), v(3, 6)], dim=1, eps=1e-8)
    for op, function in (("mse_loss", F.mse_loss), ("l1_loss", F.l1_loss), ("smooth_l1_loss", F.smooth_l1_loss),
                         ("huber_loss", F.huber_loss)):
        both(op, function, [v(3, 5), v(3, 5)], reduction="mean")
        p.add("fp32", op, lambda a, b, f=function: f(a, b, reduction="none"), [v(3, 5).to(low), v(3, 5)], region, reduction="none")
    both("mse_loss", lambda a, b: F.mse_loss(a, b, reduction="sum"), [v(40, low=-300, high=300), v(40)], reduction="sum")
    both("kl_div", lambda a, b: F.kl_div(a, b, reduction="batchmean"), [F.log_softmax(v(3, 5), 1), F.softmax(v(3, 5), 1)],
         reduction="batchmean", log_target=False)
    labels = torch.tensor([1, 4, 0, 2])
    both("nll_loss", lambda a, t: F.nll_loss(a, t), [F.log_softmax(v(4, 5), 1), labels], reduction="mean")
    both("cross_entropy", lambda a, t: F.cross_entropy(a, t), [v(4, 5), labels], reduction="mean", label_smoothing=0.0)
    both("cross_entropy", lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1), [v(4, 5), labels], reduction="mean",
         label_smoothing=0.1)
    both("cross_entropy", lambda a, t: F.cross_entropy(a, t), [v(4, 5), F.softmax(v(4, 5), 1)], reduction="mean",
         label_smoothing=0.0, target="probabilities")
    both("binary_cross_entropy_with_logits", lambda a, t: F.binary_cross_entropy_with_logits(a, t),
         [v(3, 5, low=-20, high=20), v(3, 5, low=0, high=1)], reduction="mean")
    p.add("fp32", "exp", torch.exp, [v(3).to(F64)], region)


def fp32_dtype(p, region):
    low, v = LOW[region], p.values

    def both(op, function, inputs, torch_name="", **attributes):
        for kind in (low, F32):
            p.add("fp32_dtype", op, function, [inputs[0].to(kind)] + list(inputs[1:]), region, torch_name, **attributes)

    both("sum", torch.sum, [v(40, low=500, high=4000)])
    both("sum", lambda x: torch.sum(x, dim=1, keepdim=True), [v(3, 8)], dim=1, keepdim=True)
    both("prod", torch.prod, [v(9, low=2, high=6)])
    both("prod", lambda x: torch.prod(x, dim=0), [v(3, 4)], dim=0, keepdim=False)
    both("cumsum", lambda x: torch.cumsum(x, 1), [v(2, 12)], dim=1)
    both("cumprod", lambda x: torch.cumprod(x, 1), [v(2, 6, low=0.5, high=3)], dim=1)
    for op in ("softmax", "log_softmax"):
        both(op, lambda x, f=getattr(F, op): f(x, 1), [v(3, 5, low=-5, high=5)], dim=1)
    for order in (2.0, 1.0, float("inf")):
        both("norm", lambda x, o=order: torch.linalg.vector_norm(x, o), [v(30, low=-400, high=400)], "linalg.vector_norm", p=order)
    both("norm", lambda x: torch.linalg.vector_norm(x, 2.0, dim=1), [v(3, 6)], "linalg.vector_norm", p=2.0, dim=1, keepdim=False)
    p.add("fp32_dtype", "sum", torch.sum, [torch.tensor([1, 2, 3])], region)
    p.add("fp32_dtype", "sum", torch.sum, [v(5).to(F64)], region)
    p.add("pass", "sum", lambda x: torch.sum(x.to(F64)), [v(5).to(low)], region, "sum with dtype=f64 given by the caller", dtype="f64")
    p.add("pass", "softmax", lambda x: F.softmax(x.float(), 1).to(x.dtype) if x.dtype != F64 else F.softmax(x, 1),
          [v(2, 5).to(low)], region, "softmax with dtype given by the caller", dim=1, dtype=region)


def promote(p, region):
    low, v = LOW[region], p.values
    other = LOW["bf16" if region == "f16" else "f16"]
    rows = torch.tensor([2, 0, 2, 1])
    scatter_rows = torch.tensor([[0, 1], [2, 2], [1, 0]])
    for first, second in ((low, low), (low, F32), (F32, low), (F32, F32), (other, low), (F32, other), (F64, low)):
        if F64 in (first, second):
            # float64 operands are no matter of the policy: the op's own promotion rules.
            p.add("pass", "atan2", torch.atan2, [v(5).to(first), v(5).to(second)], region)
            continue
        a = lambda *s, **o: p.values(*s, **o).to(first)
        b = lambda *s, **o: p.values(*s, **o).to(second)
        p.add("promote", "addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [a(2, 3), b(2, 3), b(3)], region, value=0.5)
        p.add("promote", "addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=2.0), [a(2, 3), b(2, 3), b(2, 3, low=0.5, high=2)],
              region, value=2.0)
        p.add("promote", "atan2", torch.atan2, [a(6), b(6)], region)
        p.add("promote", "dot", torch.dot, [a(12), b(12)], region, "", absolute(torch.dot), 12)
        p.add("promote", "scatter_add", lambda x, i, s: torch.scatter_add(x, 0, i, s), [a(3, 2), scatter_rows, b(3, 2)], region, dim=0)
        p.add("promote", "index_put", lambda x, i, s: torch.index_put(x, (i,), s, accumulate=True), [a(3, 2), rows, b(4, 2)], region,
              accumulate=True)


def others(p, region):
    low, v = LOW[region], p.values
    for kind in (low, F32):
        p.add("banned", "binary_cross_entropy", F.binary_cross_entropy,
              [v(3, 2, low=0.1, high=0.9).to(kind), v(3, 2, low=0, high=1).to(kind)], region, reduction="mean")
    for op in ("add", "sub", "mul", "div", "maximum", "minimum"):
        for first, second in ((low, low), (low, F32), (F32, low), (F32, F32)):
            p.add("pass", op, getattr(torch, op), [v(2, 4).to(first), v(4).to(second)], region)
    for op in ("relu", "silu", "sigmoid", "tanh", "abs", "neg", "square", "sin", "cos", "erf", "sign"):
        function = getattr(torch, op, None) or getattr(F, op)
        p.add("pass", op, function, [v(13, low=-6, high=6).to(low)], region)
    p.add("pass", "sqrt", torch.sqrt, [v(7, low=0, high=9).to(low)], region)
    p.add("pass", "sigmoid", torch.sigmoid, [v(5)], region)
    for approximate in ("none", "tanh"):
        p.add("pass", "gelu", lambda x, a=approximate: F.gelu(x, approximate=a), [v(13, low=-4, high=4).to(low)], region,
              approximate=approximate)
    p.add("pass", "leaky_relu", lambda x: F.leaky_relu(x, 0.1), [v(6).to(low)], region, negative_slope=0.1)
    p.add("pass", "mean", torch.mean, [v(30).to(low)], region)
    p.add("pass", "mean", lambda x: torch.mean(x, 1), [v(3, 8, low=10, high=60).to(low)], region, dim=1, keepdim=False)
    p.add("pass", "mean", torch.mean, [v(30)], region)
    for op in ("var", "std"):
        p.add("pass", op, lambda x, f=getattr(torch, op): f(x, dim=1), [v(3, 8).to(low)], region, dim=1, correction=1, keepdim=False)
    for op in ("amax", "amin"):
        p.add("pass", op, lambda x, f=getattr(torch, op): f(x, 1), [v(3, 8).to(low)], region, dim=1, keepdim=False)
    for op in ("cat", "stack"):
        for first, second in ((low, low), (low, F32), (F32, low)):
            p.add("pass", op, lambda x, y, f=getattr(torch, op): f((x, y), 0), [v(2, 3).to(first), v(2, 3).to(second)], region, dim=0)
    for training in (True, False):
        w, b, m, s = v(4), v(4), v(4), v(4, low=0.5, high=2)
        p.add("pass", "batch_norm", lambda x, w, b, m, s, t=training: F.batch_norm(x, m.clone(), s.clone(), w, b, t, 0.1, 1e-5),
              [v(6, 4).to(low), w, b, m, s], region, "batch_norm: output only", training=training, momentum=0.1, eps=1e-5)
    p.add("pass", "embedding", lambda w, i: F.embedding(i, w), [v(4, 3), torch.tensor([3, 0, 3])], region, "embedding(weight, indices)")
    mask = torch.tensor([True, False, True])
    for first, second in ((low, low), (low, F32)):
        p.add("pass", "where", torch.where, [mask, v(3).to(first), v(3).to(second)], region)
    p.add("pass", "clamp", lambda x: torch.clamp(x, -0.5, 0.5), [v(6).to(low)], region, min=-0.5, max=0.5)
    p.add("pass", "masked_fill", lambda x, m: x.masked_fill(m, -10.0), [v(3).to(low), mask], region, value=-10.0)
    p.add("pass", "tril", torch.tril, [v(3, 3).to(low)], region, diagonal=0)
    p.add("pass", "gather", lambda x, i: torch.gather(x, 0, i), [v(4).to(low), torch.tensor([3, 3, 0])], region, dim=0)
    p.add("pass", "dropout", lambda x: F.dropout(x, 0.0, True), [v(5).to(low)], region, p=0.0, training=True)
    p.add("pass", "lt", torch.lt, [v(4).to(low), v(4)], region)
    p.add("pass", "argmax", lambda x: torch.argmax(x, 1), [v(3, 5).to(low)], region, dim=1, keepdim=False)


def further(p, region):
    """Added later: at the end, so that the others keep their numbers."""
    low, v = LOW[region], p.values
    for op, function, shapes, terms in (("addr", torch.addr, [(4, 3), (4,), (3,)], 2),
                                        ("addbmm", torch.addbmm, [(3, 2), (2, 3, 5), (2, 5, 2)], 11)):
        for first in (F32, low):
            inputs = [v(*s) for s in shapes]
            inputs[0] = inputs[0].to(first)
            p.add("lower", op, function, inputs, region, "", absolute(function), terms, beta=1.0, alpha=1.0)
    # Not on PyTorch's list, where it is a product that passes: Halfstep counts it among the matrix products.
    p.add("lower", "outer", torch.outer, [v(4), v(3)], region)
    for first, second in ((low, low), (low, F32), (F32, low), (F32, F32)):
        p.add("promote", "tensordot", lambda a, b: torch.tensordot(a, b, 1), [v(3, 6).to(first), v(6, 2).to(second)], region,
              "", absolute(lambda a, b: torch.tensordot(a, b, 1)), 6, dims=1)


def images(p, region):
    """With a generator of their own: entries can follow."""
    low, v = LOW[region], p.values
    for dtype in (low, F32):
        for mode, align in (("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True)):
            p.add("fp32", "interpolate", lambda x, m=mode, a=align: F.interpolate(x, size=[5, 3], mode=m, align_corners=a),
                  [v(1, 2, 3, 4).to(dtype)], region, size=[5, 3], mode=mode, align_corners=align)
    p.add("pass", "max_pool2d", lambda x: F.max_pool2d(x, [2, 2]), [v(1, 2, 4, 4).to(low)], region, "max_pool2d: values only",
          kernel=[2, 2])
    p.add("pass", "avg_pool2d", lambda x: F.avg_pool2d(x, [3, 3]), [v(1, 2, 6, 6).to(low)], region, kernel=[3, 3])
    p.add("pass", "adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, [1, 1]), [v(1, 2, 6, 6).to(low)], region, size=[1, 1])
    p.add("pass", "pad", lambda x: F.pad(x, [1, 2], mode="reflect"), [v(1, 2, 6).to(low)], region, pads=[1, 2], mode="reflect")


def convolutions(p, region):
    low, v = LOW[region], p.values
    for op, x, w, terms, options in (
            ("conv1d", (2, 4, 7), (6, 2, 3), 7, dict(stride=[2], padding=[1], groups=2)),
            ("conv2d", (2, 3, 5, 4), (4, 3, 3, 2), 19, dict(padding=[1, 0])),
            ("conv2d", (1, 4, 5, 5), (4, 1, 3, 3), 10, dict(dilation=[2, 1], groups=4)),
            ("conv_transpose1d", (2, 3, 4), (3, 2, 3), 10, dict(stride=[2], output_padding=[1])),
            ("conv_transpose2d", (1, 4, 3, 3), (4, 1, 3, 2), 13, dict(stride=[2, 1], padding=[1, 0], groups=2))):
        function = getattr(F, op)
        out = w[1] * options.get("groups", 1) if "transpose" in op else w[0]

        def call(*inputs, function=function, options=options):
            return function(*inputs, **options)
        # What a layer has: float32 parameters, and an input of either kind; then the reverse.
        for kinds in ((F32, F32, F32), (low, F32, F32), (F32, low, low)):
            inputs = [v(*shape).to(kind) for shape, kind in zip((x, w, (out,)), kinds)]
            p.add("lower", op, call, inputs, region, "", absolute(call), terms, **options)
        p.add("lower", op, call, [v(*x), v(*w)], region, "", absolute(call), terms, **options)
    p.add("lower", "conv2d", F.conv2d, [v(1, 2, 3, 3).to(F64), v(1, 2, 2, 2).to(F64)], region)


def detection(p, region):
    low = LOW[region]

    def corners(n, dtype):
        place = p.values(n, 2, low=0, high=4)
        return torch.cat([place, place + p.values(n, 2, low=1, high=3)], 1).to(dtype)
    pairwise = {"iou": tv.box_iou, "giou": tv.generalized_box_iou, "diou": tv.distance_box_iou, "ciou": tv.complete_box_iou}
    for kind, function in pairwise.items():
        for first, second in ((low, low), (low, F32)):
            p.add("fp32", "box_iou", function, [corners(3, first), corners(2, second)], region, kind=kind)
    for first, second in ((low, low), (F32, low)):
        p.add("fp32", "paired_box_iou", lambda a, b: 1 - tv.complete_box_iou_loss(a, b), [corners(3, first), corners(3, second)],
              region, kind="ciou")
    rows = torch.tensor([[0, 1], [2, 1], [0, 0]])
    for first, second in ((low, low), (low, F32), (F32, low)):
        p.add("promote", "scatter_amax", lambda x, i, s: torch.scatter_reduce(x, 0, i, s, "amax"),
              [p.values(3, 2).to(first), rows, p.values(3, 2).to(second)], region, dim=0)


def quantization(p, region):
    low, scale, zero = LOW[region], torch.tensor([0.03]), torch.tensor([5], dtype=torch.int32)

    def fake(x):
        # The result is rounded to the region's dtype after it is quantized.
        y = torch.fake_quantize_per_tensor_affine(x.float() if x.dtype != F64 else x, 0.03, 5, -128, 127)
        return y if x.dtype == F64 else y.to(low)

    def learnable(x):
        y = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero.float(), -128, 127, 1.0)
        return y if x.dtype == F64 else y.to(low)

    for op, function in (("fake_quantize", fake), ("fake_quantize_learnable", learnable)):
        for dtype in (F32, low, F64):
            # Not near the middle of a step, where the float64 reference may go another way.
            steps = torch.tensor([-150, -128, -3, 0, 1, 90, 127, 140]).double() + p.values(8, low=-0.3, high=0.3).double()
            x = (steps * 0.03).to(dtype)
            p.add("low_output", op, lambda x, s, z, f=function: f(x), [x, scale, zero], region,
                  quant_min=-128, quant_max=127)


def make():
    file = GoldenFile("policy_ops.json")
    p = Policy(file, 20262)
    for region in LOW:
        for part in (lower, fp32, fp32_dtype, promote, others):
            part(p, region)
    for region in LOW:
        further(p, region)
    p.generator = torch.Generator().manual_seed(20276)
    for region in LOW:
        images(p, region)
    p.generator = torch.Generator().manual_seed(20277)
    for region in LOW:
        convolutions(p, region)
    p.generator = torch.Generator().manual_seed(20282)
    for region in LOW:
        detection(p, region)
    p.generator = torch.Generator().manual_seed(20283)
    for region in LOW:
        quantization(p, region)
    file.write()
