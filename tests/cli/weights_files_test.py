# SPDX-License-Identifier: Apache-2.0
"""`halfstep convert` and `halfstep inspect`, on files that PyTorch wrote (tests/goldens/pth)."""
import json
import os
import pathlib
import shutil
import struct
import unittest

from program import ProgramTest, Safetensors

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "pth"


class Files(ProgramTest):
    def done(self, *arguments):
        status, out, err = self.run_program(*arguments)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def inspected(self, file):
        return json.loads(self.done("inspect", file, "--json"))

    def entries(self, file):
        return {t["name"]: t for t in self.inspected(file)["tensors"]}


def legacy(count, elements):
    """A file of torch.save's before 1.6 with tensors that repeat one value."""
    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value
    def number(value):
        return b"\x8a\x08" + struct.pack("<q", value)
    tensor = (b"ctorch._utils\n_rebuild_tensor_v2\n((" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"k") + text(b"cpu") + number(1) + b"NtQ"
              + number(0) + b"(" + number(elements) + b"t(" + number(0) + b"t\x89ccollections\nOrderedDict\n)RtR")
    head = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.\x80\x02}."
    items = b"".join(text(f"w{i}".encode()) + tensor for i in range(count))
    return head + b"\x80\x02}(" + items + b"u.\x80\x02](" + text(b"k") + b"e." + struct.pack("<qf", 1, 1.5)


