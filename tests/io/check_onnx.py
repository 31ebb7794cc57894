#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks ONNX files against what the network that was exported computes.

usage: check_onnx.py FOLDER

For each FOLDER/NAME.json, NAME.onnx goes through ONNX's checker and strict shape inference, and ONNX's reference
evaluator runs it on each of the recorded runs; so does ONNX Runtime, where it is installed. The JSON file:

    {"tolerance": 1e-5,                               largest error, as a share of the output's largest value
     "runs": [{"inputs": [TENSOR...], "outputs": [TENSOR...]}...]}

where TENSOR is {"name", "dtype": NumPy's name, "shape", "file": little-endian elements, row-major, in FOLDER, and
perhaps "step": of the grid that the output is quantized to}. Of an output with a step, elements may be off by one step,
and none by more; how many are off is printed. ONNX Runtime runs each file twice: as it optimizes it, in integers where
the file is quantized, and as it is written. Prints a line a file and run; exits with 1 if anything is wrong.
"""
import json
import pathlib
import sys

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

try:
    import onnxruntime
except ImportError:
    onnxruntime = None


def load(folder, tensor):
    data = np.fromfile(folder / tensor["file"], dtype=np.dtype(tensor["dtype"]).newbyteorder("<"))
    return data.reshape(tensor["shape"])


def check_declared(model, run):
    """What is wrong with the declared names, types and shapes, as the run has them."""
    for declared, given in ((model.graph.input, run["inputs"]), (model.graph.output, run["outputs"])):
        if [d.name for d in declared] != [g["name"] for g in given]:
            return f"declares {[d.name for d in declared]}, expected {[g['name'] for g in given]}"
        for d, g in zip(declared, given):
            dims = [x.dim_param or x.dim_value for x in d.type.tensor_type.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(d.type.tensor_type.elem_type)
            same = len(dims) == len(g["shape"]) and all(isinstance(x, str) or x == s for x, s in zip(dims, g["shape"]))
            if not same or dtype != np.dtype(g["dtype"]):
                return f"declares {d.name} as {dtype} {dims}, expected {g['dtype']} {g['shape']}"
    return ""


def check_inferred(model, inferred):
    """What is wrong with the declared outputs, as shape inference has them."""
    for declared, found in zip(model.graph.output, inferred.graph.output):
        if declared.type.tensor_type.elem_type != found.type.tensor_type.elem_type:
            return f"declares another type for {declared.name} than inference finds"
        for d, f in zip(declared.type.tensor_type.shape.dim, found.type.tensor_type.shape.dim):
            if f.HasField("dim_value") and (d.dim_param or d.dim_value != f.dim_value):
                return f"declares {d.dim_param or d.dim_value} for {declared.name}, inference finds {f.dim_value}"
    return ""


def for_reference(model):
    """The reference evaluator has QuantizeLinear and DequantizeLinear from opset 19 on, where they do the same."""
    if not any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import[0].version = max(19, copy.opset_import[0].version)
    return copy


def session(model, level):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def check(folder, name):
    record = json.loads((folder / f"{name}.json").read_text())
    model = onnx.load(folder / f"{name}.onnx")
    onnx.checker.check_model(model, full_check=True)
    # Without the declared outputs, so that what is found there is inference's own.
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=True)
    wrong = check_inferred(model, inferred)
    if wrong:
        return [f"{name}: {wrong}"]
    evaluators = {"reference": ReferenceEvaluator(for_reference(model))}
    if onnxruntime:
        evaluators["runtime"] = session(model, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
        evaluators["runtime as written"] = session(model, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    problems = []
    for who, evaluator in evaluators.items():
        problems += run_all(folder, f"{name}, {who}", model, record, evaluator)
    return problems


def run_all(folder, name, model, record, evaluator):
    """What is wrong with an evaluator's results."""
    problems = []
    for i, run in enumerate(record["runs"]):
        wrong = check_declared(model, run)
        if wrong:
            problems.append(f"{name}, run {i}: {wrong}")
            continue
        results = evaluator.run(None, {t["name"]: load(folder, t) for t in run["inputs"]})
        for tensor, result in zip(run["outputs"], results):
            expected = load(folder, tensor)
            result = np.asarray(result)
            if result.shape != expected.shape or result.dtype != expected.dtype:
                problems.append(f"{name}, run {i}: {tensor['name']} is {result.dtype} {list(result.shape)}, "
                                f"expected {expected.dtype} {list(expected.shape)}")
                continue
            a, b = result.astype(np.float64), expected.astype(np.float64)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            finite = np.isfinite(b)
            if "step" in tensor:
                steps = np.abs(a - b) / tensor["step"]
                off, far = int((steps > 0.5).sum()), int((steps > 1.5).sum())
                print(f"{name}, run {i}: {tensor['name']} {list(result.shape)} is off by a step in {off} of {a.size} "
                      f"elements, by more in {far}")
                if far or not np.isfinite(a).all():
                    problems.append(f"{name}, run {i}: {tensor['name']} is off by more than a step in {far} elements")
                continue
            scale = float(np.abs(b[finite]).max()) if finite.any() else 0.0
            error = float(np.abs(a - b)[~same].max()) if not same.all() else 0.0
            share = error / scale if scale else error
            print(f"{name}, run {i}: {tensor['name']} {list(result.shape)} differs by {share:.2g} of {scale:.3g}")
            if not share <= record["tolerance"]:
                problems.append(f"{name}, run {i}: {tensor['name']} differs by {share:.3g} of its largest value, "
                                f"expected at most {record['tolerance']:.3g}")
    return problems


def main():
    folder = pathlib.Path(sys.argv[1])
    problems = []
    names = sorted(path.stem for path in folder.glob("*.json"))
    for name in names:
        try:
            problems += check(folder, name)
        except Exception as error:  # the next file is still worth a look
            problems.append(f"{name}: {type(error).__name__}: {error}")
    for problem in problems:
        print("WRONG:", problem)
    print(f"{len(names)} files, {len(problems)} problems, onnx {onnx.__version__}")
    return 1 if problems or not names else 0


if __name__ == "__main__":
    sys.exit(main())
