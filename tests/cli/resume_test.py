# SPDX-License-Identifier: Apache-2.0
"""What verbs take from a run: its network, its data and its flags; what may change in a run that goes on, and its log."""
import json
import math
import random
import re
import shutil
import signal
import struct
import time
import unittest

from images_test import SMALL, ImageTest
from program import ProgramTest, Safetensors, events, idx, make_data


class RunTest(ProgramTest):
    def good(self, *arguments, **options):
        status, out, err = self.run_program(*arguments, **options)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def other_data(self, name="other"):
        """As many pictures as data() makes, and others."""
        folder = make_data(self.folder / name)
        numbers = random.Random(2)
        for part, count in (("train", 128), ("t10k", 64)):
            (folder / f"{part}-images-idx3-ubyte").write_bytes(idx([count, 28, 28], numbers.randbytes(count * 784)))
        return name

    def state(self, run="run"):
        return Safetensors(self.folder / run / "last.safetensors").state


FLAGS = ["--epochs", "2", "--batch-size", "32", "--lr", "0.05", "--optimizer", "adam", "--seed", "3", "--limit", "100", "--amp", "f16", "--loss-scale",
         "megatron:1024,hysteresis=3", "--clip-norm", "0.5", "--label-smoothing", "0.1", "--accumulate", "2", "--threads", "1"]


