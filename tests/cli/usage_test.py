# SPDX-License-Identifier: Apache-2.0
"""Arguments and environment: what is refused, with which status and in which words."""
import os
import unittest

from program import ProgramTest


class Arguments(ProgramTest):
    def test_commands(self):
        self.refused(2, ["expected a command", "train, eval, predict, bench, compare, data, convert, inspect, export, ops, devices"])
        self.refused(2, ["there is no command 'trian'", "did you mean train?"], "trian")
        self.refused(2, "there is no command 'xyzzy'; the commands are train", "xyzzy")
        for later in ("quantize",):
            self.refused(2, [later, "not there yet"], later)

    def test_help_and_version_are_no_errors(self):
        for arguments in (["--help"], ["--help-all"], ["train", "--help"], ["ops", "-h"], ["--version"]):
            status, out, err = self.run_program(*arguments)
            self.assertEqual((status, err), (0, ""))
            self.assertGreater(len(out), 5)
        self.assertRegex(self.run_program("--version")[1], r"\Ahalfstep \d+\.\d+\.\d+\n\Z")

    def test_flags_that_are_not_known(self):
        self.refused(2, ["there is no flag --epochz", "did you mean --epochs?", "halfstep train --help"], "train", "mlp", "--epochz", "3")
        self.refused(2, "did you mean --batch-size?", "train", "mlp", "--bacth-size=3")
        self.refused(2, "did you mean --weights?", "eval", "mlp", "--wieghts", "x")
        self.refused(2, "there is no flag --xyzzy;", "train", "mlp", "--xyzzy")
        self.refused(2, ["--qat", "not there yet"], "train", "mlp", "--qat")
        self.refused(2, "one argument too many: 'c'", "train", "mlp", "a", "c")
        self.refused(2, "one argument too many: 'x'", "devices", "cpu", "x")

    def test_models_and_missing_arguments(self):
        self.refused(2, "MODEL is required", "train")
        self.refused(2, ["MODEL: expected mlp, resnet18, ", "got 'mpl'", "did you mean mlp?"], "train", "mpl")
        self.refused(2, ["got 'resnet51'", "did you mean resnet50?"], "bench", "resnet51")
        self.refused(2, "--weights is required", "eval", "mlp")
        self.refused(2, "--epochs: expected a value", "train", "mlp", "--epochs")
        self.refused(2, "--epochs: given more than once", "train", "mlp", "--epochs", "1", "--epochs", "2")
        self.refused(2, "RUN", "compare", "a")
        self.refused(2, "there is no op called 'lineer'; did you mean linear?", "ops", "lineer")

    def test_whole_numbers(self):
        for flag, bad in (("--epochs", ["0", "-1", "", "x", "1.5", "99999999999", "1e3", " 1", "0x10", "nan"]),
                          ("--batch-size", ["0", "-64", "1e99", "1000000001"]),
                          ("--seed", ["-1", "18446744073709551616"]), ("--threads", ["0", "-1", "4097"]),
                          ("--accumulate", ["0"]), ("--workers", ["-1", "257"]), ("--limit", ["-4"]),
                          ("--save-every", ["-1"]), ("--gpu", ["-1"])):
            for value in bad:
                self.refused(2, [f"{flag}: expected a whole number from ", f"got '{value}'"], "train", "mlp", flag, value)
        self.refused(2, "--index: expected a whole number", "predict", "mlp", "--weights", "x", "--index", "1,a")
        self.refused(2, "--count: expected a whole number from 1", "predict", "mlp", "--weights", "x", "--count", "0")
        self.refused(2, "--steps: expected a whole number from 1", "bench", "mlp", "--steps", "0")
        self.refused(2, "--batch-size: expected a whole number", "bench", "mlp", "--batch-size", "100000000000")

    def test_numbers(self):
        for flag, bad in (("--lr", ["", "x", "1,5", "0", "-1", "nan", "inf", "1e999", "1e-3x"]),
                          ("--momentum", ["1", "-0.1", "nan"]), ("--weight-decay", ["-1", "nan", "inf"]),
                          ("--clip-norm", ["-1", "nan", "inf"])):
            for value in bad:
                self.refused(2, f"{flag}: expected", "train", "mlp", flag, value)
        self.refused(2, "decimals follow a point", "train", "mlp", "--lr", "0,1")

    def test_words(self):
        for flag, bad, said in (("--optimizer", "adm", "expected sgd, adam or adamw, got 'adm'"),
                                ("--device", "gpu", "got 'gpu'"), ("--device", "cuda:0", "got 'cuda:0'"),
                                ("--device", "cpu:3", "got 'cpu:3'"), ("--amp", "F16", "expected off, bf16, f16, O0, O1, O2, O3 or auto, got 'F16'"),
                                ("--loss-scale", "dynamic:1,2", "got 'dynamic:1,2'"),
                                ("--loss-scale", "fixed:-1", "--loss-scale"), ("--amp-dtype", "f16", "--amp-dtype: belongs to a level")):
            self.refused(2, said, "train", "mlp", flag, bad)
        for flag in ("--amp", "--optimizer", "--loss-scale", "--data", "--out", "--resume", "--log-json"):
            self.refused(2, [flag, "empty"], "train", "mlp", flag, "")
        self.refused(2, "--momentum: only sgd has it", "train", "mlp", "--optimizer", "adam", "--momentum", "0.9")

    def test_levels_are_of_training(self):
        for level in ("O0", "O1", "O2", "O3", "auto"):
            for arguments in (["bench", "mlp"], ["eval", "mlp", "--weights", "x"], ["ops"]):
                self.refused(2, [f"got '{level}'", "levels are of training", "off, bf16 or f16"], *arguments, "--amp", level)
        self.refused(2, "expected off, bf16, f16, O0, O1, O2, O3 or auto, got 'O5'", "train", "mlp", "--amp", "O5")
        self.refused(2, "--amp-dtype: expected f16 or bf16, got 'f32'", "train", "mlp", "--amp", "O2", "--amp-dtype", "f32")
        self.refused(2, "--amp-dtype: expected f16 or bf16, got 'off'", "train", "mlp", "--amp", "O2", "--amp-dtype", "off")
        self.refused(2, "--amp bf16 says its dtype itself", "train", "mlp", "--amp", "bf16", "--amp-dtype", "f16")
        self.refused(2, "--debug-compare twin", "train", "mlp", "--amp", "O1", "--debug-compare", "twin")


