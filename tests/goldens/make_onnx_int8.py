#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quantizes networks of tests/goldens/onnx as ONNX Runtime does (QDQ) and records what it computes in integers.

usage: make_onnx_int8.py     (a Python with torch, onnx and onnxruntime)

Writes onnx/NAME_qdq.onnx and onnx_int8.json: inputs, the outputs of ONNX Runtime with all of its optimizations, which
compute in integers, and those of the operators as they are written, in float32. The attribute `step` is the scale of
the output's grid.
"""
import pathlib
import tempfile

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from golden_format import HERE, GoldenFile, values

FOLDER = HERE / "onnx"


class Batches(CalibrationDataReader):
    def __init__(self, name, batches):
        self.batches = iter([{name: b.numpy()} for b in batches])

    def get_next(self):
        return next(self.batches, None)


def step_of(model):
    """The scale of the DequantizeLinear that gives the only output."""
    scales = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    last = next(n for n in model.graph.node if model.graph.output[0].name in n.output)
    assert last.op_type == "DequantizeLinear", last.op_type
    return float(scales[last.input[1]])


def add(golden, name, source, activations, **options):
    generator = torch.Generator().manual_seed(len(golden.lines) + 1)
    network = onnx.load(FOLDER / f"{source}.onnx")
    port = network.graph.input[0]
    shape = [d.dim_value or 4 for d in port.type.tensor_type.shape.dim]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "quantized.onnx"
        quantize_static(FOLDER / f"{source}.onnx", path, Batches(port.name, [values(generator, *shape, dtype=torch.float32) for _ in range(16)]),
                        quant_format=QuantFormat.QDQ, activation_type=activations, weight_type=QuantType.QInt8, per_channel=True, **options)
        model = onnx.load(path)
    model.doc_string = model.producer_version = ""
    (FOLDER / f"{name}.onnx").write_bytes(model.SerializeToString())
    x = values(generator, *shape, dtype=torch.float32)
    outputs = []
    for level in (onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL):
        session_options = onnxruntime.SessionOptions()
        session_options.graph_optimization_level = level
        session = onnxruntime.InferenceSession(model.SerializeToString(), session_options, providers=["CPUExecutionProvider"])
        outputs.append(torch.from_numpy(session.run(None, {port.name: x.numpy()})[0]))
    golden.add(name, "onnx", attributes={"step": step_of(model)}, inputs=[x], outputs=outputs)


def main():
    np.random.seed(0)
    golden = GoldenFile("onnx_int8.json")
    add(golden, "residual_qdq", "residual", QuantType.QUInt8)
    add(golden, "residual_qdq_s8", "residual", QuantType.QInt8, extra_options={"ActivationSymmetric": True})
    add(golden, "mobile_qdq", "mobile", QuantType.QUInt8)
    golden.write()


if __name__ == "__main__":
    main()
