# SPDX-License-Identifier: Apache-2.0
"""Arguments and environment: what is refused, with which status and in which words."""
import os
import signal
import unittest

from program import ProgramTest, events


class Arguments(ProgramTest):
    def test_commands(self):
        self.refused(2, ["expected a command", "train, eval, predict, bench, compare, data, convert, inspect, export, quantize, summary, ops, devices"])
        self.refused(2, ["there is no command 'trian'", "did you mean train?"], "trian")
        self.refused(2, "there is no command 'xyzzy'; the commands are train", "xyzzy")

    def test_help_and_version_are_no_errors(self):
        for arguments in (["--help"], ["--help-all"], ["train", "--help"], ["ops", "-h"], ["--version"]):
            status, out, err = self.run_program(*arguments)
            self.assertEqual((status, err), (0, ""))
            self.assertGreater(len(out), 5)
        # What a flag does here and there, and by itself.
        for said in ("TF32 on devices with such units", "two parts of bf16 on CPUs with AMX", "default: full float32"):
            self.assertIn(said, self.run_program("train", "--help")[1])
        self.assertRegex(self.run_program("--version")[1], r"\Ahalfstep \d+\.\d+\.\d+\n\Z")

    def test_flags_that_are_not_known(self):
        self.refused(2, ["there is no flag --epochz", "did you mean --epochs?", "halfstep train --help"], "train", "mlp", "--epochz", "3")
        self.refused(2, "did you mean --batch-size?", "train", "mlp", "--bacth-size=3")
        self.refused(2, "did you mean --weights?", "eval", "mlp", "--wieghts", "x")
        self.refused(2, "there is no flag --xyzzy;", "train", "mlp", "--xyzzy")
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
        self.refused(2, "--no-out: --out run is given too", "train", "mlp", "--no-out", "--out", "run")
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

    def test_one_limit_of_image_sizes(self):
        weights = ["--weights", "x"]
        for arguments in (["train", "yolov5n", "x"], ["train", "resnet20", "x"], ["eval", "yolov5n", *weights], ["predict", "yolov5n", "a.jpg", *weights],
                          ["predict", "resnet18", "a.jpg", *weights], ["export", "yolov5n", *weights, "--onnx", "y"], ["bench", "resnet18"], ["summary", "resnet18"],
                          ["devices", "cpu", "--model", "resnet18"], ["plan-parallel", "resnet18"]):
            self.refused(2, "--image-size: expected a whole number from 1 to 8192, got '8193'", *arguments, "--image-size", "8193")

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
                                ("--loss-scale", "dynamic:1,x", "got 'dynamic:1,x'"),
                                ("--loss-scale", "fixed:-1", "--loss-scale"), ("--amp-dtype", "f16", "--amp-dtype: belongs to a level")):
            self.refused(2, said, "train", "mlp", flag, bad)
        for flag in ("--amp", "--optimizer", "--loss-scale", "--data", "--out", "--resume", "--log-json"):
            self.refused(2, [flag, "empty"], "train", "mlp", flag, "")
        for flags in ([], ["--weight-decay", "0"]):
            self.refused(2, "halfstep: --no-norm-decay: needs a --weight-decay above 0", "train", "mlp", "--no-norm-decay", *flags)
        self.refused(2, "--momentum: only sgd has it", "train", "mlp", "--optimizer", "adam", "--momentum", "0.9")

    def test_explain_takes_every_dtype(self):
        for dtype in ("f64", "f32", "f16", "bf16"):
            status, out, err = self.run_program("ops", "mm", "--explain", dtype, dtype)
            self.assertEqual((status, err), (0, ""))
            self.assertTrue(out.startswith(f"mm({dtype}, {dtype}) ran on"), out)
        self.refused(2, "--explain: 'f12' is no dtype", "ops", "mm", "--explain", "f12", "f32")

    def test_levels_are_of_networks(self):
        for level in ("O0", "O1", "O2", "O3", "auto"):
            self.refused(2, [f"got '{level}'", "train, eval, predict, bench and devices --model take levels", "off, bf16 or f16"], "ops", "--amp", level)
        for arguments in (["bench", "mlp"], ["eval", "mlp", "--weights", "x"], ["predict", "mlp", "--weights", "x"]):
            self.refused(2, "expected off, bf16, f16, O0, O1, O2, O3 or auto, got 'O4'", *arguments, "--amp", "O4")
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
        self.refused(2, "HALFSTEP_WINOGRAD: expected one of off, 2x2, 4x4, got '3x3'", "devices", env={"HALFSTEP_WINOGRAD": "3x3"})
        self.refused(2, "HALFSTEP_TF32: expected one of 0, 1, got 'yes'", "devices", env={"HALFSTEP_TF32": "yes"})
        self.refused(2, "HALFSTEP_TUNE: expected one of 0, 1, got 'yes'", "devices", env={"HALFSTEP_TUNE": "yes"})
        for name in ("HALFSTEP_ISA", "HALFSTEP_THREADS", "HALFSTEP_LOG", "HALFSTEP_WINOGRAD", "HALFSTEP_TF32", "HALFSTEP_TUNE"):
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


