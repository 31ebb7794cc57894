# SPDX-License-Identifier: Apache-2.0
"""Runs on another device than the CPU: the simulated one. Results, fallback, faults, checkpoints, lists."""
import json
import re
import signal
import unittest

from images_test import SMALL, make_images
from program import ProgramTest, Safetensors, events


class Runs(ProgramTest):
    def losses(self, name):
        return [e["loss"] for e in events(self.folder / name / "log.jsonl") if e["event"] == "step"]

    def test_reach_the_results_of_the_cpu(self):
        self.data(train=512)
        for amp, rounding in (("off", 2**-24), ("f16", 2**-11), ("bf16", 2**-8)):
            for optimizer in ("sgd", "adam"):
                with self.subTest(amp=amp, optimizer=optimizer):
                    # Of seeds 0 to 5 two have a unit whose sum is a rounding from zero: it switches with the order of sums, and Adam makes a
                    # whole step of it.
                    flags = ["data", "--epochs", "2", "--batch-size", "64", "--amp", amp, "--optimizer", optimizer, "--lr", "1e-3", "--seed", "2"]
                    self.train(*flags, "--out", "cpu", "--overwrite")
                    out = self.run_program("train", "mlp", *flags, "--out", "sim", "--overwrite", "--device", "sim")
                    self.assertEqual(out.returncode, 0, out.stderr)
                    here, there = self.losses("cpu"), self.losses("sim")
                    self.assertEqual(len(here), 16)
                    # A loss of about 2.4 rounds activations a few times a step; 16 steps of a small rate add little.
                    for a, b in zip(here, there):
                        self.assertAlmostEqual(a, b, delta=64 * rounding)
                    self.assertEqual(events(self.folder / "sim/log.jsonl")[0]["device"], "sim:0")

    def test_captured_steps_give_the_same_bits(self):
        """The step is replayed through the device's graphs, kernel by kernel, or not at all; some of its steps are skipped."""
        self.data(train=512)
        flags = ["data", "--epochs", "2", "--batch-size", "64", "--amp", "f16", "--optimizer", "adam", "--loss-scale", "dynamic:1e9", "--device", "sim"]
        kinds = {"graphs": ([], {}), "switched-off": ([], {"HALFSTEP_GRAPHS": "0"}), "without": ([], {"HALFSTEP_SIM_GRAPHS": "0"}),
                 "plain": (["--no-capture"], {})}
        runs = {}
        for name, (more, environment) in kinds.items():
            out = self.run_program("train", "mlp", *flags, *more, "--out", name, env=environment)
            self.assertEqual(out.returncode, 0, out.stderr)
            log = events(self.folder / name / "log.jsonl")
            captured = next((e for e in log if e["event"] == "capture"), {})
            self.assertEqual(captured.get("replayed", 0) > 8, name != "plain", captured)
            self.assertEqual("graphs" in captured, name == "graphs", captured)
            runs[name] = ([(e["loss"], e["scale"], e["skipped"]) for e in log if e["event"] == "step"],
                          Safetensors(self.folder / name / "last.safetensors").data)
        self.assertEqual(len(runs["plain"][0]), 16)
        self.assertGreater(runs["plain"][0][-1][2], 0, "steps were skipped")
        self.assertLess(runs["plain"][0][-1][2], 16)
        for name in kinds:
            self.assertEqual(runs[name], runs["plain"], name)

    def test_captured_steps_of_images_give_the_same_bits(self):
        """Most ops of such a network run on the CPU here, between graphs; right answers are counted on the host."""
        make_images(self.folder / "images", train=16, test=4)
        flags = ["images", *SMALL, "--epochs", "4", "--amp", "f16", "--loss-scale", "dynamic:1e8", "--print-freq", "2", "--device", "sim"]
        runs = {}
        for name, more, environment in ("graphs", [], {}), ("one-by-one", [], {"HALFSTEP_GRAPHS": "0"}), ("plain", ["--no-capture"], {}):
            out = self.run_program("train", "resnet20", *flags, *more, "--out", name, env=environment)
            self.assertEqual(out.returncode, 0, out.stderr)
            log = events(self.folder / name / "log.jsonl")
            captured = next((e for e in log if e["event"] == "capture"), {})
            self.assertEqual(captured.get("replayed", 0) >= 8, name != "plain", captured)
            self.assertEqual(captured.get("graphs", 0) >= 4, name == "graphs", captured)
            runs[name] = ([(e["loss"], e["top1"], e["top5"], e["skipped"]) for e in log if e["event"] == "step"],
                          Safetensors(self.folder / name / "last.safetensors").data)
        self.assertTrue(0 < runs["plain"][0][-1][3] < len(runs["plain"][0]), runs["plain"][0])
        self.assertEqual(runs["graphs"], runs["plain"])
        self.assertEqual(runs["one-by-one"], runs["plain"])

    def test_the_devices_memory_stands_beside_the_process_s(self):
        self.data()
        peaks = {}
        for device in ("cpu", "sim"):
            out = self.run_program("train", "mlp", "data", "--device", device, "--out", device, "--epochs", "1")
            self.assertEqual(out.returncode, 0, out.stderr)
            self.assertEqual(bool(re.search(r"peak memory \d+ MB, \d+ MB on sim:0$", out.stdout, re.M)), device == "sim", out.stdout)
            log = [e for e in events(self.folder / device / "log.jsonl") if e["event"] in ("step", "eval", "end")]
            self.assertEqual({"device_peak_mb" in e for e in log}, {device == "sim"})
            peaks[device] = [e.get("device_peak_mb") for e in log]
        self.assertEqual(peaks["sim"], sorted(peaks["sim"]), "a peak")
        # 669,706 parameters and their gradients in float32, and not much more.
        self.assertTrue(2 * 4 * 0.67 < peaks["sim"][-1] < 60, peaks["sim"][-1])
        rows = self.run_program("compare", "cpu", "sim").stdout
        self.assertRegex(rows, r"(?m)^peak device memory +- +\d+ MB +-$")
        bench = [json.loads(self.run_program("bench", "mlp", "--device", d, "--steps", "2", "--warmup", "1").stdout) for d in ("cpu", "sim")]
        self.assertEqual(["device_peak_mb" in b for b in bench], [False, True])

    def test_gpu_is_the_device_of_the_only_accelerator(self):
        self.data()
        out = self.run_program("train", "mlp", "data", "--gpu", "1", "--no-out", "--epochs", "1", "--limit", "64")
        self.assertEqual(out.returncode, 0, out.stderr)
        self.assertIn("(device sim:1)", out.stdout)
        out = self.run_program("train", "mlp", "data", "--gpu", "0", "--device", "sim", "--no-out", "--epochs", "1", "--limit", "64")
        self.assertEqual(out.returncode, 0, out.stderr)
        self.refused(2, "there are 2 devices of kind sim", "train", "mlp", "data", "--gpu", "2")
        self.refused(2, "--gpu: means device 1 of the accelerator, and --device sim:0 is given", "train", "mlp", "--gpu", "1", "--device", "sim:0")
        self.refused(2, "--gpu: means device 0 of the accelerator, and --device cpu is given", "bench", "mlp", "--gpu", "0", "--device", "cpu")
        out = self.run_program("train", "mlp", "data", "--gpu", "0", env={"HALFSTEP_SIM_DEVICES": "0"})
        self.assertEqual(out.returncode, 2)
        self.assertIn("--gpu 0: there is no accelerator here", out.stderr)

    def test_resume_bit_for_bit_and_on_another_device(self):
        self.data()
        flags = ["data", "--amp", "f16", "--device", "sim", "--optimizer", "adam"]
        self.train(*flags, "--epochs", "3", "--out", "whole")
        self.train(*flags, "--epochs", "1", "--out", "part")
        self.train(*flags, "--epochs", "3", "--out", "part", "--resume", "part")
        whole, part = (Safetensors(self.folder / f / "last.safetensors") for f in ("whole", "part"))
        self.assertEqual(whole.data, part.data)
        # What one device wrote another goes on with.
        self.train("data", "--amp", "f16", "--optimizer", "adam", "--epochs", "4", "--out", "part", "--resume", "part", "--device", "cpu")
        out = self.run_program("eval", "mlp", "data", "--weights", "part", "--device", "sim:1")
        self.assertEqual(out.returncode, 0, out.stderr)
        self.assertRegex(out.stdout, r"(?m)^mlp: loss \d")

    def test_say_what_ran_on_the_cpu(self):
        self.data()
        out = self.run_program("train", "mlp", "data", "--device", "sim", "--clip-norm", "0.5", "--optimizer", "adamw", "--out", "run")
        self.assertEqual(out.returncode, 0, out.stderr)
        fallbacks = [e for e in events(self.folder / "run/log.jsonl") if e["event"] == "fallback"]
        self.assertTrue(fallbacks)
        for e in fallbacks:
            self.assertIn(e["op"], out.stdout)
            self.assertIn(f"{e['op']}: sim:0 has no kernel", out.stderr)
            self.assertGreater(e["calls"], 0)
            self.assertGreater(e["seconds"], 0)
            self.assertGreater(e["bytes_to_host"] + e["bytes_to_device"], 0)
        self.assertIn("ran on the CPU in place of sim:0", out.stdout)
        failed = self.run_program("train", "mlp", "data", "--device", "sim", "--clip-norm", "0.5", "--no-out", env={"HALFSTEP_FALLBACK": "0"})
        self.assertEqual(failed.returncode, 1)
        self.assertIn("HALFSTEP_FALLBACK=1", failed.stderr)


