# SPDX-License-Identifier: Apache-2.0
"""What tests of training on several ranks share: the MPIs that can be used, jobs under `halfstep launch`, and their ranks' processes."""
import os
import pathlib
import shutil
import signal
import subprocess
import time

from program import PROGRAM, ProgramTest

MODULES = pathlib.Path(PROGRAM).resolve().parent.parent / "lib" / "halfstep" / "mpi"
MPIS = [name for name in ("openmpi", "mpich") if shutil.which("mpirun." + name) and (MODULES / f"libhalfstep_mpi_{name}.so").exists()]


class JobTest(ProgramTest):
    def job(self, mpi, ranks, *arguments, **options):
        """Starts `halfstep launch`; its ranks have this test's folder as working folder."""
        options.setdefault("env", {"HALFSTEP_THREADS": "1"})
        self.jobs = getattr(self, "jobs", 0) + 1
        errors = self.folder / f"errors.{self.jobs}"  # a pipe would fill up
        with open(errors, "w", encoding="utf-8") as file:
            process = self.start("launch", "--mpi", mpi, "--nproc-per-node", ranks, *arguments, stderr=file, **options)
        process.errors = errors
        self.addCleanup(self.clear, process)
        return process

    def clear(self, process):
        if process.poll() is None:
            process.kill()  # ranks follow
            process.communicate()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def processes(self):
        """Those that train in this test's folder, by rank."""
        found = {}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "cwd") != str(self.folder) or (entry / "cmdline").read_bytes().split(b"\0")[1:2] != [b"train"]:
                    continue
                variables = dict(v.split(b"=", 1) for v in (entry / "environ").read_bytes().split(b"\0") if b"=" in v)
            except OSError:
                continue
            rank = variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"PMI_RANK"))
            if rank is not None:
                found[int(entry.name)] = int(rank)
        return found

    def ranks(self, count):
        """The processes of a job that has begun, in the order of ranks."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = self.processes()
            if sorted(found.values()) == list(range(count)):
                return sorted(found, key=found.get)
            time.sleep(0.02)
        self.fail(f"{count} ranks did not start")

    def wait_for(self, said, what):
        deadline = time.monotonic() + 60
        while not what():
            self.assertLess(time.monotonic(), deadline, said)
            time.sleep(0.01)

    def wait_for_steps(self, run, steps):
        log = self.folder / run / "log.jsonl"
        self.wait_for(f"{steps} steps", lambda: log.exists() and log.read_text().count('"event":"step"') >= steps)

    def finish(self, process, seconds=60):
        """(status, standard output, standard error, seconds that it took) of a job that has to end."""
        began = time.monotonic()
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.fail(f"it hangs; ranks {self.processes()}")
        took = time.monotonic() - began
        return process.returncode, out, err if err is not None else process.errors.read_text(), took
