# SPDX-License-Identifier: Apache-2.0
"""Writes golden files: see README.md beside this file for the format."""
import json
import math
import pathlib

import numpy
import torch

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def number(value, dtype):
    """A JSON token: the shortest decimal that reads back as the same value. f32 reads back through float."""
    if dtype == torch.bool:
        return "1" if value else "0"
    if not dtype.is_floating_point:
        return str(int(value))
    if math.isnan(value):
        return '"nan"'
    if math.isinf(value):
        return '"inf"' if value > 0 else '"-inf"'
    if dtype != torch.float32:
        text = repr(float(value))
    else:
        text = str(numpy.float32(value))
        assert numpy.float32(float(text)) == numpy.float32(value)
    return text[:-2] if text.endswith(".0") and text != "-0.0" else text


def tensor_json(tensor):
    if tensor is None:
        return "null"
    tensor = tensor.detach().contiguous()
    flat = tensor.reshape(-1)
    values = (flat.to(torch.float64) if flat.dtype.is_floating_point else flat).tolist()
    data = ",".join(number(v, tensor.dtype) for v in values)
    shape = ",".join(map(str, tensor.shape))
    return f'{{"dtype":"{DTYPES[tensor.dtype]}","shape":[{shape}],"data":[{data}]}}'


def attribute_json(value):
    if isinstance(value, float):
        return number(value, torch.float64) if not value.is_integer() or math.isinf(value) else f"{value!r}"
    if isinstance(value, torch.dtype):
        return f'"{DTYPES[value]}"'
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(attribute_json(v) for v in value) + "]"
    return json.dumps(value)


class GoldenFile:
    """Collects entries and writes them one a line, so that a regenerated file has a readable difference."""

    def __init__(self, name):
        self.name = name
        self.lines = []
        self.names = set()

    def add(self, name, op, torch_name="", attributes=None, inputs=(), cotangents=(), outputs=(), grads=(), exact=(),
            tensors=None):
        assert name not in self.names, name
        self.names.add(name)
        parts = [f'"name":{json.dumps(name)}', f'"op":{json.dumps(op)}']
        if torch_name:
            parts.append(f'"torch":{json.dumps(torch_name)}')
        attributes = {k: v for k, v in (attributes or {}).items() if v is not None}
        parts.append('"attributes":{' + ",".join(f"{json.dumps(k)}:{attribute_json(v)}" for k, v in attributes.items()) + "}")
        for key, values in (("inputs", inputs), ("cotangents", cotangents), ("outputs", outputs), ("grads", grads),
                            ("exact", exact)):
            if len(values):
                parts.append(f'"{key}":[' + ",".join(tensor_json(v) for v in values) + "]")
        if tensors:
            parts.append('"tensors":{' + ",".join(f"{json.dumps(k)}:{tensor_json(v)}" for k, v in tensors.items()) + "}")
        self.lines.append("{" + ",".join(parts) + "}")

    def write(self):
        version = torch.__version__.split("+")[0]
        text = f'{{"header":{{"format":1,"torch":"{version}","made_by":"tests/goldens/make_goldens.py"}},\n"entries":[\n'
        text += ",\n".join(self.lines) + "\n]}\n"
        json.loads(text)
        path = HERE / self.name
        path.write_text(text)
        print(f"{self.name}: {len(self.lines)} entries, {len(text) / 1e3:.0f} kB")


def values(generator, *shape, dtype=torch.float64, low=None, high=None):
    """Random values: normal, or uniform in [low, high). Rounded to f32 so that they read short and cast exactly."""
    if low is None:
        result = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        result = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    # Five significant decimals, then f32: every value is short in the file.
    scaled = torch.tensor([float(f"{v:.5g}") for v in result.reshape(-1).tolist()], dtype=torch.float64).reshape(result.shape)
    return scaled.to(torch.float32).to(dtype)
