# SPDX-License-Identifier: Apache-2.0
"""`mpirun -n N halfstep train`: the run of one process, divided among several."""
import math
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
import unittest

from images_test import make_images
from program import PROGRAM, RUN_FILES, ProgramTest, Safetensors, events, make_data

LAUNCHERS = {"openmpi": ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none"], "mpich": ["mpirun.mpich"]}
FLAGS = ["--batch-size", "16", "--lr", "0.05", "--momentum", "0.9"]


def modules():
    folder = os.path.join(os.path.dirname(os.path.dirname(PROGRAM)), "lib", "halfstep", "mpi")
    return [name for name, command in LAUNCHERS.items()
            if shutil.which(command[0]) and os.path.exists(os.path.join(folder, f"libhalfstep_mpi_{name}.so"))]


@unittest.skipUnless(modules(), "no MPI was found when this was built, or no mpirun is installed")
class RanksTest(ProgramTest):
    def launch(self, ranks, *arguments, mpi=None, variables=None, **options):
        env = self.environment(HALFSTEP_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                               OMPI_MCA_btl_vader_single_copy_mechanism="none", **(variables or {}))
        command = [*LAUNCHERS[mpi or modules()[0]], "-n", str(ranks), PROGRAM, *map(str, arguments)]
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        return subprocess.Popen(command, cwd=self.folder, text=True, stdin=subprocess.DEVNULL, env=env, **options)

    def finish(self, process, timeout=120):
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            self.fail(f"it hangs: {process.communicate()}")
        return process.returncode, out, err

    def done(self, ranks, *arguments, **options):
        status, out, err = self.finish(self.launch(ranks, "train", "mlp", *arguments, **options))
        self.assertEqual(status, 0, out + err)
        return out

    def losses(self, run):
        return [e["loss"] for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"]

    def evaluations(self, run):
        return [e for e in events(self.folder / run / "log.jsonl") if e["event"] == "eval"]

    def why_not(self, run):
        """Why the steps of a run weren't replayed."""
        return [e["why_not"] for e in events(self.folder / run / "log.jsonl") if e["event"] == "capture" and "why_not" in e][-1]

    def near(self, a, b, relative):
        self.assertEqual(len(a), len(b))
        for x, y in zip(a, b):
            self.assertTrue(math.isclose(x, y, rel_tol=relative), f"{x} and {y}")


class Ranks(RanksTest):
    # 131 samples in batches of 16: the last one has 3, which rank 0 has alone: single samples have no statistics. 50 test
    # samples.
    def test_a_run_is_that_of_one_process(self):
        self.data(train=131, test=50)
        self.train("data", "--out", "one", *FLAGS, "--epochs", "2")
        for mpi in modules():
            for ranks in (2, 4):
                run = f"{mpi}-{ranks}"
                out = self.done(ranks, "data", "--out", run, *FLAGS, "--epochs", "2", mpi=mpi)
                self.assertEqual(out.count("2 epochs completed"), 1, "rank 0 speaks for all")
                self.assertRegex(out, rf"by {ranks} ranks \(.*\), {16 // ranks} samples a rank, float32")
                start = events(self.folder / run / "log.jsonl")[0]
                self.assertEqual((start["ranks"], start["share"]), (ranks, [16 // ranks] * ranks))
                self.assertEqual(sorted(p.name for p in (self.folder / run).iterdir()), RUN_FILES)
                # 18 steps of sums in another order: a few roundings of 2^-24 in each, which the network carries on.
                self.near(self.losses(run), self.losses("one"), 1e-5)
                for mine, theirs in zip(self.evaluations(run), self.evaluations("one")):
                    self.assertEqual((mine["top1"], mine["top5"]), (theirs["top1"], theirs["top5"]))
                    self.assertTrue(math.isclose(mine["loss"], theirs["loss"], rel_tol=1e-5))
        start = events(self.folder / "one" / "log.jsonl")[0]
        self.assertEqual((start["ranks"], start["share"]), (1, [16]))
        # Which library carries the data makes no difference to the bits, and the table of classes has all samples.
        if len(modules()) == 2:
            self.assertEqual(self.losses("openmpi-4"), self.losses("mpich-4"))
        table = (self.folder / run / "classes.csv").read_text().splitlines()
        self.assertEqual(sum(int(line.split(",")[-1]) for line in table[1:]), 50)

    def test_parts_of_unlike_sizes_are_told(self):
        self.data()
        out = self.done(3, "data", "--out", "run", "-b", "16", "--accumulate", "2", "--epochs", "1")
        self.assertIn("), 10 to 12 samples a rank, ", out)
        self.assertEqual(events(self.folder / "run" / "log.jsonl")[0]["share"], [12, 10, 10])

    # What one process trains on, several do: here the last layers see one value per sample and channel, and of the last
    # batch's 3 samples rank 1 would have a single one.
    def test_the_last_batch_of_a_network_with_batch_norm(self):
        make_images(self.folder / "images", train=11)
        flags = ["resnet18", "images", "--image-size", "32", "-b", "8", "--limit", "11", "--threads", "1", "--epochs", "1", "--lr", "0.01"]
        status, out, err = self.run_program("train", *flags, "--out", "one")
        self.assertEqual((status, err), (0, ""), out)
        for ranks in (2, 4):
            status, out, err = self.finish(self.launch(ranks, "train", *flags, "--out", str(ranks)))
            self.assertEqual(status, 0, out + err)
            last = Safetensors(self.folder / str(ranks) / "last.safetensors")
            counts = [struct.unpack("<q", last.tensor(name))[0] for name in last.header if name.endswith("num_batches_tracked")]
            self.assertEqual(counts, [2] * 20)
            # Each part has statistics of its own: the losses aren't those of one process.
            self.assertTrue(all(map(math.isfinite, self.losses(str(ranks)))))

    def test_precisions(self):
        self.data()
        for flags in (["--amp", "f16"], ["--amp", "bf16", "--compress-gradients", "bf16"], ["--amp", "f16", "--compress-gradients", "f16"],
                      ["--accumulate", "3", "--clip-norm", "0.5"], ["--reduce", "library", "--no-capture", "--bucket-mb", "0.1"], ["--reduce", "fast"],
                      ["--amp", "O2", "--sync-batch-norm"]):
            self.train("data", "--out", "one", "--overwrite", *FLAGS, "--epochs", "2", *flags)
            self.done(2, "data", "--out", "two", "--overwrite", *FLAGS, "--epochs", "2", *flags)
            # 16-bit roundings of activations and gradients; noise as data, whose losses stay near ln 10.
            self.near(self.losses("two"), self.losses("one"), 1e-5 if "--amp" not in flags else 2e-2)

    def test_power_sgd(self):
        self.data()
        flags = [*FLAGS, "--amp", "f16", "--loss-scale", "dynamic:1e7", "--compress-gradients", "powersgd:2,3", "--bucket-mb", "0"]
        self.done(2, "data", "--out", "whole", *flags, "--epochs", "3")
        self.train("data", "--out", "one", *FLAGS, "--epochs", "3", "--amp", "f16", "--loss-scale", "dynamic:1e7")
        # The first steps are whole, those after them not.
        one, two = self.losses("one"), self.losses("whole")
        self.near(two[:1], one[:1], 2e-2)
        self.assertNotEqual(two, one)
        self.near(two, one, 0.2)
        sizes = [e for e in events(self.folder / "whole" / "log.jsonl") if e["event"] == "buckets"]
        self.assertEqual(len(sizes), 1)
        # Resumed with the same bits, from what both ranks had left out.
        self.done(2, "data", "--out", "run", *flags, "--epochs", "1")
        self.done(2, "--resume", "run", "--epochs", "3")
        self.assertEqual(self.losses("run"), two)
        run, whole = [Safetensors(self.folder / name / "last.safetensors") for name in ("run", "whole")]
        self.assertEqual(run.data, whole.data)
        self.assertEqual(run.header["communication.error.fc1.weight"]["shape"], [2, 512, 784])
        # On one rank, which compresses nothing, and as weights without it.
        status, out, err = self.run_program("train", "--resume", "run", "--epochs", "4")
        self.assertEqual(status, 0, out + err)
        for bad in ("powersgd:0", "powersgd:1.5", "powersgd:1,2,3", "powersgdd", "f8"):
            status, out, err = self.run_program("train", "mlp", "data", "--no-out", "--compress-gradients", bad)
            self.assertEqual(status, 2, out + err)
            self.assertIn("powersgd[:RANK[,START]]", err)
            self.assertIn(bad, err)

    def test_a_comparison_changes_nothing(self):
        """Its passes are no steps: what PowerSGD left out of the steps' gradients stays as it was."""
        self.data()
        flags = [*FLAGS, "--epochs", "2", "--amp", "f16", "--compress-gradients", "powersgd:1,2"]
        self.done(2, "data", "--out", "plain", *flags)
        out = self.done(2, "data", "--out", "compared", *flags, "--debug-compare", "twin", "--debug-steps", "6")
        self.assertIn("calls and casts compared", (self.folder / "compared" / "debug-twin.txt").read_text(), out)
        self.assertEqual(self.losses("compared"), self.losses("plain"))
        runs = [Safetensors(self.folder / run / "last.safetensors") for run in ("compared", "plain")]
        self.assertEqual(runs[0].data, runs[1].data)

    def test_an_evaluation_is_divided(self):
        self.data(test=3000)
        self.train("data", "--out", "run", "--epochs", "1")
        flags = ["train", "mlp", "data", "--resume", "run", "--evaluate", "-p", "1"]
        one = self.run_program(*flags, "--log-json", "one.jsonl")
        self.assertEqual(one.returncode, 0, one.stderr)
        for mpi in modules():
            status, out, err = self.finish(self.launch(3, *flags, "--log-json", f"{mpi}.jsonl", mpi=mpi))
            self.assertEqual(status, 0, out + err)
            self.assertIn("by 3 ranks", out)
            self.assertIn("Test: [4/4]", out)  # a rank has 1000 samples, in batches of 1000 / 3
            self.assertEqual(re.findall(r" \* Acc.*", out), re.findall(r" \* Acc.*", one.stdout))
            mine, theirs = [next(e for e in events(self.folder / f"{name}.jsonl") if e["event"] == "eval") for name in (mpi, "one")]
            self.assertEqual((mine["top1"], mine["top5"]), (theirs["top1"], theirs["top5"]))
            self.assertTrue(math.isclose(mine["loss"], theirs["loss"], rel_tol=1e-6))
            status, out, err = self.finish(self.launch(2, "train", "mlp", "data", "--evaluate", "--resume", "nowhere", mpi=mpi))
            self.assertNotEqual(status, 0)
            self.assertIn("nowhere", err)

    def test_a_file_gets_no_progress_bar(self):
        """Open MPI's ranks have a terminal whatever mpirun writes to."""
        self.data(train=2048)
        flags = ["train", "mlp", "data", "--no-out", "--epochs", "2", "-p", "0"]
        terminal = {"TERM": "xterm", "COLUMNS": "100"}
        for mpi in modules():
            for ranks in (1, 2):
                with open(self.folder / "out", "w+b") as out:
                    status, _, err = self.finish(self.launch(ranks, *flags, mpi=mpi, variables=terminal, stdout=out))
                    self.assertEqual(status, 0, err)
                    out.seek(0)
                    text = out.read()
                self.assertIn(b"2 epochs completed", text)
                self.assertNotIn(b"\x1b", text)
        for start in (lambda slave: self.launch(2, *flags, mpi="openmpi", variables=terminal, stdout=slave),
                      lambda slave: self.start("launch", "--mpi", "openmpi", "--nproc-per-node", 2, *flags, env=terminal, stdout=slave)):
            if "openmpi" not in modules():
                continue
            text = self.shown(start)
            self.assertIn(b"2 epochs completed", text)
            self.assertIn(b"\x1b", text)

    def shown(self, start):
        """What a program writes to a terminal."""
        master, slave = pty.openpty()
        text = []

        def read():
            while True:
                try:
                    piece = os.read(master, 4096)
                except OSError:  # nobody has the other side open any more
                    return
                text.append(piece)

        process = start(slave)
        os.close(slave)
        reader = threading.Thread(target=read)
        reader.start()
        status, _, err = self.finish(process)
        reader.join(30)
        os.close(master)
        self.assertEqual(status, 0, err)
        return b"".join(text)

    def test_resuming_on_another_number_of_ranks(self):
        self.data()
        self.train("data", "--out", "whole", *FLAGS, "--epochs", "3")
        self.train("data", "--out", "run", *FLAGS, "--epochs", "1")
        self.done(2, "--resume", "run", "--epochs", "2")
        status, out, err = self.run_program("train", "--resume", "run", "--epochs", "3")
        self.assertEqual((status, err), (0, ""), out)
        self.near(self.losses("run"), self.losses("whole"), 1e-5)
        # Where nothing is left to do, one rank says so.
        status, out, err = self.finish(self.launch(2, "train", "--resume", "run"))
        self.assertEqual((status, err.count("all 3 epochs are done")), (0, 1), out + err)

    # With the same number the bits are those of a run that wasn't interrupted.
    def test_a_stop_on_any_rank_is_one_of_all(self):
        self.data(train=4096)
        flags = ["--epochs", "2", "--batch-size", "16", "--lr", "0.05", "--amp", "f16"]
        self.done(2, "data", "--out", "whole", *flags)
        process = self.launch(2, "train", "mlp", "data", "--out", "run", *flags)
        log = self.folder / "run" / "log.jsonl"
        deadline = time.time() + 60
        while time.time() < deadline and not (log.exists() and log.read_text().count("\n") > 20):
            time.sleep(0.01)
        ranks = subprocess.run(["pgrep", "-f", f"{PROGRAM} train mlp data --out run"], capture_output=True, text=True, check=True)
        # The launcher has the program's command line too, and so has for a moment what a rank forks; of the two that were
        # started, the last one.
        pids = [int(p) for p in ranks.stdout.split() if os.path.realpath(f"/proc/{p}/exe") == os.path.realpath(PROGRAM)]
        pids = [p for p in pids if self.parent_of(p) not in pids]
        self.assertEqual(len(pids), 2)
        os.kill(pids[-1], signal.SIGTERM)
        status, out, err = self.finish(process)
        self.assertNotEqual(status, 0)
        self.assertIn("resume with", err)
        self.done(2, "--resume", "run")
        self.assertEqual(self.losses("run"), self.losses("whole"))
        both = [Safetensors(self.folder / run / "last.safetensors") for run in ("run", "whole")]
        self.assertEqual(both[0].data, both[1].data)

    @staticmethod
    def parent_of(pid):
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("PPid:")), 0)
        except OSError:
            return 0

    def test_who_can_not_begin_ends_all(self):
        self.data()
        self.train("data", "--out", "run", "--epochs", "1")
        for flags, said in ((["data", "--out", "run"], "holds a run already"), (["nowhere", "--out", "new"], "nowhere"),
                            (["data", "--out", "new", "--batch-size", "1"], "at least the number of ranks, 2, got 1"),
                            (["data", "--out", "new", "--device", "sim:7"], "sim")):
            started = time.time()
            status, out, err = self.finish(self.launch(2, "train", "mlp", *flags), 60)
            self.assertNotEqual(status, 0, flags)
            self.assertIn(said, err)
            if "--batch-size" in flags:
                self.assertEqual((out, err.count("--batch-size: expected")), ("", 1), "one rank says it, before anything else")
            self.assertLess(time.time() - started, 30)
            self.assertFalse((self.folder / "new").exists())

    def test_the_same_bits_on_any_number_of_ranks(self):
        self.data(train=131)
        flags = ["data", "--epochs", "2", *FLAGS, "--reproducible", "4", "--amp", "f16", "--clip-norm", "1"]
        self.train(*flags, "--out", "1")
        first = Safetensors(self.folder / "1" / "last.safetensors")
        for ranks in (2, 4):
            self.done(ranks, *flags, "--out", str(ranks))
            self.assertEqual(self.losses(str(ranks)), self.losses("1"))
            self.assertEqual(Safetensors(self.folder / str(ranks) / "last.safetensors").data, first.data)
            self.assertEqual(self.why_not(str(ranks)), "its batches are divided into shards (reproducible)")
        # In the middle of an epoch to another number of ranks.
        self.train("data", "--epochs", "1", *FLAGS, "--reproducible", "4", "--amp", "f16", "--clip-norm", "1", "--out", "mixed")
        self.done(2, "--resume", "mixed", "--epochs", "2")
        self.assertEqual(self.losses("mixed"), self.losses("1"))
        self.refused(2, "expected a power of 2, got 3", "train", "mlp", "data", "--reproducible", "3")
        self.refused(2, "--sync-batch-norm", "train", "mlp", "data", "--reproducible", "2", "--sync-batch-norm")
        # A partner is one of the rank's own samples.
        self.refused(2, "--mixup", "train", "mlp", "data", "--reproducible", "2", "--mixup", "0.2")
        status, _, err = self.finish(self.launch(3, "train", "mlp", "data", "--no-out", "--reproducible", "4"))
        self.assertNotEqual(status, 0)
        self.assertIn("3 ranks divide, got 4", err)

    def test_a_divided_state_gives_the_same_bits(self):
        self.data(train=131)
        for flags in (["--optimizer", "adamw", "--amp", "f16", "--accumulate", "2", "--clip-norm", "0.5", "--weight-decay", "0.01", "--no-norm-decay"],
                      ["--momentum", "0.9", "--amp", "bf16", "--compress-gradients", "bf16", "--save-every", "4"], ["--momentum", "0.9", "--ema", "0.9"]):
            flags = ["data", "--batch-size", "16", "--lr", "0.01", "--overwrite", *flags]
            self.done(2, *flags, "--out", "whole", "--epochs", "2")
            whole = Safetensors(self.folder / "whole" / "last.safetensors")
            for stage in (1, 2) if "--ema" in flags else (1, 2, 3):  # averages are of whole weights
                self.done(2, *flags, "--out", "run", "--epochs", "2", "--zero", stage)
                self.assertEqual(self.losses("run"), self.losses("whole"))
                self.assertEqual([e["top1"] for e in self.evaluations("run")], [e["top1"] for e in self.evaluations("whole")])
                if stage == 3:
                    self.assertEqual(self.why_not("run"), "parameters are divided among the ranks (ZeRO stage 3)")
                divided = Safetensors.whole(self.folder / "run" / "last.safetensors")
                self.assertEqual(divided.data, whole.data, f"--zero {stage}: weights and the optimizer's state")
                # A checkpoint is whole when it is read: it goes on divided in another way, or not at all.
                self.done(2, *flags, "--out", "half", "--epochs", "1", "--zero", stage)
                self.done(2, "--resume", "half", "--epochs", "2", "--zero", 3 - stage)
                self.assertEqual(self.losses("half"), self.losses("whole"))
                self.assertEqual(Safetensors.whole(self.folder / "half" / "last.safetensors").data, whole.data)

    def test_a_divided_state_resumes_on_another_number_of_ranks(self):
        self.data(train=131)
        flags = ["data", *FLAGS, "--reproducible", "4", "--clip-norm", "1"]
        self.train(*flags, "--out", "one", "--epochs", "3")
        for stage in (1, 2):
            self.done(4, *flags, "--out", "run", "--overwrite", "--epochs", "1", "--zero", stage)
            self.done(2, "--resume", "run", "--epochs", "2")
            status, out, err = self.run_program("train", "--resume", "run", "--epochs", "3")
            self.assertEqual((status, err), (0, ""), out)
            self.assertEqual(self.losses("run"), self.losses("one"))
        self.refused(2, "--zero: --debug-compare twin runs a step twice", "train", "mlp", "data", "--zero", "1",
                     "--debug-compare", "twin", "--amp", "f16")
        self.refused(2, "--zero 3: ranks bring parameters together", "train", "mlp", "data", "--zero", "3", "--reproducible", "2")

    def test_devices(self):
        self.data()
        flags = ["--device", "sim", *FLAGS, "--epochs", "2", "--print-freq", "1"]
        two = self.done(2, "data", "--out", "two", *flags)
        one = self.train("data", "--out", "one", *flags)
        self.near(self.losses("two"), self.losses("one"), 1e-5)
        # By the devices' own collectives or through the host: the same bits.
        self.done(2, "data", "--out", "host", *flags, variables={"HALFSTEP_DEVICE_COLLECTIVES": "0"})
        self.assertEqual(self.losses("two"), self.losses("host"))
        # Steps are replayed, through the device's graphs, with the bits of steps that run as they are.
        for more in ([], ["--zero", "2", "--amp", "f16"]):
            runs = []
            for run, capture in (("replayed", []), ("plain", ["--no-capture"])):
                self.done(2, "data", "--out", run, "--overwrite", *flags, *more, *capture)
                counts = next((e for e in events(self.folder / run / "log.jsonl") if e["event"] == "capture"), {})
                runs.append((self.losses(run), Safetensors.whole(self.folder / run / "last.safetensors").data))
                if not capture:
                    self.assertGreater(counts["replayed"], counts["plain"] + counts["recorded"], counts)
                    self.assertGreater(counts["graphs"], 0, counts)
            self.assertEqual(runs[0], runs[1])
        # Hits are counted on the host there, where each rank has those of its own samples.
        accuracies = [re.findall(r"Epoch:.*?Acc@1 +([0-9. (]+)\).*?Acc@5 +([0-9. (]+)\)", text.replace("\t", " ")) for text in (one, two)]
        self.assertGreater(len(accuracies[0]), 3)
        self.assertEqual(accuracies[0], accuracies[1])
        # Several batches a step.
        several = [*flags, "--accumulate", "3"]
        self.done(2, "data", "--out", "two-3", *several)
        self.train("data", "--out", "one-3", *several)
        self.near(self.losses("two-3"), self.losses("one-3"), 1e-5)
        status, _, err = self.finish(self.launch(4, "train", "mlp", "data", "--no-out", "--device", "sim", *FLAGS, "--epochs", "2"))
        self.assertNotEqual(status, 0)
        self.assertIn("4 ranks on this machine", err)
        status, _, err = self.finish(self.launch(2, "train", "mlp", "data", "--no-out", "--device", "sim:1", *FLAGS, "--epochs", "1"))
        self.assertEqual(status, 2, err)
        self.assertIn("--device: sim:1 is one device, and each of 2 ranks on this machine takes its own", err)

    def test_few_samples(self):
        """Of the test set, and of the training set, fewer than ranks: those who have none take part with zero counts."""
        for count in (1, 2, 3):
            data = self.folder / f"few{count}"
            make_data(data, train=count, test=count)
            flags = [data, *FLAGS, "--epochs", "3"]
            self.train(*flags, "--out", f"one{count}")
            for mpi, ranks in ((modules()[0], 2), (modules()[-1], 4)):
                run = f"{count}-{ranks}"
                self.done(ranks, *flags, "--out", run, mpi=mpi)
                self.near(self.losses(run), self.losses(f"one{count}"), 1e-5)
                self.assertEqual(len(self.evaluations(run)), 3)
                for mine, theirs in zip(self.evaluations(run), self.evaluations(f"one{count}")):
                    self.assertEqual((mine["top1"], mine["top5"]), (theirs["top1"], theirs["top5"]))
                    self.assertTrue(math.isclose(mine["loss"], theirs["loss"], rel_tol=1e-5))
                table = (self.folder / run / "classes.csv").read_text().splitlines()
                self.assertEqual(sum(int(line.split(",")[-1]) for line in table[1:]), count)
                status, out, err = self.finish(self.launch(ranks, "train", "mlp", data, "--resume", run, "--evaluate", mpi=mpi))
                self.assertEqual(status, 0, out + err)


if __name__ == "__main__":
    unittest.main()
