# SPDX-License-Identifier: Apache-2.0
"""Training runs from the command line: signals, pipes, terminals, logs, resuming, and what threads and instruction sets change."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
import unittest

from program import PROGRAM, ProgramTest, Safetensors, events

ENDLESS = ["train", "mlp", "data", "--epochs", "1000000", "--optimizer", "adam", "--lr", "1e-4", "--amp", "f16", "-q"]


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("nothing came in time")
        time.sleep(0.01)


class Signals(ProgramTest):
    def interrupted(self, number, *arguments):
        if not (self.folder / "data").exists():
            self.data()
        process = self.start(*ENDLESS, "--out", "a run", *arguments)
        log = self.folder / "a run/log.jsonl"
        wait_for(lambda: log.exists() and log.read_text().count('"step"') > 7)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + number, err)
        return err

    def test_the_step_is_finished_and_saved(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number.name):
                err = self.interrupted(number)
                match = re.fullmatch(r"halfstep: interrupted after step (\d+); resume with: (halfstep train .*)\n", err)
                self.assertTrue(match, err)
                log = events(self.folder / "a run/log.jsonl")
                self.assertEqual(log[-1]["event"], "end")
                self.assertTrue(log[-1]["interrupted"])
                self.assertEqual(Safetensors(self.folder / "a run/last.safetensors").state["step"], int(match[1]))
                for path in (self.folder / "a run").iterdir():
                    path.unlink()

    def test_the_command_that_is_printed_goes_on_bit_for_bit(self):
        err = self.interrupted(signal.SIGINT)
        command = err.split("resume with: ")[1].strip()
        saved = Safetensors(self.folder / "a run/last.safetensors").state
        epochs = saved["epoch"] + 2
        command = command.replace("halfstep", PROGRAM, 1).replace("1000000", str(epochs))
        rest = subprocess.run(["sh", "-c", command], cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=60)
        self.assertEqual((rest.returncode, rest.stderr), (0, ""))
        whole = [str(epochs) if a == "1000000" else a for a in ENDLESS]
        self.train(*whole[2:], "--out", "whole")
        a, b = Safetensors(self.folder / "a run/last.safetensors"), Safetensors(self.folder / "whole/last.safetensors")
        self.assertEqual(a.data, b.data)
        self.assertEqual(a.header, b.header)
        losses = [[e["loss"] for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"] for run in ("a run", "whole")]
        self.assertEqual(*losses)

    def test_without_a_folder_it_says_so(self):
        self.data()
        process = self.start(*ENDLESS, "--no-out", "--log-json", "log")
        wait_for(lambda: (self.folder / "log").exists() and (self.folder / "log").read_text().count('"step"') > 3)
        process.terminate()
        self.assertIn("no checkpoint, since there is no --out", process.communicate(timeout=30)[1])
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)

    def test_nohup_is_heeded(self):
        self.data()
        process = self.start(*ENDLESS, "--out", "run", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        log = self.folder / "run/log.jsonl"
        wait_for(lambda: log.exists() and log.read_text().count('"step"') > 3)
        process.send_signal(signal.SIGHUP)
        before = log.read_text().count('"step"')
        wait_for(lambda: log.read_text().count('"step"') > before + 5)
        process.terminate()
        process.communicate(timeout=30)

    def test_killed_at_any_moment_the_last_checkpoint_loads(self):
        self.data()
        for delay in (0, 0.003, 0.011, 0.023, 0.041):
            process = self.start(*ENDLESS, "--out", "run", "--save-every", "1", *(["--resume", "run"] if (self.folder / "run").exists() else []))
            log = self.folder / "run/log.jsonl"
            before = log.read_text().count('"checkpoint"') if log.exists() else 0
            wait_for(lambda: log.exists() and log.read_text().count('"checkpoint"') > before)
            time.sleep(delay)
            process.kill()
            process.communicate(timeout=30)
            file = Safetensors(self.folder / "run/last.safetensors")
            self.assertEqual(file.checksum(), file.header["__metadata__"]["halfstep_crc32"])
            status, _, err = self.run_program("eval", "mlp", "data", "--weights", "run/last.safetensors")
            self.assertEqual((status, err), (0, ""))

    def test_a_reader_that_goes_away(self):
        self.data()
        process = self.start(*[a for a in ENDLESS if a != "-q"], "--out", "run")
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        self.assertEqual(process.wait(timeout=30), 128 + signal.SIGPIPE)
        self.assertIn("resume with: halfstep train mlp", err)
        process.stderr.close()
        state = Safetensors(self.folder / "run/last.safetensors").state
        self.assertGreater(state["step"], 0)
        shell = subprocess.run([f"{PROGRAM} ops | head -1"], shell=True, capture_output=True, text=True, env=self.environment(), timeout=30)
        self.assertEqual((shell.stdout.count("\n"), shell.stderr), (1, ""))


class Log(ProgramTest):
    NUMBER = (int, float)

    def check(self, event, fields):
        self.assertEqual(list(event)[0], "event")
        self.assertEqual(set(event), {"event", *fields}, event)
        for name, kind in fields.items():
            self.assertIsInstance(event[name], kind, f"{name} of {event}")

    def test_what_the_lines_say(self):
        self.data()
        self.train("data", "--epochs", "2", "--batch-size", "40", "--lr", "0.5", "--amp", "f16", "--loss-scale", "dynamic:1e9,2,0.5,3", "--out", "run",
                   "--log-json", "log", "--seed", "18446744073709551615", "-q", "--sync-checkpoints")  # beside training, a checkpoint is known a step later or so
        log = events(self.folder / "log")
        self.assertFalse((self.folder / "run/log.jsonl").exists())
        kinds = [e["event"] for e in log]
        per_epoch = ["step"] * 4 + ["eval", "checkpoint"]
        self.assertEqual([k for k in kinds if k != "checkpoint"], ["start"] + (["step"] * 4 + ["eval"]) * 2 + ["capture", "end"])
        self.assertEqual(kinds[1:7], per_epoch)
        n, words = self.NUMBER, str
        self.check(log[0], {"model": words, "epochs": int, "batch_size": int, "accumulate": int, "samples": int, "best_by": words, "lr": n, "optimizer": words, "amp": words, "device": words,
                            "ranks": int, "share": list, "scale": n, "seed": int, "step": int})
        self.assertEqual((log[0]["seed"], log[0]["samples"], log[0]["batch_size"]), (2**64 - 1, 128, 40))
        steps = [e for e in log if e["event"] == "step"]
        for number, e in enumerate(steps):
            self.check(e, {"epoch": int, "step": int, "loss": (int, float, type(None)), "lr": n, "scale": n, "skipped": int, "samples_per_s": n,
                           "peak_rss_mb": n})
            self.assertEqual((e["epoch"], e["step"], e["lr"]), (number // 4 + 1, number + 1, 0.5))
            self.assertTrue(5 < e["peak_rss_mb"] < 5000)
        # The scale that is shown is the one the step used; a step that was skipped halves the next.
        self.assertEqual((steps[0]["scale"], steps[0]["skipped"], steps[1]["scale"]), (1e9, 1, 5e8))
        for before, after in zip(steps, steps[1:]):
            self.assertEqual(after["skipped"] - before["skipped"] in (0, 1), True)
        for e in log:
            if e["event"] == "eval":
                self.check(e, {"epoch": int, "step": int, "loss": n, "top1": n, "top5": n, "scale": n, "skipped": int, "peak_rss_mb": n})
                self.assertEqual(e["step"], 4 * e["epoch"])
                self.assertTrue(0 <= e["top1"] <= e["top5"] <= 1)
                self.assertEqual(e["top1"] * 64 % 1, 0)
            if e["event"] == "checkpoint":
                self.check(e, {"epoch": int, "step": int, "file": words})
                self.assertEqual(e["step"], 4 * e["epoch"])
                self.assertIn(e["file"], ("run/last.safetensors", "run/best.safetensors"))
        self.check(log[-1], {"epochs": int, "step": int, "seconds": n, "skipped": int, "scale": n, "loss": n, "top1": n, "top5": n, "interrupted": bool,
                             "peak_rss_mb": n})
        self.assertEqual((log[-1]["epochs"], log[-1]["step"], log[-1]["interrupted"]), (2, 8, False))

    def test_tiles_of_convolutions_are_named(self):
        self.data()
        for arguments, variables, said in (((), {}, None), (("--winograd", "4x4"), {}, "4x4"), ((), {"HALFSTEP_WINOGRAD": "2x2"}, "2x2"),
                                           (("--winograd", "off"), {"HALFSTEP_WINOGRAD": "2x2"}, None)):
            self.train("data", "--epochs", "1", "--no-out", "--log-json", "log", "-q", *arguments, env=variables)
            self.assertEqual(events(self.folder / "log")[0].get("winograd"), said, (arguments, variables))
            out = self.run_program("bench", "mlp", "--steps", "1", "--warmup", "0", "--batch-size", "1", *arguments, env=variables)[1]
            self.assertEqual(json.loads(out).get("winograd"), said, (arguments, variables))

    def test_less_precise_float32_is_named(self):
        self.data()
        for arguments, variables, said in (((), {}, None), (("--tf32",), {}, "high"), ((), {"HALFSTEP_TF32": "1"}, "high"),
                                           ((), {"HALFSTEP_TF32": "0"}, None)):
            self.train("data", "--epochs", "1", "--no-out", "--log-json", "log", "-q", *arguments, env=variables)
            self.assertEqual(events(self.folder / "log")[0].get("float32_precision"), said, (arguments, variables))
            out = self.run_program("bench", "mlp", "--steps", "1", "--warmup", "0", "--batch-size", "1", *arguments, env=variables)[1]
            self.assertEqual(json.loads(out).get("float32_precision"), said, (arguments, variables))

    def test_levels_say_what_they_are_and_scale_in_f16(self):
        self.data()
        for level, dtype, said, scaled in (("O0", None, "O0", False), ("O1", None, "O1", True), ("O2", "bf16", "O2 bf16", False),
                                           ("O3", "f16", "O3", True), ("auto", "bf16", "auto bf16", False)):
            with self.subTest(level):
                flags = ["--amp-dtype", dtype] if dtype else []
                self.train("data", "--epochs", "1", "--amp", level, *flags, "--out", f"run-{level}", "--log-json", f"log-{level}", "-q")
                log = events(self.folder / f"log-{level}")
                self.assertEqual((log[0]["amp"], log[0]["scale"]), (said, 65536 if scaled else 1))
                # What was saved goes on at the same level.
                again = self.run_program("train", "--config", f"run-{level}/config.yaml", "--epochs", "2", "--resume", f"run-{level}", "-q")
                self.assertEqual((again.returncode, again.stderr), (0, ""))

    def test_what_was_trained_at_a_level_is_used_at_it(self):
        self.data()
        for level, dtype, said in (("O2", "bf16", "O2 bf16"), ("O3", "f16", "O3"), ("O1", "f16", "O1")):
            with self.subTest(level):
                self.train("data", "--epochs", "1", "--amp", level, "--amp-dtype", dtype, "--out", f"run-{level}", "-q")
                trained = [e["loss"] for e in events(self.folder / f"run-{level}/log.jsonl") if e["event"] == "eval"]
                # The file alone says it, too.
                (self.folder / f"{level}.safetensors").write_bytes((self.folder / f"run-{level}/last.safetensors").read_bytes())
                losses = {}
                for name, arguments in (("run", [f"run-{level}"]), ("file", [f"{level}.safetensors"]), ("off", [f"run-{level}", "--amp", "off"]),
                                        ("given", [f"run-{level}", "--amp", level])):
                    out = self.run_program("eval", "mlp", "data", "--weights", *arguments, "--log-json", "eval")
                    self.assertEqual((out.returncode, out.stderr), (0, ""))
                    self.assertEqual(f", {said}, as it was trained\n" in out.stdout, name in ("run", "file"), out.stdout)
                    losses[name] = events(self.folder / "eval")[0]["loss"]
                self.assertEqual([losses["run"], losses["file"]], trained * 2)
                self.assertNotEqual(losses["off"], trained[0])
                if dtype == "f16":
                    self.assertEqual(losses["given"], trained[0])
                out = self.run_program("predict", "mlp", "--data", "data", "--weights", f"run-{level}", "--count", "1")
                self.assertIn(f", {said}, as it was trained\n", out.stdout)
        self.refused(2, "expected off, bf16, f16, O0, O1, O2, O3 or auto, got 'O4'", "eval", "mlp", "--weights", "run-O2", "--amp", "O4")
        lines = [json.loads(line) for line in self.run_program("bench", "mlp", "--amp", "off,f16,O2", "--steps", "1", "--warmup", "1").stdout.splitlines()]
        self.assertEqual([(line["dtype"], line.get("level")) for line in lines], [("f32", None), ("f16", None), ("f16", "O2")])

    def test_numbers_that_are_none_are_null(self):
        self.data()
        self.refused(1, "finite loss", "train", "mlp", "data", "--lr", "1e30", "--amp", "f16", "--epochs", "30", "--no-out", "--log-json", "log", "-q",
                     env={"HALFSTEP_LOG": "error"})
        text = (self.folder / "log").read_text()
        self.assertIn('"loss":null', text)
        self.assertNotRegex(text.lower(), r"[:,\[] *-?(nan|inf)")  # as a value: a path may have the letters

    def test_a_run_without_a_finite_loss_at_its_end_has_failed(self):
        """One step is enough for weights whose loss is none. Without another step, or with steps that a dynamic scale skips, the evaluation alone tells."""
        self.data()
        for limit, amp, skipped in ((64, "off", 0), (64, "f16", 0), (128, "f16", 1)):
            with self.subTest(limit=limit, amp=amp):
                steps = limit // 64
                err = self.refused(1, [f"in the last evaluation, of epoch 1, step {steps}; last checkpoint: run/last.safetensors; a smaller --lr may help"], "train", "mlp",
                                   "data", "--lr", "1e30", "--amp", amp, "--limit", limit, "--epochs", "1", "--out", "run", "--overwrite", "-q")
                self.assertRegex(err, "train: expected a finite loss, got (nan|-?inf) ")
                end = events(self.folder / "run/log.jsonl")[-1]
                self.assertEqual([end[k] for k in ("event", "epochs", "step", "skipped", "loss", "interrupted")], ["end", 1, steps, skipped, None, False])
                self.assertEqual(Safetensors(self.folder / "run/last.safetensors").state["step"], steps)
                # Nor is it one that is done when it is resumed, as by `launch --max-restarts`.
                status, _, err = self.run_program("train", "--resume", "run")
                self.assertEqual((status, "all 1 epochs are done" in err, "expected a finite loss" in err), (1, True, True), err)
        # A step that is skipped at the end is none of these: the scale was too large, the weights are good.
        self.train("data", "--limit", "64", "--epochs", "1", "--amp", "f16", "--loss-scale", "dynamic:1e30", "--no-out", "--log-json", "log", "-q")
        self.assertEqual(events(self.folder / "log")[-1]["skipped"], 1)

    def test_the_lines_that_are_printed(self):
        self.data()
        out = self.train("data", "--epochs", "2", "--amp", "f16", "--out", "run")
        lines = out.splitlines()
        self.assertEqual(lines[0], "training mlp on data, f16 with loss scale dynamic:65536,2,0.5,2000")
        for number in (1, 2):
            self.assertRegex(lines[number], rf"\Aepoch {number}/2: loss \d\.\d{{4}}, test loss \d\.\d{{4}}, top1 \d+\.\d\d%, top5 \d+\.\d\d%, \d+ samples/s, scale 65536, skipped 0\Z")
        self.assertRegex(lines[3], r"\A2 epochs completed in \d\.\d{3} hours \(\d+\.\d s\): top1 \d+\.\d\d%, 0 steps skipped, peak memory \d+ MB\Z")
        self.assertEqual(lines[4:], ["checkpoints and log in run"])
        self.assertNotIn("\x1b", out)
        status, out, err = self.run_program("compare", "run", "run/log.jsonl")
        self.assertEqual((status, err), (0, ""))
        for word in ("precision", "epoch 2 top1", "time", "peak memory", "skipped steps"):
            self.assertIn(word, out)

    def test_eval_says_what_training_said(self):
        self.data()
        self.train("data", "--out", "run", "-q")
        trained = [e for e in events(self.folder / "run/log.jsonl") if e["event"] == "eval"][0]
        status, out, err = self.run_program("eval", "mlp", "data", "--weights", "run", "--log-json", "eval")
        self.assertEqual((status, err), (0, ""))
        evaluated = events(self.folder / "eval")[0]
        for key in ("loss", "top1", "top5"):
            self.assertEqual(evaluated[key], trained[key])
        self.assertRegex(out, r"\Aevaluating mlp with run/best.safetensors on data\nclass +precision +recall +F1 +count\n[^\n]+\n(\d( +\d+\.\d\d%){3} +\d+\n){10}\nmlp: loss \d\.\d{4}, top1 \d+\.\d\d%, top5 \d+\.\d\d% in \d+\.\d\d s\n\Z")


class Terminal(ProgramTest):
    def on_terminal(self, arguments, columns, **env):
        """What the program writes to a terminal that wide, standard error included."""
        leader, follower = pty.openpty()
        import fcntl
        import struct
        import termios
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen([PROGRAM, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower,
                                   env=self.environment(**{"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **env}))
        os.close(follower)
        output = b""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if not select.select([leader], [], [], 1)[0]:
                continue
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            output += part
        os.close(leader)
        self.assertEqual(process.wait(timeout=30), 0, output)
        return output.decode().replace("\r\n", "\n")

    def test_the_bar_fits_and_leaves_no_trace(self):
        self.data()
        for columns in (20, 60, 120):
            out = self.on_terminal(["train", "mlp", "data", "--epochs", "2", "--no-out", "--amp", "f16"], columns)
            bars = [re.sub(r"\x1b\[[0-9;]*[mK]", "", part) for line in out.split("\n") for part in line.split("\r") if "%" in part and "top1" not in part]
            self.assertGreater(len(bars), 0, out)
            for bar in bars:
                self.assertLess(len(bar), columns, bar)
            # Each bar is erased before the line that takes its place.
            self.assertEqual(out.count("\r\x1b[Kepoch"), 2, out)
            self.assertTrue(out.rstrip("\n").split("\n")[-1].startswith("2 epochs completed"), out)

    def test_no_colours_when_not_wanted_and_no_bar_on_a_dumb_terminal(self):
        self.data()
        self.assertIn("\x1b[3", self.on_terminal(["train", "mlp", "data", "--no-out"], 80))
        plain = self.on_terminal(["train", "mlp", "data", "--no-out"], 80, NO_COLOR="1")
        self.assertNotRegex(plain, r"\x1b\[[0-9;]*m")
        self.assertIn("━", plain)
        dumb = self.on_terminal(["train", "mlp", "data", "--no-out"], 80, TERM="dumb")
        self.assertNotIn("\x1b", dumb)
        self.assertNotIn("\r", dumb)
        self.assertNotIn("━", self.on_terminal(["train", "mlp", "data", "--no-out"], 80, LC_ALL="C"))
        self.assertEqual(self.on_terminal(["train", "mlp", "data", "--no-out", "--quiet"], 80), "")

    def test_pictures_fit_narrow_outputs(self):
        self.data()
        self.train("data", "--out", "run", "-q")
        for columns in ("20", "0", "-5", "many", "1000000", ""):
            status, out, err = self.run_program("predict", "mlp", "--data", "data", "--weights", "run", "--count", "3", env={"COLUMNS": columns})
            self.assertEqual((status, err), (0, ""))
            self.assertIn(" of 3 right", out)


class Numbers(ProgramTest):
    def losses(self, *arguments, **env):
        log = self.folder / "log"
        self.train("data", "--epochs", "4", "--lr", "0.05", "--no-out", "--log-json", "log", "-q", *arguments, env=env)
        return [e["loss"] for e in events(log) if e["event"] == "step"]

    @staticmethod
    def tasks_of(pid):
        time.sleep(0.003)
        return len(os.listdir(f"/proc/{pid}/task"))

    def test_threads_reach_every_loop(self):
        """One thread more or less changes which sums are cut where, not what comes out; the same number gives the same bits."""
        self.data()
        counts = []
        for flags, env in (([], {"HALFSTEP_THREADS": "1"}), (["--threads", "3"], {"HALFSTEP_THREADS": "1"}), ([], {"OMP_NUM_THREADS": "3"})):
            process = self.start(*[a for a in ENDLESS], "--no-out", "--workers", "0", "--log-json", "log", *flags, env={**env, "DNNL_VERBOSE": "1"})
            log = self.folder / "log"
            wait_for(lambda: log.exists() and log.read_text().count('"step"') > 5)
            # A pool lets threads go between a wide loop and a narrow one.
            tasks = max(self.tasks_of(process.pid) for _ in range(100))
            process.kill()
            out = process.communicate()[0]
            log.unlink()
            said = re.search(r"nthr:(\d+)", out)
            counts.append((tasks, int(said[1]) if said else None))
        self.assertLessEqual(counts[0][0], 2, f"{counts}; the second one loads for the evaluation")
        for (tasks, said), threads in zip(counts, (1, 3, 3)):
            self.assertGreaterEqual(tasks, threads, counts)
            self.assertIn(said, (None, 1), f"{counts}; oneDNN runs in our threads")
        one, again, three = (self.losses(HALFSTEP_THREADS=n) for n in ("1", "1", "3"))
        self.assertEqual(one, again)
        for a, b in zip(one, three):
            self.assertAlmostEqual(a, b, delta=1e-4)

    def test_every_instruction_set_agrees(self):
        """Sums of 784 terms in another order: some units of the last place of the logits, and the steps add to them."""
        self.data()
        for amp, bound in (("off", 1e-4), ("bf16", 0.02), ("f16", 0.005)):
            expected = self.losses("--amp", amp)
            for isa in ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx"):
                got = self.losses("--amp", amp, HALFSTEP_ISA=isa)
                self.assertEqual(len(got), len(expected))
                for a, b in zip(got, expected):
                    self.assertAlmostEqual(a, b, delta=bound, msg=f"{amp} {isa}")


if __name__ == "__main__":
    unittest.main()
