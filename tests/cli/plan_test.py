# SPDX-License-Identifier: Apache-2.0
"""`halfstep plan`: the table, the document, the file of times, and what is refused."""
import json
import pathlib
import unittest

from program import ProgramTest


class Plan(ProgramTest):
    def setUp(self):
        super().setUp()
        self.cache = self.folder / "cache"

    def plan(self, *flags, cache=None):
        status, out, err = self.run_program("plan", *flags, env={"XDG_CACHE_HOME": str(cache or self.cache)})
        self.assertEqual(status, 0, err)
        return out, err

    def document(self, *flags, **options):
        out, err = self.plan(*flags, "--json", **options)
        self.assertEqual(err, "")
        return json.loads(out)

    def test_a_second_plan_measures_nothing(self):
        first = self.document("mlp", "-b", "8,16", "--amp", "off,bf16")
        self.assertEqual([(p["dtype"], p["batch"]) for p in first["plans"]], [("f32", 8), ("bf16", 8), ("f32", 16), ("bf16", 16)])
        self.assertGreater(first["measured"], 0)
        for plan in first["plans"]:
            self.assertAlmostEqual(sum(part["ms"] for part in plan["parts"]), plan["ms_per_step"], places=9)
            self.assertAlmostEqual(1000 * plan["batch"] / plan["ms_per_step"], plan["samples_per_s"], places=6)
            self.assertEqual((plan["calling_ms"], plan["calls_left_out"]), (0, 0))
            kinds = {part["kind"]: part for part in plan["parts"]}
            self.assertEqual(set(kinds) & {"products", "loss", "optimizer"}, {"products", "loss", "optimizer"})
            # Of the forward pass, and of both gradients but that of the pictures.
            weights = [784 * 512, 512 * 512, 512 * 10]
            self.assertEqual(kinds["products"]["multiply_adds"], plan["batch"] * (3 * sum(weights) - weights[0]))
        file = pathlib.Path(first["file"])
        self.assertEqual(file.parent, self.cache / "halfstep" / "calls")
        second = self.document("mlp", "-b", "8,16", "--amp", "off,bf16")
        self.assertEqual((second["measured"], second["plans"]), (0, first["plans"]))
        # Steps that aren't replayed call the same kernels, and have to call them.
        plain = self.document("mlp", "-b", "8", "--no-capture")
        self.assertGreater(plain["plans"][0]["calling_ms"], 0)
        for part, captured in zip(plain["plans"][0]["parts"], first["plans"][0]["parts"], strict=True):
            for key in ("kind", "calls", "multiply_adds", "bytes"):
                self.assertEqual(part[key], captured[key])
        self.assertGreater(self.document("mlp", "-b", "8", "--measure")["measured"], 10)

    def test_a_damaged_file_is_written_anew(self):
        first = self.document("mlp", "-b", "4")
        file = pathlib.Path(first["file"])
        file.write_bytes(file.read_bytes()[:100])
        out, err = self.plan("mlp", "-b", "4", "--json")
        self.assertRegex(err, r"\Ahalfstep: warning: [^\n]*\.json is damaged: what it said is measured again\n\Z")
        self.assertEqual(json.loads(out)["measured"], first["measured"])
        self.assertEqual(self.document("mlp", "-b", "4")["measured"], 0)

    def test_the_table(self):
        out, err = self.plan("resnet20", "-b", "2", "--image-size", "16", "--amp", "off,O2", "--optimizer", "adam")
        self.assertEqual(err, "")
        self.assertTrue(out.startswith("resnet20: a training step on 2 samples with adam, captured and replayed\n"), out)
        for words in (r"f32 +O2 f16\n", r"\ntime of a step +[\d.]+ m?s", r"\nsamples/s ", r"\nof what is possible +\d+%", r"\n  convolutions, forward +[\d.]+ m?s +\d+%",
                      r"\n  convolutions, input gradients ", r"\n  norms ", r"\n  optimizer "):
            self.assertRegex(out, words)

    def test_recomputed_steps(self):
        flags = ("resnet20", "-b", "8", "--amp", "bf16")
        plain = self.document(*flags)["plans"][0]
        self.assertNotIn("recompute", plain)
        again = self.document(*flags, "--recompute", "all")["plans"][0]
        self.assertEqual(len(again["recompute"].split(",")), 9)
        self.assertLess(again["memory"]["peak"], plain["memory"]["peak"])
        # The blocks' forward passes run twice, and all else once.
        work = [{part["kind"]: part["multiply_adds"] for part in p["parts"]} for p in (plain, again)]
        ratio = work[1]["convolutions, forward"] / work[0]["convolutions, forward"]
        self.assertTrue(1.9 < ratio < 2, ratio)
        for kind in ("convolutions, input gradients", "convolutions, weight gradients", "products"):
            self.assertEqual(work[1][kind], work[0][kind])
        self.assertEqual(self.document(*flags, "--recompute", "none")["plans"][0]["recompute"], "none")
        # A budget between both: some blocks, and the same step as with these named.
        budget = (plain["memory"]["peak"] + again["memory"]["peak"]) // 2
        chosen = self.document(*flags, "--memory-budget", str(budget))["plans"][0]
        self.assertLessEqual(chosen["memory"]["peak"], budget)
        self.assertTrue(0 < len(chosen["recompute"].split(",")) < 9, chosen["recompute"])
        self.assertEqual(self.document(*flags, "--recompute", chosen["recompute"])["plans"], [chosen])
        status, out, err = self.run_program("bench", *flags, "--steps", "1", "--warmup", "3", "--memory-budget", str(budget))
        self.assertEqual(status, 0, err)
        line = json.loads(out)
        self.assertEqual((line["recompute"], round(1e6 * line["predicted_peak_mb"])), (chosen["recompute"], chosen["memory"]["peak"]))
        self.assertAlmostEqual(line["tensor_peak_mb"], line["predicted_peak_mb"], delta=0.02 * line["predicted_peak_mb"])
        out, _ = self.plan(*flags, "--memory-budget", str(budget))
        self.assertRegex(out, r"\nmodules recomputed +\d of 10\n")

    def test_a_file_that_cannot_be_written_is_warned_of(self):
        file = self.folder / "file"
        file.write_text("no folder")
        out, err = self.plan("mlp", "-b", "2", "--json", cache=file)
        self.assertRegex(err, r"\Ahalfstep: warning: [^\n]*measured times are not kept\n\Z")
        self.assertGreater(json.loads(out)["plans"][0]["ms_per_step"], 0)

    def test_what_is_refused(self):
        self.refused(2, "did you mean resnet50?", "plan", "resnet51")
        self.refused(2, "--batch-size: expected a whole number from 1", "plan", "mlp", "-b", "16,0")
        self.refused(2, "--amp", "plan", "mlp", "--amp", "off,f8")
        self.refused(2, "--optimizer: expected sgd or adam, got 'lamb'", "plan", "mlp", "--optimizer", "lamb")
        self.refused(2, "--image-size: mlp is no network of images", "plan", "mlp", "--image-size", "32")
        self.refused(2, "--memory-budget: expected a size such as 1GB", "plan", "mlp", "--memory-budget", "1XB")
        self.refused(2, "give one of them", "plan", "resnet20", "--memory-budget", "1GB", "--recompute", "all")
        self.refused(2, "--recompute: expected all, none or paths of modules", "plan", "resnet20", "--recompute", "layer9")
        self.refused(1, "--memory-budget: expected at least ", "plan", "resnet20", "--memory-budget", "1MB")
        self.refused(2, "--device: plan knows the CPU's times only, got sim", "plan", "mlp", "--device", "sim")


if __name__ == "__main__":
    unittest.main()
