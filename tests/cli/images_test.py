# SPDX-License-Identifier: Apache-2.0
"""Networks of images from the command line: training, resuming, evaluating and predicting, on small drawn pictures."""
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import time
import unittest
import zlib

from program import PROGRAM, ProgramTest, Safetensors, events

METER = r"\s*\d+\.\d{3} \(\s*\d+\.\d{3}\)"
LOSS = r"Loss \d\.\d{4}e[+-]\d\d \(\d\.\d{4}e[+-]\d\d\)"
ACCURACY = r"Acc@1\s+\d+\.\d\d \(\s*\d+\.\d\d\)\tAcc@5\s+\d+\.\d\d \(\s*\d+\.\d\d\)"
# The smallest that a residual network of 20 layers can do something with.
SMALL = ["--image-size", "8", "--batch-size", "8", "--threads", "1"]
RECIPE = [*SMALL, "--lr", "0.1", "--lr-schedule", "onecycle", "--mixup", "0.3", "--label-smoothing", "0.1", "--color-jitter", "0.3", "--epochs", "3",
          "--no-norm-decay", "--nesterov", "--seed", "5"]


def png(width, height, pixels):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    rows = b"".join(b"\0" + pixels[y * width * 3:(y + 1) * width * 3] for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(rows))
            + chunk(b"IEND", b""))


def make_images(folder, train=12, test=5, classes=("cat", "dog")):
    """Noise around a colour of the class."""
    numbers = random.Random(1)
    for part, count in (("train", train), ("val", test)):
        for label, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                base = [200 if channel == label % 3 else 60 for channel in range(3)]
                pixels = bytes(min(255, max(0, base[k % 3] + numbers.randrange(-50, 50))) for k in range(12 * 10 * 3))
                (folder / part / name / f"{i:03d}.png").write_bytes(png(12, 10, pixels))
    return folder


class ImageTest(ProgramTest):
    def images(self, name="images", **sizes):
        return make_images(self.folder / name, **sizes)

    def done(self, *arguments, **options):
        options.setdefault("timeout", 120)
        status, out, err = self.run_program(*arguments, **options)
        self.assertEqual((status, err), (0, ""), out)
        return out


