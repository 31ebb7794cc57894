#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the small files of torch.save in tests/goldens/pth and the seeds of the fuzz targets that read them.

usage: make_pth.py [--check]     --check: load what Halfstep wrote instead: make_pth.py --check FILE.pth FILE.json

What a test expects of a file is written in the test: the values here are counted, not drawn.
"""
import argparse
import collections
import io
import json
import pathlib
import pickle
import sys
import warnings
import zipfile

import torch

GOLDENS = pathlib.Path(__file__).resolve().parent / "pth"
CORPUS = pathlib.Path(__file__).resolve().parent.parent.parent / "fuzz" / "corpus"
DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "i64": torch.int64, "i32": torch.int32,
    "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}


def count(*shape, dtype=torch.float32, start=0):
    n = 1
    for size in shape:
        n *= size
    return torch.arange(start, start + n, dtype=torch.float32).reshape(shape).to(dtype)


def dtypes():
    return {name: torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).to(dtype) for name, dtype in DTYPES.items()} | {
        "halves": torch.tensor([0.5, -1.5, 65504.0, 2.0**-24, float("inf")], dtype=torch.float16)}


def layouts():
    base = count(4, 6)
    shared = count(2, 3, start=100)
    return {
        "transposed": count(2, 3).t(),
        "slice": base[1:3, 2:6:2],       # its storage is all of the 4 by 6
        "whole": base,
        "embedding.weight": shared, "decoder.weight": shared,      # tied
        "image": count(1, 2, 2, 3).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "expanded": torch.tensor([7.0]).expand(3),
        "parameter": torch.nn.Parameter(count(2)),
        "buffer": torch.nn.Buffer(count(3)),
    }


def module():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(count(*p.shape, start=10 * i))
    return net


def checkpoint():
    net = torch.nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.copy_(count(2, 3))
        net.bias.copy_(count(2, start=6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        net.weight.copy_(count(2, 3))
        net.bias.copy_(count(2, start=6))
    state = {"module." + k: v for k, v in net.state_dict().items()}
    return {"epoch": 90, "arch": "resnet50", "state_dict": collections.OrderedDict(state), "best_acc1": torch.tensor(76.25),
            "optimizer": optimizer.state_dict(), "args": argparse.Namespace(lr=0.1, gpu=None, seed=2**40, milestones={30}),
            "size": torch.Size([224, 224]), "accuracy": float("nan"), "name": "größer"}


class Runs:
    """What loading with pickle would run."""

    def __init__(self, module_name, name, *arguments):
        self.call = module_name, name, arguments

    def text(self):
        module_name, name, arguments = self.call
        body = b"".join(b"X" + len(a).to_bytes(4, "little") + a.encode() for a in arguments)
        return b"\x80\x02c" + f"{module_name}\n{name}\n".encode() + b"(" + body + b"tR."


def archive(data_pkl, storages=(), byteorder=b"little", compression=zipfile.ZIP_STORED):
    """A zip file as torch.save's, with what it would not write."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as z:
        z.writestr(zipfile.ZipInfo("archive/data.pkl"), data_pkl, compression)
        z.writestr(zipfile.ZipInfo("archive/byteorder"), byteorder, compression)
        for key, data in enumerate(storages):
            z.writestr(zipfile.ZipInfo(f"archive/data/{key}"), data, compression)
        z.writestr(zipfile.ZipInfo("archive/version"), b"3\n", compression)
    return content.getvalue()


def parts(content):
    with zipfile.ZipFile(io.BytesIO(content)) as z:
        names = {n.partition("/")[2]: n for n in z.namelist()}
        data = [z.read(names[f"data/{k}"]) for k in range(sum(n.startswith("data/") for n in names))]
        return z.read(names["data.pkl"]), data