class Faults(ProgramTest):
    """Each ends in a clear error or in the right result; none in a hang."""

    def train_with(self, faults, *flags, **environment):
        if not (self.folder / "data").exists():
            self.data(train=512)
        return self.run_program("train", "mlp", "data", "--device", "sim", "--amp", "f16", "--batch-size", "64", "--out", "run", "--overwrite",
                                *flags, env={"HALFSTEP_SIM_FAULTS": faults, **environment})

    def test_failing_kernels_name_the_op(self):
        out = self.train_with("fail:linear:7")
        self.assertEqual(out.returncode, 1, out.stdout)
        self.assertRegex(out.stderr, r"linear \(call \d+\): failed on sim:0")
        self.assertNotIn("Traceback", out.stderr)
        out = self.train_with("fail:linear:7", HALFSTEP_SYNC="1")
        self.assertRegex(out.stderr, r"linear \(call \d+\): failed on sim:0")
        self.assertNotIn("found out in", out.stderr)
        out = self.train_with("refuse:sgd_step:2")
        self.assertEqual(out.returncode, 1)
        self.assertRegex(out.stderr, r"sgd_step: .*on sim:0")

    def test_failing_kernels_can_be_replaced(self):
        out = self.train_with("fail:linear:7;refuse:linear:9;unsupported:linear:11", HALFSTEP_FALLBACK_ON_FAILURE="1")
        self.assertEqual(out.returncode, 0, out.stderr)
        self.assertIn("after a failure", out.stdout)
        self.assertIn("linear", out.stdout)

    def test_no_memory_says_what_is_held(self):
        for faults, memory in (("oom:2:always", "1G"), ("", "3M")):
            out = self.train_with(faults, HALFSTEP_SIM_MEMORY=memory)
            self.assertEqual(out.returncode, 1)
            self.assertRegex(out.stderr, r"allocate: sim:0 has no .* [kM]B left.*in use")
        self.assertEqual(self.train_with("oom:2").returncode, 0, "one failure is made good by giving back what is kept")

    def test_a_lost_device_ends_the_run(self):
        # In a graph, in a replay kernel by kernel, and in a step by itself.
        for flags, environment in ([], {}), ([], {"HALFSTEP_GRAPHS": "0"}), (["--no-capture"], {}):
            out = self.train_with("lost:150", *flags, **environment)
            self.assertEqual(out.returncode, 1)
            self.assertRegex(out.stderr, r"sim:0 is lost: .*; resume from the last checkpoint")
            # The same for a failure on the queue, which a later step finds.
            out = self.train_with("fail:linear:20", *flags, **environment)
            self.assertEqual(out.returncode, 1)
            self.assertRegex(out.stderr, r"linear \((call \d+|in a captured step)\): failed on sim:0: a failure was ordered")

    def test_delays_change_nothing(self):
        out = self.train_with("delay:linear:1:always:1ms")
        self.assertEqual(out.returncode, 0, out.stderr)
        late = [e["loss"] for e in events(self.folder / "run/log.jsonl") if e["event"] == "step"]
        out = self.train_with("")
        soon = [e["loss"] for e in events(self.folder / "run/log.jsonl") if e["event"] == "step"]
        self.assertEqual(late, soon)


