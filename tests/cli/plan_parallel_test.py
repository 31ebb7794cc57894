# SPDX-License-Identifier: Apache-2.0
"""`halfstep plan-parallel`: the tables, the figure, what is measured by a job, and what is refused."""
import json
import pathlib
import shutil
import tempfile
import unittest

from program import ProgramTest

CLUSTER = ["--ranks-per-machine", "4", "--latency-inside", "5", "--bandwidth-inside", "10", "--latency", "20", "--bandwidth", "2"]


class PlanParallel(ProgramTest):
    def rows(self, *flags):
        status, out, err = self.run_program("plan-parallel", *flags, "--json")
        self.assertEqual((status, err), (0, ""))
        return json.loads(out)

    def test_the_step_of_the_mlp(self):
        # Two buckets, as PyTorch makes them: the last two layers with 1,071,144 bytes, which close the first one of 1 MiB, and the
        # first layer with 1,607,680. The backward pass, two thirds of the step, comes to the first when it has done their part
        # of the multiply-adds. 16 ranks on 4 machines of 4, by a ring: 2 * 12 messages inside, 2 * 3 between, 2 * 15/16 of the
        # bytes at 2 GB/s; 8.4 us at the start.
        document = self.rows("mlp", "--ranks", "16", "--amp", "off,bf16", "--step-ms", "10,2", "--batch-size", "64", *CLUSTER,
                             "--algorithm", "ring", "--variation", "0", "--buckets-mb", "25")
        self.assertEqual(document["parameters"], 669706)
        share = (512 * 512 + 512 * 10) / (784 * 512 + 512 * 512 + 512 * 10)
        full, half = document["rows"]
        for row, compute, part in ((full, 10, 1), (half, 2, 0.5)):
            first, second = (8.4e-3 + 24 * 5e-3 + 6 * 20e-3 + 2 * 15 / 16 * size * part / 2e9 * 1e3 for size in (1071144, 1607680))
            step = max(compute, compute / 3 + 2 / 3 * compute * share + first) + second
            self.assertEqual((row["ranks"], row["buckets"], row["compute_ms"]), (16, 2, compute))
            self.assertAlmostEqual(row["communication_ms"], first + second, places=9)
            self.assertAlmostEqual(row["step_ms"], step, places=9)
            self.assertAlmostEqual(row["exposed_ms"], step - compute, places=9)
            self.assertAlmostEqual(row["efficiency"], compute / step, places=9)
            self.assertAlmostEqual(row["samples_per_s"], 16 * 64 / step * 1e3, places=3)
        self.assertEqual((full["precision"], half["precision"]), ("f32", "bf16, gradients in bf16"))

    def test_more_ranks_never_scale_better(self):
        rows = self.rows("--system", "v100-10g")["rows"]
        for precision in ("f32", "f16, gradients in f16"):
            mine = [r for r in rows if r["precision"] == precision]
            self.assertEqual([r["ranks"] for r in mine], [8, 16, 32, 64, 128, 256, 512, 1024])
            efficiency = [r["efficiency"] for r in mine]
            self.assertEqual(efficiency, sorted(efficiency, reverse=True))
            self.assertTrue(0 < efficiency[-1] < efficiency[0] < 1)
        # Over a narrow network a quicker step hides less, and gradients in full hide even less.
        at = {r["precision"]: r["efficiency"] for r in rows if r["ranks"] == 64}
        whole = self.rows("--system", "v100-10g", "--ranks", "64", "--amp", "f16", "--full-gradients")["rows"][0]
        self.assertGreater(at["f32"], at["f16, gradients in f16"])
        self.assertGreater(at["f16, gradients in f16"], whole["efficiency"])
        self.assertEqual(whole["precision"], "f16, gradients in f32")

    # What docs/guide/plan-parallel.md shows and compares with published figures; the model's inputs are in its table of machines.
    def test_the_figures_of_the_documentation(self):
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/guide/plan-parallel.md").read_text()
        sample = self.rows("--system", "v100-10g", "--ranks", "8,16", "--amp", "f16")["rows"]
        for row in sample:
            words = [row["ranks"], row["ranks"] // 8, int(row["bucket_mb"]), *(f"{row[f'{k}_ms']:.2f}" for k in ("step", "communication", "exposed", "waiting")),
                     f"{100 * row['efficiency']:.1f}%", f"{row['samples_per_s']:.0f}"]
            self.assertIn(" ".join(map(str, words)), " ".join(page.split()))
        self.assertEqual([f"{r['step_ms']:.2f}" for r in sample], ["109.83", "135.81"])
        at_1024 = [round(100 * r["efficiency"]) for r in self.rows("--system", "v100-10g", "--ranks", "1024")["rows"]]
        self.assertTrue(at_1024[0] >= 93 and at_1024[1] == 73, at_1024)

        def percent(value):
            return f"{100 * value:.1f} %"

        one_v100, mixed_v100 = (percent(r["efficiency"]) for r in self.rows("--system", "dgx1-v100", "--ranks", "8")["rows"])
        one_a100, mixed_a100 = (percent(r["efficiency"]) for r in self.rows("--system", "dgx-a100", "--ranks", "8")["rows"])
        few, many = (r["efficiency"] for r in self.rows("--system", "p100-50g", "--ranks", "8,256", "--amp", "off", "--batch-size", "32")["rows"])
        horovod = self.rows("resnet101", "--system", "p100-25g", "--ranks", "16,512", "--amp", "off", "--batch-size", "64")["rows"]
        self.assertEqual((one_v100, mixed_v100, one_a100, mixed_a100), ("97.2 %", "97.1 %", "97.1 %", "97.1 %"))
        self.assertEqual((percent(many / few), f"{horovod[0]['samples_per_s']:,.0f}", percent(horovod[1]["efficiency"])), ("97.2 %", "1,771", "94.1 %"))
        table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
        first = table.index(["source", "", "published", "predicted"]) + 2
        self.assertEqual([row[3].split(" (")[0] for row in table[first:first + 9]], [one_v100, mixed_v100, one_a100, mixed_a100, one_a100, mixed_a100, percent(many / few), "1,771", "94.1 %"])

    def test_tables_and_figures(self):
        with tempfile.TemporaryDirectory() as folder:
            for ending, first in (("svg", b"<?xml"), ("png", b"\x89PNG")):
                file = pathlib.Path(folder) / f"plan.{ending}"
                status, out, err = self.run_program("plan-parallel", "mlp", "--ranks", "2,6", "--step-ms", "3,2", "--figure", str(file))
                self.assertEqual((status, err), (0, ""))
                self.assertEqual(file.read_bytes()[:len(first)], first)
            text = (pathlib.Path(folder) / "plan.svg").read_text()
        for words in ("Data parallel training of mlp on dgx-a100", "Scaling efficiency", "size of buckets, MiB", "gradients in f16"):
            self.assertIn(words, text)
        self.assertIn("mlp: 0.67 million parameters, 128 samples a rank\ndgx-a100 (8 A100 with NVLink", out)
        self.assertRegex(out, r"(?m)^6 +1 +[\d.]+ +[\d.]+")
        self.assertNotIn("speed of a rank", out)
        self.assertIn("speed of a rank: NVIDIA/DeepLearningExamples", self.run_program("plan-parallel", "mlp", "--ranks", "8")[1])

    def test_what_is_refused(self):
        self.refused(2, ["--system: expected one of dgx-a100", "did you mean dgx-h100?"], "plan-parallel", "mlp", "--system", "dgx-h10")
        self.refused(2, "--ranks: expected a range such as 8-1024, got '8-4'", "plan-parallel", "mlp", "--ranks", "8-4")
        self.refused(2, "--ranks: expected a whole number from 1", "plan-parallel", "mlp", "--ranks", "0")
        self.refused(2, "--amp: expected off, f16 and bf16", "plan-parallel", "mlp", "--amp", "off,f8")
        self.refused(2, "--step-ms: expected a number for each precision of --amp, 2, got 1", "plan-parallel", "mlp", "--step-ms", "3")
        self.refused(2, "--step-ms: expected numbers above 0, got '-1'", "plan-parallel", "mlp", "--amp", "off", "--step-ms", "-1")
        self.refused(2, "give one of them", "plan-parallel", "mlp", "--step-ms", "3,2", "--images-per-second", "3,2")
        self.refused(2, ["--step-ms: needed", "no speed in off is known of dgx-h100"], "plan-parallel", "mlp", "--system", "dgx-h100")
        self.refused(2, "--bandwidth: expected a number above 0, got 0", "plan-parallel", "mlp", "--bandwidth", "0")
        self.refused(2, "--latency: expected", "plan-parallel", "mlp", "--latency", "-1")
        self.refused(2, "--interference: expected", "plan-parallel", "mlp", "--interference", "2")
        self.refused(2, "--algorithm: expected fastest, ring or tree, got 'rings'", "plan-parallel", "mlp", "--algorithm", "rings")
        self.refused(2, "--measure: start it on several processes", "plan-parallel", "mlp", "--measure")
        self.refused(2, "did you mean resnet50?", "plan-parallel", "resnet51")

    @unittest.skipUnless(shutil.which("mpirun.openmpi") or shutil.which("mpirun.mpich"), "no MPI")
    def test_measures_the_ranks_of_a_job(self):
        status, out, err = self.run_program("launch", "--nproc-per-node", "2", "plan-parallel", "mlp", "--measure", "--step-ms", "5,4",
                                            "--ranks", "1,2", "--json")
        if "no MPI can be used" in err:
            self.skipTest(err)
        self.assertEqual(status, 0, err)
        document = json.loads(out)  # one, although there are two ranks
        self.assertEqual(document["ranks_per_machine"], 2)
        self.assertTrue(0 <= document["inside"]["latency_us"] < 1e6 and document["inside"]["bandwidth_gbs"] > 0, document)
        alone, together = [r for r in document["rows"] if r["precision"] == "f32"]
        self.assertEqual((alone["step_ms"], alone["efficiency"]), (5, 1))
        self.assertGreater(together["communication_ms"], 0)
        # What is wrong is wrong on all ranks: nobody waits for the others.
        status, _, err = self.run_program("launch", "--nproc-per-node", "2", "plan-parallel", "mlp", "--measure", "--step-ms", "5,4")
        self.assertEqual(status, 2, err)
        self.assertIn("--bandwidth: needed for 1024 ranks, 2 on a machine", err)
        self.assertNotIn("other ranks still run", err)


if __name__ == "__main__":
    unittest.main()
