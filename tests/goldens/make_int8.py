# SPDX-License-Identifier: Apache-2.0
"""int8.json: PyTorch's quantized ops on integers.

A value is rounded in float32 here and there, in another order of its factors: cases in which one lies within 1e-3 of the
middle of two integers are drawn again."""
import warnings

import numpy
import torch
from golden_format import GoldenFile

Q = torch.ops.quantized


class Cases:
    def __init__(self, file, seed):
        self.file = file
        self.generator = torch.Generator().manual_seed(seed)
        self.counts = {}

    def bytes(self, *shape, low=0, high=256):
        return torch.randint(low, high, shape, generator=self.generator)

    def add(self, op, torch_name, attributes, inputs, output):
        self.counts[op] = self.counts.get(op, -1) + 1
        self.file.add(f"{op}/{self.counts[op]}", op, torch_name, attributes, inputs, outputs=[output.int_repr()])


def quantized(integers, scale, zero_point):
    return torch._make_per_tensor_quantized_tensor(integers.to(torch.uint8), scale, zero_point)


def far_from_ties(values, scale):
    t = values.double().numpy() / scale
    return numpy.abs(t - numpy.floor(t) - 0.5).min() > 1e-3


def draw(make):
    """The first of the cases that make() draws without a value near the middle of two integers."""
    while True:
        case, values, scale = make()
        if far_from_ties(values, scale):
            return case


def product(cases, op, shape, weight_shape, relu, residual=False, **geometry):
    def make():
        # Weights of 7 bits: sums of pairs fit 16 bits on processors without VNNI, where PyTorch's would saturate.
        x, w = cases.bytes(*shape), cases.bytes(*weight_shape, low=-64, high=64)
        scales = torch.rand(weight_shape[0], generator=cases.generator).float() * 0.01 + 0.001
        bias = cases.bytes(weight_shape[0], low=-2000, high=2000)
        a = {"input_scale": 0.02, "input_zero_point": 113, "output_scale": 0.25, "output_zero_point": 77, "relu": relu,
             **geometry}
        qx = quantized(x, a["input_scale"], a["input_zero_point"])
        qw = torch._make_per_channel_quantized_tensor(w.to(torch.int8), scales.double(),
                                                      torch.zeros(weight_shape[0], dtype=torch.long), 0)
        real_bias = (bias.double() * a["input_scale"] * scales.double()).float()
        real_x, real_w = qx.dequantize().double(), w.double() * scales.double().reshape(-1, *[1] * (w.dim() - 1))
        out = (a["output_scale"], a["output_zero_point"])
        inputs = [x.to(torch.uint8), w.to(torch.int8), scales, bias.to(torch.int32)]
        if op == "linear_int8":
            packed = Q.linear_prepack(qw, real_bias)
            y = (Q.linear_relu if relu else Q.linear)(qx, packed, *out)
            real = torch.nn.functional.linear(real_x, real_w, real_bias.double())
        else:
            stride, padding, groups = geometry["stride"], geometry["padding"], geometry["groups"]
            packed = Q.conv2d_prepack(qw, real_bias, [stride] * 2, [padding] * 2, [1, 1], groups)
            real = torch.nn.functional.conv2d(real_x, real_w, real_bias.double(), stride, padding, 1, groups)
            if residual:
                a |= {"residual_scale": 0.3, "residual_zero_point": 90}
                r = cases.bytes(*real.shape)
                qr = quantized(r, 0.3, 90)
                real = real + qr.dequantize().double()
                y = (Q.conv2d_add_relu if relu else Q.conv2d_add)(qx, qr, packed, *out)
                inputs.append(r.to(torch.uint8))
            else:
                y = (Q.conv2d_relu if relu else Q.conv2d)(qx, packed, *out)
        return (a, inputs, y), real, out[0]

    a, inputs, y = draw(make)
    name = "quantized." + ("linear" if op == "linear_int8" else "conv2d_add" if residual else "conv2d")
    cases.add(op, name + ("_relu" if relu else ""), a, inputs, y)


def sums(cases):
    for relu in (False, True):
        def make():
            x, y = cases.bytes(3, 40), cases.bytes(3, 40)
            a = {"a_scale": 0.031, "a_zero_point": 120, "b_scale": 0.047, "b_zero_point": 99, "output_scale": 0.06,
                 "output_zero_point": 88, "relu": relu}
            qx, qy = quantized(x, 0.031, 120), quantized(y, 0.047, 99)
            z = (Q.add_relu if relu else Q.add)(qx, qy, 0.06, 88)
            return (a, [x.to(torch.uint8), y.to(torch.uint8)], z), qx.dequantize() + qy.dequantize(), 0.06
        a, inputs, z = draw(make)
        cases.add("add_int8", "quantized.add_relu" if relu else "quantized.add", a, inputs, z)


def means(cases):
    def make():
        x = cases.bytes(2, 5, 7, 6)
        qx = quantized(x, 0.05, 30)
        return ({"scale": 0.05, "zero_point": 30}, [x.to(torch.uint8)], qx.mean([2, 3])), \
            qx.dequantize().double().mean([2, 3]), 0.05
    a, inputs, y = draw(make)
    cases.add("mean_int8", "mean", a, inputs, y)


def make():
    warnings.filterwarnings("ignore")
    torch.backends.quantized.engine = "onednn"
    file = GoldenFile("int8.json")
    cases = Cases(file, 20261123)
    for relu in (False, True):
        product(cases, "conv2d_int8", (2, 3, 8, 7), (4, 3, 3, 3), relu, stride=1, padding=1, groups=1)
        product(cases, "conv2d_int8", (1, 8, 6, 6), (8, 1, 3, 3), relu, stride=2, padding=1, groups=8)
        product(cases, "conv2d_int8", (2, 16, 4, 4), (10, 16, 1, 1), relu, stride=1, padding=0, groups=1)
        product(cases, "conv2d_int8", (1, 6, 7, 7), (5, 6, 3, 3), relu, residual=True, stride=1, padding=1, groups=1)
        product(cases, "linear_int8", (3, 33), (7, 33), relu)
    sums(cases)
    means(cases)
    file.write()
