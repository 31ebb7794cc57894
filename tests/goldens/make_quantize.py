# SPDX-License-Identifier: Apache-2.0
"""quantize.json: fake quantization and quantization to integers, with gradients; observers and the parameters of ranges.

PyTorch deletes torch.ao.quantization in steps; its arithmetic is what int8 networks were trained with, and stays the
reference."""
import warnings

import numpy
import torch
import torch.ao.quantization as ao
from golden_format import GoldenFile, values

INF, NAN = float("inf"), float("nan")
I32 = torch.int32


def tensor(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)


class Quantize:
    def __init__(self, file, seed):
        self.file = file
        self.generator = torch.Generator().manual_seed(seed)
        self.counts = {}

    def values(self, *shape, **options):
        return values(self.generator, *shape, dtype=options.pop("dtype", torch.float32), **options)

    def add(self, op, attributes, inputs, torch_name="", **parts):
        self.counts[op] = self.counts.get(op, -1) + 1
        self.file.add(f"{op}/{self.counts[op]}", op, torch_name or op, attributes, inputs, **parts)


def fake_quantize(q):
    def add(x, scale, zero, low, high, axis=None):
        # PyTorch's kernel for whole tensors rounds float64 results to float32, that for channels doesn't.
        if axis is None and x.dtype == torch.float64:
            return
        leaf = x.clone().requires_grad_()
        if axis is None:
            y = torch.fake_quantize_per_tensor_affine(leaf, scale, zero, low, high)
        else:
            y = torch.fake_quantize_per_channel_affine(leaf, scale, zero, axis % x.dim(), low, high)
        g = q.values(*x.shape, dtype=x.dtype)
        grad, = torch.autograd.grad(y, leaf, g)
        q.add("fake_quantize", {"quant_min": low, "quant_max": high, "axis": axis}, [x, scale, zero], cotangents=[g],
              outputs=[y], grads=[grad, None, None])

    edge = tensor(-1.6, -1.28, -1.275, -.005, .005, .015, .025, 1.27, 1.275, 1.3, 0.0, -0.0)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        add(edge.to(dtype), tensor(.01), tensor(0, dtype=I32), -128, 127)
        for low, high, zero in ((0, 255, 86), (-8, 7, 0), (-2, 1, 0), (0, 15, 3), (-32768, 32767, 11), (0, 127, 64)):
            span = 6.0 / (high - low)
            add(q.values(5, 13, low=-4, high=4).to(dtype), tensor(span), tensor(zero, dtype=I32), low, high)
        scales = q.values(4, low=0.01, high=0.05)
        zeros = torch.tensor([0, 3, -7, 120], dtype=I32)
        add(q.values(3, 4, 5, low=-5, high=5).to(dtype), scales, zeros, -128, 127, 1)
        add(q.values(4, 3, 3, 3, low=-5, high=5).to(dtype), scales, torch.zeros(4, dtype=I32), -128, 127, 0)
        add(q.values(2, 3, 4, low=-5, high=5).to(dtype), scales, zeros, -128, 127, -1)
        # A zero point of floats: with channels it has a fraction, without them it is cut.
        add(q.values(3, 4, 5, low=-5, high=5).to(dtype), scales, tensor(0.25, 2.5, -7.75, 119.5), -128, 127, 1)
        add(q.values(29, low=-5, high=5).to(dtype), tensor(0.03), tensor(3.75), -128, 127)
        add(q.values(29, low=-5, high=5).to(dtype), tensor(0.03), tensor(-3.75), -128, 127)
    add(tensor(INF, -INF, NAN, 1e30, -1e30, 3e38, 1e-45), tensor(.01), tensor(5, dtype=I32), -128, 127)
    # Halves of steps: the reciprocal of the scale is not exact.
    add(torch.arange(-300, 300, dtype=torch.float32) * 0.5 * 0.07, tensor(0.07), tensor(1, dtype=I32), -128, 127)
    add(torch.arange(-300, 300, dtype=torch.float32).reshape(2, 300) * 0.5 * 0.07, tensor(0.07, 0.21),
        torch.tensor([1, 0], dtype=I32), -128, 127, 0)