class Resuming(RunTest):
    def setUp(self):
        super().setUp()
        self.data()

    def test_all_is_taken_from_the_run(self):
        self.good("train", "mlp", "data", *FLAGS, "--out", "run", "-q")
        shutil.copytree(self.folder / "run", self.folder / "typed")
        # quiet is one of the run's flags.
        out = self.good("train", "--resume", "run", "--epochs", "4", "--quiet=false")
        self.assertIn("training mlp on data, f16 with loss scale megatron:1024,hysteresis=3\n", out)
        self.assertIn("resuming from run/last.safetensors, with what run/config.yaml says\n  --epochs 4 in place of 2\n", out)
        typed = [a if a != "2" or FLAGS[i - 1] != "--epochs" else "4" for i, a in enumerate(FLAGS)]
        self.good("train", "mlp", "data", *typed, "--resume", "typed", "-q")
        self.assertEqual((self.folder / "run/last.safetensors").read_bytes(), (self.folder / "typed/last.safetensors").read_bytes())
        # In one go, and on more threads: results don't depend on their number.
        threads = ["3" if typed[i - 1] == "--threads" else a for i, a in enumerate(typed)]
        for out, flags in (("whole", typed), ("threads", threads)):
            self.good("train", "mlp", "data", *flags, "--out", out, "-q")
            self.assertEqual((self.folder / "run/last.safetensors").read_bytes(), (self.folder / out / "last.safetensors").read_bytes(), out)
        lines = (self.folder / "run/config.yaml").read_text().splitlines()
        self.assertEqual([line for line in lines if line.startswith("epochs")], ["epochs: 4"])
        # The same from a checkpoint's file, and with what the run had said again.
        for arguments in (["--resume", "run/last.safetensors"], ["mlp", "--resume", "run"], ["data", "--resume", "run"], ["-a", "mlp", "data", "--resume", "run"],
                          ["mlp", "data", *typed, "--resume", "run"]):
            status, out, err = self.run_program("train", *arguments)
            self.assertEqual((status, err.count("all 4 epochs are done")), (0, 1), arguments)

    def test_nothing_left(self):
        self.good("train", "mlp", "data", "--out", "run", "-q")
        before = {p.name: p.read_bytes() for p in (self.folder / "run").iterdir()}
        status, out, err = self.run_program("train", "--resume", "run")
        self.assertEqual((status, err), (0, "halfstep: run: all 1 epochs are done; a larger --epochs continues\n"))
        self.assertEqual(before, {p.name: p.read_bytes() for p in (self.folder / "run").iterdir()})

    def test_what_may_change_is_said(self):
        self.good("train", "mlp", "data", "--out", "run", "--amp", "f16", "--threads", "2", "--accumulate", "2")
        status, out, err = self.run_program("train", "--resume", "run", "--epochs", "2", "--amp", "bf16", "--threads", "1", "--accumulate", "1")
        self.assertEqual(status, 0, err)
        self.assertEqual(err, "halfstep: warning: run: the run had --amp f16, it continues with bf16\n")
        said = out[out.index("resuming from"):].splitlines()[1:6]
        self.assertEqual(said[:4], ["  --epochs 2 in place of 1", "  --amp bf16 in place of f16", "  --loss-scale none in place of dynamic:65536,2,0.5,2000",
                                    "  --accumulate 1 in place of 2"])
        # Taken over, and not said again.
        out = self.good("train", "--resume", "run", "--epochs", "3")
        self.assertIn("  --epochs 3 in place of 2\nepoch 3/3", out)
        self.assertIn("bf16 with loss scale none", out)
        # Inside an epoch the group of batches is one.
        process = self.start("train", "mlp", "data", "--out", "part", "--epochs", "100000", "--batch-size", "8", "--accumulate", "2", "-q")
        log = self.folder / "part/log.jsonl"
        end = time.monotonic() + 30
        while not (log.exists() and log.read_text().count('"step"') > 3) and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        if self.state("part")["batch"] not in (0, 16):
            self.refused(1, "--accumulate 2, got 4; it can change at the end of an epoch only", "train", "--resume", "part", "--accumulate", "4")

    def test_what_may_not_change_is_refused(self):
        self.good("train", "mlp", "data", "--out", "run", "-q", "--lr-schedule", "cosine", "--limit", "100")
        other = self.other_data()
        before = (self.folder / "run/config.yaml").read_bytes()
        for flags, said in ((["resnet20", "data"], ["expected a checkpoint of resnet20, got one of mlp", "run/config.yaml"]),
                            (["--data", other], ["other data", "--data other"]), ([other], ["other data"]), (["--seed", "1"], ["--seed 0, got 64 and 1"]),
                            (["--batch-size", "32"], ["--batch-size 64", "got 32"]), (["--optimizer", "adam"], ["expected the state of Adam, got that of SGD", "--optimizer"]),
                            (["--lr", "1"], ["--lr 0.01, got 1"]), (["--lr-schedule", "constant"], ["--lr-schedule cosine, got constant"]),
                            (["--epochs", "3"], ["--epochs 1, got 3", "of --lr-schedule cosine ", "with --pretrained run --start-epoch 1\n"]),
                            (["--momentum", "0.5"], ["--momentum 0, got 0.5"]), (["--clip-norm", "2"], ["--clip-norm 0, got 2"]),
                            (["--limit", "90"], ["100 training samples, got 90"]), (["--mixup", "0.2"], ["--mixup 0, got 0.2"]),
                            (["--loss-scale", "apex"], ["without a loss scale, got --loss-scale apex"]), (["--no-norm-decay", "--weight-decay", "1"], ["got"])):
            with self.subTest(flags):
                self.refused(1, said, "train", *flags, "--resume", "run")
        self.assertEqual(before, (self.folder / "run/config.yaml").read_bytes())

    def test_a_schedule_of_another_length_goes_on_from_the_weights(self):
        """Half a cosine over 3 epochs of 2 steps, of which one epoch has passed: torch.optim.lr_scheduler.CosineAnnealingLR, with T_max 6 and from step 2."""
        self.good("train", "mlp", "data", "--out", "run", "-q", "--lr-schedule", "cosine", "--lr", "0.04")
        said = self.refused(1, "--pretrained", "train", "--resume", "run", "--epochs", "3")
        flags = re.search(r"continues from its weights with (.*)\n", said)[1].split()
        self.assertEqual(flags, ["--pretrained", "run", "--start-epoch", "1"])
        self.good("train", "mlp", "data", "--out", "longer", "-q", "--lr-schedule", "cosine", "--lr", "0.04", "--epochs", "3", *flags)
        steps = [e for e in events(self.folder / "longer/log.jsonl") if e["event"] == "step"]
        self.assertEqual([(s["epoch"], s["step"]) for s in steps], [(2, 3), (2, 4), (3, 5), (3, 6)])
        for s in steps:
            self.assertAlmostEqual(s["lr"], 0.02 * (1 + math.cos(math.pi * (s["step"] - 1) / 6)), delta=1e-12)
        # It is a run like any other: it resumes, and begins there no second time.
        self.assertIn("all 3 epochs are done", self.run_program("train", "--resume", "longer").stderr)
        self.refused(2, "--start-epoch: --resume is given", "train", "--resume", "longer", "--start-epoch", "2")

    def test_flags_that_the_run_had_and_the_command_has_no_use_for(self):
        self.good("train", "mlp", "data", "--out", "run", "-q", "--tensorboard", "--weight-decay", "0.1", "--no-norm-decay")
        self.assertIn("tensorboard: true\n", (self.folder / "run/config.yaml").read_text())
        files = sorted((self.folder / "run/tensorboard").iterdir())
        self.assertIn("Acc@1", self.good("train", "--resume", "run", "--evaluate", "--quiet=false", "-p", "1"))
        self.good("train", "--resume", "run", "--epochs", "2", "--no-out")
        self.assertEqual(sorted((self.folder / "run/tensorboard").iterdir()), files)
        # Given together they contradict each other.
        self.refused(2, "--tensorboard: it writes into the folder of a run, and --evaluate has none", "train", "--resume", "run", "--evaluate", "--tensorboard")
        self.refused(2, "run/config.yaml: --no-norm-decay: needs a --weight-decay above 0", "train", "--resume", "run", "--epochs", "2", "--weight-decay", "0")

    def test_one_precision_under_two_names(self):
        self.good("train", "mlp", "data", "--out", "run", "-q", "--amp", "fp16", "--loss-scale", "dynamic:1024")
        self.assertEqual(self.state()["amp"], "f16")
        self.assertEqual(events(self.folder / "run/log.jsonl")[0]["amp"], "f16")
        self.assertIn("amp: f16\n", (self.folder / "run/config.yaml").read_text())
        for number, name in enumerate(("f16", "float16", "fp16"), 2):
            # No warning, nothing that changed, and its loss scale.
            out = self.good("train", "--resume", "run", "--epochs", str(number), "--amp", name, "--quiet=false")
            self.assertIn(f"says\n  --epochs {number} in place of {number - 1}\nepoch {number}", out)
            self.refused(1, "growth_factor 2, got 4", "train", "--resume", "run", "--epochs", "9", "--amp", name, "--loss-scale", "dynamic:1024,4")
        # Files of before have the name that was given.
        config, last = self.folder / "run/config.yaml", self.folder / "run/last.safetensors"
        config.write_text(config.read_text().replace("amp: f16", "amp: fp16"))
        file = Safetensors(last)
        file.set_state(amp="fp16")
        file.write(last)
        self.good("train", "--resume", "run", "--epochs", "5", "--amp", "f16")
        self.good("train", "mlp", "data", "--out", "level", "-q", "--amp", "O2", "--amp-dtype", "bfloat16")
        self.assertIn("amp-dtype: bf16\n", (self.folder / "level/config.yaml").read_text())

    def test_data_that_are_elsewhere_now(self):
        self.good("train", "mlp", "data", "--out", "run", "-q")
        (self.folder / "data").rename(self.folder / "moved")
        for verb in (["train", "--resume", "run", "--epochs", "2"], ["eval", "--weights", "run"], ["predict", "--weights", "run"]):
            self.refused(1, ["data: the run's data, as run/config.yaml says, are not there any more; --data names where they are"], *verb)
        out = self.good("train", "--resume", "run", "--epochs", "2", "--data", "moved", "--quiet=false")
        self.assertIn("  --data moved in place of data\n", out)
        self.assertIn("data: moved\n", (self.folder / "run/config.yaml").read_text())
        self.assertIn("on moved, as run/config.yaml says\n", self.good("eval", "--weights", "run"))
        # Others in the same place.
        self.other_data("third")
        shutil.rmtree(self.folder / "moved")
        (self.folder / "third").rename(self.folder / "moved")
        self.refused(1, "other data", "train", "--resume", "run", "--epochs", "3")
        self.refused(1, ["moved: the test part is not that of the run run any more", "--data moved takes it all the same"], "eval", "--weights", "run")
        self.good("eval", "--weights", "run", "--data", "moved")

    def test_where_a_run_began_stays_in_its_configuration(self):
        self.good("train", "mlp", "data", "--out", "first", "-q")
        self.good("train", "mlp", "data", "--out", "run", "-q", "--pretrained", "first", "--epochs", "2", "--threads", "1")
        self.good("train", "--resume", "run", "--epochs", "3")
        config = (self.folder / "run/config.yaml").read_text()
        self.assertIn("pretrained: first\n", config)
        self.good("train", "--config", "run/config.yaml", "--out", "again")
        self.assertEqual((self.folder / "run/last.safetensors").read_bytes(), (self.folder / "again/last.safetensors").read_bytes())

    def test_a_run_without_a_configuration(self):
        self.good("train", "mlp", "data", "--out", "run", "-q")
        (self.folder / "run/config.yaml").unlink()
        self.refused(2, ["MODEL is required: run has no config.yaml"], "train", "--resume", "run", "--epochs", "2")
        self.good("train", "mlp", "data", "--resume", "run", "--epochs", "2", "-q")
        (self.folder / "run/config.yaml").write_text("model: [1]\n")
        self.refused(2, "run/config.yaml:1", "train", "--resume", "run", "--epochs", "3")

    def test_a_run_that_was_ended_between_its_two_files(self):
        """The best one is written first: it is the whole state as well."""
        self.good("train", "mlp", "data", "--out", "run", "-q", "--threads", "1")
        shutil.copytree(self.folder / "run", self.folder / "whole")
        self.good("train", "--resume", "whole", "--epochs", "2")
        (self.folder / "run/last.safetensors").unlink()
        self.assertIn("resuming from run/best.safetensors", self.good("train", "--resume", "run", "--epochs", "2", "--quiet=false"))
        self.assertEqual((self.folder / "run/last.safetensors").read_bytes(), (self.folder / "whole/last.safetensors").read_bytes())

    def test_nowhere(self):
        self.refused(2, "--resume: nowhere does not exist", "train", "--resume", "nowhere")
        (self.folder / "empty").mkdir()
        self.refused(1, "empty: expected last.safetensors", "train", "mlp", "data", "--resume", "empty")
        self.assertEqual(list((self.folder / "empty").iterdir()), [])

    def test_gpu_and_device(self):
        self.refused(2, "--gpu: means device 3 of the accelerator, and --device cpu is given", "train", "mlp", "--gpu", "3", "--device", "cpu")
        self.refused(2, "--gpu: means device 3 of the accelerator, and --device sim:1 is given", "eval", "mlp", "--weights", "x", "--gpu", "3", "--device", "sim:1")


