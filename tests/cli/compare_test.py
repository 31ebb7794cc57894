# SPDX-License-Identifier: Apache-2.0
"""`halfstep compare RUN RUN`: two logs side by side."""
import json
import re
import unittest

from program import ProgramTest, events


def step(number, loss, scale=1, skipped=0, epoch=1):
    return {"event": "step", "epoch": epoch, "step": number, "loss": loss, "scale": scale, "skipped": skipped, "samples_per_s": 100 * number}


class CompareTest(ProgramTest):
    def write(self, name, *lines):
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))

    def compare(self, *arguments):
        status, out, err = self.run_program("compare", *arguments)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def rows(self, *arguments):
        """Each line as its words."""
        return [line.split() for line in self.compare(*arguments).splitlines()]

    def assertRows(self, wanted, rows):
        for row in wanted:
            self.assertIn(row.split(), rows)


class Table(CompareTest):
    def test_epochs_time_and_memory(self):
        for name, seconds, rate, skipped in (("a", 10, 300, 5), ("b", 4, 600, 2)):
            self.write(name, {"event": "start", "amp": name, "lr": seconds, "seed": 0}, {"event": "step", "epoch": 1, "samples_per_s": rate},
                       {"event": "eval", "epoch": 1, "loss": seconds / 8, "top1": seconds / 20, "top5": 1, "f1": seconds, "peak_rss_mb": 70 * seconds},
                       {"event": "end", "seconds": seconds, "skipped": skipped, "scale": 2.0, "peak_rss_mb": 50})
        rows = self.rows("a", "b")
        self.assertRows(["a b difference", "precision a b", "lr 10 4", "epoch 1 test loss 1.2500 0.5000 +0.7500", "epoch 1 top1 50.00% 20.00% +30.00%",
                         "epoch 1 top5 100.00% 100.00% +0.00%", "epoch 1 f1 10.0000 4.0000 +6.0000", "time 10.00 s 4.00 s 2.50x", "samples a second 300 600 0.50x",
                         "peak memory 700 MB 280 MB 2.50x", "loss scale at the end 2 2", "skipped steps 5 2 +3"], rows)
        self.assertFalse([row for row in rows if "seed" in row or row[:2] == ["the", "run"]])

    def test_epochs_that_one_has(self):
        self.write("a", {"event": "start"}, *[step(i, i, epoch=(i + 1) // 2) for i in range(1, 5)], {"event": "eval", "epoch": 1, "loss": 3},
                   {"event": "end"})
        self.write("b", {"event": "start"}, step(1, 2), step(2, None), {"event": "eval", "epoch": 1, "loss": None}, {"event": "end", "interrupted": True})
        self.assertRows(["precision ? ?", "the run is done interrupted", "epoch 1 loss 1.5000 NaN -", "epoch 2 loss 3.5000 - -", "epoch 1 test loss 3.0000 NaN -"],
                        self.rows("a", "b"))

    def test_what_the_best_evaluation_is_chosen_by(self):
        for name, fitness in (("a", 0.5), ("b", 0.25)):
            self.write(name, {"event": "start", "model": "yolov5n", "best_by": "fitness"}, step(1, 2),
                       {"event": "eval", "epoch": 1, "step": 1, "loss": 1, "mAP50": 0.8, "fitness": fitness}, {"event": "end"})
        self.assertRows(["epoch 1 fitness 0.5000 0.2500 +0.2500", "epoch 1 mAP50 0.8000 0.8000 +0.0000"], self.rows("a", "b"))
        self.assertRows(["fitness 0.5000 0.2500 +0.2500"], self.rows("a", "b", "--brief"))
        self.compare("a", "b", "--brief", "--figure", "figure.svg")
        self.assertIn("fitness", (self.folder / "figure.svg").read_text())

    def test_names(self):
        for name in ("x/log.jsonl", "y/x/log.jsonl"):
            (self.folder / name).parent.mkdir(parents=True)
            self.write(name, {"event": "start"})
        self.write("z.jsonl", {"event": "start"})
        self.assertRows(["x y/x difference"], self.rows("x", "y/x"))  # both are called x
        self.assertRows(["x z difference"], self.rows("x/log.jsonl", "z.jsonl"))
        self.assertRows(["x z difference"], self.rows("x/", "z.jsonl"))


class Parting(CompareTest):
    def both(self, first, second, *flags):
        self.write("a", {"event": "start"}, *[step(i + 1, x) for i, x in enumerate(first)])
        self.write("b", {"event": "start"}, *[step(i + 1, x) for i, x in enumerate(second)])
        return [line for line in self.compare("a", "b", *flags).splitlines() if "step" in line and "skipped" not in line]

    def test_where_the_losses_part(self):
        self.assertEqual(self.both([3, 2, 1], [3, 2, 1, 5]), ["first step with another loss: none of the 3 that both have"])
        self.assertEqual(self.both([3, 2, 1, 4], [3, 2.0625, 1.03125, 8]), [
            "first step with another loss: 2 (2.000000 and 2.062500)", "first step whose losses are more than 5% apart: 4 (4.000000 and 8.000000)"])
        self.assertEqual(self.both([3, 2], [3, 2.0625]), [
            "first step with another loss: 2 (2.000000 and 2.062500)", "first step whose losses are more than 5% apart: none of the 2 that both have"])
        self.assertIn("more than 3% apart: 2 ", self.both([3, 2], [3, 2.0625], "--tolerance", "0.03")[1])
        self.assertIn("more than 0% apart: 2 ", self.both([3, 2], [3, 2.0625], "--tolerance", "0")[1])

    def test_nan(self):
        self.assertEqual(self.both([None, 2], [None, None]), [
            "first step with another loss: 2 (2.000000 and NaN)", "first step whose losses are more than 5% apart: 2 (2.000000 and NaN)"])

    def test_nothing_in_common(self):
        self.assertEqual(self.both([1], []), ["the runs have no steps in common"])

    def test_tolerance(self):
        self.write("a", {"event": "start"})
        for value in ("-1", "nan", "inf"):
            self.refused(2, "--tolerance: expected a number of at least 0", "compare", "a", "a", "--tolerance", value)


class Scale(CompareTest):
    def test_history(self):
        self.write("a", {"event": "start"}, step(1, 1, 65536), step(2, 1, 32768, 1), step(3, 1, 32768, 1), step(4, 1, 65536, 1))
        self.write("b", {"event": "start"}, step(1, 1), step(2, 1), step(3, 1))
        out = self.compare("a", "b")
        self.assertRows(["1 65536 1", "2 32768 1", "4 65536 -", "loss scale at the end 65536 1", "skipped steps 1 0 +1"], [line.split() for line in out.splitlines()])
        self.assertIn("loss scale from step", out)
        self.assertNotIn("loss scale from step", self.compare("b", "b"))

    def test_long_histories_are_cut_in_the_middle(self):
        self.write("a", {"event": "start"}, *[step(i, 1, 2 ** (i % 2)) for i in range(1, 101)])
        rows = self.rows("a", "a")
        self.assertRows(["12 1 1", "(76 more)", "89 2 2", "100 1 1"], rows)
        self.assertNotIn("13 2 2".split(), rows)


class Brief(CompareTest):
    def steps(self, first, times, samples, epoch=1):
        """Steps that take so many seconds each, with the speed of the part of the epoch so far."""
        return [{"event": "step", "epoch": epoch, "step": first + i, "loss": 1, "samples_per_s": samples * (i + 1) / sum(times[:i + 1])} for i in range(len(times))]

    def time(self, *lines):
        self.write("a", *lines)
        return re.findall(r"(?m)^time of a step, at best +(\S+ ms) ", self.compare("a", "a", "--brief"))

    def test_time_of_a_step_of_several_batches(self):
        start = {"event": "start", "batch_size": 8, "accumulate": 4, "samples": 32 * 20}
        self.assertEqual(self.time(start, *self.steps(1, [0.5] + [0.01] * 19, 32)), ["10.0 ms"])
        # Logs of before have no accumulation.
        del start["accumulate"]
        self.assertEqual(self.time(start, *self.steps(1, [0.5] + [0.01] * 19, 8)), ["10.0 ms"])

    def test_time_of_a_step_of_a_run_that_resumed_inside_an_epoch(self):
        start = {"event": "start", "batch_size": 10, "accumulate": 1, "samples": 400}
        self.assertEqual(self.time(start, *self.steps(1, [0.01] * 10, 10), {**start, "step": 10}, *self.steps(11, [0.1] + [0.01] * 29, 10)), ["10.0 ms"])

    def test_the_smaller_last_step_has_no_time(self):
        start = {"event": "start", "batch_size": 8, "samples": 9}
        epochs = [self.steps(2 * epoch - 1, [0.01, 0.01], 4.5, epoch) for epoch in range(1, 5)]
        self.assertEqual(self.time(start, *[step for steps in epochs for step in steps]), [])
        self.assertEqual(self.time({**start, "samples": 9000}, *self.steps(1, [0.01, 0.01, 0.01], 8)), ["10.0 ms"])

    def test_what_is_said_of_memory(self):
        said = "Memory: activations take half; weights, their gradients and the optimizer's state stay float32."

        def note(a, b):
            for name, settings, mb in (("a", a, 60), ("b", b, 100)):
                self.write(f"{name}/log.jsonl", {"event": "start", "model": "cnn", "batch_size": 64, "optimizer": "sgd", **settings})
                (self.folder / name / "results.csv").write_text(f"epoch,step,loss,peak_tensor_mb\n1,1,1,{mb}\n")
            out = self.compare("a", "b", "--brief")
            self.assertRegex(out, r"(?m)^memory of tensors, at most +60\.0 MB +100\.0 MB +0\.60x$")
            return said in out

        for amp in ("f16", "bf16"):
            self.assertTrue(note({"amp": amp}, {"amp": "off"}))
        for a, b in (({"amp": "off"}, {"amp": "off"}), ({"amp": "O3"}, {"amp": "off"}), ({"amp": "O2 bf16"}, {"amp": "off"}), ({"amp": "f16"}, {"amp": "bf16"}),
                     ({"amp": "f16", "batch_size": 32}, {"amp": "off"}), ({"amp": "f16"}, {"amp": "off", "model": "mlp"}), ({}, {})):
            self.assertFalse(note(a, b), (a, b))

    def test_skipped_steps_of_both(self):
        for name, amp, skipped in (("a", "f16", 3), ("b", "O2", 5)):
            self.write(name, {"event": "start", "amp": amp}, step(1, 1, 64), {"event": "end", "skipped": skipped, "scale": 8})
        out = self.compare("a", "b", "--brief")
        for line in ("Skipped steps: 3 whose gradients overflowed f16 were dropped; the loss scale went from 64 to 8.\n",
                     "Skipped steps: 5 whose gradients overflowed O2 were dropped; the loss scale went from 64 to 8.\n"):
            self.assertIn(line, out)


class Logs(CompareTest):
    def test_logs_that_are_none(self):
        good = {"event": "start", "amp": "off"}
        self.write("good", good)
        for name, text, said in (("text", "hello\n", "text:1: expected a JSON object"), ("empty", "", "no run was started"),
                                 ("array", "[1]\n", "array:1:"), ("number", '{"event": 5}\n', "number:1:"), ("half", '{"event": "st', "half:1:"),
                                 ("middle", json.dumps(good) + '\n{"event": "st\n{}\n', "middle:2:"), ("deep", "[" * 200000, "deep:1:"),
                                 ("text.bin", "\udcff\0\n", "text.bin:1:")):
            (self.folder / name).write_bytes(text.encode(errors="surrogateescape"))
            self.refused(1, said, "compare", "good", name)
        self.refused(1, "nowhere: expected the log of a run", "compare", "good", "nowhere")
        self.refused(1, "expected the log of a run", "compare", "good", ".")
        self.refused(1, "expected a file", "compare", "good", "/dev/zero", timeout=20)
        self.refused(2, "RUN", "compare", "good")
        self.refused(2, "RUN", "compare", "good", "good", "good")

    def test_odd_values(self):
        self.write("good", {"event": "start"})
        self.write("odd", {"event": "start", "amp": 7, "lr": [1], "seed": {"a": 1}}, {"event": "eval", "epoch": 1, "loss": None, "top1": "x", "classes": ["a"]},
                   '{"event": "step", "epoch": 99999999999999999999, "step": 18446744073709551615, "loss": 1e308, "scale": "x"}',
                   '{"event": "step", "epoch": -3, "step": -1, "loss": true}', {"event": "news"}, {"event": "eval"}, {"event": "end", "seconds": "long", "interrupted": 1})
        self.compare("good", "odd")

    def test_a_run_that_was_killed(self):
        self.write("whole", {"event": "start"}, step(1, 1))
        (self.folder / "cut").write_text((self.folder / "whole").read_text() + '{"event":"ste')
        self.assertRows(["the run is not ended in a line"], self.rows("whole", "cut"))
        # What it did again after it went on from step 1 replaces what it had done.
        again = [{"event": "start", "step": 1}, step(2, 7), {"event": "eval", "epoch": 1, "step": 2, "loss": 8}, {"event": "end", "seconds": 3}]
        self.write("again", {"event": "start", "step": 0}, step(1, 5), step(2, 6), step(3, 6, epoch=2), {"event": "eval", "epoch": 2, "step": 3, "loss": 9},
                   {"event": "end", "seconds": 4, "interrupted": True}, '{"event":"step","ep' + json.dumps(again[0], separators=(",", ":")), *again[1:])
        rows = self.rows("again", "again")
        self.assertRows(["epoch 1 loss 6.0000 6.0000 +0.0000", "epoch 1 test loss 8.0000 8.0000 +0.0000", "time 7.00 s 7.00 s 1.00x",
                         "the run is done, resumed 1x done, resumed 1x"], rows)
        self.assertFalse([row for row in rows if row[:2] == ["epoch", "2"]])

    def test_real_runs(self):
        self.data()
        self.train("data", "--epochs", "2", "--out", "f32", "-q", "--seed", "1")
        self.train("data", "--epochs", "2", "--out", "f16", "-q", "--seed", "1", "--amp", "f16", "--loss-scale", "dynamic:1e30")
        out = self.compare("f32", "f16")
        rows = [line.split() for line in out.splitlines()]
        self.assertRows(["f32 f16 difference", "precision off f16"], rows)
        for name in ("f32", "f16"):
            log = events(self.folder / name / "log.jsonl")
            losses = [e["loss"] for e in log if e["event"] == "step" and e["epoch"] == 2]
            self.assertIn(f"{sum(losses) / len(losses):.4f}", out)
        # 1e30 overflows in every step: each is skipped, and the scale halved.
        self.assertRows(["skipped steps 0 4 -4", "1 1 1e+30", "2 1 5e+29", "4 1 1.25e+29"], rows)


if __name__ == "__main__":
    unittest.main()
