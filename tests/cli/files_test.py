# SPDX-License-Identifier: Apache-2.0
"""Files that are missing, damaged or not what they should be; disks that are full; places that can't be written."""
import os
import pathlib
import re
import resource
import shutil
import unittest

from program import CHECKPOINT, CHECKSUM, IMAGES, LABELS, RUN_FILES, ProgramTest, Safetensors, events, gz, idx, make_data


class Data(ProgramTest):
    def damaged(self, damage):
        folder = self.folder / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        make_data(folder, train=8, test=4)
        damage(folder)
        return folder

    def test_damaged_data_sets(self):
        def images(change):
            return lambda d: (d / IMAGES).write_bytes(change((d / IMAGES).read_bytes()))

        def packed(change):
            def damage(d):
                (d / f"{IMAGES}.gz").write_bytes(change(gz((d / IMAGES).read_bytes())))
                (d / IMAGES).unlink()
            return damage

        def swap(d):
            (d / IMAGES).rename(d / "x")
            (d / LABELS).rename(d / IMAGES)
            (d / "x").rename(d / LABELS)

        def instead(make):
            def damage(d):
                (d / IMAGES).unlink()
                make(d / IMAGES)
            return damage

        flipped = lambda at: lambda b: b[:at] + bytes([b[at] ^ 0x10]) + b[at + 1:]
        cases = {
            "no images": (lambda d: (d / IMAGES).unlink(), [f"expected {IMAGES}", "found neither"]),
            "no labels": (lambda d: (d / LABELS).unlink(), [f"expected {LABELS}", "found neither"]),
            "no test part": (lambda d: (d / "t10k-images-idx3-ubyte").unlink(), ["t10k-images-idx3-ubyte", "found neither"]),
            "empty": (images(lambda b: b""), [IMAGES, "got 0 bytes"]),
            "cut in the header": (images(lambda b: b[:10]), [IMAGES, "expected a header with 3 dimensions, got 1"]),
            "cut in the data": (images(lambda b: b[:-5]), [IMAGES, "cut short"]),
            "too long": (images(lambda b: b + b"x"), [IMAGES, "expected the end of the file"]),
            "other magic": (images(lambda b: b"PK\3\4" + b[4:]), [IMAGES, "0x504b0304", "not an IDX file?"]),
            "huge": (images(lambda b: idx([2**32 - 1] * 3, b"")), [IMAGES, "expected at most"]),
            "other size": (images(lambda b: idx([8, 14, 56], b[16:])), [IMAGES, "expected images of 28x28, got 14x56"]),
            "none": (lambda d: ((d / IMAGES).write_bytes(idx([0, 28, 28], b"")), (d / LABELS).write_bytes(idx([0], b""))),
                     [IMAGES, "at least one image"]),
            "float32": (images(lambda b: idx([8, 28, 28], bytes(8 * 784 * 4), 0x0D)), [IMAGES, "0x00000d03"]),
            "mislabelled": (swap, [LABELS, "expected labels", "(images)"]),
            "counts": (lambda d: (d / LABELS).write_bytes(idx([7], bytes(7))), ["7 labels", "8 images"]),
            "label out of range": (lambda d: (d / LABELS).write_bytes(idx([8], bytes([0] * 7 + [10]))), [LABELS, "got 10 at position 7"]),
            "gz cut": (packed(lambda b: b[:-100]), [f"{IMAGES}.gz", "cut short"]),
            "gz flipped": (packed(flipped(3000)), [f"{IMAGES}.gz", "damaged"]),
            "gz checksum": (packed(flipped(-6)), [f"{IMAGES}.gz", "damaged"]),
            "gz tail": (packed(lambda b: b + b"xyz"), [f"{IMAGES}.gz", "got more bytes"]),
            "a folder": (instead(pathlib.Path.mkdir), ["got the folder", IMAGES]),
            "a link to nowhere": (instead(lambda p: p.symlink_to("nowhere")), [IMAGES, "No such file"]),
            "a pipe": (instead(os.mkfifo), ["expected a file", IMAGES]),
        }
        for name, (damage, text) in cases.items():
            with self.subTest(name):
                folder = self.damaged(damage)
                self.refused(1, text, "train", "mlp", folder, "--out", "run", timeout=20)
                self.assertFalse((self.folder / "run/last.safetensors").exists())

    def test_folders_that_are_none(self):
        (self.folder / "file").write_text("x")
        self.refused(1, ["nowhere", "no such folder"], "train", "mlp", "nowhere", "--no-out")
        self.refused(1, ["file", "not a folder"], "train", "mlp", "file", "--no-out")

    @unittest.skipIf(os.geteuid() == 0, "root reads everything")
    def test_unreadable(self):
        folder = self.damaged(lambda d: (d / IMAGES).chmod(0))
        self.refused(1, [IMAGES, "Permission denied"], "train", "mlp", folder, "--no-out")

    def test_packed_data_train_alike(self):
        plain, packed = self.data("plain"), self.data("packed")
        for file in list(packed.iterdir()):
            (packed / f"{file.name}.gz").write_bytes(gz(file.read_bytes()))
            file.unlink()
        self.train(plain, "--out", "a", "-q")
        self.train(packed, "--out", "b", "-q")
        self.assertEqual((self.folder / "a/last.safetensors").read_bytes(), (self.folder / "b/last.safetensors").read_bytes())

    def test_predict_takes_pictures_of_bytes_only(self):
        self.train(self.data(), "--out", "run", "-q")
        for name, content, text in (("float", idx([2, 28, 28], bytes(2 * 784 * 4), 0x0D), "got float32 with [2, 28, 28]"),
                                    ("double", idx([2, 28, 28], bytes(2 * 784 * 8), 0x0E), "got float64"),
                                    ("signed", idx([2, 28, 28], bytes(2 * 784), 0x09), "got signed bytes"),
                                    ("labels", idx([784], bytes(784)), "got bytes with [784]"),
                                    ("size", idx([2, 14, 56], bytes(2 * 784)), "got bytes with [2, 14, 56]"),
                                    ("none", idx([0, 28, 28], b""), "at least one picture"),
                                    ("text", b"hello, world", "not an IDX file?")):
            (self.folder / name).write_bytes(content)
            self.refused(1, [name, text], "predict", "mlp", "--weights", "run", name)
        (self.folder / "good").write_bytes(idx([2, 28, 28], bytes(784) + b"\xff" * 784))
        status, out, err = self.run_program("predict", "mlp", "--weights", "run", "good")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(out.count("%"), 2)
        # The same picture from a data set by its number, and the same numbers as eval's.
        self.train("data", "--out", "learned", "-q", "--epochs", "8", "--lr", "0.5", "--seed", "3")
        test = (self.folder / "data/t10k-images-idx3-ubyte").read_bytes()[16:]
        (self.folder / "five").write_bytes(idx([1, 28, 28], test[5 * 784:6 * 784]))
        predict = lambda *more: self.run_program("predict", "mlp", "--weights", "learned/last.safetensors", *more)[1]
        by_number, by_file = predict("--data", "data", "--index", "5"), predict("five")
        said = lambda out: re.search(r"(\d) \((\d+\.\d)%\)", out).groups()
        self.assertEqual(said(by_number), said(by_file))
        self.assertEqual(by_number.splitlines()[1:14], by_file.splitlines()[1:14])
        self.assertNotEqual(said(by_number), said(predict("--data", "data", "--index", "6")))
        right = int(re.search(r"(\d+) of 64 right", predict("--data", "data", "--count", "64"))[1])
        out = self.run_program("eval", "mlp", "data", "--weights", "learned/last.safetensors")[1]
        self.assertIn(f"top1 {100 * right / 64:.2f}%", out)
        self.refused(2, "--index: expected 0 to 1, got 2", "predict", "mlp", "--weights", "run", "good", "--index", "2")
        self.refused(1, "nowhere", "predict", "mlp", "--weights", "run", "nowhere")


