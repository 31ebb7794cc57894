# SPDX-License-Identifier: Apache-2.0
"""`halfstep launch`: programs of any kind as ranks, under each MPI that is installed."""
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import unittest

from program import PROGRAM, ProgramTest

MPIS = [name for name in ("openmpi", "mpich") if shutil.which("mpirun." + name)]
MODULES = pathlib.Path(PROGRAM).resolve().parent.parent / "lib" / "halfstep" / "mpi"
# Of the machine's own job, if the tests run in one.
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "HYDRA_", "MPI_")
RANK = ("import os, sys, time, signal\nrank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')))\n"
        # In one piece, as rank 0's lines get between those of others otherwise.
        "def say(*words): os.write(2, ' '.join(map(str, words)).encode() + b'\\n')\n")


class LaunchTest(ProgramTest):
    def environment(self, **changes):
        environment = super().environment(**changes)
        return {k: v for k, v in environment.items() if k in changes or not (k.startswith(LAUNCHERS) or k == "OMP_NUM_THREADS")}

    def program(self, text, name="rank.py"):
        """A Python program for ranks to run, after `rank` has been set."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n" + RANK + text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def launch(self, mpi, ranks, *arguments, **options):
        return self.run_program("launch", "--mpi", mpi, "--nproc-per-node", ranks, *arguments, **options)

    def each(self):
        if not MPIS:
            self.skipTest("neither mpirun.openmpi nor mpirun.mpich is installed")
        return MPIS

    def start_ranks(self, mpi, ranks, *arguments, **options):
        """Starts it, and waits until every rank has made a file of its number."""
        process = self.start("launch", "--mpi", mpi, "--nproc-per-node", ranks, *arguments, **options)
        self.addCleanup(process.kill)
        end = time.monotonic() + 30
        while not all((self.folder / f"pid.{r}").exists() for r in range(ranks)):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        pids = []
        for r in range(ranks):
            pids.append(int((self.folder / f"pid.{r}").read_text()))
            (self.folder / f"pid.{r}").unlink()
        return process, pids

    def assert_gone(self, pids):
        end = time.monotonic() + 10
        while [p for p in pids if pathlib.Path(f"/proc/{p}").exists()]:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    # Written at once, so that nobody reads half of it.
    SAY_PID = "open(f'new.{rank}', 'w').write(str(os.getpid())); os.rename(f'new.{rank}', f'pid.{rank}')\n"


class Output(LaunchTest):
    def test_rank_0_is_untouched_and_others_are_prefixed(self):
        program = self.program("print('out', rank)\nsay('one\\ntwo', rank)\nos.write(2, b'end')\n")
        for mpi in self.each():
            status, out, err = self.launch(mpi, 3, program)
            self.assertEqual((status, out), (0, "out 0\n"))
            lines = sorted(err.splitlines())
            if "endone" in err or "end[rank" in err:  # rank 0's last line has no end, and another rank's may follow it
                err = re.sub(r"end(?=\[rank)", "end\n", err)
                lines = sorted(err.splitlines())
            self.assertEqual(lines, sorted(["one", "two 0", "end"] + [f"[rank {r}] {t}" for r in (1, 2) for t in ("one", f"two {r}", "end")]))

    def test_standard_output_of_rank_0_is_the_launchers_own(self):
        program = self.program("import stat\nprint(stat.S_ISREG(os.fstat(1).st_mode), os.isatty(1), os.isatty(2), sys.stdin.read() == '')\n")
        for mpi in self.each():
            with open(self.folder / "out", "w") as out:
                self.assertEqual(self.launch(mpi, 2, program, stdout=out)[0], 0)
            self.assertEqual((self.folder / "out").read_text(), "True False False True\n")

    def test_a_terminal_is_a_terminal(self):
        import pty
        program = self.program("if rank == 0: print(os.isatty(1), os.get_terminal_size(1).columns)\n")
        for mpi in self.each():
            master, slave = pty.openpty()
            import fcntl
            import struct
            import termios
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 123, 0, 0))
            self.assertEqual(self.launch(mpi, 2, program, stdout=slave)[0], 0)
            self.assertEqual(os.read(master, 100), b"True 123\r\n")
            os.close(master)
            os.close(slave)

    def test_any_bytes_and_long_lines_stay_whole(self):
        program = self.program("data = bytes(range(256)) * 100\nif rank == 0: sys.stdout.buffer.write(data)\n"
                               "else:\n for i in range(20): sys.stderr.buffer.write(bytes([64 + rank]) * 20000 + b'\\n')\n")
        for mpi in self.each():
            with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
                self.assertEqual(self.launch(mpi, 3, program, stdout=out, stderr=err)[0], 0)
            self.assertEqual((self.folder / "out").read_bytes(), bytes(range(256)) * 100)
            lines = (self.folder / "err").read_bytes().split(b"\n")
            self.assertEqual(sorted(lines), sorted([b""] + [b"[rank %d] " % r + bytes([64 + r]) * 20000 for r in (1, 2) for _ in range(20)]))

    def test_bytes_that_are_no_text_are_passed_on(self):
        program = self.program("if rank == 1: sys.stderr.buffer.write(bytes(b for b in range(256) if b != 10))\n")
        for mpi in self.each():
            with open(self.folder / "err", "wb") as err:
                self.assertEqual(self.launch(mpi, 2, program, stderr=err)[0], 0)
            self.assertEqual((self.folder / "err").read_bytes(), b"[rank 1] " + bytes(b for b in range(256) if b != 10) + b"\n")

    def test_arguments_and_paths_with_spaces(self):
        program = self.program("if rank == 1: print(sys.argv[1:], os.path.basename(os.getcwd()), file=sys.stderr)\n", "a folder/my rank.py")
        for mpi in self.each():
            given = ["--nproc-per-node", "a  b", "", "'\"$HOME", "--", "-x", "ä"]
            status, _, err = self.launch(mpi, 2, program, *given)
            self.assertEqual((status, err), (0, f"[rank 1] {given} {self.folder.name}\n"))

    def test_ranks_share_the_processors(self):
        program = self.program("print(os.environ['HALFSTEP_THREADS'], os.environ['OMP_NUM_THREADS'], 'HALFSTEP_LAUNCH' in os.environ)\n")
        mine = len(os.sched_getaffinity(0))
        for mpi in self.each():
            status, out, _ = self.launch(mpi, 2, program)
            self.assertEqual(status, 0)
            threads, same, launch = out.split()
            self.assertEqual((same, launch), (threads, "False"))
            self.assertLessEqual(int(threads), max(1, mine // 2))  # fewer where a control group says so
            more = mine + 1
            self.assertEqual(self.launch(mpi, more, program)[:2], (0, "1 1 False\n"))
        chosen = self.program("print(os.environ.get('HALFSTEP_THREADS'), os.environ['OMP_NUM_THREADS'])\n")
        for mpi in self.each():
            self.assertEqual(self.launch(mpi, 2, chosen, env={"OMP_NUM_THREADS": "7"})[:2], (0, "None 7\n"))


class Ends(LaunchTest):
    def test_status_is_that_of_the_first_failure(self):
        program = self.program("time.sleep([0.6, 0.3, 0, 0.9][rank])\nsys.exit([4, 5, 0, 6][rank])\n")
        for mpi in self.each():
            status, _, err = self.launch(mpi, 4, program)
            self.assertEqual(status, 5)
            self.assertRegex(err, r"\Ahalfstep: launch: rank 1 \(host \S+, pid \d+\) ended with status 5\n\Z")

    def test_a_killed_rank_leaves_the_others_time_to_speak(self):
        program = self.program("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1)\nsay('rank 1 is lost')\nsys.exit(3)\n")
        for mpi in self.each():
            status, _, err = self.launch(mpi, 3, program)
            self.assertEqual(status, 128 + signal.SIGKILL)
            self.assertRegex(err, r"rank 1 \(host \S+, pid \d+\) was ended by signal 9 \(Killed\)\n")
            self.assertIn("[rank 2] rank 1 is lost\n", err)

    def test_what_a_rank_started_does_not_keep_the_job(self):
        program = self.program("import subprocess\nif rank == 1: subprocess.Popen(['sleep', '20'])\nsay('done', rank)\n")
        for mpi in self.each():
            begin = time.monotonic()
            status, _, err = self.launch(mpi, 2, program)
            self.assertEqual((status, sorted(err.splitlines())), (0, ["[rank 1] done 1", "done 0"]))
            self.assertLess(time.monotonic() - begin, 10)

    def test_what_a_rank_started_and_that_goes_on_writing_does_not_either(self):
        program = self.program("import subprocess\n"
                               "if rank == 1: subprocess.Popen(['sh', '-c', 'for i in $(seq 400); do echo more >&2; sleep 0.05; done'])\n"
                               "say('done', rank)\n")
        for mpi in self.each():
            begin = time.monotonic()
            status, _, err = self.launch(mpi, 2, program)
            self.assertEqual((status, {line for line in err.splitlines() if "more" not in line}), (0, {"[rank 1] done 1", "done 0"}))
            self.assertLess(time.monotonic() - begin, 10)

    def test_a_program_that_cannot_be_started(self):
        path = self.folder / "no.sh"
        path.write_text("#!/there/is/no/such/shell\n")
        path.chmod(0o755)
        for mpi in self.each():
            status, _, err = self.launch(mpi, 2, path)
            self.assertEqual(status, 127)
            self.assertIn("can't be started: No such file or directory", err)

    def test_signals_reach_all_ranks_once(self):
        program = self.program("count = 0\ndef stop(*_):\n global count\n count += 1\nsignal.signal(signal.SIGTERM, stop)\nsignal.signal(signal.SIGINT, stop)\n"
                               + self.SAY_PID + "while not count: time.sleep(0.01)\ntime.sleep(0.3)\nsay('stopped', count)\nsys.exit(9)\n")
        for mpi in self.each():
            for number in (signal.SIGTERM, signal.SIGINT):
                process, _ = self.start_ranks(mpi, 2, program)
                process.send_signal(number)
                out, err = process.communicate(timeout=30)
                self.assertEqual((process.returncode, out, sorted(err.splitlines())), (9, "", ["[rank 1] stopped 1", "stopped 1"]))

    def test_a_second_signal_kills(self):
        program = self.program("signal.signal(signal.SIGTERM, lambda *_: None)\n" + self.SAY_PID + "while True: time.sleep(0.01)\n")
        for mpi in self.each():
            process, pids = self.start_ranks(mpi, 2, program)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            self.assertIsNone(process.poll())
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
            self.assertEqual(process.returncode, 128 + signal.SIGKILL)
            self.assert_gone(pids)

    def test_no_rank_outlives_a_killed_launcher(self):
        program = self.program(self.SAY_PID + "while True: time.sleep(0.01)\n")
        for mpi in self.each():
            process, pids = self.start_ranks(mpi, 2, program, env={"TMPDIR": str(self.folder)})
            self.assertEqual(len(list(self.folder.glob("halfstep-launch-*"))), 1)
            process.kill()
            process.communicate(timeout=30)
            self.assert_gone(pids)
            self.assertEqual(list(self.folder.glob("halfstep-launch-*")), [])


class Restarts(LaunchTest):
    def test_the_job_starts_again_after_failures(self):
        # Rank 1 fails the first two times.
        program = self.program("open(f'tries.{rank}', 'a').write('x')\nn = len(open(f'tries.{rank}').read())\nsys.exit(3 if rank == 1 and n <= 2 else 0)\n")
        for mpi in self.each():
            for restarts, status in ((3, 0), (2, 0), (1, 3), (0, 3)):
                for file in self.folder.glob("tries.*"):
                    file.unlink()
                got, _, err = self.launch(mpi, 2, "--max_restarts", restarts, program)
                self.assertEqual(got, status, err)
                starts = min(restarts, 2) + 1
                self.assertEqual((self.folder / "tries.1").read_text(), "x" * starts)
                self.assertEqual(err.count("ended with status 3"), min(starts, 2) if status == 0 else starts)
                for n in range(1, starts):
                    self.assertIn(f"halfstep: launch: restart {n} of {restarts}, from the beginning\n", err)

    def test_a_stop_that_was_asked_for_is_no_failure(self):
        program = self.program(self.SAY_PID + "while True: time.sleep(0.01)\n")
        for mpi in self.each():
            process, _ = self.start_ranks(mpi, 2, "--max-restarts", "5", program)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=30)
            self.assertEqual((process.returncode, err), (128 + signal.SIGTERM, ""))

    def test_a_run_goes_on_from_its_checkpoint(self):
        mpi = next((m for m in MPIS if (MODULES / f"libhalfstep_mpi_{m}.so").exists()), None)
        if mpi is None:
            self.skipTest("this build has no module for MPI")
        self.data(train=2560)
        arguments = ["train", "mlp", "data", "--epochs", "40", "--seed", "1", "-q"]
        self.assertEqual(self.launch(mpi, 1, *arguments, "--out", "unbroken")[0], 0)
        process = self.start("launch", "--mpi", mpi, "--nproc-per-node", 1, "--max-restarts", "1", *arguments, "--out", "run")
        end = time.monotonic() + 30
        while not (self.folder / "run" / "last.safetensors").exists():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.005)
        for status in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = status.read_bytes().split(b"\0")
                cwd = os.readlink(status.parent / "cwd")
            except OSError:
                continue
            if words[1:2] == [b"train"] and cwd == str(self.folder):
                os.kill(int(status.parent.name), signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertIn("launch: restart 1 of 1, from run/last.safetensors", err)
        self.assertEqual((self.folder / "run" / "last.safetensors").read_bytes(), (self.folder / "unbroken" / "last.safetensors").read_bytes())


class Usage(LaunchTest):
    def test_wrong_arguments_are_refused(self):
        (self.folder / "hosts").write_text("a slots=2\nb slots=x\n")
        (self.folder / "empty").write_text("# nobody\n\n")
        for text, arguments in (
                ("--nproc-per-node: expected a whole number from 1", ["--nproc-per-node", "0", "true"]),
                ("--nproc-per-node: expected a whole number from 1, auto, cpu or gpu, got 'many'", ["--nproc_per_node", "many", "true"]),
                ("--nproc-per-node: gpu: there is no device here but the CPU", ["--nproc-per-node", "gpu", "true"]),
                ("--mpi: expected openmpi or mpich, got 'lam'", ["--mpi", "lam", "true"]),
                ("expected what to run", []),
                ("expected what to run", ["--nproc-per-node", "2"]),
                ("there is no flag -n; --nproc-per-node N starts N processes on each machine", ["-n", "2", "true"]),
                ("there is no flag --np; --nproc-per-node N starts N processes on each machine", ["--np=2", "true"]),
                ("there is no flag --nproc; did you mean --nproc-per-node?", ["--nproc", "2", "true"]),
                ("got tain, which is neither a command nor in PATH; did you mean train?", ["tain", "mlp"]),
                ("got ./none, which is no program", ["./none"]),
                ("can't launch itself", ["launch", "true"]),
                (["--nnodes: got 2", "--master-addr", "--hosts FILE"], ["--nnodes", "2", "--node_rank", "1", "--master_port", "1", "true"]),
                ("--nnodes: expected one number of machines, got 1:4", ["--nnodes", "1:4", "true"]),
                ("--node-rank: expected a number from 0 to 0 (--nnodes 1), got 1", ["--node-rank=1", "true"]),
                ("--hosts: nowhere can't be read", ["--hosts", "nowhere", "true"]),
                ("--hosts: hosts line 2: expected HOST, HOST slots=N or HOST:N, got 'b slots=x'", ["--hosts", "hosts", "true"]),
                ("--hosts: empty names no host", ["--hosts", "empty", "true"]),
                ("--max-restarts: expected a whole number", ["--max-restarts", "-1", "true"])):
            self.refused(2, text, "launch", *arguments, env={"HALFSTEP_PLUGIN_DIR": str(self.folder)})

    def test_it_is_not_needed_inside_a_job(self):
        self.refused(2, "OMPI_COMM_WORLD_SIZE=4 says that a launcher has started 4 processes already", "launch", "true", env={"OMPI_COMM_WORLD_SIZE": "4"})
        self.refused(2, "--as-rank is for the processes that `halfstep launch` starts", "launch", "--as-rank", "true")

    def test_without_mpi_it_says_so(self):
        os.symlink(shutil.which("true"), self.folder / "true")
        self.refused(2, ["no MPI can be used", "Open MPI: there is no mpirun.openmpi or orterun in PATH", "MPICH: there is no mpirun.mpich"],
                     "launch", "./true", env={"PATH": str(self.folder)})

    def test_flags_of_torchrun_are_taken(self):
        for mpi in self.each():
            status, out, err = self.run_program("launch", "--mpi", mpi, "--standalone", "--nnodes=1", "--nproc_per_node=2", "--node_rank", "0", "--master_addr",
                                                "127.0.0.1", "--master_port=29500", "--use-env", "--max_restarts=0", "echo", "--standalone")
            self.assertEqual((status, out, err), (0, "--standalone\n", ""))


class StandInTest(LaunchTest):
    def stand_ins(self):
        """A PATH whose mpirun prints what it is given."""
        (self.folder / "bin").mkdir()
        for name in ("mpirun.openmpi", "mpirun.mpich"):
            path = self.folder / "bin" / name
            path.write_text("#!/bin/sh\necho \"$@\"\nexit 6\n")
            path.chmod(0o755)
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"


class RanksOfAMachine(StandInTest):
    def started(self, *arguments, before=(), **env):
        """What mpirun is given; the program is started by the command `before`."""
        env = self.environment(PATH=self.path, **env)
        done = subprocess.run([*before, PROGRAM, "launch", *arguments, "true"], cwd=self.folder, env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 6, done.stderr)
        return done.stderr  # where what mpirun itself prints goes

    def setUp(self):
        super().setUp()
        self.path = self.stand_ins()

    def test_one_for_each_processor_or_accelerator(self):
        one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if shutil.which("taskset") else None
        none = {"HALFSTEP_PLUGIN_DIR": str(self.folder)}
        for count in ("auto", "cpu"):
            ranks = int(re.search(r"-n (\d+) ", self.started("--nproc-per-node", count, **none)).group(1))
            self.assertTrue(1 <= ranks <= len(os.sched_getaffinity(0)), ranks)  # fewer where a control group says so
            if one:
                self.assertIn("-n 1 ", self.started("--nproc-per-node", count, before=one, **none))
        plugins = pathlib.Path(PROGRAM).resolve().parent.parent / "lib" / "halfstep" / "plugins"
        if not (plugins / "libhalfstep_sim.so").exists():
            self.skipTest("the plug-in sim isn't built")
        for count in ("auto", "gpu"):
            self.assertIn("-n 5 ", self.started("--nproc-per-node", count, HALFSTEP_PLUGINS=str(plugins / "libhalfstep_sim.so"), HALFSTEP_SIM_DEVICES="5",
                                                **none))

    def test_ranks_stay_beside_their_memory(self):
        """Two parts of memory, by a folder in the place of the system's."""
        for part in ("node0", "node1", "power"):
            (self.folder / "nodes" / part).mkdir(parents=True)
        nodes = "/sys/devices/system/node"
        before = ["unshare", "-m", "sh", "-c", f'mount --bind {self.folder}/nodes {nodes} && exec "$@"', "x"]
        if subprocess.run([*before, "true"], capture_output=True).returncode != 0:
            self.skipTest(f"no folder can be put in the place of {nodes} here")
        for mpi, bound, unbound in (("openmpi", "--map-by numa --bind-to numa ", "--bind-to none "), ("mpich", "-bind-to numa -map-by numa ", None)):
            for ranks in ("2", "4"):
                self.assertIn(bound, self.started("--mpi", mpi, "--nproc-per-node", ranks, before=before))
            uneven = self.started("--mpi", mpi, "--nproc-per-node", "3", before=before)
            self.assertNotIn("numa", uneven)
            self.assertIn(unbound or "", uneven)