class Checks(ProgramTest):
    """halfstep devices --check: a device beside the CPU."""

    def check(self, *arguments, faults=""):
        return self.run_program("devices", "--check", *arguments, timeout=240,
                                env={"HALFSTEP_SIM_FAULTS": faults, "XDG_STATE_HOME": str(self.folder / "state")})

    def test_passes_and_is_remembered(self):
        out = self.check("sim")
        self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        self.assertEqual(out.stderr, "")
        self.assertRegex(out.stdout, r"(?m)^ok +optimizers, master weights +f16 +\d+ cases +0\.\d+ +\d+\.\d s +native")
        self.assertRegex(out.stdout, r"(?m)^ok +softmax +f32 +\d+ cases +0\.\d+ +\d+\.\d s +on the CPU: ")
        self.assertRegex(out.stdout, r"(?m)^ +worst: .*; bound: 1 x 2\^-11 \|x\| \+ ")
        self.assertRegex(out.stdout, r"(?m)^ok +training an MLP +f16 AMP")
        self.assertRegex(out.stdout.splitlines()[-1], r"^sim:0: passed: \d+ lines, \d+ s$")
        records = list((self.folder / "state/halfstep/devices").iterdir())
        self.assertEqual([r.name for r in records], ["sim-simulated-accelerator.json"])
        state = {"XDG_STATE_HOME": str(self.folder / "state")}
        listed = self.run_program("devices", env=state).stdout
        self.assertEqual(len(re.findall(r"(?m)^  checked \d{4}-\d\d-\d\d$", listed)), 2, "both are of this hardware")
        # What was checked was another version.
        record = json.loads(records[0].read_text())
        records[0].write_text(json.dumps({**record, "version": "0.9"}))
        listed = self.run_program("devices", "sim", env=state).stdout
        self.assertRegex(listed, r"(?m)^  checked \S+ with version 0\.9 and Halfstep \S+: run halfstep devices --check sim$")

    def test_fails_on_a_wrong_value_and_keeps_no_record(self):
        out = self.check("sim:1", "--quick", faults="corrupt:linear:1")
        self.assertEqual(out.returncode, 1, out.stdout)
        self.assertRegex(out.stdout, r"(?m)^FAILED matrix products +f32")
        self.assertIn("linear: result 0, element", out.stdout)
        self.assertRegex(out.stdout.splitlines()[-1], r"^sim:1: FAILED: 1 of \d+ lines")
        self.assertFalse((self.folder / "state").exists())
        # sim asks for no check, so that nothing is said. (A path of a plug-in may well have the word in it.)
        listed = self.run_program("devices", env={"XDG_STATE_HOME": str(self.folder / "state")}).stdout
        self.assertNotRegex(listed, r"(?m)^  (checked|untested)")

    def test_a_lost_device_is_a_failure(self):
        out = self.check("sim", "--quick", faults="lost:500")
        self.assertEqual(out.returncode, 1)
        self.assertIn("the device was lost before the end", out.stdout)

    def test_a_quick_check_keeps_no_record(self):
        out = self.check("sim", "--quick")
        self.assertEqual(out.returncode, 0, out.stdout)
        self.assertFalse((self.folder / "state").exists())

    def test_collectives_are_checked_between_the_devices_there_are(self):
        # What is given to the library's collectives by a device that promises less is within its own bounds.
        for variables, expected in (({"HALFSTEP_SIM_DEVICES": "3"}, r"collectives, 3 ranks +\d+ cases +same"),
                                    ({"HALFSTEP_SIM_DEVICES": "3", "HALFSTEP_SIM_COLLECTIVES": "ring"},
                                     r"reductions between 3 ranks +f16 +\d+ cases +0\.\d+ .* not by the library: mean"),
                                    ({"HALFSTEP_SIM_DEVICES": "1"},
                                     r"collectives, 1 rank +\d+ cases +same .* one device: it exchanges with itself only"),
                                    ({"HALFSTEP_SIM_COLLECTIVES": "0"},
                                     r"collectives +0 cases .* has none: tensors are staged through the host")):
            out = self.run_program("devices", "--check", "sim", "--quick", timeout=240, env=variables)
            self.assertEqual(out.returncode, 0, out.stdout)
            self.assertRegex(out.stdout, "(?m)^ok +" + expected)

    def test_graphs_are_checked_where_there_are_some(self):
        for variables, expected in (({}, r"f32 +4 cases +same .* native"),
                                    ({"HALFSTEP_GRAPHS": "0"}, r"bf16 +4 cases +same .* native"),
                                    ({"HALFSTEP_SIM_GRAPHS": "0"}, r"0 cases .* no graphs: replays enqueue kernel by kernel"),
                                    ({"HALFSTEP_SYNC": "1"}, r"0 cases .* not checked: each op waits until it is done \(HALFSTEP_SYNC\)")):
            out = self.run_program("devices", "--check", "sim", "--quick", timeout=240, env=variables)
            self.assertEqual(out.returncode, 0, out.stdout)
            self.assertRegex(out.stdout, "(?m)^ok +captured steps, by graphs +" + expected)

    def test_wrong_usage(self):
        self.refused(2, "expected the device", "devices", "--check")
        self.refused(2, "belongs to --check", "devices", "--quick")
        self.refused(2, ["expected one of cpu, ", "sim, got 'simm'"], "devices", "--check", "simm")
        for command in (["devices", "--check", "meta"], ["devices", "meta"], ["bench", "mlp", "--device", "meta"]):
            self.refused(2, "expected one that computes, got meta", *command)
        self.refused(2, "--ops is given too", "devices", "--check", "sim", "--ops")


