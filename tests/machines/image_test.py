#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/recipes/Dockerfile: by docker, where its daemon runs; elsewhere its steps, of both stages, in Debians made by debootstrap.

What can't be had is skipped, and the message says what: without debootstrap or an archive all steps but their syntax, without pip's index the
build of the first stage, in whose place the second one gets what this build installs. HALFSTEP_BUILD names the build folder; HALFSTEP_DEBIAN a
folder with a fresh bookworm that debootstrap has made, to copy in place of another download.
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

SOURCES = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = os.environ.get("HALFSTEP_BUILD", str(SOURCES / "build"))
DOCKERFILE = SOURCES / "docs" / "recipes" / "Dockerfile"

sys.path.insert(0, str(SOURCES / "tests" / "cli"))
from program import make_data  # noqa: E402


def stages(text):
    """The instructions of each stage, as [(name, text)]."""
    lines = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    found = []
    for line in filter(str.strip, lines.splitlines()):
        name, rest = line.split(None, 1)
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


class Image(unittest.TestCase):
    def setUp(self):
        self.first, self.second = stages(DOCKERFILE.read_text())
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="halfstep-image-", dir="/var/tmp"))
        self.addCleanup(subprocess.run, ["rm", "-rf", "--one-file-system", self.folder], check=False)

    def test_instructions_are_those_that_are_tested_here(self):
        known = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "CMD"}
        self.assertEqual({name for name, _ in self.first + self.second} - known, set())
        for name, rest in self.first:
            for source in rest.split()[:-1] if name == "COPY" else []:
                self.assertTrue((SOURCES / source).exists(), source)
        # The command is one of the Makefile's, with variables that it knows.
        commands = [shlex.split(rest) for name, rest in self.first if name == "RUN" and rest.startswith("make ")]
        self.assertEqual([c[:2] for c in commands], [["make", "install"]])
        variables = dict(word.split("=", 1) for word in commands[0][2:])
        makefile = (SOURCES / "Makefile").read_text()
        for variable in variables:
            self.assertRegex(makefile, rf"(?m)^{variable} \?=", variable)
        for flag in variables["CMAKE_FLAGS"].split():
            name = re.fullmatch(r"-D(\w+)=OFF", flag)[1]
            self.assertIn(f"option({name} ", (SOURCES / "CMakeLists.txt").read_text())
        self.assertIn(("COPY", f"--from=build {variables['PREFIX']} /usr/local"), self.second)

    def test_the_steps_make_an_image_that_trains(self):
        if shutil.which("docker") and subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0:
            subprocess.run(["docker", "build", "--tag", "halfstep-test", "--file", DOCKERFILE, SOURCES], check=True)
            out = subprocess.run(["docker", "run", "--rm", "halfstep-test", "halfstep", "--version"], capture_output=True, text=True, check=True).stdout
            self.assertRegex(out, r"^halfstep \d")
            return
        if os.geteuid() != 0:
            self.skipTest("none of the Dockerfile's steps was run: docker's daemon doesn't run, and only root can use debootstrap")
        self.root = self.folder / "root"
        self.make_debian()
        missing, self.built = self.without_pip(), None
        if missing:
            # Everything that it installs is there.
            for name, rest in self.first:
                if name == "RUN" and "apt-get" in rest:
                    self.step(rest.replace("apt-get install -y", "apt-get install -y --simulate"), "/")
        else:
            self.built, second = self.folder / "build", self.root
            subprocess.run(["cp", "-a", second, self.built], check=True)
            self.root = self.built
            self.run_stage(self.first)
            self.root = second
        self.trains(self.run_stage(self.second))
        if missing:
            self.skipTest(f"the first stage's `make install` was not run, and its packages were not installed: {missing}; the second stage was run and trains, "
                          "with what this build installs")

    def run_stage(self, stage):
        """Does what the instructions say; returns the environment of the image's programs."""
        folder, environment = "/", {}
        for name, rest in stage:
            began = time.monotonic()
            if name == "FROM":
                self.assertEqual(rest.split()[0], "debian:bookworm")
            elif name == "WORKDIR":
                folder = rest
                (self.root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif name == "RUN":
                self.step(rest, folder, environment)
            elif name == "COPY":
                self.copy(rest.split(), self.root / folder.lstrip("/"))
            elif name == "ENV":
                environment.update(word.split("=", 1) for word in shlex.split(rest))
            print(f"{time.monotonic() - began:6.1f} s  {name} {rest[:100]}", flush=True)
        return environment

    def copy(self, words, folder):
        """A folder's content goes into the folder that is named."""
        *sources, to = words
        to = self.root / to.lstrip("/") if to.startswith("/") else folder / to
        base = SOURCES
        if sources[0] == "--from=build":
            if self.built:
                base = self.built
            else:
                subprocess.run(["cmake", "--install", BUILD, "--prefix", self.folder / "stand-in" / sources[1].lstrip("/")], check=True, capture_output=True)
                base = self.folder / "stand-in"
            sources = sources[1:]
        to.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = base / source.lstrip("/")
            subprocess.run(["cp", "-a", f"{path}/." if path.is_dir() else path, to], check=True)

    def make_debian(self):
        ready = os.environ.get("HALFSTEP_DEBIAN")
        nothing = "none of the Dockerfile's steps was run: docker's daemon doesn't run, and"
        if ready:
            subprocess.run(["cp", "-a", ready, self.root], check=True)
        elif not shutil.which("debootstrap"):
            self.skipTest(f"{nothing} debootstrap isn't installed")
        else:
            made = subprocess.run(["debootstrap", "--variant=minbase", "bookworm", self.root, *self.archive()], capture_output=True, text=True, check=False)
            if made.returncode != 0:
                self.skipTest(f"{nothing} debootstrap can't make a Debian here: {made.stdout[-500:]}{made.stderr[-500:]}")
        # Services of the packages aren't started, as in a container.
        policy = self.root / "usr" / "sbin" / "policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        shutil.copy("/etc/resolv.conf", self.root / "etc" / "resolv.conf")
        # What apt needs to reach the archive from here.
        for file in pathlib.Path("/etc/apt/apt.conf.d").glob("*proxy*"):
            shutil.copy(file, self.root / "etc" / "apt" / "apt.conf.d" / file.name)

    @staticmethod
    def archive():
        """Debian's archive that this machine uses, where it uses one; else debootstrap knows one itself."""
        found = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"],
                               capture_output=True, text=True, check=False).stdout.split()
        return found[:1]

    def without_pip(self):
        """Why the first stage can't download oneDNN; nothing where it can, with this machine's settings of pip."""
        pip = [sys.executable, "-m", "pip"]
        tried = subprocess.run([*pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", self.folder / "wheels",
                                "--requirement", SOURCES / "scripts" / "onednn.txt"], capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            return f"pip can't download scripts/onednn.txt: {tried.stderr[-500:]}"
        settings = {}  # as `global.cert='/path'`, or `:env:.cert=...`, which counts
        lines = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
        for line in sorted(lines, key=lambda line: line.startswith(":env:")):
            key, value = line.split("=", 1)
            settings[key.split(".")[-1]] = value.strip("'")
        if "cert" in settings:
            shutil.copy(settings["cert"], self.root / "etc" / "pip-cert.pem")
            settings["cert"] = "/etc/pip-cert.pem"
        (self.root / "etc" / "pip.conf").write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in settings.items() if k != "find-links"))
        return None

    def inside(self, script, environment=None, network=False):
        """A command that runs a shell script in the image, with the file systems that containers have."""
        mounts = (f"mount --make-rprivate /; cd {shlex.quote(str(self.root))}; mount -t proc none proc; mount -t sysfs none sys; mount -t tmpfs none tmp; "
                  "mount -t tmpfs none dev; mkdir dev/shm dev/pts; for d in null zero random urandom tty; do touch dev/$d; mount --bind /dev/$d dev/$d; done; "
                  "mount -t devpts -o newinstance,ptmxmode=0666 none dev/pts; ln -s pts/ptmx dev/ptmx; mount -t tmpfs none dev/shm; ln -s /proc/self/fd dev/fd; ")
        variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": os.path.expanduser("~root"), "DEBIAN_FRONTEND": "noninteractive", **(environment or {})}
        own = ["-n", "-u", "-i"] if network else []
        # Open MPI doesn't send by the loopback interface.
        up = ("hostname image; ip link set lo up; ip link add eth0 type veth peer name eth1; ip address add 10.78.0.1/24 dev eth0; "
              "ip link set eth0 up; ip link set eth1 up; ") if network else ""
        return ["unshare", "-m", "-p", "--fork", "--kill-child", *own, "sh", "-e", "-c",
                f'{mounts} {up} exec env -i {" ".join(f"{k}={shlex.quote(v)}" for k, v in variables.items())} chroot . sh -e -c "$1"', "x", script]

    def step(self, script, folder, environment=None):
        done = subprocess.run(self.inside(f"cd {folder}; {script}", environment), capture_output=True, text=True, timeout=6000, check=False)
        self.assertEqual(done.returncode, 0, f"{script}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")

    def trains(self, environment):
        """The server that the MPI operator starts on workers, and a launcher that reaches two of them by ssh."""
        make_data(self.root / "data", 256)
        (self.root / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
        command = " ".join(shlex.quote(w) for w in json.loads(dict(self.second)["CMD"]))
        script = ("ssh-keygen -q -t rsa -N '' -f ~root/.ssh/id_rsa; cp ~root/.ssh/id_rsa.pub ~root/.ssh/authorized_keys; "
                  f"{command} 2>/tmp/sshd.log & "
                  "for i in $(seq 50); do ssh 127.0.0.2 true 2>/dev/null && break; sleep 0.2; done; ssh 127.0.0.2 halfstep --version || cat /tmp/sshd.log; "
                  "cd; train='train mlp /data --epochs 2 --batch-size 32 --reproducible 2'; "
                  "halfstep $train --out one -q; halfstep launch --hosts /hosts $train --out two; "
                  "sha256sum one/last.safetensors two/last.safetensors")
        done = subprocess.run(self.inside(script, {**environment, "OMP_NUM_THREADS": "1"}, network=True), capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"\Ahalfstep \d")
        self.assertRegex(done.stdout, r"by 2 ranks \(Open MPI")
        sums = re.findall(r"^([0-9a-f]{64})  ", done.stdout, re.MULTILINE)
        self.assertEqual((len(sums), len(set(sums))), (2, 1), "one machine and two gave different weights")


if __name__ == "__main__":
    unittest.main()