def saved(value, **options):
    content = io.BytesIO()
    torch.save(value, content, **options)
    return content.getvalue()


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def make():
    legacy = {"_use_new_zipfile_serialization": False}
    small = {"a": count(2, 3).t(), "b": torch.tensor(1.5, dtype=torch.float16)}
    small["tied"] = small["a"]
    write(GOLDENS, "dtypes.pth", saved(dtypes()))
    write(GOLDENS, "layouts.pth", saved(layouts()))
    write(GOLDENS, "module.pth", saved(module().state_dict()))
    write(GOLDENS, "checkpoint.pth", saved(checkpoint()))
    write(GOLDENS, "legacy.pth", saved(layouts() | {"f8": torch.ones(3).to(torch.float8_e5m2)}, **legacy))
    write(GOLDENS, "protocol5.pth", saved(small, pickle_protocol=5))
    write(GOLDENS, "int16.pth", saved({"fine": torch.ones(1), "short": torch.ones(2, dtype=torch.int16)}))
    write(GOLDENS, "whole_model.pth", saved(torch.nn.Linear(1, 1)))
    write(GOLDENS, "tensor.pth", saved(count(3)))
    pickled, storages = parts(saved(small))
    write(GOLDENS, "deflated.pth", archive(pickled, storages, compression=zipfile.ZIP_DEFLATED))
    write(GOLDENS, "big_endian.pth", archive(pickled, storages, byteorder=b"big"))

    # Seeds: the forms above in small, and bare pickles.
    write(CORPUS / "pth", "zip", saved(small))
    write(CORPUS / "pth", "deflated", archive(pickled, storages, compression=zipfile.ZIP_DEFLATED))
    write(CORPUS / "pth", "legacy", saved(small | {"p": torch.nn.Parameter(torch.ones(1)), "n": [1, {"x": None}]}, **legacy))
    write(CORPUS / "pth", "legacy_checkpoint", saved({"epoch": 3, "model": small, "optimizer": {"lr": 0.1}}, **legacy))
    write(CORPUS / "pth", "code", archive(Runs("os", "system", "true").text()))
    write(CORPUS / "pickle", "tensors", pickled)
    write(CORPUS / "pickle", "float8", parts(saved({"a": torch.ones(2).to(torch.float8_e4m3fn)}))[0])
    write(CORPUS / "pickle", "parameter", parts(saved([torch.nn.Parameter(torch.ones(2))]))[0])
    write(CORPUS / "pickle", "code", Runs("os", "system", "true").text())
    values = [None, True, -1, 300, 2**31, 2**70, 1.5, "text", b"bytes", bytearray(b"x"), (), (1,), (1, 2), (1, 2, 3, 4), [], [1],
              {}, {"a": 1}, {1}, frozenset([2]), collections.OrderedDict(b=2), argparse.Namespace(lr=0.1)]
    values.append(values)
    for protocol in range(2, 6):
        write(CORPUS / "pickle", f"values{protocol}", pickle.dumps(values, protocol))


def check(file, expected):
    """Whether torch reads FILE without a word and finds what the JSON says: {name: [dtype, sizes, values]}, tied: [[a, b]]."""
    warnings.simplefilter("error")
    wanted = json.loads(pathlib.Path(expected).read_text())
    for options in ({}, {"mmap": True}):
        state = torch.load(file, weights_only=True, **options)
        if "metadata" in wanted:
            rest = {k: v for k, v in state.items() if k != "state_dict"}
            assert rest == wanted["metadata"], rest
            state = state["state_dict"]
        assert list(state) == list(wanted["tensors"]), list(state)
        for name, (dtype, shape, values) in wanted["tensors"].items():
            t = state[name]
            assert t.dtype == DTYPES[dtype] and list(t.shape) == shape, (name, t.dtype, t.shape)
            assert t.to(torch.float64).flatten().tolist() == values, (name, t)
        for a, b in wanted.get("tied", []):
            assert state[a].untyped_storage().data_ptr() == state[b].untyped_storage().data_ptr(), (a, b)
    with zipfile.ZipFile(file) as z:
        assert z.testzip() is None
        for entry in z.infolist():
            assert entry.compress_type == zipfile.ZIP_STORED
            with open(file, "rb") as f:
                f.seek(entry.header_offset + 26)
                lengths = f.read(4)
            start = entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            assert start % 64 == 0, entry.filename


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(*sys.argv[2:4])
    else:
        make()
