# SPDX-License-Identifier: Apache-2.0
"""`halfstep train --config FILE.yaml`, and the effective configuration beside the checkpoints."""
import re
import unittest

from images_test import ImageTest
from program import ProgramTest, events

# Flags that a saved configuration has only where they were given, or never: they say where this run wrote or began, or
# are another way to say what is there.
ONLY_GIVEN = {"threads", "amp-dtype", "pretrained", "start-epoch", "debug-dump", "debug-level", "debug-compare", "debug-nonfinite", "debug-steps", "profile",
              "profile-steps", "data", "quant-weight-bits", "quant-activation-bits", "quant-observer", "quant-symmetric", "quant-reduce-range", "quant-learned",
              "quant-skip", "quant-no-first", "quant-no-last", "quant-freeze-ranges", "quant-freeze-norms", "winograd", "recompute", "memory-budget"}
NEVER = {"help", "no-quant", "help-all", "config", "arch", "gpu", "pyamp", "resume", "evaluate", "out", "overwrite", "no-out", "log-json", "max-bytes", "max-unpacked", "weights"}
OF_IMAGES = {"image-size", "resize", "crop", "min-area", "color-jitter", "max-damaged", "zero-init-residual"}
OF_BOXES = {"cfg", "mosaic", "mixup-pictures", "copy-paste", "degrees", "translate", "scale", "shear", "perspective", "hsv-h", "hsv-s", "hsv-v", "flip-ud", "flip-lr",
            "multi-scale", "no-rect", "no-polygon-boxes", "cache", "box-gain", "object-gain", "class-gain", "anchor-ratio", "focal-gamma", "class-weight",
            "object-weight", "conf-thres", "iou-thres", "max-detections"}


def keys(text):
    return [line.split(":")[0] for line in text.splitlines() if not line.startswith("#")]


class ConfigTest(ProgramTest):
    def write(self, text, name="c.yaml"):
        (self.folder / name).write_text(text) if isinstance(text, str) else (self.folder / name).write_bytes(text)
        return name

    def config(self, run="run"):
        return (self.folder / run / "config.yaml").read_text()


