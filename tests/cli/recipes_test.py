# SPDX-License-Identifier: Apache-2.0
"""docs/recipes: the manifest of the Kubernetes MPI operator, the script for Slurm and the file of hosts."""
import copy
import os
import pathlib
import re
import subprocess
import unittest

from program import ProgramTest

RECIPES = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "recipes"

# The part of MPIJob that the manifest may use, by manifests/base/kubeflow.org_mpijobs.yaml of kubeflow/mpi-operator at
# 013fa15b22a6 (v2beta1): a type; a list of what is allowed; or the fields of an object, "*" for fields of any name.
# Required fields end in "!". What isn't listed there is unknown to the API, which drops it without a word.
QUANTITIES = {"*": "quantity"}
VOLUME = {"name!": str, "persistentVolumeClaim": {"claimName!": str, "readOnly": bool}, "emptyDir": {"medium": str, "sizeLimit": "quantity"},
          "hostPath": {"path!": str, "type": str}, "configMap": {"name": str}, "secret": {"secretName": str}}
CONTAINER = {"name!": str, "image": str, "imagePullPolicy": ["Always", "Never", "IfNotPresent"], "command": [str], "args": [str], "workingDir": str,
             "env": [{"name!": str, "value": str}], "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str}],
             "resources": {"limits": QUANTITIES, "requests": QUANTITIES}, "securityContext": {"runAsUser": int, "capabilities": {"add": [str], "drop": [str]}}}
REPLICAS = {"replicas": int, "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
            "template": {"metadata": {"labels": {"*": str}, "annotations": {"*": str}},
                         "spec": {"containers!": [CONTAINER], "initContainers": [CONTAINER], "volumes": [VOLUME], "nodeSelector": {"*": str},
                                  "restartPolicy": str, "serviceAccountName": str, "hostNetwork": bool, "dnsPolicy": str}}}
MPI_JOB = {"apiVersion!": ("kubeflow.org/v2beta1",), "kind!": ("MPIJob",), "metadata!": {"name!": str, "namespace": str, "labels": {"*": str}},
           "spec!": {"slotsPerWorker": int, "sshAuthMountPath": str, "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
                     "mpiImplementation": ("OpenMPI", "Intel", "MPICH"), "mpiReplicaSpecs!": {"Launcher!": REPLICAS, "Worker": REPLICAS},
                     "runPolicy": {"cleanPodPolicy": ("Running", "All", "None"), "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int,
                                   "backoffLimit": int, "suspend": bool, "schedulingPolicy": {"minAvailable": int, "queue": str, "priorityClass": str}}}}
QUANTITY = re.compile(r"(\+|-)?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE](\+|-)?[0-9]+)?")