class Environment(ProgramTest):
    def test_wrong_values_are_refused(self):
        names = "avx2, avx512, avx512_vnni, avx512_bf16, avx512_fp16, amx"
        for value in ("bad", "avx512_core", "AVX2", " avx2"):
            self.refused(2, ["HALFSTEP_ISA", names, f"'{value}'"], "devices", env={"HALFSTEP_ISA": value})
        for value in ("x", "0", "-1", "1e3", "5000", "2 "):
            self.refused(2, ["HALFSTEP_THREADS", f"'{value}'"], "devices", env={"HALFSTEP_THREADS": value})
        self.refused(2, "HALFSTEP_LOG", "devices", env={"HALFSTEP_LOG": "loud"})
        for name in ("HALFSTEP_ISA", "HALFSTEP_THREADS", "HALFSTEP_LOG"):
            self.assertEqual(self.run_program("devices", env={name: ""})[0], 0)

    def test_caps_are_shown(self):
        self.assertIn("instruction set: avx2", self.run_program("devices", env={"HALFSTEP_ISA": "avx2"})[1])
        self.assertNotIn("capped", self.run_program("devices", env={"HALFSTEP_ISA": "amx"})[1])
        self.assertIn(", 3 threads,", self.run_program("devices", env={"HALFSTEP_THREADS": "3"})[1])
        self.assertIn(", 1 thread,", self.run_program("devices", env={"HALFSTEP_THREADS": "1", "OMP_NUM_THREADS": "4"})[1])
        self.assertIn(", 4 threads,", self.run_program("devices", env={"OMP_NUM_THREADS": "4"})[1])

    def test_a_locale_with_decimal_comma_changes_nothing(self):
        for env in ({}, {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8"}):
            out = self.run_program("bench", "mlp", "--steps", "1", "--warmup", "0", "--batch-size", "1", "--optimizer", "adam", env=env)[1]
            self.assertRegex(out, r'"ms_per_step_median":\d+\.\d+')


class Output(ProgramTest):
    def test_a_full_disk_behind_standard_output_is_an_error(self):
        with open("/dev/full", "w") as full:
            for arguments in (["ops"], ["devices"], ["--help"], ["bench", "mlp", "--steps", "1", "--warmup", "0"]):
                self.refused(1, "standard output can't be written", *arguments, stdout=full)

    def test_a_closed_standard_output_gets_nothing_and_spoils_no_file(self):
        data = self.data()
        status, _, err = self.run_program("train", "mlp", data, "--out", "run", stdout=None,
                                          preexec_fn=lambda: os.close(1))
        self.assertEqual((status, err), (0, ""))
        for line in (self.folder / "run/log.jsonl").read_text().splitlines():
            self.assertTrue(line.startswith('{"event":'), line)

    def test_quiet_prints_nothing(self):
        self.assertEqual(self.train(self.data(), "--no-out", "--quiet"), "")


if __name__ == "__main__":
    unittest.main()
