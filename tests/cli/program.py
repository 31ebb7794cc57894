# SPDX-License-Identifier: Apache-2.0
"""What the tests of the program share: running it, and small data sets and checkpoints to damage."""
import collections
import gzip
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import tempfile
import unittest
import zlib

PROGRAM = os.path.abspath(os.environ.get("HALFSTEP_PROGRAM", "build/bin/halfstep"))
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
# What a run leaves in its folder beside its log: to go on with, and to look at.
STATE = ["best.safetensors", "config.yaml", "last.safetensors"]
FIGURES = ["classes.csv", "confusion.svg", "curves.svg", "predictions.png", "results.csv"]
RUN_FILES = sorted([*STATE, *FIGURES, "log.jsonl"])
CHECKPOINT, CHECKSUM = "halfstep_checkpoint", "halfstep_crc32"


def idx(shape, data, code=8):
    return struct.pack(">BBBB", 0, 0, code, len(shape)) + b"".join(struct.pack(">I", n) for n in shape) + data


def make_data(folder, train=128, test=64):
    """A data set in MNIST's format: noise, so that a run takes a moment and learns nothing."""
    numbers = random.Random(1)
    folder.mkdir(parents=True)
    for prefix, count in (("train", train), ("t10k", test)):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx([count, 28, 28], numbers.randbytes(count * 784)))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx([count], bytes(numbers.randrange(10) for _ in range(count))))
    return folder


class Safetensors:
    """A file in parts: the header as an object, and the data behind it."""

    def __init__(self, path):
        content = pathlib.Path(path).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        self.header = json.loads(content[8:8 + length])
        self.data = content[8 + length:]

    @property
    def state(self):
        return json.loads(self.header["__metadata__"][CHECKPOINT])

    @property
    def shards(self):
        """Names of the files beside a checkpoint whose state was divided."""
        return [entry["file"] for entry in self.state.get("shards", [])]

    @classmethod
    def whole(cls, path):
        """A checkpoint with its shards, as the file that it would be without them, but for the texts."""
        path = pathlib.Path(path)
        file = cls(path)
        if not file.shards:
            return file
        tensors = {}
        for part in (file, *(cls(path.parent / name) for name in file.shards)):
            for name in set(part.header) - {"__metadata__"}:
                assert name not in tensors, f"{name} is there twice"
                tensors[name] = ({k: v for k, v in part.header[name].items() if k != "data_offsets"}, part.tensor(name))
        size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
        names = sorted(tensors, key=lambda name: (-size.get(tensors[name][0]["dtype"], 1), name))
        header, data = {"__metadata__": dict(file.header["__metadata__"])}, b""
        for name in names:
            entry, content = tensors[name]
            header[name] = {**entry, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        file.header, file.data = header, data
        state = file.state
        del state["shards"]
        file.header["__metadata__"][CHECKPOINT] = json.dumps(state)
        return file

    def set_state(self, **changes):
        state = self.state
        state.update(changes)
        self.header["__metadata__"][CHECKPOINT] = json.dumps(state)

    def tensor(self, name):
        begin, end = self.header[name]["data_offsets"]
        return self.data[begin:end]

    def keep(self, names):
        """Leaves out the metadata and all other tensors."""
        header, data = {}, b""
        for name in names:
            content = self.tensor(name)
            header[name] = {**self.header[name], "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        self.header, self.data = header, data

    def checksum(self):
        """As train/checkpoint.cpp says: the state, then each tensor's name, dtype, sizes and data, by name."""
        names = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F64": "f64", "I64": "i64", "I32": "i32", "I8": "i8", "U8": "u8"}
        crc = zlib.crc32(self.header["__metadata__"][CHECKPOINT].encode())
        for name in sorted(set(self.header) - {"__metadata__"}):
            entry = self.header[name]
            head = f"\n{name} {names[entry['dtype']]} [{', '.join(map(str, entry['shape']))}]\n"
            crc = zlib.crc32(self.tensor(name), zlib.crc32(head.encode(), crc))
        return f"{crc:08x}"

    def write(self, path, sign=True):
        if sign:
            self.header["__metadata__"][CHECKSUM] = self.checksum()
        text = json.dumps(self.header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + self.data)
        return path


Result = collections.namedtuple("Result", "returncode stdout stderr")


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="halfstep-cli-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def environment(self, **changes):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HALFSTEP_") and k not in ("NO_COLOR", "COLUMNS")}
        environment.update(changes)
        return environment

    def start(self, *arguments, env=None, **options):
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        return subprocess.Popen([PROGRAM, *map(str, arguments)], cwd=self.folder, text=True, stdin=subprocess.DEVNULL,
                                env=self.environment(**(env or {})), **options)

    def run_program(self, *arguments, env=None, timeout=60, **options):
        process = self.start(*arguments, env=env, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return Result(process.returncode, out, err)

    def data(self, name="data", **sizes):
        return make_data(self.folder / name, **sizes)

    def train(self, *arguments, **options):
        """A run that must be done; returns what it printed."""
        status, out, err = self.run_program("train", "mlp", *arguments, **options)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def refused(self, status, text, *arguments, **options):
        """The program ends with this status and one line on standard error that has the texts in it."""
        got, out, err = self.run_program(*arguments, **options)
        self.assertEqual(got, status, f"{arguments}: {out}{err}")
        self.assertRegex(err, r"\Ahalfstep: [^\n]+\n\Z", arguments)
        for part in [text] if isinstance(text, str) else text:
            self.assertIn(part, err, arguments)
        return err


def events(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def gz(data):
    return gzip.compress(data, mtime=0)