class Reading(ConfigTest):
    def test_flags_of_the_file(self):
        self.data()
        self.write("# a recipe\nmodel: mlp\ndata: data\nepochs: 2\nbatch-size: 32\nwd: 1e-4\nmomentum: '0.9'\nnesterov: yes\nlr-schedule: \"cosine\"\n"
                   "amp: f16\nloss-scale: dynamic:1024\nquiet: true\nout: run\nsave-every: 3\n")
        status, out, err = self.run_program("train", "--config", "c.yaml")
        self.assertEqual((status, out, err), (0, "", ""))
        start, end = events(self.folder / "run/log.jsonl")[0], events(self.folder / "run/log.jsonl")[-1]
        self.assertEqual([start[k] for k in ("epochs", "batch_size", "amp", "scale")], [2, 32, "f16", 1024])
        self.assertEqual((end["event"], end["step"]), ("end", 8))
        for line in ("weight-decay: 0.0001", "momentum: 0.9", "nesterov: true", "lr-schedule: cosine", "save-every: 3"):
            self.assertIn(line + "\n", self.config())

    def test_flags_win(self):
        self.data()
        self.write("model: mlp\ndata: nowhere\nepochs: 7\nlr: 3\nnesterov: true\nmomentum: 0.9\ngpu: 5\nno-out: true\npyamp: true\namp-dtype: f16\nresume: nowhere\n"
                   "start-epoch: 4\npretrained: nowhere.pth\nquiet: true\n")
        (self.folder / "weights.pth").touch()
        flags = ["--data", "data", "--epoch", "1", "--learning-rate", "0.5", "--nesterov=false", "--device", "cpu", "--out", "run", "--amp", "bf16"]
        # Of --resume, --pretrained and --start-epoch one given displaces all.
        self.refused(1, "weights.pth", "train", "--config", "c.yaml", *flags, "--pretrained", "weights.pth")
        self.run_program("train", "--config", "c.yaml", *flags, "--start-epoch", "0")
        for line in ("data: data", "epochs: 1", "lr: 0.5", "nesterov: false", "device: cpu", "amp: bf16", "momentum: 0.9"):
            self.assertIn(line + "\n", self.config())
        self.assertEqual(events(self.folder / "run/log.jsonl")[-1]["event"], "end")

    def test_network_and_folder(self):
        self.data()
        self.write("model: mlp\nquiet: true\nno-out: true\nepochs: 1\n")
        for arguments in (["data"], ["--data", "data"], ["mlp", "data"], ["-a", "mlp", "data"]):
            with self.subTest(arguments):
                self.assertEqual(self.run_program("train", "--config", "c.yaml", *arguments, "--log-json", "log")[0], 0)
                self.assertEqual(events(self.folder / "log")[0]["samples"], 128)
        self.refused(2, ["--data", "expected a folder with images"], "train", "resnet20", "--config", "c.yaml")
        self.write("model: mlp\ndata: nowhere\nquiet: true\nno-out: true\nepochs: 1\n")
        for arguments in (["data"], ["mlp", "data"], ["-a", "mlp", "data"]):
            self.assertEqual(self.run_program("train", "--config", "c.yaml", *arguments)[::2], (0, ""), arguments)
        self.write("arch: mlp\nepochs: 1\nquiet: true\nno-out: true\n")
        self.assertEqual(self.run_program("train", "--config", "c.yaml", "data")[0], 0)
        self.write("epochs: 1\n")
        self.refused(2, "MODEL is required", "train", "--config", "c.yaml")

    def test_flags_without_values(self):
        self.data()
        self.write("debug-nonfinite:\ndebug-compare: f32\nno-norm-decay: false\nquiet: on\nepochs: 1\nout: run\n")
        self.assertEqual(self.run_program("train", "mlp", "data", "--config", "c.yaml")[0], 0)
        for line in ("debug-nonfinite: log", "debug-compare: f32", "debug-steps: 1", "no-norm-decay: false", "quiet: true"):
            self.assertIn(line + "\n", self.config())

    def test_says_what_is_wrong_and_where(self):
        wrong = {
            "lr: 1\nbatch_size: 3\n": ["c.yaml:2: there is no flag 'batch_size'; did you mean batch-size?"],
            "epoch: 1\n\nepochs: 2": ["c.yaml:3: epochs is given more than once, also as epoch"],
            "lr: 1\nlr: 1": ["c.yaml:2: lr is given more than once"],
            "lr: [1, 2]": ["c.yaml:1: lr: expected a single value, got a list"],
            "lr:\n  x: 1": ["c.yaml:1: lr: expected a single value, got a mapping"],
            "quiet: [true]": ["c.yaml:1: quiet: expected a single value, got a list"],
            "lr:": ["c.yaml:1: lr: expected a value, got none"],
            "lr: ~": ["c.yaml:1: lr: expected a value, got none"],
            "lr: fast": ["c.yaml:1: --lr: expected a number, got 'fast'"],
            "lr: 0,1": ["--lr: expected a number", "decimals follow a point"],
            "epochs: 1.5": ["c.yaml:1: --epochs: expected a whole number", "got '1.5'"],
            "epochs: -1": ["--epochs: expected a whole number", "got '-1'"],
            "seed: 99999999999999999999": ["--seed: expected a whole number"],
            "nesterov: 3": ["c.yaml:1: nesterov: expected true or false, got '3'"],
            "nesterov:": ["c.yaml:1: nesterov: expected true or false, got no value"],
            "data: ''": ["c.yaml:1: --data: expected a path, got an empty one"],
            "config: other.yaml": ["there is no flag 'config'; a configuration names no other"],
            "help: true": ["there is no flag 'help'"],
            "model: mlpp": ["MODEL: expected mlp,", "did you mean mlp?"],
            "amp: f8": ["--amp: expected off", "got 'f8'"],
            "lr: -1": ["c.yaml:1: --lr: expected a number above 0, got -1"],
            "epochs: 1\nmomentum: 1": ["c.yaml:2: --momentum: expected 0 to under 1, got 1"],
            "label-smoothing: nan": ["c.yaml:1: --label-smoothing: expected 0 to under 1, got nan"],
            "optimizer: sgdd": ["c.yaml:1: --optimizer: expected sgd, adam or adamw, got 'sgdd'"],
            "debug-nonfinite: data": ["c.yaml:1: --debug-nonfinite: expected log or raise, got 'data'"],
            "no-norm-decay: true": ["c.yaml: --no-norm-decay: needs a --weight-decay above 0"],
            "no-norm-decay: true\nwd: 0": ["c.yaml: --no-norm-decay: needs a --weight-decay above 0"],
            "debug-steps: 3": ["c.yaml: --debug-steps: belongs to --debug-dump"],
            "- lr": ["c.yaml:1: expected lines `flag: value`, got a list"],
            "lr 0.1": ["c.yaml:1: expected lines `flag: value`, got a text"],
            "lr: 1\n---\nlr: 2": ["c.yaml: expected one document, got more"],
            "? [a]\n: 1": ["c.yaml:1: expected the name of a flag"],
            "a: {": ["c.yaml:1: expected YAML"],
            "lr: 'x": ["c.yaml:1: expected YAML"],
            "lr: *a": ["c.yaml:1: expected YAML: the referenced anchor is not defined"],
            "lr: 1\n  epochs: 2": ["c.yaml:2: expected YAML"],
            ",lr: 1": ["c.yaml: expected one document, got more"],
            ", \"lr": ["c.yaml"],
            "<<: {lr: 1}": ["there is no flag '<<'"],
            "[" * 50000: ["c.yaml:1: expected YAML"],
            b"\xff\xfe\x00\x01": ["c.yaml: expected text, got a zero byte at offset 2"],
            b"lr: \"\0\"": ["zero byte at offset 5"],
            bytes(range(128, 256)): ["c.yaml"],
        }
        for text, said in wrong.items():
            with self.subTest(text[:30]):
                network = [] if isinstance(text, str) and text.startswith("model") else ["mlp"]
                self.refused(2, said, "train", *network, "--no-out", "--limit", "64", "--config", self.write(text))
        self.assertEqual(list(self.folder.iterdir()), [self.folder / "c.yaml"])

    def test_files_that_are_none(self):
        self.write("x: " + "y" * (1 << 20))
        self.refused(1, "c.yaml: expected at most 1048576 bytes, got 1048579", "train", "mlp", "--config", "c.yaml")
        self.refused(1, "nope.yaml: there is no such file", "train", "mlp", "--config", "nope.yaml")
        self.refused(1, "expected a file, got a folder", "train", "mlp", "--config", ".")
        self.refused(1, "expected a file", "train", "mlp", "--config", "/dev/zero", timeout=20)
        self.refused(2, "--config: given more than once", "train", "mlp", "--config", "a", "--config", "b")
        self.refused(2, "there is no flag --config", "eval", "mlp", "--config", "a", "--weights", "w")

    def test_empty_files_say_nothing(self):
        self.data()
        for text in ("", "# nothing\n", "---\n", "{}"):
            with self.subTest(text):
                self.train("data", "--no-out", "--epochs", "1", "--config", self.write(text))