class Training(ImageTest):
    def test_lines_log_and_checkpoints(self):
        self.images()
        out = self.done("train", "resnet20", "images", *SMALL, "--lr", "0.05", "--epochs", "2", "-p", "2", "--out", "run")
        lines = out.splitlines()
        self.assertEqual(lines[0], "training resnet20 on images, float32 with loss scale none")
        patterns = []
        for epoch in (0, 1):
            for place in ("[1/3]", "[3/3]"):
                patterns.append(rf"Epoch: \[{epoch}\]{re.escape(place)}\tTime{METER}\tData{METER}\t{LOSS}\t{ACCURACY}")
            for place in ("[1/2]", "[2/2]"):
                patterns.append(rf"Test: {re.escape(place)}\tTime{METER}\t{LOSS}\t{ACCURACY}")
            patterns.append(r" \* Acc@1 \d+\.\d{3} Acc@5 100\.000")
            patterns.append(rf"epoch {epoch + 1}/2: loss .*")
        for line, pattern in zip(lines[1:], patterns):
            self.assertRegex(line, rf"\A{pattern}\Z")
        self.assertRegex(lines[1 + len(patterns)], r"\A2 epochs completed")
        log = events(self.folder / "run/log.jsonl")
        evals = [e for e in log if e["event"] == "eval"]
        shown = [float(m) for m in re.findall(r"^ \* Acc@1 (\d+\.\d+)", out, re.M)]
        self.assertEqual(shown, [round(100 * e["top1"], 3) for e in evals])
        state = Safetensors(self.folder / "run/last.safetensors").state
        self.assertEqual((state["model"], state["classes"], state["step"]), ("resnet20", ["cat", "dog"], 6))
        self.assertEqual((state["recipe"]["image-size"], state["recipe"]["crop"], state["recipe"]["lr-schedule"]), ("8", "padded", "onecycle"))
        config = (self.folder / "run/config.yaml").read_text()
        for line in ("lr-schedule: onecycle", "image-size: 8", "momentum: 0.9"):
            self.assertIn(line + "\n", config)
        # What evaluation says of the last weights is what training said, in both ways to ask.
        shutil.copy(self.folder / "run/last.safetensors", self.folder / "last.safetensors")
        again = self.done("eval", "resnet20", "images", "--weights", "last.safetensors", "-b", "8", "--log-json", "eval", "-p", "1", "--threads", "1")
        for key in ("loss", "top1", "top5"):
            self.assertEqual(events(self.folder / "eval")[0][key], evals[1][key])
        self.assertEqual(len(re.findall(r"^Test: \[\d/2\]\t", again, re.M)), 2)
        self.assertIn(f" * Acc@1 {shown[1]:.3f} Acc@5 100.000\n", again)
        script = self.done("train", "-a", "resnet20", *SMALL, "--evaluate", "--resume", "last.safetensors", "images")
        self.assertIn(f" * Acc@1 {shown[1]:.3f} Acc@5 100.000\n", script)

    def test_flags_of_the_usual_scripts(self):
        self.images()
        first = self.done("train", "--arch", "resnet20", "--epoch", "1", "-j", "2", "-b", "8", "--learning-rate", "0.05", "--momentum", "0.8", "--wd", "1e-4",
                          "-p", "1", "--pyamp", "--seed", "3", "--image-size", "8", "--out", "a", "--threads", "1", "images")
        self.assertIn("training resnet20 on images, f16 with loss scale dynamic:65536,2,0.5,2000", first)
        self.done("train", "resnet20", "--data", "images", "--epochs", "1", "--workers", "1", "--batch-size", "8", "--lr", "0.05", "--momentum", "0.8",
                  "--weight-decay", "1e-4", "--amp", "f16", "--seed", "3", "--image-size", "8", "--out", "b", "--threads", "1")
        a, b = (Safetensors(self.folder / run / "last.safetensors") for run in "ab")
        self.assertEqual(a.data, b.data)
        self.assertEqual(a.state["recipe"], b.state["recipe"])
        # Part of the training pictures, of all classes.
        self.done("train", "resnet20", "images", "--epochs", "1", *SMALL, "--limit", "6", "--log-json", "log", "--no-out", "-q")
        self.assertEqual(events(self.folder / "log")[0]["samples"], 6)
        # Another seed is another order, other weights and other pictures.
        self.done("train", "resnet20", "images", "--epochs", "1", *SMALL, "--seed", "4", "--out", "c", "-q")
        self.assertNotEqual(a.data, Safetensors(self.folder / "c/last.safetensors").data)

    def test_classes_of_the_data_make_the_last_layer(self):
        self.images(classes=("a", "b", "c"), train=4, test=2)
        self.done("train", "resnet20", "images", *SMALL, "--epochs", "1", "--out", "run", "-q")
        self.assertEqual(Safetensors(self.folder / "run/last.safetensors").header["fc.weight"]["shape"], [3, 64])
        # Weights of a run begin another one; the head begins anew where it must.
        self.images("two", train=4, test=2)
        status, out, err = self.run_program("train", "resnet20", "two", *SMALL, "--epochs", "1", "--no-out", "--pretrained", "run")
        self.assertEqual(status, 0, err)
        self.assertRegex(err, r"fc\.(weight|bias)")
        self.assertIn("tensors loaded", out)
        self.refused(1, ["expected weights for the 3 classes", "got weights for 2"], "eval", "resnet20", "images", "--weights", self.two())

    def test_classes_of_any_name(self):
        names = [os.fsdecode(b"caf\xe9"), "\x1b[31mdog"]
        self.images(classes=names, train=8)
        kept = ["\\e[31mdog", "caf\\xe9"]
        self.done("train", "resnet20", "images", *SMALL, "--lr-schedule", "constant", "--epochs", "1", "--out", "run", "-q")
        self.assertEqual(Safetensors(self.folder / "run/last.safetensors").state["classes"], kept)
        # The same folders are the same classes.
        self.done("train", "resnet20", "images", *SMALL, "--lr-schedule", "constant", "--epochs", "2", "--resume", "run", "-q")
        self.done("eval", "resnet20", "images", "--weights", "run", "--threads", "1")
        out = self.done("predict", "resnet20", "--weights", "run", "--threads", "1", self.folder / "images/val" / names[0] / "000.png")
        for name in kept:
            self.assertIn(f"%  {name}\n", out)
        self.assertNotIn("\x1b", out)
        status, out, err = self.run_program("train", "resnet20", "no\x1b[2Jimages", *SMALL, "--no-out")
        self.assertEqual(status, 1)
        self.assertIn("no\\e[2Jimages", err)
        self.assertNotIn("\x1b", out + err)

    def two(self):
        self.done("train", "resnet20", "two", *SMALL, "--epochs", "1", "--out", "of two", "-q")
        return "of two"

    def test_damaged_pictures_are_counted(self):
        self.images()
        for name in ("train/cat/003.png", "val/dog/001.png"):
            (self.folder / "images" / name).write_bytes(b"no picture")
        status, _, err = self.run_program("train", "resnet20", "images", *SMALL, "--epochs", "1", "--no-out", "-q")
        self.assertEqual(status, 0, err)
        for part in ("003.png", "001.png", "2 pictures could not be read"):
            self.assertIn(part, err)
        status, _, err = self.run_program("train", "resnet20", "images", *SMALL, "--epochs", "1", "--no-out", "-q", "--max-damaged", "0")
        self.assertEqual(status, 1)
        self.assertRegex(err, r"00\d\.png")


