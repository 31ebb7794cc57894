# SPDX-License-Identifier: Apache-2.0
"""Programs of several ranks, which MPI's launcher starts."""
from __future__ import annotations

import os
import shutil

RANKS = 2  # one thread each
LAUNCHERS = ("mpirun.openmpi", "mpirun.mpich", "mpirun", "mpiexec")  # the first one in PATH is taken


def rank_launcher(processors: int) -> tuple[list[str], str]:
    """The words before a program that start it as RANKS ranks; none, and why, where that can't be measured here."""
    if processors < RANKS:
        return [], f"they need {RANKS} processors, this run has {processors}"
    found = next((path for name in LAUNCHERS if (path := shutil.which(name))), None)
    if found is None:
        return [], "there is no mpirun (Debian: apt-get install openmpi-bin)"
    # MPICH's takes neither of the options that Open MPI's needs to start ranks on all hardware threads, and as root.
    options: list[str] = []
    if "mpich" not in os.path.basename(os.path.realpath(found)) and "hydra" not in os.path.basename(os.path.realpath(found)):
        options = ["--oversubscribe", "--bind-to", "none"] + (["--allow-run-as-root"] if os.geteuid() == 0 else [])
    return [found, *options, "-n", str(RANKS)], ""