def learnable(q):
    def add(x, scale, zero, low, high, factor, axis=None):
        leaves = [t.clone().requires_grad_() for t in (x, scale, zero)]
        if axis is None:
            y = torch._fake_quantize_learnable_per_tensor_affine(*leaves, low, high, factor)
        else:
            y = torch._fake_quantize_learnable_per_channel_affine(*leaves, axis, low, high, factor)
        g = q.values(*x.shape, dtype=x.dtype)
        grads = torch.autograd.grad(y, leaves, g)
        # The sums again in float64, and of what they are sums.
        wide, shape = x.double(), [-1 if i == axis else 1 for i in range(x.dim())]
        s, z = (t.double().reshape(shape if axis is not None else []) for t in (scale, zero.round().clamp(low, high)))
        whole = torch.round(x.float() * (1 / scale).reshape(shape if axis is not None else [])).double() + z
        # Where x is in the middle of a step, PyTorch's backward pass, which adds before it rounds, may go another way.
        assert (torch.round(wide / s + z) == whole).all()
        below, above = whole < low, whole > high
        slope = torch.where(below, low - z, torch.where(above, high - z, whole - z - wide / s))
        terms = {"scale": g.double() * slope * factor,
                 "zero": torch.where(below | above, g.double() * -s * factor, 0.0 * wide)}
        dims = [i for i in range(x.dim()) if i != axis]
        tensors = {}
        for name, t in terms.items():
            tensors[name] = t.sum(dims).reshape(scale.shape)
            tensors[f"{name}_magnitude"] = t.abs().sum(dims).reshape(scale.shape)
        q.add("fake_quantize_learnable",
              {"quant_min": low, "quant_max": high, "axis": axis, "grad_factor": factor}, [x, scale, zero],
              cotangents=[g], outputs=[y], grads=list(grads), tensors=tensors)

    x = torch.linspace(-2, 2, 9)
    add(x, tensor(.5), tensor(0.0), -2, 1, 1.0)
    # Zero points from 0 on, which PyTorch's backward pass for whole tensors rounds as its forward pass does.
    add(q.values(7, 11, low=-4, high=4), tensor(0.113), tensor(7.25), -8, 20, 0.25)
    add(q.values(50, low=-4, high=4), tensor(0.02), tensor(100.0), 0, 255, 1.0)
    zeros = tensor(0.0, -2.25, 3.75, -1.0)
    add(q.values(3, 4, 5, low=-4, high=4), q.values(4, low=0.05, high=0.3), zeros, -8, 7, 0.5, 1)
    add(q.values(2, 5, 4, low=-4, high=4), q.values(4, low=0.05, high=0.3), zeros, -8, 7, 1.0, 2)
    add(q.values(4, 9, low=-4, high=4), q.values(4, low=0.05, high=0.3), torch.zeros(4), -8, 7, 1.0, 0)


def pact(q):
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = q.values(4, 15, low=-2, high=3).to(dtype)
        x[0, :3] = tensor(0.0, 1.5, -0.0).to(dtype)
        leaf, alpha = x.clone().requires_grad_(), tensor(1.5).requires_grad_()
        # The paper's function; where x is 0 its slope is relu's here.
        wide = leaf.double()
        y = torch.where(wide >= alpha, alpha.double(), torch.relu(wide)).to(dtype)
        g = q.values(4, 15, dtype=dtype)
        grads = torch.autograd.grad(y, [leaf, alpha], g)
        q.add("pact", {}, [x, alpha], "where(x >= alpha, alpha, relu(x))", cotangents=[g], outputs=[y], grads=list(grads))