class Resuming(ImageTest):
    def whole(self):
        self.images()
        self.done("train", "resnet20", "images", *RECIPE, "--out", "whole", "-q")
        return Safetensors(self.folder / "whole/last.safetensors")

    def assert_same(self, run, whole):
        got = Safetensors(self.folder / run / "last.safetensors")
        self.assertEqual(got.data, whole.data)
        self.assertEqual(got.header, whole.header)

    def losses(self, run):
        """By step: a killed run makes some steps twice."""
        return {e["step"]: (e["loss"], e["lr"]) for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"}

    def test_killed_and_stopped_inside_epochs_the_bits_are_the_same(self):
        whole = self.whole()
        train = ["train", "resnet20", "images", *RECIPE, "--out", "run", "--save-every", "2", "-q"]
        log = self.folder / "run/log.jsonl"
        for number, after in ((signal.SIGKILL, 1), (signal.SIGTERM, 4), (signal.SIGKILL, 5)):
            resume = ["--resume", "run"] if (self.folder / "run/last.safetensors").exists() else ["--overwrite"]
            process = self.start(*train, *resume)
            end = time.monotonic() + 60
            while time.monotonic() < end and process.poll() is None:
                steps = [e["step"] for e in self.whole_lines(log) if e["event"] == "step"] if log.exists() else []
                if steps and steps[-1] >= after:
                    break
                time.sleep(0.002)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
            self.assertIn(process.returncode, (-number, 128 + number, 0), err)
        train += ["--resume", "run"] if (self.folder / "run/last.safetensors").exists() else ["--overwrite"]
        status, _, err = self.run_program(*train, timeout=120)
        self.assertEqual(status, 0, err)
        self.assert_same("run", whole)
        steps = self.losses("run")
        for step, values in self.losses("whole").items():
            self.assertEqual(steps[step], values)

    @staticmethod
    def whole_lines(path):
        import json
        text = path.read_text()
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def test_every_place_between_steps(self):
        """A checkpoint after each step of the first epochs: each one leads to the same end."""
        whole = self.whole()
        # Nine steps in all: stop by a copy of what was saved on the way.
        for every in (1, 4):
            run = f"every {every}"
            process = self.start("train", "resnet20", "images", *RECIPE, "--out", run, "--save-every", str(every), "-q")
            saved = self.folder / run / "last.safetensors"
            end = time.monotonic() + 60
            while time.monotonic() < end and not saved.exists():
                time.sleep(0.002)
            process.kill()
            process.communicate(timeout=60)
            state = Safetensors(saved).state
            self.assertGreater(state["step"], 0)
            status, _, err = self.run_program("train", "resnet20", "images", *RECIPE, "--resume", run, "-q", timeout=120)
            self.assertEqual(status, 0, err)
            # It was killed once it had saved, and may have logged a step more by then.
            self.assertRegex(err, r"\A(halfstep: warning: .*log\.jsonl: \d+ lines? from behind step \d+.*\n)?\Z")
            self.assert_same(run, whole)

    def test_other_flags_are_another_run(self):
        self.images()
        process = self.start("train", "resnet20", "images", *RECIPE, "--out", "run", "--save-every", "1", "-q")
        saved = self.folder / "run/last.safetensors"
        end = time.monotonic() + 60
        while time.monotonic() < end and not saved.exists():
            time.sleep(0.002)
        process.kill()
        process.communicate(timeout=60)
        without = lambda flag: [a for i, a in enumerate(RECIPE) if a != flag and (i == 0 or RECIPE[i - 1] != flag)]
        for flag, value, said in (("--mixup", "0", "--mixup 0.3, got 0"), ("--label-smoothing", "0", "--label-smoothing 0.1, got 0"),
                                  ("--color-jitter", "0", "--color-jitter 0.3, got 0"), ("--image-size", "7", "--image-size 8, got 7"),
                                  ("--epochs", "8", "--epochs 3, got 8")):
            self.refused(1, said, "train", "resnet20", "images", *without(flag), flag, value, "--resume", "run", "--no-out")
        # Without the run's own flags, a network's customary ones would be others.
        (self.folder / "run/config.yaml").unlink()
        self.refused(1, "--image-size 8, got 32", "train", "resnet20", "images", *without("--image-size"), "--resume", "run", "--no-out")
        self.refused(1, "expected a checkpoint of resnet32, got one of resnet20", "train", "resnet32", "images", *RECIPE, "--resume", "run", "--no-out")


class Predicting(ImageTest):
    def setUp(self):
        super().setUp()
        self.images()
        self.done("train", "resnet20", "images", *SMALL, "--epochs", "1", "--lr", "0.02", "--out", "run", "-q")

    def test_names_and_shares(self):
        out = self.done("predict", "resnet20", "--weights", "run", "images/val/cat/000.png", "images/val/dog/001.png")
        parts = re.findall(r"^(\S+)\n  ( *\d+\.\d\d)%  (cat|dog)\n  ( *\d+\.\d\d)%  (cat|dog)\n", out, re.M)
        self.assertEqual([p[0] for p in parts], ["images/val/cat/000.png", "images/val/dog/001.png"], out)
        for _, first, name, second, other in parts:
            self.assertGreaterEqual(float(first), float(second))
            self.assertAlmostEqual(float(first) + float(second), 100, delta=0.011)
            self.assertNotEqual(name, other)
        (self.folder / "names").write_text("Felis\r\nCanis\n")
        named = self.done("predict", "resnet20", "--weights", "run", "--classes", "names", "--top", "1", "images/val/cat/000.png")
        self.assertEqual(named, "resnet20 with run/best.safetensors\nimages/val/cat/000.png\n  " + parts[0][1] + "%  " + {"cat": "Felis", "dog": "Canis"}[parts[0][2]] + "\n")
        for content, said in (("one\n", "got 1"), ("1\n2\n3\n", "got more")):
            (self.folder / "names").write_text(content)
            self.refused(1, ["names: expected 2 class names", said], "predict", "resnet20", "--weights", "run", "--classes", "names", "x.png")
        # Right or wrong, prediction and evaluation agree.
        right = 0
        for name in ("cat", "dog"):
            for i in range(5):
                out = self.done("predict", "resnet20", "--weights", "run/last.safetensors", "--top", "1", f"images/val/{name}/{i:03d}.png")
                right += out.endswith(f"%  {name}\n")
        self.assertIn(f" * Acc@1 {100 * right / 10:.3f} ", self.done("eval", "resnet20", "images", "--weights", "run/last.safetensors"))

    def test_a_damaged_file_does_not_stop_the_others(self):
        good = (self.folder / "images/val/cat/000.png").read_bytes()
        (self.folder / "cut.png").write_bytes(good[:60])
        (self.folder / "text.jpg").write_text("hello")
        status, out, err = self.run_program("predict", "resnet20", "--weights", "run", "cut.png", "nowhere.png", "images/val/cat/000.png", "text.jpg")
        self.assertEqual(status, 1)
        self.assertEqual(re.findall(r"^\S+$", out, re.M), ["images/val/cat/000.png"])
        for name, line in zip(("cut.png", "nowhere.png", "text.jpg"), err.splitlines()):
            self.assertTrue(line.startswith("halfstep: ") and name in line, err)
        self.assertEqual(err.count("\n"), 3)

    def test_flags_that_belong_to_others(self):
        predict = ["predict", "resnet20", "x.png", "--weights", "run"]
        self.refused(2, "expected at least one image", "predict", "resnet20", "--weights", "run")
        self.refused(2, "--index: resnet20 takes files", *predict, "--index", "1")
        self.refused(2, "--data: resnet20 takes files", *predict, "--data", "images")
        self.refused(2, "--classes: mlp is no network of images", "predict", "mlp", "--weights", "run", "--classes", "x")
        self.refused(1, "expected a checkpoint of resnet50, got one of resnet20", "predict", "resnet50", "--weights", "run", "x.png")


class Refusing(ImageTest):
    def test_data_that_is_missing_or_another(self):
        self.refused(2, ["--data: expected a folder with images", "train.txt", "train.tar.gz"], "train", "resnet20", "--no-out")
        shutil.copy(self.folder / self.weights() / "last.safetensors", self.folder / "away.safetensors")
        self.refused(2, "--data: expected a folder with images", "eval", "resnet20", "--weights", "away.safetensors")
        self.refused(1, "nowhere", "train", "resnet20", "nowhere", "--no-out")
        (self.folder / "empty").mkdir()
        self.refused(1, ["empty", "train"], "train", "resnet20", "empty", "--no-out")
        self.images()
        self.refused(1, "images", "train", "mlp", "images", "--no-out")
        (self.folder / "images/val/cat").rename(self.folder / "images/val/cow")
        self.refused(1, ["expected the same classes in the training and the test part, got 2 and 2", "cat and cow"],
                     "train", "resnet20", "images", *SMALL, "--no-out")

    def weights(self):
        make_images(self.folder / "small", train=2, test=1)
        self.done("train", "resnet20", "small", *SMALL, "--epochs", "1", "--out", "weights", "-q")
        return "weights"

    def test_networks_and_folders_that_changed_places(self):
        self.images()
        self.refused(2, ["got the folder 'images'", "halfstep train resnet50 images"], "train", "images")
        self.refused(2, "MODEL is required", "train", "--epochs", "3")
        self.refused(2, "did you mean resnet50?", "train", "resnet5O", "images")
        self.refused(2, "did you mean resnet50?", "train", "--arch", "resnet500", "images")
        self.refused(2, "a second folder with data", "train", "--arch", "resnet20", "images", "other")

    def test_the_call_of_the_original_program(self):
        """Its accelerator is the third: where there is none, that is what is said."""
        err = self.refused(2, "sim:2", "train", "--gpu", "2", "--arch", "resnet50", "--epoch", "8", "--workers", "10", "/data/datasets/imagenet/")
        self.assertNotIn("flag", err)
        self.refused(2, "--data: expected a folder", "train", "--arch", "resnet50", "--epoch", "8", "--workers", "10")
        self.refused(1, "/data/datasets/imagenet/", "train", "--arch", "resnet50", "--epoch", "8", "--workers", "10", "--no-out", "/data/datasets/imagenet/")

    def test_pretrained_weights_are_files(self):
        self.images()
        for arguments in (["--pretrained"], ["--pretrained", "images"]):
            self.refused(2, ["--pretrained: expected a file with weights", "nothing is downloaded", "torchvision"], "train", "-a", "resnet20", *arguments)
        self.refused(2, "--pretrained: nowhere.pth does not exist", "train", "resnet20", "images", "--pretrained", "nowhere.pth")
        (self.folder / "x.pth.tar").write_bytes(b"")
        self.refused(2, "--pretrained takes the weights", "train", "resnet20", "images", "--resume", "x.pth.tar")
        self.refused(2, "its checkpoint has all the weights", "train", "resnet20", "images", "--pretrained", "images", "--resume", "images")
        (self.folder / "bad.pth").write_bytes(b"PK\3\4 no archive")
        self.refused(1, "bad.pth", "train", "resnet20", "images", *SMALL, "--no-out", "--pretrained", "bad.pth")

    def test_data_parallel_comes_with_mpirun(self):
        for flag, value in (("--dist-url", "tcp://localhost:1"), ("--dist-backend", "nccl"), ("--world-size", "2"), ("--rank", "0"),
                            ("--multiprocessing-distributed", None)):
            self.refused(2, [flag + " is not needed", "mpirun -n N"], "train", "-a", "resnet50", flag, *([value] if value else []), "images")

    def test_numbers_and_words(self):
        train = ["train", "resnet20", "images"]
        self.images()
        for flag, value, said in (("--lr-schedule", "polynomial", "expected constant, step"), ("--lr-schedule", "step:0", "at least 1"),
                                  ("--lr-schedule", "onecycle:2", "between 0 and 1"), ("--warmup-epochs", "-1", "at least 0"),
                                  ("--label-smoothing", "1", "0 to under 1"), ("--mixup", "-1", "at least 0"), ("--crop", "center", "got 'center'"),
                                  ("--min-area", "0", "above 0 to 1"), ("--color-jitter", "2", "0 to 1"), ("--image-size", "0", "whole number"),
                                  ("--resize", "4", "at least the --image-size"), ("--max-damaged", "-1", "whole number"),
                                  ("--print-freq", "-1", "whole number"), ("--start-epoch", "-1", "whole number")):
            self.refused(2, [flag, said], *train, flag, value)
        self.refused(2, "--nesterov: belongs to sgd", *train, "--nesterov", "--momentum", "0")
        self.refused(2, "--warmup-epochs: onecycle has a rise of its own", *train, "--lr-schedule", "onecycle", "--warmup-epochs", "1")
        self.refused(2, "--pyamp: means --amp f16, and --amp bf16", *train, "--pyamp", "--amp", "bf16")
        self.refused(2, "--evaluate: expected the weights", *train, "--evaluate")
        self.refused(2, "--crop: mlp is no network of images", "train", "mlp", "--crop", "none")
        self.refused(2, "--image-size: mlp is no network of images", "bench", "mlp", "--image-size", "32")


class Timing(ImageTest):
    def test_bench_times_steps_of_any_size(self):
        out = self.done("bench", "resnet20", "--image-size", "16", "-b", "2", "--steps", "1", "--warmup", "0", "--amp", "off,bf16", "--threads", "1")
        self.assertEqual(len(out.splitlines()), 2)
        for line, dtype in zip(out.splitlines(), ("f32", "bf16")):
            self.assertIn(f'"model":"resnet20","batch":2,"dtype":"{dtype}","image_size":16', line)

    def test_bench_times_inference_in_floats_and_integers(self):
        few = ["-b", "2", "--steps", "3", "--warmup", "1", "--threads", "1"]
        out = self.done("bench", "resnet20", "--inference", "--int8", "--amp", "off,bf16", "--write-onnx", ".", *few)
        lines = [json.loads(line) for line in out.splitlines()]
        self.assertEqual([line["dtype"] for line in lines], ["f32", "bf16", "int8"])
        for line in lines:
            self.assertEqual((line["mode"], line["batch"], line["image_size"]), ("inference", 2, 32))
            self.assertTrue(0 < line["ms_min"] <= line["ms_median"] <= line["ms_max"])
            self.assertAlmostEqual(line["samples_per_s"] * line["ms_median"], 2000, delta=1e-6)
        # Operators are text in the file; ONNX's name for those of 8 bits is in the second one only.
        plain, integers = ((self.folder / name).read_bytes() for name in ("resnet20.onnx", "resnet20-int8.onnx"))
        self.assertIn(b"Conv", plain)
        self.assertNotIn(b"QuantizeLinear", plain)
        self.assertIn(b"QuantizeLinear", integers)
        # Boxes are made by ops with numbers, which are the same for any number of samples.
        out = self.done("bench", "yolov5n", "--inference", "--int8", "--image-size", "64", *few)
        self.assertEqual([json.loads(line)["dtype"] for line in out.splitlines()], ["f32", "int8"])
        self.assertEqual(json.loads(self.done("bench", "mlp", "--inference", "--int8", *few).splitlines()[1])["dtype"], "int8")

    def test_what_bench_refuses_of_inference(self):
        self.refused(2, "--int8: only with --inference", "bench", "resnet20", "--int8")
        self.refused(2, "--write-onnx: only with --inference", "bench", "resnet20", "--write-onnx", ".")
        self.refused(2, "--write-onnx: expected a folder", "bench", "resnet20", "--inference", "--write-onnx", "none")
        for flag in (["--optimizer", "adam"], ["--loss-scale", "8"], ["--no-capture"]):
            self.refused(2, f"{flag[0]}: of training steps", "bench", "resnet20", "--inference", *flag)
        self.refused(2, "--amp: expected off, bf16 or f16 with --inference, got 'O2'", "bench", "resnet20", "--inference", "--amp", "O2")
        self.refused(2, "--int8: integers are computed on the CPU", "bench", "resnet20", "--inference", "--int8", "--device", "sim")


if __name__ == "__main__":
    unittest.main()
