# SPDX-License-Identifier: Apache-2.0
"""The flags of `halfstep train` that dump, compare, watch and profile."""
import json
import re
import unittest

from program import ProgramTest, Safetensors

# 128 samples in batches of 32: four steps an epoch.
RUN = ["data", "--batch-size", "32", "--amp", "f16", "--out", "run", "--overwrite"]


class Debug(ProgramTest):
    def calls(self, folder):
        return {path.name: json.loads((path / "call.json").read_text()) for path in sorted((self.folder / folder).iterdir())}

    def test_flags_that_would_do_nothing(self):
        self.refused(2, "--debug-level: belongs to --debug-dump", "train", "mlp", "--debug-level", "whole")
        self.refused(2, "--debug-steps: belongs to --debug-dump or --debug-compare", "train", "mlp", "--debug-steps", "3")
        self.refused(2, "--profile-steps: belongs to --profile", "train", "mlp", "--profile-steps", "3")

    def test_dump(self):
        self.data()
        out = self.train(*RUN, "--debug-dump", "dump", "--debug-level", "whole", "--debug-steps", "2-3")
        calls = self.calls("dump")
        self.assertIn(f"{len(calls)} calls dumped in dump\n", out)
        self.assertEqual([c["number"] for c in calls.values()], list(range(1, len(calls) + 1)))
        linear = [c for c in calls.values() if c["op"] == "linear"]
        self.assertEqual([c["module"] for c in linear], ["fc1", "fc2", "fc3"] * 2)
        self.assertEqual({c["outputs"][0]["dtype"] for c in linear}, {"f16"})
        self.assertEqual(linear[0]["inputs"][0]["shape"], [32, 784])
        self.assertEqual(sum(c["op"] == "sgd_step" for c in calls.values()), 2)
        self.assertTrue(any(c["backward_of"] == "linear" and c["module"] == "fc1" for c in calls.values()))
        name = next(name for name, c in calls.items() if c["op"] == "linear")
        tensors = Safetensors(self.folder / "dump" / name / "tensors.safetensors")
        self.assertEqual(tensors.header["output0"]["dtype"], "F16")
        self.assertEqual(len(tensors.tensor("output0")), 32 * 512 * 2)
        # A second run has a folder of its own.
        self.train(*RUN, "--debug-dump", "dump")
        self.assertEqual(sum(c["op"] == "sgd_step" for c in self.calls("dump.1").values()), 1)
        self.assertNotIn("first", next(iter(self.calls("dump.1").values()))["outputs"][0])

    def test_compare(self):
        self.data()
        out = self.train(*RUN, "--debug-compare")
        report = (self.folder / "run/debug-compare.txt").read_text()
        self.assertIn(report, out)
        self.assertIn("compared with the CPU in f64", report)
        worst = float(re.search(r"worst results\n +([0-9.e+]+) roundings", report)[1])
        self.assertGreater(worst, 0)
        # The longest sums have 784 terms.
        self.assertLess(worst, 784 ** 0.5)
        self.assertRegex(report, r"fc1: mm \(backward of linear\), call \d+")
        self.assertIn("sgd_step: a kernel that runs by itself", report)
        self.assertIn("compared with the CPU in f32", self.train(*RUN, "--debug-compare", "f32"))

    def test_twin(self):
        self.data()
        out = self.train(*RUN, "--debug-compare", "twin", "--debug-steps", "2")
        self.assertIn("no op departs beyond what the rounding of f16 explains", out)
        self.assertRegex(out, r"0 only in float32's run, 0 only in the other")
        self.assertTrue((self.folder / "run/debug-twin.txt").exists())
        self.refused(2, ["--debug-compare twin", "--amp is off"], "train", "mlp", "data", "--debug-compare", "twin")

    def test_nonfinite(self):
        self.data()
        out = self.train(*RUN, "--debug-nonfinite")
        self.assertIn("0 calls made infinities or NaNs out of finite inputs\n", out)
        # A loss scale that float16's gradients can't bear, and that isn't lowered.
        overflow = [*RUN, "--loss-scale", "fixed:1e9"]
        status, out, err = self.run_program("train", "mlp", *overflow, "--debug-nonfinite")
        self.assertEqual(status, 0, err)
        self.assertRegex(err, r"halfstep: warning: to \(backward of to\): made \d+ inf among 320 values out of finite inputs, f16 ")
        self.assertIn("f16 overflow: the largest |value| of the exact result is ", err)
        self.assertIn("a smaller loss scale", err)
        self.assertEqual(len(err.splitlines()), len(set(err.splitlines())))
        self.assertRegex(out, r"4 calls made infinities or NaNs out of finite inputs\nthe first: to \(backward of to\): ")
        self.assertIn("the first:", (self.folder / "run/debug-nonfinite.txt").read_text())
        self.refused(1, ["to (backward of to): made", "a smaller loss scale"], "train", "mlp", *overflow, "--debug-nonfinite", "raise")

    def test_profile(self):
        self.data()
        out = self.train(*RUN, "--profile", "a folder/profile", "--profile-steps", "2-3")
        table = (self.folder / "a folder/profile/profile.txt").read_text()
        self.assertIn(table, out)
        rows = {tuple(line.split()[:2]): line.split() for line in table.splitlines() if line}
        self.assertEqual(rows["linear", "f16"][2], "6")
        self.assertEqual(rows["sgd_step", "i64"][2], "2")
        for module in ("fc1", "fc2", "fc3"):
            self.assertIn(f"\n{module} ", table)
        trace = json.loads((self.folder / "a folder/profile/trace.json").read_text())["traceEvents"]
        self.assertEqual(sum(e["name"] == "linear" for e in trace), 6)
        self.assertTrue(any(e["name"] == "wait for batch" for e in trace))
        self.assertTrue(any(e["name"] == "thread_name" and e["args"]["name"] == "host 0" for e in trace))

    def test_on_a_device(self):
        self.data()
        flags = ["--device", "sim", "--debug-dump", "dump", "--debug-compare", "--debug-nonfinite", "--profile", "profile", "--profile-steps", "2-3"]
        status, out, err = self.run_program("train", "mlp", *RUN, *flags)
        self.assertEqual(status, 0, err)
        calls = self.calls("dump")
        self.assertEqual({c["device"] for c in calls.values() if c["op"] == "linear"}, {"sim:0"})
        self.assertLessEqual({c["path"] for c in calls.values()}, {"native", "contiguous", "fallback", "transfer"})
        report = (self.folder / "run/debug-compare.txt").read_text()
        self.assertIn(", sim:0: element ", report)
        self.assertLess(float(re.search(r"worst results\n +([0-9.e+]+) roundings", report)[1]), 784 ** 0.5)
        self.assertIn("0 calls made infinities or NaNs out of finite inputs\n", out)
        self.assertIn("ms on devices", out)
        trace = json.loads((self.folder / "profile/trace.json").read_text())["traceEvents"]
        device = next(e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"] == "sim:0")
        kernels = {e["args"]["call"]: e["name"] for e in trace if e["pid"] == device and e.get("cat") == "kernel"}
        host = {e["args"]["call"]: e["name"] for e in trace if e["pid"] != device and e["ph"] == "X" and "call" in e.get("args", {})}
        self.assertTrue(set(kernels) & set(host))
        for number in set(kernels) & set(host):
            self.assertEqual(kernels[number], host[number])

    def test_a_value_that_is_left_out_takes_no_other_argument(self):
        self.data()
        for arguments in (["--debug-nonfinite", "mlp", "data"], ["mlp", "--debug-nonfinite", "data"], ["--debug-compare", "mlp", "--debug-nonfinite", "data"]):
            status, out, err = self.run_program("train", *arguments, "--no-out", "--epochs", "1")
            self.assertEqual((status, err), (0, ""), out)
            self.assertIn("training mlp on data, float32", out)
            self.assertIn("calls made infinities or NaNs", out)
        # A value that is one stays the flag's.
        self.assertIn("compared with the CPU in f32", self.train("data", "--no-out", "--debug-compare", "f32"))

    def test_failures(self):
        self.data()
        (self.folder / "file").write_text("x")
        self.refused(1, "file/dump: can't be made", "train", "mlp", *RUN, "--debug-dump", "file/dump")
        self.refused(2, "--debug-level: expected statistics, first or whole, got 'all'", "train", "mlp", "--debug-level", "all")
        self.refused(2, "--debug-compare: expected f64, f32 or twin, got 'f16'", "train", "mlp", "--debug-compare", "f16")
        self.refused(2, "--debug-nonfinite: expected log or raise, got 'nothing'", "train", "mlp", "--debug-nonfinite", "nothing")
        self.refused(2, "--debug-nonfinite: expected log or raise, got 'data'", "train", "mlp", "--debug-nonfinite=data")
        for steps in ("0", "3-2", "x", "-1"):
            self.refused(2, ["--debug-steps: expected ", f"got '{steps}'"], "train", "mlp", f"--debug-steps={steps}")
        self.refused(2, "--profile-steps: expected", "train", "mlp", "--profile-steps", "1-2-3")
        status, _, err = self.run_program("train", "mlp", *RUN, "--debug-dump", "dump", "--debug-steps", "100")
        self.assertEqual((status, err), (0, "halfstep: warning: --debug-steps 100: the run ended after step 4\n"))


if __name__ == "__main__":
    unittest.main()
