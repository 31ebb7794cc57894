# SPDX-License-Identifier: Apache-2.0
"""`--tune` and HALFSTEP_TUNE: kernels chosen by timing, once for a machine."""
import json
import unittest

from images_test import ImageTest, SMALL
from program import events


class Tuning(ImageTest):
    def run_of(self, name, *arguments, **variables):
        """The log's events, and the lines in which the run says what kernels of a convolution take."""
        env = {"XDG_CACHE_HOME": str(self.folder / "cache"), "HALFSTEP_LOG": "debug", **variables}
        status, out, err = self.run_program("train", "resnet20", "images", *SMALL, "--epochs", "1", "--no-out", "--log-json", name, "-q", *arguments, env=env)
        self.assertEqual(status, 0, out + err)
        return events(self.folder / name), [line for line in err.splitlines() if "window" in line and line.endswith(" ms")]

    def choices(self):
        return sorted((self.folder / "cache" / "halfstep" / "choices").iterdir())

    def test_choices_are_kept_and_said(self):
        self.images()
        log, timed = self.run_of("one", "--tune")
        self.assertIs(log[0]["tuning"], True)
        self.assertEqual(len(self.choices()), 1)
        kept = json.loads(self.choices()[0].read_text())["convolutions"]
        self.assertEqual(len(timed), len(kept))
        self.assertTrue(any(k.startswith("weight ") for k in kept), kept)
        # The second run, asked in the other way, finds all choices: the same bits, and the file stays as it is.
        before = self.choices()[0].stat().st_mtime_ns
        again, timed = self.run_of("two", HALFSTEP_TUNE="1")
        self.assertEqual(timed, [])
        self.assertEqual(self.choices()[0].stat().st_mtime_ns, before)
        losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (log, again)]
        self.assertEqual(*losses)
        # Another instruction set has choices of its own.
        self.run_of("three", "--tune", HALFSTEP_ISA="avx2")
        self.assertEqual(len(self.choices()), 2)

    def test_nothing_is_timed_unless_asked_for(self):
        self.images()
        log, timed = self.run_of("log", HALFSTEP_TUNE="0")
        self.assertNotIn("tuning", log[0])
        self.assertEqual(timed, [])
        self.assertFalse((self.folder / "cache").exists())

    def test_a_run_goes_on_where_choices_cannot_be_kept(self):
        self.images()
        (self.folder / "cache").write_text("no folder")
        log, timed = self.run_of("log", "--tune")
        self.assertEqual((log[-1]["event"], log[-1]["interrupted"]), ("end", False))
        self.assertTrue(timed)

    def test_the_same_bits_on_any_number_of_ranks_need_the_model(self):
        self.data()
        for flags, env in ((["--tune"], {}), ([], {"HALFSTEP_TUNE": "1"})):
            self.refused(2, "--reproducible: gives the same bits on any number of ranks, and --tune (or HALFSTEP_TUNE)", "train", "mlp", "data", *flags,
                         "--reproducible", "2", "--no-out", env=env)


if __name__ == "__main__":
    unittest.main()
