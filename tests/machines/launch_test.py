#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training on two machines, which are namespaces here (machines.py): the same bits, slow networks, and cut ones.

HALFSTEP_PROGRAM names the program. HALFSTEP_MPIS: the implementations of MPI to use, by default all.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cli"))

from machines import CannotBeMade, Machines, address  # noqa: E402
from program import PROGRAM, events, make_data  # noqa: E402

MODULES = pathlib.Path(PROGRAM).resolve().parent.parent / "lib" / "halfstep" / "mpi"
MPIS = [name for name in os.environ.get("HALFSTEP_MPIS", "openmpi mpich").split()
        if shutil.which("mpirun." + name) and (MODULES / f"libhalfstep_mpi_{name}.so").exists()]
# With --reproducible the number of ranks makes no difference to the bits.
TRAIN = ["train", "mlp", "data", "--epochs", "2", "--batch-size", "32", "--reproducible", "4", "--lr", "0.05"]


@unittest.skipUnless(MPIS, "no MPI was found when this was built, or no mpirun is installed")
class MachinesTest(unittest.TestCase):
    def setUp(self):
        try:
            self.machines = Machines(2)
        except (CannotBeMade, OSError) as why:
            self.skipTest(f"no machines can be made of namespaces here: {why}")
        self.addCleanup(self.machines.close)
        self.folder = self.machines.folder
        (self.folder / "hosts").write_text("# two machines\nnorth slots=1\nsouth slots=1\n")

    def start(self, machine, *arguments, folder=None, **variables):
        # Not pipes: what is left somewhere would keep them open.
        self.outputs = getattr(self, "outputs", 0) + 1
        files = [open(self.folder / f"{name}.{self.outputs}", "w+") for name in ("out", "err")]
        for file in files:
            self.addCleanup(file.close)
        process = subprocess.Popen(self.machines.command(machine, PROGRAM, *arguments, folder=folder), env=self.machines.environment(**variables),
                                   stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1])
        process.files = files
        return process

    @staticmethod
    def output(process):
        for file in process.files:
            file.seek(0)
        return [file.read() for file in process.files]

    def finish(self, process, seconds=120):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            where = [words for i in (0, 1) for _, words in self.machines.processes(i)]
            self.fail(f"it hangs: {self.output(process)} {where}")
        return process.returncode, *self.output(process)

    def on_one_machine(self, run):
        """What one process makes of it."""
        environment = {k: v for k, v in self.machines.environment().items()}
        done = subprocess.run([PROGRAM, *TRAIN, "--out", run], cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def weights(self, run):
        return (self.folder / run / "last.safetensors").read_bytes()

    def losses(self, run):
        return [e["loss"] for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"]

    def wait_for_steps(self, run, steps, process):
        """Until the log has so many lines, which are a few more than steps."""
        log = self.folder / run / "log.jsonl"
        end = time.monotonic() + 60
        while not log.exists() or log.read_text().count("\n") < steps:
            self.assertIsNone(process.poll(), "it has ended")
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)


class Hosts(MachinesTest):
    def test_a_file_of_hosts_trains_as_one_machine_does(self):
        make_data(self.folder / "data", 256)
        self.on_one_machine("one")
        for mpi in MPIS:
            for per_node in (1, 2):
                run = f"{mpi}-{per_node}"
                status, out, err = self.finish(self.start(0, "launch", "--mpi", mpi, "--hosts", "hosts", "--nproc-per-node", per_node, *TRAIN, "--out", run))
                self.assertEqual((status, err), (0, ""), out)
                self.assertIn(f"by {2 * per_node} ranks", out)
                self.assertEqual(self.losses(run), self.losses("one"))
                self.assertEqual(self.weights(run), self.weights("one"))
                self.assertEqual(self.machines.left(5), [])

    def test_a_slow_network_that_loses_packets_changes_no_bit(self):
        make_data(self.folder / "data", 64)
        self.on_one_machine("one")
        # 5 ms each way, and one packet of 500 comes to nothing.
        self.machines.wire("delay 0.005")
        self.machines.wire("loss 0.002")
        for mpi in MPIS:
            status, out, err = self.finish(self.start(0, "launch", "--mpi", mpi, "--hosts", "hosts", *TRAIN, "--out", mpi), 240)
            self.assertEqual((status, err), (0, ""), out)
            self.assertEqual(self.weights(mpi), self.weights("one"))

    def test_a_network_that_stops_for_a_moment_is_no_failure(self):
        make_data(self.folder / "data", 256)
        self.on_one_machine("one")
        for mpi in MPIS:
            process = self.start(0, "launch", "--mpi", mpi, "--hosts", "hosts", *TRAIN, "--out", mpi)
            self.wait_for_steps(mpi, 4, process)
            self.machines.wire("cut 1")
            time.sleep(4)
            self.machines.wire("join 1")
            status, out, err = self.finish(process)
            self.assertEqual((status, err), (0, ""), out)
            self.assertEqual(self.weights(mpi), self.weights("one"))

    def test_a_host_that_cannot_be_reached_is_named(self):
        (self.folder / "hosts").write_text("north\nwest\n")
        for mpi in MPIS:  # MPICH's launcher waits for ever
            status, _, err = self.finish(self.start(0, "launch", "--mpi", mpi, "--hosts", "hosts", "train", "mlp", "data", "--no-out"), 100)
            self.assertNotEqual(status, 0)
            self.assertIn("there is no machine west", err)
            self.assertRegex(err, r"halfstep: launch: (\S+ ended with status \d+ before all ranks had begun|rank 1 hasn't begun 60 s after the others: .*)\n")
            self.assertEqual(self.machines.left(15), [])


class Nodes(MachinesTest):
    """The same command on each machine, without an agent."""
    def nodes(self, mpi, *arguments, first=1, other=1, count=2, folder=None):
        flags = ["launch", "--mpi", mpi, "--nnodes", count, "--master-addr", "north", "--master_port", "29511"]
        variables = {"OMPI_MCA_plm_rsh_agent": "/nowhere", "HYDRA_LAUNCHER_EXEC": "/nowhere"}
        return [self.start(machine, *flags, f"--node_rank={machine}", "--nproc_per_node", ranks, *arguments, **variables, folder=folder)
                for machine, ranks in ((1, other), (0, first)) if ranks]

    def test_it_trains_as_one_machine_does(self):
        make_data(self.folder / "data", 256)
        self.on_one_machine("one")
        for mpi in MPIS:
            for first, other in ((1, 1), (1, 3)):
                run = f"{mpi}-{other}"
                there, here = self.nodes(mpi, *TRAIN, "--out", run, first=first, other=other)
                status, out, err = self.finish(here)
                self.assertEqual((status, err), (0, ""), out)
                self.assertEqual(self.finish(there, 15), (0, "", ""))
                self.assertIn(f"by {first + other} ranks", out)
                self.assertEqual(self.weights(run), self.weights("one"))
                self.assertEqual(self.machines.left(5), [])

    def test_all_end_with_the_same_status_and_a_signal_is_for_all(self):
        make_data(self.folder / "data", 32768)
        for mpi in MPIS:
            there, here = self.nodes(mpi, "train", "mlp", "data", "--epochs", "1000", "--batch-size", "32", "--out", mpi, "-q")
            self.wait_for_steps(mpi, 20, here)
            there.send_signal(signal.SIGINT)
            status, _, err = self.finish(here, 60)
            self.assertEqual(status, 128 + signal.SIGINT, err)
            self.assertIn("resume with", err)
            self.assertEqual(self.finish(there, 15)[0], status)
            self.assertEqual(self.machines.left(10), [])

    def test_what_differs_is_refused_on_both(self):
        for mpi in MPIS:
            there, here = self.nodes(mpi, "true")
            there.kill()
            there.wait()
            other = self.start(1, "launch", "--mpi", mpi, "--nnodes", 2, "--node-rank", 1, "--master-addr", "north", "--master-port", 29511, "false")
            for process in (here, other):
                status, _, err = self.finish(process, 30)
                self.assertNotEqual(status, 0)
                self.assertIn("expected the same command on all machines, got true on node 0, false there (node 1, host south)", err)


class Operator(MachinesTest):
    def test_the_launcher_of_the_kubernetes_mpi_operator(self):
        """The variables, the file of hosts and the names of its controller (v2beta1) in the launcher's pod."""
        if "openmpi" not in MPIS:
            self.skipTest("Open MPI is needed")
        make_data(self.folder / "data", 256)
        self.on_one_machine("one")
        pods = [f"job-worker-{i}.job.default.svc" for i in (0, 1)]
        with open(self.folder / "etc-hosts", "a") as hosts:
            for i, pod in enumerate(pods):
                hosts.write(f"{address(i)} {pod}\n")
                (self.folder / "pids" / pod).symlink_to(self.machines.names[i])
        (self.folder / "hostfile").write_text("".join(f"{pod} slots=2\n" for pod in pods))
        variables = {"OMPI_MCA_orte_default_hostfile": str(self.folder / "hostfile"), "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
                     "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        status, out, err = self.finish(self.start(0, "launch", "--hosts", "hostfile", *TRAIN, "--out", "launch", **variables))
        self.assertEqual((status, err), (0, ""), out)
        self.assertIn("by 4 ranks (Open MPI", out)
        plain = subprocess.run(self.machines.command(0, "mpirun.openmpi", "-n", 4, "--bind-to", "none", PROGRAM, *TRAIN, "--out", "plain"),
                               env=self.machines.environment(**variables), capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(plain.returncode, 0, plain.stdout + plain.stderr)
        self.assertEqual((self.weights("launch"), self.weights("plain")), (self.weights("one"), self.weights("one")))


class Cut(MachinesTest):
    LIMIT = 15  # seconds, of the promise: all ranks have ended by then
    GRADIENTS = r"gradients of bucket \d+: \S+ to \S+, [0-9.]+ [KM]iB"

    def ranks(self, machine):
        """The processes of the program itself, without those beside them."""
        return [pid for pid, words in self.machines.processes(machine) if words[1:2] == ["train"]]

    def in_training(self, mpi, run):
        """A job in the middle of its first epoch, and the processes of its ranks."""
        process = self.start(0, "launch", "--mpi", mpi, "--hosts", "hosts", "train", "mlp", "data", "--epochs", "1000", "--batch-size", "32", "--out", run, "-q")
        self.wait_for_steps(run, 20, process)
        ranks = [self.ranks(0), self.ranks(1)]
        self.assertEqual([len(pids) for pids in ranks], [1, 1])
        return process, ranks[0][0], ranks[1][0]

    def wait_for_ends(self, machines):
        began = time.monotonic()
        while any(self.ranks(m) for m in machines):
            self.assertLess(time.monotonic() - began, self.LIMIT, "ranks still run")
            time.sleep(0.05)

    def check(self, process, first, second):
        """What is said on the machine of `launch`; returns the collective."""
        status, _, err = self.finish(process, 60)
        self.assertEqual(status, 1, err)
        self.assertRegex(err, rf"rank 1 \(host south, pid {second}\) hasn't answered for 1[0-4][0-9.]* s: stopped, or cut off")
        self.assertRegex(err, rf"halfstep: launch: rank 0 \(host north, pid {first}\) ended with status 1\n")
        self.assertRegex(err, r"rank 0 waits in all_reduce #\d+ \(")
        return err

    def test_a_cut_network_ends_all_ranks_and_names_who_is_lost(self):
        make_data(self.folder / "data", 32768)
        said = ""
        for mpi in MPIS:
            # The machine without `launch` is cut off, and the one with it.
            for number in (1, 0):
                process, first, second = self.in_training(mpi, f"{mpi}-{number}")
                self.machines.wire(f"cut {number}")
                self.wait_for_ends((0, 1))
                said += self.check(process, first, second)
                # Open MPI's own process on the other side may wait for its connection as long as TCP does.
                left = [(name, words) for name, words in self.machines.left(20) if not any("orted" in w for w in words)]
                self.assertEqual(left, [], "after the cut")
                self.machines.end_all()
                self.machines.wire(f"join {number}")
        # Nearly all of the time it is gradients that are on the wire.
        self.assertRegex(said, rf"rank 0 waits in all_reduce #\d+ \({self.GRADIENTS}\)")

    def test_a_machine_that_dies_is_named(self):
        make_data(self.folder / "data", 32768)
        for mpi in MPIS:
            process, first, second = self.in_training(mpi, mpi)
            self.machines.wire("cut 1")  # no goodbye leaves it
            (self.folder / "dead-south").touch()
            for pid, _ in self.machines.processes(1):
                os.kill(pid, signal.SIGKILL)
            self.wait_for_ends((0,))
            self.check(process, first, second)
            self.assertEqual(self.machines.left(65), [])  # the agent, too, hears of nothing for a minute
            self.machines.wire("join 1")
            (self.folder / "dead-south").unlink()


if __name__ == "__main__":
    unittest.main()