class Names(ProgramTest):
    """Names of any bytes: no message and no line of output hands them to a terminal as they are."""
    ODD = "a\x1b[31m\udcff\n"

    def shown(self, status, *arguments, out=r"a\e[31m\xff\n", err=""):
        got, stdout, stderr = self.run_program(*arguments)
        self.assertEqual(got, status, stdout + stderr)
        for text, part in ((stdout, out), (stderr, err)):
            self.assertIn(part, text)
            self.assertFalse(set(text) - {"\n", "\t"} & {chr(c) for c in (*range(32), *range(127, 160))}, repr(text))
        return stdout

    def test_in_what_is_printed(self):
        odd = self.ODD
        self.data(odd)
        self.shown(0, "train", "mlp", odd, "--out", f"{odd}1")
        self.shown(0, "train", "mlp", odd, "--resume", f"{odd}1", "--epochs", "2")
        self.shown(0, "train", "mlp", odd, "--no-out", "--pretrained", f"{odd}1/last.safetensors")
        self.shown(0, "train", "mlp", odd, "--no-out", "--debug-dump", f"{odd}d", "--debug-steps", "1", "--profile", f"{odd}p")
        self.shown(0, "eval", "mlp", odd, "--weights", f"{odd}1")
        self.shown(0, "predict", "mlp", f"{odd}/t10k-images-idx3-ubyte", "--weights", f"{odd}1", "--count", "1")
        self.shown(0, "export", "--weights", f"{odd}1", "--onnx", f"{odd}.onnx")
        self.shown(0, "convert", f"{odd}1/last.safetensors", f"{odd}.pth")
        self.shown(0, "inspect", f"{odd}1/last.safetensors")
        self.train(odd, "--out", f"{odd}2", "-q", "--lr", "0.02")
        self.shown(0, "compare", f"{odd}1", f"{odd}2")

    def test_in_what_is_refused(self):
        odd, err = self.ODD, r"a\e[31m\xff\n"
        (self.folder / odd).mkdir()
        (self.folder / f"{odd}.yaml").write_text("- x\n")
        for status, arguments in ((1, ["train", "mlp", odd]), (2, ["train", "mlp", "--resume", f"{odd}x"]), (2, ["train", "mlp", "--config", f"{odd}.yaml"]),
                                  (2, ["train", "mlp", "--pretrained", f"{odd}x"]), (1, ["train", "mlp", "--out", f"{odd}.yaml"]),
                                  (1, ["train", "mlp", "--no-out", "--log-json", f"{odd}.yaml"]), (1, ["eval", "--weights", f"{odd}x"]),
                                  (1, ["compare", f"{odd}x", f"{odd}x"]), (1, ["inspect", f"{odd}x"]), (2, ["convert", "x", f"{odd}x"]),
                                  (1, ["data", "fetch", "mnist", "--out", f"{odd}.yaml"])):
            self.shown(status, *arguments, out="", err=err)