class Weights(RunTest):
    def test_the_data_are_those_of_the_run(self):
        self.data()
        self.good("train", "mlp", "data", "--out", "run", "-q")
        trained = [e for e in events(self.folder / "run/log.jsonl") if e["event"] == "eval"][0]
        for arguments in (["mlp", "--weights", "run"], ["--weights", "run"], ["--weights", "run/last.safetensors"], ["data", "--weights", "run"]):
            with self.subTest(arguments):
                out = self.good("eval", *arguments, "--log-json", "eval")
                self.assertRegex(out, r"\Aevaluating mlp with run/(best|last)\.safetensors on data" +
                                 (r"\n" if arguments[0] == "data" else r", as run/config.yaml says\n"))
                self.assertEqual([events(self.folder / "eval")[0][k] for k in ("loss", "top1", "top5")], [trained[k] for k in ("loss", "top1", "top5")])
        out = self.good("predict", "--weights", "run", "--count", "64")
        self.assertTrue(out.startswith("mlp with run/best.safetensors on data, as run/config.yaml says\n"), out[:100])
        self.assertEqual(int(re.search(r"(\d+) of 64 right", out)[1]), round(64 * trained["top1"]))
        # Pictures in place of MODEL.
        (self.folder / "five").write_bytes(idx([2, 28, 28], bytes(2 * 784)))
        self.assertEqual(self.good("predict", "five", "--weights", "run").count("%"), 2)
        out = self.good("export", "--weights", "run", "--onnx", "a.onnx")
        self.assertTrue(out.startswith("mlp with run/best.safetensors\n"), out)
        self.good("export", "mlp", "--weights", "run", "--onnx", "b.onnx")
        self.assertEqual((self.folder / "a.onnx").read_bytes(), (self.folder / "b.onnx").read_bytes())

    def test_the_digits_of_the_run(self):
        self.good("train", "mlp", "--seed", "5", "--limit", "64", "--out", "run", "-q")
        trained = [e for e in events(self.folder / "run/log.jsonl") if e["event"] == "eval"][0]
        self.assertIn("on the built-in digits, as run/config.yaml says\n", self.good("eval", "--weights", "run", "--log-json", "a"))
        self.assertEqual(events(self.folder / "a")[0]["loss"], trained["loss"])
        for verb, model in (("eval", ["mlp"]), ("eval", []), ("predict", ["mlp"]), ("predict", [])):
            for flag, value in (("--image-size", "32"), ("--resize", "3")):
                self.refused(2, f"{flag}: mlp is no network of images", verb, *model, "--weights", "run", flag, value)
        self.good("eval", "--weights", "run", "--log-json", "a", "--seed", "0")
        self.assertNotEqual(events(self.folder / "a")[0]["loss"], trained["loss"])

    def test_another_network_is_an_error(self):
        self.data()
        self.good("train", "mlp", "data", "--out", "run", "-q")
        for verb in (["eval", "resnet20", "--weights", "run"], ["predict", "resnet20", "x.png", "--weights", "run"],
                     ["export", "resnet20", "--weights", "run", "--onnx", "x"], ["train", "resnet20", "data", "--resume", "run"]):
            self.refused(1, "expected a checkpoint of resnet20, got one of mlp", *verb)

    def test_weights_that_say_nothing(self):
        self.data()
        self.good("train", "mlp", "data", "--out", "run", "-q")
        file = Safetensors(self.folder / "run/last.safetensors")
        file.keep(name for name in file.header if name.startswith("fc"))
        file.write(self.folder / "run/plain.safetensors", sign=False)
        self.refused(2, "MODEL: run/plain.safetensors doesn't say which network", "eval", "--weights", "run/plain.safetensors")
        # Beside a run, and not of it for all that is known.
        self.assertIn("on the built-in digits\n", self.good("eval", "mlp", "--weights", "run/plain.safetensors"))
        shutil.copy(self.folder / "run/last.safetensors", self.folder / "away.safetensors")
        self.assertIn("evaluating mlp with away.safetensors on the built-in digits\n", self.good("eval", "--weights", "away.safetensors"))
        file = Safetensors(self.folder / "run/last.safetensors")
        file.set_state(model="alexnet")
        file.write(self.folder / "away.safetensors")
        self.refused(1, "'alexnet'", "eval", "--weights", "away.safetensors")