class Machines(StandInTest):
    def test_a_file_of_hosts_reaches_the_launcher(self):
        path = self.stand_ins()
        (self.folder / "hosts").write_text("# machines\nnode-1 slots=2\n\nnode-2:3 # fast\nnode-3\n")
        env = {"PATH": path, "HALFSTEP_LOG": "info"}
        for mpi, hosts in (("openmpi", "--host node-1:2,node-2:3,node-3:1"), ("mpich", "-hosts node-1:2,node-2:3,node-3:1")):
            status, out, err = self.run_program("launch", "--mpi", mpi, "--hosts", "hosts", "prog", "x", env=env)
            self.assertEqual(status, 6)
            self.assertIn(f"{hosts} ", out)
            self.assertRegex(out, r"-n 6 \S+ launch --as-rank prog x\n\Z")
            self.assertEqual("-x HALFSTEP_LOG" in out, mpi == "openmpi")
            self.assertIn(f"mpirun.{mpi} ended with status 6 before all ranks had begun", err)
            _, out, _ = self.run_program("launch", "--mpi", mpi, "--hosts", "hosts", "--nproc-per-node", "4", "prog", env=env)
            self.assertIn("node-1:4,node-2:4,node-3:4 ", out)
            self.assertIn("-n 12 ", out)

    def test_ranks_on_other_machines(self):
        """Machines with names and temporary files of their own, which an agent in place of ssh makes."""
        temporary = self.folder / "t"
        temporary.mkdir()
        agent = self.folder / "agent"
        agent.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\nexec unshare -m -u sh -c "hostname machine-${host##*.} && '
                         f'mount -t tmpfs none {temporary} && cd / && exec sh -c \\"\\$1\\"" x "$*"\n')
        agent.chmod(0o755)
        made = subprocess.run([agent, "127.0.0.2", "hostname"], capture_output=True, text=True)
        if made.stdout != "machine-2\n":
            self.skipTest(f"no machines can be made of namespaces here: {made.stderr.strip()}")
        (self.folder / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=2\n")
        program = self.program("import socket\nprint('out', rank, socket.gethostname())\nsay('err', rank, socket.gethostname())\n"
                               "sys.exit(int(sys.argv[1]) if rank == 1 else 0)\n")
        env = {"TMPDIR": str(temporary), "OMPI_MCA_plm_rsh_agent": str(agent), "HYDRA_LAUNCHER_EXEC": str(agent)}
        for mpi in self.each():
            for wanted in (0, 4):
                status, out, err = self.run_program("launch", "--mpi", mpi, "--hosts", "hosts", program, wanted, env=env)
                self.assertEqual((status, out), (wanted, "out 0 machine-2\n"), err)
                for line in ("err 0 machine-2", "[rank 1] err 1 machine-3", "[rank 2] err 2 machine-3"):
                    self.assertIn(line + "\n", err)
                if wanted:
                    self.assertRegex(err, r"rank 1 \(host machine-3, pid \d+\) ended with status 4\n")


if __name__ == "__main__":
    unittest.main()