class Output(ProgramTest):
    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--out", "run", "-q")

    def commands(self):
        return (["train", "mlp", "data", "--no-out"], ["train", "mlp", "data", "--evaluate", "--resume", "run"], ["eval", "--weights", "run"],
                ["predict", "--weights", "run"], ["bench", "mlp", "--steps", "1", "--warmup", "0"], ["compare", "run", "run"],
                ["data", "fetch", "list"], ["convert", "run/last.safetensors", "x.pth", "--force"], ["inspect", "run/last.safetensors"],
                ["inspect", "run/last.safetensors", "--json"], ["export", "--weights", "run", "--onnx", "x.onnx"], ["ops"], ["ops", "mm"],
                ["devices"], ["--help"], ["--help-all"], ["train", "--help"], ["--version"])

    def test_output_that_cannot_be_written_is_an_error(self):
        for arguments in self.commands():
            with self.subTest(arguments):
                with open("/dev/full", "w") as full:
                    self.refused(1, "standard output can't be written", *arguments, stdout=full)
                self.refused(1, "standard output can't be written", *arguments, preexec_fn=lambda: os.close(1))

    def test_a_reader_that_has_gone(self):
        """As head leaves programs: ended by SIGPIPE, or, where that is ignored, an error."""
        def gone():
            reader, writer = os.pipe()
            os.close(reader)
            return writer

        for arguments in self.commands():
            with self.subTest(arguments), os.fdopen(gone(), "w") as pipe:
                status, _, err = self.run_program(*arguments, stdout=pipe)
                expected = (128 + signal.SIGPIPE,) if arguments[0] == "train" and "--help" not in arguments else (-signal.SIGPIPE,)
                self.assertIn(status, expected, err)
                if arguments[0] != "train":
                    self.assertEqual(err, "")
                    self.refused(1, "standard output can't be written", *arguments, stdout=pipe, restore_signals=False,
                                 preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN))

    def test_another_error_is_not_hidden(self):
        (self.folder / "broken").mkdir()
        for closed in (lambda: os.close(1), None):
            self.refused(1, "broken", "train", "mlp", "broken", "--no-out", preexec_fn=closed)

    def test_closed_files_are_taken_by_no_other(self):
        """Whatever the program opens: nothing is printed, warned or logged into it."""
        def close(descriptors):
            for descriptor in descriptors:
                os.close(descriptor)

        run = ["train", "mlp", "data", "--threads", "1", "--seed", "3", "--epochs", "2", "--out"]
        self.assertEqual(self.run_program(*run, "open")[0], 0)
        whole = {p.name: p.read_bytes() for p in (self.folder / "open").iterdir() if p.name.endswith(".safetensors")}
        for descriptors in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
            with self.subTest(descriptors):
                out = "closed " + "".join(map(str, descriptors))
                status, _, err = self.run_program(*run, out, env={"HALFSTEP_LOG": "debug"}, preexec_fn=lambda: close(descriptors))
                self.assertEqual(status, 1 if 1 in descriptors else 0, err)
                folder = self.folder / out
                self.assertEqual({p.name: p.read_bytes() for p in folder.iterdir() if p.name.endswith(".safetensors")}, whole)
                kinds = [[e["event"] for e in events(self.folder / f / "log.jsonl")] for f in ("open", out)]
                self.assertEqual(*map(sorted, kinds))
                # A checkpoint is logged when it is written, beside training.
                self.assertEqual(*[[kind for kind in all_of if kind != "checkpoint"] for all_of in kinds])
                lines = [(self.folder / f / "config.yaml").read_text().splitlines()[1:] for f in ("open", out)]
                self.assertEqual(*lines)
                # What is quiet needs no standard output.
                self.assertEqual(self.run_program(*run, out, "--overwrite", "-q", preexec_fn=lambda: close(descriptors))[0], 0)

    def test_quiet_prints_nothing(self):
        self.assertEqual(self.train("data", "--no-out", "--quiet"), "")


if __name__ == "__main__":
    unittest.main()