def problems(value, schema, where="MPIJob"):
    """What the API would reject or drop."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where}: expected an object, got {value!r}"]
        fields = {name.rstrip("!"): part for name, part in schema.items()}
        found = [f"{where}.{name[:-1]} is missing" for name in schema if name.endswith("!") and name[:-1] not in value]
        for name, part in value.items():
            rule = fields.get(name, fields.get("*"))
            found += problems(part, rule, f"{where}.{name}") if rule is not None else [f"{where}.{name}: there is no such field"]
        return found
    if isinstance(schema, list) and len(schema) == 1:
        if not isinstance(value, list):
            return [f"{where}: expected a list, got {value!r}"]
        return [p for i, part in enumerate(value) for p in problems(part, schema[0], f"{where}[{i}]")]
    if schema == "quantity":
        good = isinstance(value, (int, str)) and not isinstance(value, bool) and QUANTITY.fullmatch(str(value))
    elif isinstance(schema, (list, tuple)):
        good = value in schema
    else:
        good = isinstance(value, schema) and not (schema is int and isinstance(value, bool))
    return [] if good else [f"{where}: expected {schema}, got {value!r}"]


class Manifest(unittest.TestCase):
    def setUp(self):
        try:
            import yaml
        except ImportError:
            self.skipTest("there is no PyYAML")
        self.job = yaml.safe_load((RECIPES / "mpijob.yaml").read_text())

    def test_it_is_an_mpi_job(self):
        self.assertEqual(problems(self.job, MPI_JOB), [])

    def test_mistakes_would_be_found(self):
        for change, said in ((lambda j: j["spec"].update(slotsPerWorkers=4), "spec.slotsPerWorkers: there is no such field"),
                             (lambda j: j["spec"].pop("mpiReplicaSpecs"), "spec.mpiReplicaSpecs is missing"),
                             (lambda j: j["spec"].update(mpiImplementation="Open MPI"), "expected"),
                             (lambda j: j["spec"]["mpiReplicaSpecs"]["Worker"].update(replicas="2"), "Worker.replicas: expected"),
                             (lambda j: j["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"].append(8), "expected <class 'str'>, got 8")):
            job = copy.deepcopy(self.job)
            change(job)
            self.assertTrue(any(said in p for p in problems(job, MPI_JOB)), said)

    def test_pods_have_what_they_name(self):
        for name, replicas in self.job["spec"]["mpiReplicaSpecs"].items():
            pod = replicas["template"]["spec"]
            volumes = {v["name"] for v in pod.get("volumes", [])}
            for container in pod["containers"]:
                mounted = {m["name"] for m in container.get("volumeMounts", [])}
                self.assertEqual(mounted - volumes, set(), name)
                self.assertEqual(volumes - mounted, set(), name)


class Scripts(ProgramTest):
    def stand_in(self, name, text):
        (self.folder / "bin").mkdir(exist_ok=True)
        path = self.folder / "bin" / name
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)

    def launcher(self, *arguments):
        """What mpirun of Open MPI would be given."""
        self.stand_in("mpirun.openmpi", 'echo "$@"\nexit 6\n')
        status, out, _ = self.run_program("launch", "--mpi", "openmpi", *arguments, env={"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"})
        self.assertEqual(status, 6)
        return out

    def test_the_file_of_hosts(self):
        self.assertIn("--host node-1:4,node-2:4 ", self.launcher("--hosts", RECIPES / "hosts", "prog"))

    def test_the_operators_file_of_hosts(self):
        # As the controller of v2beta1 writes it for Open MPI.
        (self.folder / "hostfile").write_text("".join(f"halfstep-worker-{i}.halfstep.default.svc slots=4\n" for i in (0, 1)))
        out = self.launcher("--hosts", "hostfile", "prog")
        self.assertIn("--host halfstep-worker-0.halfstep.default.svc:4,halfstep-worker-1.halfstep.default.svc:4 ", out)
        self.assertIn("-n 8 ", out)

    def test_the_script_for_slurm(self):
        self.stand_in("srun", 'echo "srun $@"\nexit "${SRUN_STATUS:-0}"\n')
        self.stand_in("scontrol", 'echo "scontrol $@"\n')
        env = {**self.environment(), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "halfstep",
               "SLURM_CPUS_PER_TASK": "8"}
        env.pop("SLURM_RESTART_COUNT", None)

        def run(**changes):
            done = subprocess.run(["bash", RECIPES / "train.sbatch", "resnet50", "a folder", "--amp", "bf16"], cwd=self.folder, env={**env, **changes},
                                  capture_output=True, text=True, check=False)
            return done.returncode, done.stdout, done.stderr
        words = "srun --mpi=pmix --cpus-per-task=8 halfstep train"
        self.assertEqual(run(), (0, f"{words} resnet50 a folder --amp bf16 --out runs/halfstep-7 --overwrite\n", ""))
        self.assertEqual(run(MPI="pmi2", SRUN_STATUS="3")[:2], (3, f"{words} resnet50 a folder --amp bf16 --out runs/halfstep-7 --overwrite\n".replace("pmix", "pmi2")))
        (self.folder / "runs" / "halfstep-7").mkdir(parents=True)
        (self.folder / "runs" / "halfstep-7" / "last.safetensors").touch()
        self.assertEqual(run(SRUN_STATUS="143"), (143, f"{words} --resume runs/halfstep-7\nscontrol requeue 7\n", ""))
        self.assertNotIn("requeue", run(SRUN_STATUS="143", SLURM_RESTART_COUNT="20")[1])
        for line in (RECIPES / "train.sbatch").read_text().splitlines():
            if line.startswith("#SBATCH"):
                self.assertRegex(line, r"^#SBATCH --(job-name|nodes|ntasks-per-node|cpus-per-task|time|output|signal|requeue)(=\S+)?$")


if __name__ == "__main__":
    unittest.main()