class Checkpoints(ProgramTest):
    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--out", "good", "-q")
        self.good = self.folder / "good/last.safetensors"
        self.bad = self.folder / "bad.safetensors"

    def refused_both(self, *text):
        self.refused(1, ["bad.safetensors", *text], "train", "mlp", "data", "--epochs", "2", "--no-out", "--resume", "bad.safetensors")
        self.refused(1, ["bad.safetensors", *text], "eval", "mlp", "data", "--weights", "bad.safetensors")

    def refused_to_resume(self, *text):
        self.refused(1, ["bad.safetensors", *text], "train", "mlp", "data", "--epochs", "2", "--no-out", "--resume", "bad.safetensors")

    def test_the_checksum_is_what_the_tests_think(self):
        file = Safetensors(self.good)
        self.assertEqual(file.header["__metadata__"][CHECKSUM], file.checksum())
        self.assertEqual((file.state["version"], file.state["model"], file.state["step"]), (1, "mlp", 2))

    def test_cut_short_or_something_else(self):
        good = self.good.read_bytes()
        for content, text in ((b"", "got 0 bytes"), (good[:4], "got 4 bytes"), (good[:100], "cut short"),
                              (good[:-9], "cut short"), (good + b"x", "expected"), (bytes(1000), "no safetensors file"),
                              (b"hello world, this is no checkpoint", "no safetensors file"),
                              (b"\x80\x02}q\x00." + bytes(100), "no safetensors file")):
            self.bad.write_bytes(content)
            self.refused_both(text)

    def test_every_flipped_bit_is_found(self):
        good = self.good.read_bytes()
        header = int.from_bytes(good[:8], "little")
        # Places all over the header, then in the data; every other bit of a byte.
        places = list(range(0, 8)) + list(range(8, 8 + header, 97)) + [8 + header, len(good) // 2, len(good) - 1]
        for number, at in enumerate(places):
            if good[at:at + 1] == b" ":
                continue  # blanks at the end of the header
            self.bad.write_bytes(good[:at] + bytes([good[at] ^ 1 << number % 7]) + good[at + 1:])
            status, _, err = self.run_program("eval", "mlp", "data", "--weights", "bad.safetensors")
            self.assertEqual((status, err.count("\n")), (1, 1), f"byte {at}, bit {number % 7}: {err}")

    def test_of_another_network(self):
        file = Safetensors(self.good)
        file.set_state(model="resnet50")
        file.write(self.bad)
        self.refused_both("expected a checkpoint of mlp, got one of resnet50")
        file = Safetensors(self.good)
        file.header["fc1.weight"]["shape"] = [784, 512]
        file.write(self.bad)
        self.refused_both("fc1.weight")
        file = Safetensors(self.good)
        file.header["fc4.weight"] = file.header.pop("fc3.weight")
        file.write(self.bad)
        self.refused_both("fc")
        file = Safetensors(self.good)
        file.header["fc3.bias"]["dtype"], file.header["fc3.bias"]["shape"] = "F16", [20]
        file.write(self.bad)
        self.refused_both("fc3.bias")
        # Weights without training state can be evaluated and not gone on from.
        file = Safetensors(self.good)
        file.keep(name for name in file.header if name.startswith("fc"))
        file.write(self.bad, sign=False)
        self.refused_to_resume("without training state", "--weights")
        self.assertEqual(self.run_program("eval", "mlp", "data", "--weights", "bad.safetensors")[0], 0)

    def test_states_that_no_run_leaves_behind(self):
        for key, value in (("step", -5), ("skipped", -1), ("epoch", -5), ("epoch", 2**63), ("batch", -1), ("batch", 10**9), ("loss_samples", -1),
                           ("batch_size", 0), ("accumulate", 0), ("samples", 1.5), ("model", 5), ("optimizer", "a"), ("optimizer", {}),
                           ("optimizer", {"group0.lr": None}), ("loss_sum", None), ("best", "x"), ("version", 9), ("random_seed", -1)):
            file = Safetensors(self.good)
            file.set_state(**{key: value})
            file.write(self.bad)
            with self.subTest(key=key, value=value):
                self.refused_to_resume()
        for text in ("", "{", "[]", "null", "7"):
            file = Safetensors(self.good)
            file.header["__metadata__"][CHECKPOINT] = text
            file.write(self.bad)
            self.refused_both("damaged checkpoint")
        file = Safetensors(self.good)
        del file.header["__metadata__"][CHECKSUM]
        file.write(self.bad, sign=False)
        self.refused_both("no checksum")

    def test_flags_of_another_run(self):
        resume = ["--epochs", "2", "--resume", "good", "--no-out"]
        self.refused(1, "--lr 0.01, got 0.5", "train", "mlp", "data", *resume, "--lr", "0.5")
        self.refused(1, "--momentum 0, got 0.9", "train", "mlp", "data", *resume, "--momentum", "0.9")
        self.refused(1, "--weight-decay 0, got 0.1", "train", "mlp", "data", *resume, "--weight-decay", "0.1")
        self.refused(1, "expected the state of Adam, got that of SGD", "train", "mlp", "data", *resume, "--optimizer", "adam")
        self.refused(1, "--batch-size 64 --seed 0, got 32 and 0", "train", "mlp", "data", *resume, "--batch-size", "32")
        self.refused(1, "--batch-size 64 --seed 0, got 64 and 1", "train", "mlp", "data", *resume, "--seed", "1")
        self.refused(1, "128 training samples, got 100", "train", "mlp", "data", *resume, "--limit", "100")
        status, _, err = self.run_program("train", "mlp", "data", *resume, "--amp", "f16", "-q")
        self.assertEqual(status, 0)
        self.assertRegex(err, r"\Ahalfstep: warning: good: the run had --amp off, it continues with f16\n\Z")

    def test_a_loss_scale_of_another_run(self):
        self.train("data", "--amp", "f16", "--loss-scale", "dynamic:1024,2,0.5,100", "--out", "scaled", "-q")
        resume = ["--epochs", "2", "--resume", "scaled", "--no-out", "--amp", "f16"]
        self.refused(1, ["growth_interval 100, got 2000", "in place of dynamic"], "train", "mlp", "data", *resume, "--loss-scale", "dynamic")
        self.refused(1, "growth_factor 2, got 4", "train", "mlp", "data", *resume, "--loss-scale", "dynamic:1024,4,0.5,100")
        self.refused(1, "with a loss scale, got --loss-scale none", "train", "mlp", "data", *resume, "--loss-scale", "none")
        self.refused(1, "scale 1024, got 8", "train", "mlp", "data", *resume, "--loss-scale", "fixed:8")
        # The run's own where none is given; where a dynamic scale began doesn't matter any more.
        self.train("data", *resume, "-q")
        self.train("data", *resume, "--loss-scale", "dynamic:8,2,0.5,100", "-q")

    def test_places(self):
        self.refused(2, ["--resume", "nowhere does not exist"], "train", "mlp", "data", "--resume", "nowhere")
        self.refused(1, "data: expected last.safetensors", "train", "mlp", "data", "--resume", "data", "--no-out")
        self.refused(1, "data: expected best.safetensors or last.safetensors", "eval", "mlp", "data", "--weights", "data")
        self.refused(1, "nowhere: there is no such file", "eval", "mlp", "data", "--weights", "nowhere")
        self.refused(1, "expected a file, got a device", "eval", "mlp", "data", "--weights", "/dev/null")
        os.mkfifo(self.folder / "pipe")
        self.refused(1, "pipe: expected a file", "predict", "mlp", "--weights", "pipe", timeout=20)

    def test_a_run_that_has_all_its_epochs(self):
        before = (self.good.read_bytes(), (self.folder / "good/log.jsonl").read_bytes())
        status, out, err = self.run_program("train", "mlp", "data", "--resume", "good", "-q")
        self.assertEqual((status, out), (0, ""))
        self.assertIn("all 1 epochs are done", err)
        self.assertEqual(before, (self.good.read_bytes(), (self.folder / "good/log.jsonl").read_bytes()))


class Writing(ProgramTest):
    def test_places_that_cannot_be_written(self):
        self.data()
        (self.folder / "file").write_text("x")
        train = ["train", "mlp", "data", "-q"]
        self.refused(1, ["file", "Not a directory"], *train, "--out", "file")
        self.refused(1, ["file/x", "Not a directory"], *train, "--out", "file/x")
        self.refused(1, "/proc/none", *train, "--out", "/proc/none")
        self.refused(1, ["nowhere/log.jsonl", "No such file"], *train, "--no-out", "--log-json", "nowhere/log.jsonl")
        self.refused(1, ["data", "Is a directory"], *train, "--no-out", "--log-json", "data")
        self.refused(1, ["/dev/full", "disk full?"], *train, "--no-out", "--log-json", "/dev/full")
        self.train("data", "--out", "run", "-q")
        self.refused(1, "/dev/full", "eval", "mlp", "data", "--weights", "run", "--log-json", "/dev/full")
        # A folder where the checkpoint should come.
        (self.folder / "run2/last.safetensors").mkdir(parents=True)
        (self.folder / "run2/last.safetensors/x").write_text("x")
        self.refused(1, "run2/last.safetensors", *train, "--out", "run2")
        self.assertEqual([p.name for p in (self.folder / "run2").glob("*.tmp*")], [])

    def test_a_full_disk_leaves_the_last_checkpoint(self):
        self.data()
        self.train("data", "--out", "run", "-q")
        before = (self.folder / "run/last.safetensors").read_bytes()
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        err = self.refused(1, ["run/last.safetensors", "writing failed", "unchanged"], "train", "mlp", "data", "--epochs", "2", "-q", "--resume", "run",
                           preexec_fn=limit)
        self.assertIn("File too large", err)
        self.assertEqual(before, (self.folder / "run/last.safetensors").read_bytes())
        self.assertEqual(sorted(p.name for p in (self.folder / "run").iterdir()), RUN_FILES)
        status, _, err = self.run_program("train", "mlp", "data", "--epochs", "2", "-q", "--resume", "run")
        self.assertEqual(status, 0)
        self.assertEqual(err, "halfstep: warning: run/log.jsonl: 3 lines from behind step 2, where the run resumes, are removed: they come again\n")

    def test_a_loss_that_is_no_number(self):
        self.data()
        common = ["data", "--lr", "1e30", "--limit", "64", "-q"]
        # The only step spoils the weights; the evaluation tells.
        self.refused(1, "expected a finite loss, got nan in the last evaluation, of epoch 1, step 1", "train", "mlp", *common, "--out", "run")
        before = (self.folder / "run/last.safetensors").read_bytes()
        self.refused(1, ["expected a finite loss, got nan in epoch 2, step 2", "last checkpoint: run", "a smaller --lr"], "train", "mlp", *common,
                     "--epochs", "3", "--resume", "run")
        self.assertEqual(before, (self.folder / "run/last.safetensors").read_bytes())
        # Under a dynamic scale some such losses are let pass (the log says how many): they must not be what is saved meanwhile.
        self.refused(1, "expected a finite loss", "train", "mlp", "data", "--epochs", "30", "-q", "--lr", "1e30", "--amp", "f16", "--out", "f16",
                     "--save-every", "1", env={"HALFSTEP_LOG": "error"})
        steps = [e for e in events(self.folder / "f16/log.jsonl") if e["event"] == "step"]
        self.assertIsNone(steps[-1]["loss"])
        saved = Safetensors(self.folder / "f16/last.safetensors").state["step"]
        self.assertIsNotNone(steps[saved - 1]["loss"], f"step {saved} was saved")

    def test_what_killed_processes_left_is_removed(self):
        self.data()
        (self.folder / "run").mkdir()
        mark = ".tmp0123456789abcdef"
        keep = [self.folder / "run" / name for name in ("last.safetensors.tmp", "last.safetensors.tmp12x", "last.safetensors.tmp0123456789ABCDEF",
                                                        "other" + mark)]
        gone = self.folder / ("run/last.safetensors" + mark)
        for path in [*keep, gone]:
            path.write_text("half a checkpoint")
        self.train("data", "--out", "run", "-q")
        self.assertEqual([p.exists() for p in keep], [True] * 4)
        self.assertFalse(gone.exists())


if __name__ == "__main__":
    unittest.main()