class WeightsOfImages(ImageTest):
    def test_network_data_and_sizes_are_those_of_the_run(self):
        self.images()
        self.done("train", "resnet20", "images", *SMALL, "--resize", "9", "--epochs", "1", "--lr", "0.02", "--out", "run", "-q")
        trained = [e for e in events(self.folder / "run/log.jsonl") if e["event"] == "eval"][0]
        out = self.done("eval", "--weights", "run", "--log-json", "a", "--threads", "1", "-b", "8")
        self.assertIn("evaluating resnet20 with run/best.safetensors on images, as run/config.yaml says\n", out)
        self.assertEqual(events(self.folder / "a")[0]["loss"], trained["loss"])
        out = self.done("train", "--evaluate", "--resume", "run", "--quiet=false")
        self.assertIn(f" * Acc@1 {100 * trained['top1']:.3f} ", out)
        out = self.done("predict", "images/val/cat/000.png", "images/val/dog/001.png", "--weights", "run")
        self.assertEqual(out.count(".png\n"), 2)
        (self.folder / "images").rename(self.folder / "moved")
        status, out, err = self.run_program("train", "--resume", "run")
        self.assertEqual(status, 1)
        self.assertIn("images: the run's data, as run/config.yaml says, are not there any more", err)
        # A picture more, or under another name, is another data set.
        shutil.copy(self.folder / "moved/val/cat/000.png", self.folder / "moved/val/cat/new.png")
        status, out, err = self.run_program("train", "--resume", "run", "moved")
        self.assertEqual(status, 1)
        self.assertIn("other data: its test part", err)