class Saving(ConfigTest):
    def test_does_the_same_again(self):
        # A folder whose name YAML would take for something else.
        name = "da ta: #1 'q' \"d\" \\ é -"
        self.data(name)
        self.train("--data", name, "--epochs", "2", "--batch-size", "50", "--lr", "1e-05", "--optimizer", "adamw", "--weight-decay", "0.3", "--label-smoothing", "0.1",
                   "--mixup", "0.2", "--amp", "f16", "--loss-scale", "mindspore:1024,2,50", "--accumulate", "2", "--clip-norm", "0.7", "--seed", "18446744073709551615",
                   "--threads", "1", "--limit", "120", "--warmup-epochs", "0.5", "--lr-schedule", "step:1,0.3", "--no-norm-decay", "--out", "a")
        first = self.config("a")
        self.assertIn("loss-scale: mindspore:1024,2,50\n", first)
        self.assertIn("threads: 1\n", first)
        status, out, err = self.run_program("train", "--config", "a/config.yaml", "--out", "b")
        self.assertEqual((status, err), (0, ""), out)
        self.assertEqual(self.config("b").splitlines()[1:], first.splitlines()[1:])
        self.assertEqual((self.folder / "a/last.safetensors").read_bytes(), (self.folder / "b/last.safetensors").read_bytes())

    def test_levels(self):
        self.data()
        for flags, saved in ((["O2"], ["amp: O2", "amp-dtype: f16"]), (["O3", "--amp-dtype", "bf16"], ["amp: O3", "amp-dtype: bf16", "loss-scale: none"]), (["O0"], ["amp: O0"])):
            with self.subTest(flags):
                self.train("data", "--epochs", "1", "--out", "a", "--overwrite", "-q", "--threads", "1", "--amp", *flags)
                lines = self.config("a").splitlines()
                self.assertEqual([line for line in saved if line not in lines], [])
                self.assertEqual("amp-dtype" in keys(self.config("a")), len(saved) > 1)
                self.train("--config", "a/config.yaml", "--out", "b", "--overwrite")
                self.assertEqual((self.folder / "a/last.safetensors").read_bytes(), (self.folder / "b/last.safetensors").read_bytes())
        # The dtype belongs to the level, which another --amp takes the place of.
        self.train("--config", "a/config.yaml", "--amp", "O3", "--amp-dtype", "bf16", "--out", "c")
        self.train("--config", "c/config.yaml", "--amp", "bf16", "--out", "d")
        self.assertNotIn("amp-dtype", keys(self.config("d")))

    def test_knows_every_flag(self):
        self.train("--epochs", "1", "--limit", "64", "--out", "run")
        out = self.run_program("train", "--help")[1]
        flags = set(re.findall(r"^  (?:-\w,)?--([a-z0-9-]+)", out, re.M))
        self.assertGreater(len(flags), 45)
        saved = keys(self.config())
        self.assertEqual(len(set(saved)), len(saved))
        self.assertEqual(set(saved) - {"model"}, flags - ONLY_GIVEN - NEVER - OF_IMAGES - OF_BOXES)
        self.assertEqual([k for k in ONLY_GIVEN | NEVER | OF_IMAGES | OF_BOXES if k not in flags], [])

    def test_says_where_it_went_on_from(self):
        self.data()
        self.train("data", "--epochs", "1", "--out", "run")
        self.assertNotIn("Resumed", self.config())
        self.train("data", "--epochs", "2", "--resume", "run", "--config", "run/config.yaml")
        self.assertIn("# Resumed from run.\n", self.config())
        self.assertNotIn("resume", keys(self.config()))
        self.assertIn("epochs: 2\n", self.config())


class SavingImages(ImageTest):
    def test_does_the_same_again(self):
        self.images()
        self.done("train", "resnet20", "images", "--image-size", "8", "--batch-size", "8", "--threads", "1", "--epochs", "1", "--color-jitter", "0.3", "--crop",
                  "random-resized", "--min-area", "0.5", "--zero-init-residual", "--max-damaged", "3", "--amp", "bf16", "--out", "a", "-p", "0")
        saved = keys((self.folder / "a/config.yaml").read_text())
        self.assertTrue(OF_IMAGES <= set(saved), saved)
        self.done("train", "--config", "a/config.yaml", "--out", "b")
        self.assertEqual((self.folder / "a/last.safetensors").read_bytes(), (self.folder / "b/last.safetensors").read_bytes())


if __name__ == "__main__":
    unittest.main()
