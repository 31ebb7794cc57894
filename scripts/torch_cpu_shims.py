#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes PyTorch's default Linux wheel importable without its GPU libraries.

usage: torch_cpu_shims.py SITE_PACKAGES

The wheel on PyPI is linked against cuBLAS, cuDNN, NCCL and others, some gigabytes in all. On the CPU none of their
functions is ever called, but the dynamic loader wants the libraries to be there. For each missing one this script builds a
small shared library with the right soname whose functions all return 1 (an error in all these libraries), and puts it
where the wheel's RPATH looks first. libcudart is the real one (it is small, and its registration functions run when the
libraries are loaded). Needs a C compiler, nm and readelf. Exit status 1 with a message where it can't be done.
"""
import collections
import pathlib
import re
import subprocess
import sys
import tempfile

# Libraries whose symbols carry no version: recognised by prefix. The longest match wins.
PREFIXES = {"cuFile": "libcufile.so", "cusparseLt": "libcusparseLt.so", "nccl": "libnccl.so", "nvshmem": "libnvshmem_host.so"}
OURS = ("libtorch", "libc10", "libshm", "libcaffe2", "libgomp", "libgfortran", "libcudart")
SYSTEM = ("libc.", "libm.", "libdl.", "librt.", "libpthread.", "libstdc++", "libgcc_s", "ld-linux", "libgomp")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main():
    site = pathlib.Path(sys.argv[1])
    torch_lib = site / "torch" / "lib"
    target = site / "nvidia" / "cu13" / "lib"
    if not torch_lib.is_dir():
        sys.exit(f"torch_cpu_shims: no torch in {site}")
    target.mkdir(parents=True, exist_ok=True)

    needed = set()
    functions = collections.defaultdict(set)  # soname -> {(function, version)}
    libraries = sorted(torch_lib.glob("*.so"))
    for library in libraries:
        needed.update(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(library))))
    missing = {name for name in needed if not name.startswith(OURS + SYSTEM)}
    stem_to_soname = {name.split(".so")[0] + ".so": name for name in missing}
    for library in libraries:
        # libtorch_cuda.so refers to a version node for each versioned library; the node says which library it is of.
        version_to_soname = {}
        current = None
        for line in run("readelf", "-V", str(library)).splitlines():
            if match := re.search(r"Version: \d+\s+File: (\S+)", line):
                current = match.group(1)
            elif (match := re.search(r"Name: (\S+)\s+Flags:", line)) and current:
                version_to_soname[match.group(1)] = current
        for line in run("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            soname = version_to_soname.get(version) if version else None
            if soname is None and not version:
                prefixes = [p for p in PREFIXES if name.startswith(p)]
                soname = stem_to_soname.get(PREFIXES[max(prefixes, key=len)]) if prefixes else None
            if soname in missing:
                functions[soname].add((name, version))

    for soname in sorted(missing):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "shim.c"
            script = pathlib.Path(folder) / "shim.map"
            by_version = collections.defaultdict(list)
            for name, version in sorted(functions[soname]):
                by_version[version].append(name)
            names = sorted({name for name, _ in functions[soname]})
            source.write_text("".join(f"int {n}(void) {{ return 1; }}\n" for n in names) or "typedef int nothing;\n")
            nodes = {v: ns for v, ns in by_version.items() if v}
            command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", "-o", str(target / soname), str(source)]
            if nodes:
                script.write_text("".join(f"{v} {{ global: {'; '.join(ns)}; }};\n" for v, ns in nodes.items()))
                command.insert(1, f"-Wl,--version-script={script}")
            subprocess.run(command, check=True)
    print(f"torch_cpu_shims: {len(missing)} libraries of {sum(map(len, functions.values()))} functions", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"torch_cpu_shims: {error}\n{getattr(error, 'stderr', '') or ''}")