class Log(RunTest):
    def setUp(self):
        super().setUp()
        self.data()
        self.good("train", "mlp", "data", "--out", "run", "-q", "--batch-size", "32")
        self.log = self.folder / "run/log.jsonl"
        self.lines = self.log.read_bytes().splitlines(keepends=True)

    def resumed(self, epochs="2"):
        status, out, err = self.run_program("train", "--resume", "run", "--epochs", epochs)
        self.assertEqual(status, 0, err)
        log = events(self.log)
        self.assertEqual([e["step"] for e in log if e["event"] == "step"], list(range(1, 4 * int(epochs) + 1)))
        self.assertEqual([e["epoch"] for e in log if e["event"] == "eval"], list(range(1, int(epochs) + 1)))
        return err

    def test_a_last_line_that_was_torn(self):
        step = [line for line in self.lines if b'"step"' in line[:20]][0].replace(b'"step":1', b'"step":5')
        for number, torn in enumerate((step[:1], step[:20], step[:-2], b"\0\0\0", b"{}")):
            with self.subTest(torn):
                self.log.write_bytes(b"".join(self.lines) + torn)
                shutil.copytree(self.folder / "run", self.folder / "kept")
                self.assertEqual(self.resumed(), f"halfstep: warning: run/log.jsonl: 1 line was not whole, the first is line {len(self.lines) + 1}; what was left of it is removed\n")
                shutil.rmtree(self.folder / "run")
                (self.folder / "kept").rename(self.folder / "run")

    def test_a_last_line_without_its_end(self):
        self.log.write_bytes(b"".join(self.lines)[:-1])
        self.assertEqual(self.resumed(), "")
        self.assertEqual(events(self.log)[len(self.lines) - 1]["event"], "end")

    def test_torn_lines_before_others(self):
        """Programs of before went on behind half a line."""
        self.log.write_bytes(b"".join(self.lines[:3]) + self.lines[3][:9] + self.lines[0] + b"".join(self.lines[3:]))
        self.assertIn("1 line was not whole, the first is line 4;", self.resumed())

    def test_lines_that_come_again(self):
        """Killed long after the last checkpoint, or resumed from an older one."""
        shutil.copy(self.folder / "run/last.safetensors", self.folder / "run/one.safetensors")
        self.resumed("3")
        status, out, err = self.run_program("train", "--resume", "run/one.safetensors", "--epochs", "2")
        self.assertEqual(status, 0)
        self.assertRegex(err, r"\Ahalfstep: warning: run/log.jsonl: 1[0-4] lines from behind step 4, where the run resumes, are removed: they come again\n\Z")
        log = events(self.log)
        self.assertEqual([e["step"] for e in log if e["event"] == "step"], list(range(1, 9)))
        self.assertEqual([e["epoch"] for e in log if e["event"] == "eval"], [1, 2])

    def test_a_log_that_is_gone_or_is_no_file(self):
        self.log.unlink()
        self.assertEqual(self.run_program("train", "--resume", "run", "--epochs", "2")[::2], (0, ""))
        self.assertEqual(events(self.log)[0]["step"], 4)
        self.log.unlink()
        self.log.mkdir()
        before = sorted(p.name for p in (self.folder / "run").iterdir())
        self.refused(1, "run/log.jsonl", "train", "--resume", "run", "--epochs", "3")
        self.assertEqual(before, sorted(p.name for p in (self.folder / "run").iterdir()))

    def test_an_evaluation_that_was_not_made_is_no_zero(self):
        process = self.start("train", "mlp", "data", "--epochs", "100000", "--batch-size", "1", "--optimizer", "adam", "-q", "--out", "new")
        log = self.folder / "new/log.jsonl"
        end = time.monotonic() + 30
        while not (log.exists() and '"step"' in log.read_text()) and time.monotonic() < end:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        self.assertEqual((process.wait(timeout=30), process.communicate()[0]), (130, ""))
        last = events(log)[-1]
        if not [e for e in events(log) if e["event"] == "eval"]:
            self.assertEqual((last["event"], last["loss"], last["top1"], last.get("top5")), ("end", None, None, None))
        for e in events(log):
            if e["event"] == "step":
                self.assertGreater(e["loss"], 0)

    def test_the_loss_of_an_epoch_that_is_only_evaluated(self):
        """Stopped in the evaluation, a run goes on with it: the mean of the epoch's losses is that of the steps before."""
        file = Safetensors(self.folder / "run/last.safetensors")
        file.set_state(epoch=0, batch=4, best=None, **{k: v for k, v in self.mean().items()})
        file.write(self.folder / "run/last.safetensors")
        status, out, err = self.run_program("train", "--resume", "run", "--quiet=false")
        self.assertEqual(status, 0, err)
        steps = [e["loss"] for e in events(self.log) if e["event"] == "step"]
        self.assertIn(f"epoch 1/1: loss {sum(steps) / 4:.4f}, test loss ", out)
        self.assertNotIn("samples/s", out)
        self.assertEqual([e["epoch"] for e in events(self.log) if e["event"] == "eval"], [1])

    def mean(self):
        losses = [json.loads(line)["loss"] for line in self.lines if b'"event":"step"' in line]
        return {"loss_sum": sum(losses) * 32, "loss_samples": 128}


if __name__ == "__main__":
    unittest.main()