class Limits(Files):
    def test_a_small_file_that_claims_much(self):
        (self.folder / "bomb.pth").write_bytes(legacy(50, 1 << 26))
        self.assertLess((self.folder / "bomb.pth").stat().st_size, 20_000)
        for verb in (["inspect", "bomb.pth"], ["convert", "bomb.pth", "a.safetensors"], ["eval", "mlp", "--weights", "bomb.pth"],
                     ["train", "mlp", "--pretrained", "bomb.pth", "--no-out", "--limit", "64"]):
            self.refused(1, ["bomb.pth: its tensors take 13421772800 bytes", "--max-unpacked"], *verb)
        (self.folder / "small.pth").write_bytes(legacy(3, 1 << 20))
        self.assertEqual(len(self.entries("small.pth")), 3)
        self.refused(1, "--max-unpacked", "inspect", "small.pth", "--max-unpacked", "8M")
        self.done("inspect", "small.pth", "--max-unpacked", "12M")
        self.refused(1, "at most 3", "inspect", "small.pth", "--max-bytes", "3")
        for wrong in ("", "-1", "x", "1.5G", "G", "99999999999T"):
            self.refused(2, "--max-unpacked", "inspect", "small.pth", "--max-unpacked", wrong)

    def test_names_reach_no_terminal(self):
        header = json.dumps({"\x1b[2J\n\u009b31m": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (self.folder / "a\x1b[2J.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        for out in (self.done("inspect", "a\x1b[2J.safetensors"), self.done("convert", "a\x1b[2J.safetensors", "b\x1b[2J.pth")):
            self.assertIn("\\e[2J", out)
            self.assertNotRegex(out, "[\x00-\x09\x0b-\x1f\x7f-\x9f]")

    def test_what_is_no_file(self):
        os.mkfifo(self.folder / "pipe")
        for name, what in (("pipe", "a pipe"), ("/dev/zero", "a device"), (".", "a folder")):
            self.refused(1, f"expected a file, got {what}", "inspect", name)


class Convert(Files):
    def test_there_and_back(self):
        out = self.done("convert", GOLDENS / "module.pth", "a.safetensors")
        self.assertRegex(out, r"\Aa\.safetensors: 9 tensors, \d+ bytes\n\Z")
        self.done("convert", "a.safetensors", "b.pth")
        original, back = self.entries(GOLDENS / "module.pth"), self.entries("b.pth")
        self.assertEqual(original, back)
        file = Safetensors(self.folder / "a.safetensors")
        self.assertEqual(file.header["__metadata__"], {"format": "pt"})
        self.assertEqual(file.header["0.weight"]["shape"], [2, 3])
        self.assertEqual(struct.unpack("<6f", file.tensor("0.weight")), (0, 1, 2, 3, 4, 5))

    def test_values_beside_the_weights(self):
        out = self.done("convert", GOLDENS / "checkpoint.pth", "a.safetensors")
        self.assertIn("left out: best_acc1, optimizer\n", out)
        self.assertIn("kept as metadata: accuracy, arch, args, epoch, name, size\n", out)
        file = Safetensors(self.folder / "a.safetensors")
        self.assertEqual(set(file.header) - {"__metadata__"}, {"weight", "bias"})
        metadata = file.header["__metadata__"]
        self.assertEqual((metadata["epoch"], metadata["arch"], metadata["name"]), ("90", "resnet50", "größer"))
        self.assertIn("left out: accuracy, arch, args, epoch, name, size\n", self.done("convert", "a.safetensors", "b.pt"))

    def test_tied_weights(self):
        out = self.done("convert", GOLDENS / "layouts.pth", "a.safetensors")
        self.assertIn("written twice, since safetensors files share no memory: decoder.weight (as embedding.weight)\n", out)
        file = Safetensors(self.folder / "a.safetensors")
        self.assertEqual(file.tensor("decoder.weight"), file.tensor("embedding.weight"))
        self.assertEqual(struct.unpack("<6f", file.tensor("transposed")), (0, 3, 1, 4, 2, 5))
        self.assertNotIn("twice", self.done("convert", GOLDENS / "layouts.pth", "b.pth", "--dtype", "f16"))
        entries = self.entries("b.pth")
        self.assertEqual(entries["decoder.weight"]["tied"], "embedding.weight")
        self.assertEqual(entries["decoder.weight"]["dtype"], "f16")

    def test_dtypes(self):
        for dtype, name in (("f16", "F16"), ("bf16", "BF16"), ("f32", "F32")):
            self.done("convert", GOLDENS / "module.pth", "a.safetensors", "--dtype", dtype, "--force")
            header = Safetensors(self.folder / "a.safetensors").header
            self.assertEqual(header["0.weight"]["dtype"], name)
            self.assertEqual(header["1.running_var"]["dtype"], "F32")
            self.assertEqual(header["1.num_batches_tracked"]["dtype"], "I64")
        self.refused(2, ["--dtype: expected f16, bf16 or f32", "'f64'"], "convert", "a.safetensors", "b.pth", "--dtype", "f64")

    def test_what_float16_cannot_hold(self):
        data = struct.pack("<3f", 1, 65519, -65520)
        header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
        (self.folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
        self.refused(1, ["w: 1 values of 3", "--dtype bf16"], "convert", "a.safetensors", "b.pth", "--dtype", "f16")
        self.assertFalse((self.folder / "b.pth").exists())
        self.done("convert", "a.safetensors", "b.pth", "--dtype", "bf16")

    def test_nothing_is_overwritten_unasked(self):
        source = self.folder / "a.pth"
        shutil.copy(GOLDENS / "module.pth", source)
        before = source.read_bytes()
        os.link(source, self.folder / "same.pth")
        os.symlink(source, self.folder / "link.pth")
        for target in ("a.pth", "same.pth", "link.pth", "./a.pth"):
            self.refused(2, "is the source", "convert", "a.pth", target, "--force")
        (self.folder / "b.pth").write_text("mine")
        self.refused(2, ["is there already", "--force"], "convert", "a.pth", "b.pth")
        self.assertEqual((self.folder / "b.pth").read_text(), "mine")
        self.done("convert", "a.pth", "b.pth", "--force")
        self.assertEqual(source.read_bytes(), before)
        self.refused(2, "expected a target that ends in", "convert", "a.pth", "b.onnx")
        (self.folder / "folder.pth").mkdir()
        self.refused(2, "is a folder", "convert", "a.pth", "folder.pth")
        self.refused(1, "no such file", "convert", "none.pth", "c.pth")
        self.refused(1, "can't be written", "convert", "a.pth", "no/c.pth")
        self.refused(2, "TO is required", "convert", "a.pth")

    def test_refuses_code(self):
        self.refused(1, ["refers to torch.nn.modules.linear.Linear", "state_dict()"], "convert", GOLDENS / "whole_model.pth", "a.pth")
        self.refused(1, "'short' is int16", "convert", GOLDENS / "int16.pth", "a.pth")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_checkpoint_of_a_run(self):
        self.train("--data", self.data(), "--epochs", "1", "--out", "run")
        out = self.done("convert", "run/last.safetensors", "a.pth")
        self.assertIn("left out: the state of the training\n", out)
        self.assertFalse([name for name in self.entries("a.pth") if name.startswith("optimizer.")])
        evaluated = [self.done("eval", "mlp", "--data", "data", "--weights", w).splitlines()[1].partition(" in ")[0] for w in ("run/last.safetensors", "a.pth")]
        self.assertEqual(evaluated[0], evaluated[1])


class Inspect(Files):
    def test_statistics(self):
        data = struct.pack("<7f", float("nan"), float("inf"), 0, 70000, -1e-9, 2, float("-inf"))
        header = json.dumps({"__metadata__": {"note": "x" * 300}, "w.running_var": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}}).encode()
        (self.folder / "a").write_bytes(struct.pack("<Q", len(header)) + header + data)
        report = self.inspected("a")
        self.assertEqual((report["format"], report["bytes"], report["values"], report["parameters"]), ("safetensors", 28, 7, 0))
        [t] = report["tensors"]
        self.assertEqual((t["nan"], t["inf"], t["zeros"], t["f16_overflow"], t["f16_underflow"]), (1, 2, 1, 1, 1))
        self.assertEqual((t["min"], t["max"], t["shape"], t["dtype"]), (struct.unpack("<f", struct.pack("<f", -1e-9))[0], 70000, [7], "f32"))
        self.assertAlmostEqual(t["mean"], 70002 / 4, places=6)
        out = self.done("inspect", "a")
        self.assertIn("not finite: 1 NaN, 2 infinite\n", out)
        self.assertIn("as float16, 1 would be infinite and 1 zero that are not\n", out)
        self.assertRegex(out, r"note: x{100}\.\.\. \(300 bytes\)\n")

    def test_a_checkpoint_of_pytorch(self):
        report = self.inspected(GOLDENS / "checkpoint.pth")
        self.assertEqual((report["format"], report["parameters"]), ("pth", 8))
        self.assertEqual([t["name"] for t in report["tensors"]], ["weight", "bias"])
        self.assertIn("optimizer.state.0.momentum_buffer", report["others"])
        self.assertEqual(report["metadata"]["epoch"], "90")
        out = self.done("inspect", GOLDENS / "checkpoint.pth")
        self.assertRegex(out, r"weight +f32 +\[2, 3\] +0 +5 +2\.5 +1")
        self.assertIn("epoch: 90\n", out)
        self.assertIn("beside the state dict: 3 tensors", out)

    def test_layouts_and_ties(self):
        entries = self.entries(GOLDENS / "layouts.pth")
        self.assertEqual((entries["slice"]["min"], entries["slice"]["max"]), (8, 16))
        self.assertEqual(entries["decoder.weight"]["tied"], "embedding.weight")
        self.assertEqual((entries["empty"]["min"], entries["empty"]["mean"]), (None, None))
        self.assertIn("= embedding.weight", self.done("inspect", GOLDENS / "layouts.pth"))

    def test_what_is_no_such_file(self):
        (self.folder / "a").write_bytes(b"something else")
        self.refused(1, "a: ", "inspect", "a")
        self.refused(1, "no such file", "inspect", "none")
        self.refused(1, "expected a file, got a folder", "inspect", ".")
        os.mkfifo(self.folder / "pipe.pth")
        self.refused(1, "pipe.pth: expected a file", "inspect", "pipe.pth", timeout=20)
        self.refused(2, "FILE is required", "inspect")


if __name__ == "__main__":
    unittest.main()