class Lists(ProgramTest):
    def test_devices_and_ops(self):
        out = self.run_program("devices")
        self.assertEqual(out.returncode, 0)
        self.assertRegex(out.stdout, r"(?m)^cpu: ")
        self.assertRegex(out.stdout, r"(?m)^sim:1: Simulated accelerator, .* of 1\.1 GB of memory free")
        out = self.run_program("devices", "sim", "--ops", "softmax", "linear", "view")
        self.assertEqual(out.returncode, 0, out.stderr)
        self.assertNotIn("cpu: ", out.stdout)
        self.assertRegex(out.stdout, r"(?m)^softmax +on the CPU: f32 .*\(\S.*\)$")
        self.assertRegex(out.stdout, r"(?m)^linear +native: f32 .*contiguous")
        self.assertRegex(out.stdout, r"(?m)^view +a view")
        everything = self.run_program("devices", "sim", "--ops").stdout
        self.assertGreater(len(everything.splitlines()), 150)

    def test_watch(self):
        watch = self.start("devices", "--watch", "0.05")
        lines = [watch.stdout.readline() for _ in range(12)]
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=20)
        self.assertEqual(watch.returncode, 128 + signal.SIGINT)
        text = "".join(lines)
        self.assertRegex(text, r"(?m)^\d\d:\d\d:\d\d$")
        self.assertRegex(text, r"(?m)^sim:1 +Simulated accelerator +0\.00 of 1\.07 GB +- +ready$")
        self.assertRegex(text, r"(?m)^sim:1 +Simulated accelerator +0\.00 of 1\.07 GB +0 % +ready$", "the second time")
        self.refused(2, "--watch: expected a number of seconds", "devices", "--watch", "0")
        for arguments in (["cpu", "--watch"], ["--watch", "cpu"], ["--watch", "0.5", "cpu"], ["--watch=0.5", "cpu"]):
            self.refused(2, "--watch: expected a device other than the CPU", "devices", *arguments)
        self.refused(2, "--watch: expected a number, got '1s'", "devices", "--watch", "1s")
        self.refused(2, "--ops is given too", "devices", "--watch", "1", "--ops")

    def test_what_would_be_ignored_is_refused(self):
        commands = {"--check": ["--check"], "--watch": ["--watch", "1"], "--model": ["--model", "mlp"], "--ops": ["--ops"]}
        names = list(commands)
        for i, first in enumerate(names):
            for second in names[i + 1:]:
                for device in ([], ["sim"]):
                    self.refused(2, f"{first}: {second} is given too; each is a command of its own", "devices", *device, *commands[first], *commands[second])
        for name, command in commands.items():
            if name != "--check":
                self.refused(2, "--quick: belongs to --check", "devices", "sim", *command, "--quick")
            if name != "--model":
                for flag in (["--amp", "f16"], ["--batch-size", "3"], ["--image-size", "32"]):
                    self.refused(2, f"{flag[0]}: belongs to --model", "devices", "sim", *command, *flag)

    def test_bad_names(self):
        for arguments, text in ((("simm",), "sim, got 'simm'"), (("sim:7",), "there are 2 devices of kind sim"),
                                (("sim", "--ops", "linaer"), "did you mean linear")):
            out = self.run_program("devices", *arguments)
            self.assertEqual(out.returncode, 2, out.stdout)
            self.assertIn(text, out.stderr)


if __name__ == "__main__":
    unittest.main()
