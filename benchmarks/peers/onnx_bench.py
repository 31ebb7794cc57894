#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times ONNX Runtime on the CPU, case by case on request: bench_server.py says how to talk to it.

usage: onnx_bench.py --files FOLDER [--threads N]

Cases: inference/NAME/DTYPE/bBATCH runs NAME-DTYPE.onnx of the folder on random pictures, with ONNX Runtime's own options but for
the threads. DTYPE f32 or int8.
"""
import functools
import pathlib
import sys

from bench_server import Server, arguments_parser

try:
    import numpy
    import onnxruntime
except ImportError as failure:
    sys.exit(f"onnx_bench: {failure}")


def inference(path, batch, threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    images = session.get_inputs()[0]
    inputs = {images.name: numpy.random.default_rng(1).random((batch, *images.shape[1:]), numpy.float32)}
    return lambda: session.run(None, inputs)


def main():
    parser = arguments_parser()
    parser.add_argument("--files", type=pathlib.Path, required=True)
    options = parser.parse_args()
    table = {f"inference/{name}/{dtype}/b{batch}":
             functools.partial(inference, options.files / f"{name}-{dtype}.onnx", batch, options.threads)
             for name in ("resnet50", "yolov5n") for dtype in ("f32", "int8") for batch in (1, 32)}
    Server("onnx", onnxruntime.__version__, options.threads, table).serve()


if __name__ == "__main__":
    main()
