# SPDX-License-Identifier: Apache-2.0
"""Every flag of `halfstep train`, as the program's own table of flags has it: in help, configuration files and resumed runs."""
import re
import unittest

from images_test import ImageTest, SMALL

# Values for flags that take words, or not any number. Paths and the rest: see value_of().
WORDS = {"--data": "data", "--winograd": "2x2", "--optimizer": "adam", "--lr-schedule": "step:1", "--amp": "bf16", "--amp-dtype": "bf16", "--loss-scale": "512", "--crop": "none",
         "--resize": "0", "--image-size": "4", "--device": "cpu", "--debug-level": "first", "--debug-compare": "f32", "--debug-nonfinite": "raise",
         "--debug-steps": "2", "--profile-steps": "2", "--min-area": "0.5", "--pretrained": "weights.safetensors",
         "--perspective": "0.0005", "--anchor-ratio": "3", "--cache": "disk", "--quant-observer": "entropy", "--quant-skip": "fc2",
         "--recompute": "fc1", "--memory-budget": "2GB"}
# What a flag is of no use without.
WITH = {"--debug-level": ["--debug-dump", "dump"], "--debug-steps": ["--debug-dump", "dump"], "--profile-steps": ["--profile", "profile"],
        "--amp-dtype": ["--amp", "O2"]}
NO_FLAGS = {"help", "help-all"}


class Row:
    def __init__(self, names, value, help, kept, resume):
        self.names, self.value, self.help, self.kept, self.resume = names, value, help, kept, resume
        self.flag = next((n for n in names if n.startswith("--")), names[0])
        self.key = self.flag.lstrip("-") if self.flag.startswith("-") else self.flag.lower()
        of = re.search(r"\(of ([a-z ]+)\)", help)
        self.of = of.group(1).split(" or ") if of else []  # networks that have it; none: all
        self.of_images = "images" in self.of

    def given(self):
        """The flag with a value that isn't the usual one."""
        if not self.value:
            return [self.flag]
        if self.flag in WORDS:
            return [self.flag, WORDS[self.flag]]
        return [self.flag, {"N": "3", "X": "0.25"}.get(self.value.split("=")[0], "somewhere")]

    def needed(self):
        """The flags without which it is refused."""
        return ["--qat"] if self.flag.startswith("--quant-") else WITH.get(self.flag, [])


class FlagsTest(ImageTest):
    def rows(self):
        status, out, err = self.run_program("train", "--markdown")
        self.assertEqual((status, err), (0, ""))
        rows = []
        for line in out.splitlines():
            cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not cells or not cells[0].startswith("`"):
                continue
            names, value = re.fullmatch(r"((?:`[^`]+`, )*`[^`]+`)(?: `([^`]+)`)?", cells[0]).groups()
            rows.append(Row(re.findall(r"`([^`]+)`", names), value, *cells[1:]))
        self.assertGreater(len(rows), 50)
        return rows

    def keys(self, run):
        return [line.split(":")[0] for line in (self.folder / run / "config.yaml").read_text().splitlines() if not line.startswith("#")]


class Rows(FlagsTest):
    def test_help_has_them_all_and_no_others(self):
        text = self.run_program("train", "--help")[1]
        rows = self.rows()
        self.assertEqual(sorted(re.findall(r"^  (?:-\w,)?--([a-z0-9-]+)", text, re.M)),
                         sorted({r.key for r in rows if r.flag.startswith("--")} | NO_FLAGS & set(re.findall(r"--([a-z-]+)", text))))
        words = re.sub(r"\s+", "", text)
        for row in rows:
            self.assertIn(re.sub(r"\s+", "", re.sub(r" \((of [a-z ]+|default: the network's)\)", "", row.help)), words, row.flag)
            for name in row.names:
                self.assertIn(name, text)
        self.assertEqual(len({r.key for r in rows}), len(rows))

    def test_configuration_files_know_them(self):
        for row in self.rows():
            for name in row.names:
                if len(name) == 2 or name == "DIR":
                    continue  # short, and positional with a long name beside it
                key = name.lstrip("-").lower()
                (self.folder / "c.yaml").write_text(f"\n{key}: [1]\n")
                said = "there is no flag 'config'" if key == "config" else f"c.yaml:2: {key}: expected a single value, got a list"
                with self.subTest(name):
                    self.refused(2, said, "train", "--config", "c.yaml")

    def test_saved_configurations_have_those_that_they_should(self):
        self.data()
        self.train("data", "--epochs", "1", "--out", "run")
        rows = self.rows()
        always = {r.key for r in rows if r.kept == "yes" and set(r.of) <= {"classification", "detection"}}
        self.assertEqual(set(self.keys("run")), always | {"data"})
        self.train("data", "--epochs", "1", "--out", "weights", "--seed", "7")
        (self.folder / "weights/last.safetensors").rename(self.folder / "weights.safetensors")
        for row in rows:
            if row.kept != "if given" or row.key == "data" or row.of:
                continue
            with self.subTest(row.flag):
                more = row.needed()
                self.train("data", "--epochs", "4", "--limit", "64", "--out", "run", "--overwrite", "-q", *more, *row.given())
                value = row.given()[1] if row.value else "true"
                self.assertIn(f"{row.key}: {value}", (self.folder / "run/config.yaml").read_text().splitlines())

    def test_those_of_some_data_are_refused_elsewhere(self):
        for kind, least in (("images", 5), ("boxes", 25)):
            own = [r for r in self.rows() if kind in r.of]
            self.assertGreater(len(own), least)
            for row in own:
                if row.flag != "--cfg":  # which names a network itself
                    self.refused(2, f"{row.flag}: mlp is no network of {' or '.join(row.of)}", "train", "mlp", "--no-out", *row.given())


class Resuming(FlagsTest):
    def check(self, rows, run, *begun):
        for row in rows:
            with self.subTest(row.flag):
                err = self.refused(1, "the", "train", *begun, "--out", "other", "--resume", run, "--threads", "1", *row.given())
                self.assertIn(row.flag, err)
                self.assertRegex(err, "run had|first run|began with")

    def test_flags_that_have_to_be_the_same(self):
        self.data()
        self.train("data", "--epochs", "1", "--momentum", "0.5", "--weight-decay", "0.1", "--amp", "f16", "--threads", "1", "--out", "run")
        rows = [r for r in self.rows() if r.resume.startswith("the same") and set(r.of) <= {"classification", "detection"} and r.key != "model"]
        self.assertGreater(len(rows), 12)
        momentum = [r for r in rows if r.flag == "--optimizer"]
        quantized = [r for r in rows if r.needed() == ["--qat"]]
        self.assertGreater(len(quantized), 8)
        self.check([r for r in rows if r not in momentum + quantized], "run", "mlp", "--epochs", "2")
        self.train("data", "--epochs", "1", "--threads", "1", "--qat", "--out", "quantized")
        self.check(quantized, "quantized", "mlp", "--epochs", "2")
        self.check(momentum, "run", "mlp", "--epochs", "2", "--momentum", "0")

    def test_flags_of_images_that_have_to_be_the_same(self):
        self.images()
        self.done("train", "resnet20", "images", *SMALL, "--epochs", "1", "--lr-schedule", "constant", "--out", "run")
        rows = [r for r in self.rows() if r.resume.startswith("the same") and r.of_images]
        self.assertGreater(len(rows), 4)
        self.check(rows, "run", "resnet20", "--epochs", "2")


if __name__ == "__main__":
    unittest.main()
