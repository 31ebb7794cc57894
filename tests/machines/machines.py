# SPDX-License-Identifier: Apache-2.0
"""Machines made of namespaces: each has a network, a host name, shared memory and temporary files of its own.

They are connected by a relay (relay.py). An agent that stands in for ssh starts commands on them by their names.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
NAMES = ("north", "south", "east", "west")
NETWORK = "10.77.0."


class CannotBeMade(Exception):
    """Why there are no machines here."""


def address(number):
    return f"{NETWORK}{number + 1}"


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise CannotBeMade(f"{' '.join(map(str, words))}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class Machines:
    """`count` machines and the wire between them; close() ends all that runs on them."""

    def __init__(self, count=2):
        for tool in ("unshare", "nsenter", "ip", "mount", "hostname"):
            if not shutil.which(tool):
                raise CannotBeMade(f"there is no {tool}")
        # /tmp is another one on each machine.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="halfstep-machines-", dir="/var/tmp"))
        self.keepers, self.relay = [], None
        self.names = list(NAMES[:count])
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _keeper(self, what, script):
        """A process that keeps namespaces alive until its standard input ends."""
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        process = subprocess.Popen(["unshare", *user, *what, "sh", "-c", f"set -e; {script}; echo ready; exec cat >/dev/null"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.keepers.append(process)
        if process.stdout.readline() != "ready\n":
            process.wait()
            raise CannotBeMade(f"unshare {' '.join(what)}: {process.stderr.read().strip()}")
        return process

    def _make(self):
        if os.geteuid() != 0:
            raise CannotBeMade("only root can be on several machines at once")
        (self.folder / "etc-hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{address(i)} {name}\n" for i, name in enumerate(self.names)))
        (self.folder / "pids").mkdir()
        wire = self._keeper(["-n"], "true")
        ports = []
        for i, name in enumerate(self.names):
            private = ("mount --make-rprivate /; mount -t tmpfs none /tmp; mount -t tmpfs none /dev/shm; "
                       f"mount --bind {self.folder}/etc-hosts /etc/hosts; hostname {name}; ip link set lo up")
            machine = self._keeper(["-n", "-u", "-i", "-m"], private)
            (self.folder / "pids" / name).write_text(str(machine.pid))
            ports.append(f"port{i}")
            inside = ["nsenter", "-t", wire.pid, "-n"]
            run(*inside, "ip", "link", "add", f"port{i}", "mtu", "9000", "type", "veth", "peer", "name", "eth0", "mtu", "9000", "netns", machine.pid)
            run(*inside, "ip", "link", "set", f"port{i}", "up")
            there = ["nsenter", "-t", machine.pid, "-n"]
            run(*there, sys.executable, HERE / "relay.py", "--plain", "eth0")
            run(*there, "ip", "address", "add", f"{address(i)}/24", "dev", "eth0")
            run(*there, "ip", "link", "set", "eth0", "up")
            run(*inside, sys.executable, HERE / "relay.py", "--plain", f"port{i}")
        self.relay = subprocess.Popen(["nsenter", "-t", str(wire.pid), "-n", sys.executable, str(HERE / "relay.py"), *ports],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.agent = self.folder / "agent"
        # OPTION... HOST COMMAND...: as ssh, the words are joined and given to a shell in the home folder, and nobody hears
        # at once of a machine that has lost its power.
        self.agent.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do [ "$1" != -o ] || shift; shift; done\nhost=$1\nshift\n'
                              f'[ -e "{self.folder}/pids/$host" ] || {{ echo "agent: there is no machine $host" >&2; exit 255; }}\n'
                              f'nsenter -t "$(cat "{self.folder}/pids/$host")" -n -u -i -m env -i HOME=/ PATH="/usr/bin:/bin" '
                              'sh -c "cd / && exec sh -c \\"\\$1\\"" x "$*"\nstatus=$?\n'
                              f'[ ! -e "{self.folder}/dead-$host" ] || sleep 60\nexit $status\n')
        self.agent.chmod(0o755)
        self.wire("delay 0")
        # MPICH doesn't use an interface whose link has just been made.
        end = time.monotonic() + 10
        for i in range(len(self.names)):
            while "state UP" not in run(*self.command(i, "ip", "link", "show", "eth0", folder="/")):
                if time.monotonic() > end:
                    raise CannotBeMade("the network between the machines isn't up")
                time.sleep(0.05)

    def wire(self, command):
        self.relay.stdin.write(command + "\n")
        self.relay.stdin.flush()
        if self.relay.stdout.readline() != "done\n":
            raise CannotBeMade("the relay between the machines has ended")

    def pid(self, number):
        return self.keepers[number + 1].pid

    def command(self, number, *words, folder=None):
        """What runs a command on a machine, in this object's folder by default."""
        return ["nsenter", "-t", str(self.pid(number)), "-n", "-u", "-i", "-m", "env", "-C", str(folder or self.folder), *map(str, words)]

    def environment(self, **changes):
        unwanted = ("HALFSTEP_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "HYDRA_", "MPI_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted) and k not in ("TMPDIR", "NO_COLOR", "COLUMNS")}
        return {**kept, "OMPI_MCA_plm_rsh_agent": str(self.agent), "HYDRA_LAUNCHER_EXEC": str(self.agent), "OMP_NUM_THREADS": "1", **changes}

    def processes(self, number):
        """What runs on a machine beside the process that keeps it: [(pid, words)]."""
        own = os.readlink(f"/proc/{self.pid(number)}/ns/net")
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if int(entry.name) != self.pid(number) and os.readlink(entry / "ns" / "net") == own and os.readlink(entry / "exe"):
                    found.append((int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")))
            except OSError:
                continue  # it has ended
        return found

    def left(self, seconds):
        """What still runs on the machines when this time is over."""
        end = time.monotonic() + seconds
        while True:
            rest = [(self.names[i], words) for i in range(len(self.names)) for _, words in self.processes(i)]
            if not rest or time.monotonic() > end:
                return rest
            time.sleep(0.1)

    def end_all(self):
        for i in range(len(self.names)):
            if len(self.keepers) > i + 1 and self.keepers[i + 1].poll() is None:
                for pid, _ in self.processes(i):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except OSError:
                        pass

    def close(self):
        self.end_all()
        for process in [self.relay, *reversed(self.keepers)]:
            if process is None:
                continue
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
            if process.stderr:
                process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)