def integers(q):
    kinds = {torch.quint8: "u8", torch.qint8: "i8", torch.qint32: "i32"}
    x = torch.cat([q.values(60, low=-5, high=5), torch.arange(-20, 20) * 0.5 * 0.07])
    for kind, name in kinds.items():
        for scale, zero in ((0.04, 11), (0.07, 3)):
            r = torch.quantize_per_tensor(x, scale, zero, kind)
            # qint32 is clamped to 32 bits, which nothing here reaches; Halfstep's to 16.
            q.add("quantize", {"dtype": name}, [x, tensor(scale), tensor(zero, dtype=I32)], "quantize_per_tensor",
                  outputs=[r.int_repr()])
            q.add("dequantize", {}, [r.int_repr(), tensor(scale), tensor(zero, dtype=I32)], "dequantize",
                  outputs=[r.dequantize()])
    y = q.values(3, 4, 5, low=-5, high=5)
    scales, zeros = q.values(4, low=0.01, high=0.05), torch.tensor([0, 3, 7, 120])
    for kind, name in ((torch.quint8, "u8"), (torch.qint8, "i8")):
        r = torch.quantize_per_channel(y, scales, zeros, 1, kind)
        q.add("quantize", {"dtype": name, "axis": 1}, [y, scales, zeros.to(I32)], "quantize_per_channel",
              outputs=[r.int_repr()])
        q.add("dequantize", {"axis": 1}, [r.int_repr(), scales, zeros.to(I32)], "dequantize", outputs=[r.dequantize()])
    r = torch.quantize_per_channel(y, scales, tensor(0.25, 2.5, 7.75, 119.5), 1, torch.quint8)
    q.add("quantize", {"dtype": "u8", "axis": 1}, [y, scales, tensor(0.25, 2.5, 7.75, 119.5)], "quantize_per_channel",
          outputs=[r.int_repr()])
    q.add("dequantize", {"axis": 1}, [r.int_repr(), scales, tensor(0.25, 2.5, 7.75, 119.5)], "dequantize",
          outputs=[r.dequantize()])


def parameters(q):
    lows = torch.cat([tensor(-1.0, 0.0, 0.5, -3.0, 0.0, -1e-9, -7.5, -1e20), q.values(40, low=-5, high=1)])
    highs = torch.cat([tensor(2.0, 0.0, 2.0, -1.0, 1e-9, 1e-9, 0.0, 1e20), q.values(40, low=1, high=6)])
    for low, high, dtype in ((0, 255, torch.quint8), (0, 127, torch.quint8), (-128, 127, torch.qint8),
                             (-127, 127, torch.qint8), (-8, 7, torch.qint8), (0, 15, torch.quint8),
                             (-2, 1, torch.qint8), (-32768, 32767, torch.qint32)):
        for symmetric in (False, True):
            scheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
            # The whole range of a dtype is its default; others are custom.
            custom = {} if (low, high) in ((0, 255), (-128, 127)) else {"quant_min": low, "quant_max": high}
            observer = ao.PerChannelMinMaxObserver(dtype=dtype, qscheme=scheme, **custom)
            scale, zero = observer._calculate_qparams(lows, highs)
            q.add("quantization_parameters", {"quant_min": low, "quant_max": high, "symmetric": symmetric},
                  [lows, highs], "calculate_qparams", outputs=[scale, zero.to(I32)])


def observers(q):
    """Batches in `tensors` as batch0, ...; after each, min, max, scale and zero point as min0, ..."""
    def run(kind, observer, batches, **attributes):
        tensors = {}
        for i, x in enumerate(batches):
            observer(x)
            scale, zero = observer.calculate_qparams()
            tensors |= {f"batch{i}": x, f"min{i}": observer.min_val.clone(), f"max{i}": observer.max_val.clone(),
                        f"scale{i}": scale, f"zero{i}": zero.to(I32)}
            if kind == "histogram":
                tensors[f"histogram{i}"] = observer.histogram.clone()
        q.add("observer", {"kind": kind, "batches": len(batches), "quant_min": observer.quant_min,
                           "quant_max": observer.quant_max, **attributes}, [], type(observer).__name__, tensors=tensors)

    small = [tensor(-1.0, 0.0, 0.5, 2.0), tensor(-3.0, 4.0), tensor(0.25, 0.5)]
    batches = [q.values(4, 3, 5, low=-1 - i, high=2 + 0.5 * i) for i in range(4)]
    for data in (small, batches):
        for kind, plain in (("min_max", ao.MinMaxObserver), ("moving_average", ao.MovingAverageMinMaxObserver)):
            run(kind, plain(), data, symmetric=False)
            run(kind, plain(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric), data, symmetric=True)
            run(kind, plain(quant_min=0, quant_max=127), data, symmetric=False)
    run("moving_average", ao.MovingAverageMinMaxObserver(averaging_constant=1.0), batches, symmetric=False,
        averaging_constant=1.0)
    for kind, channels in (("min_max", ao.PerChannelMinMaxObserver),
                           ("moving_average", ao.MovingAveragePerChannelMinMaxObserver)):
        run(kind, channels(ch_axis=0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric), batches, symmetric=True,
            axis=0)
        run(kind, channels(ch_axis=1, quant_min=-127, quant_max=127, dtype=torch.qint8,
                           qscheme=torch.per_channel_affine), batches, symmetric=False, axis=1)
    # Ranges that grow, that stay, of one sign, and of one value.
    normal = [values(q.generator, 400, dtype=torch.float32) * (1 + 0.4 * i) for i in range(3)]
    for data in (normal, [normal[2], normal[0]], [x.abs() for x in normal], [torch.full((5,), 2.0), normal[0]]):
        run("histogram", ao.HistogramObserver(bins=128), data, symmetric=False, bins=128)
        run("histogram", ao.HistogramObserver(bins=96, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric), data,
            symmetric=True, bins=96)


def entropy(q):
    """The bound of least divergence, by numpy, as Migacz' slides of 2017 describe it."""
    for levels, magnitudes in ((16, q.values(1500).abs()), (32, q.values(1000).abs() ** 2),
                               (16, q.values(1000, low=0, high=1)), (64, q.values(1500).abs())):
        bins = 256
        top = magnitudes.max()
        counts = torch.histc(magnitudes[magnitudes > 0], bins, min=0, max=float(top)).double().numpy()
        divergences = numpy.full(bins + 1, numpy.inf)
        for n in range(levels, bins + 1):
            reference = counts[:n].copy()
            reference[-1] += counts[n:].sum()
            level = numpy.arange(n) * levels // n
            occupied = counts[:n] > 0
            sums = numpy.bincount(level[occupied], counts[:n][occupied], levels)
            share = numpy.bincount(level[occupied], minlength=levels)
            candidate = numpy.where(occupied, sums[level] / numpy.maximum(share[level], 1), 0)
            p, c = reference / reference.sum(), candidate / candidate.sum()
            with numpy.errstate(divide="ignore", invalid="ignore"):
                divergences[n] = numpy.where(p > 0, p * numpy.log(p / c), 0).sum()
        best = bins - numpy.argmin(divergences[::-1])
        # Signed and symmetric: half of the integers are for magnitudes.
        q.add("entropy", {"quant_min": -levels, "quant_max": levels - 1, "bins": bins}, [magnitudes], "numpy",
              outputs=[torch.tensor(float(top) * best / bins, dtype=torch.float64)])


def percentile(q):
    """Quantiles of the values themselves; a histogram knows them to a bin."""
    x = q.values(2000)
    for share in (99.9, 99.0, 90.0):
        cut = (1 - share / 100) / 2
        both = numpy.quantile(x.double().numpy(), [cut, 1 - cut])
        one = numpy.quantile(x.abs().double().numpy(), 1 - 2 * cut)
        q.add("percentile", {"percentile": share}, [x] if share == 99.9 else [], "numpy.quantile",
              outputs=[torch.tensor([*both, one], dtype=torch.float64)])


def make():
    warnings.filterwarnings("ignore")
    file = GoldenFile("quantize.json")
    q = Quantize(file, 20261123)
    for part in (fake_quantize, learnable, pact, integers, parameters, observers, entropy, percentile):
        part(q)
    file.write()
