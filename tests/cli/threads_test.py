# SPDX-License-Identifier: Apache-2.0
"""A user who may start no thread more: everything runs on the threads that are there, to the same bits, and says so once."""
import os
import resource
import unittest

from program import ProgramTest

NOBODY = 65534


def no_threads():
    """In the child: as a user other than root, for whom there is no such limit."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


class NoThreads(ProgramTest):
    WARNING = r"halfstep: warning: DataLoader: 0 of \d workers could be started \(Resource temporarily unavailable\); the loop makes its batches itself\n"

    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--out", "run", "-q", "--seed", "1", "--workers", "2")
        for folder, _, files in os.walk(self.folder):
            for name in [folder, *(os.path.join(folder, f) for f in files)]:
                if os.geteuid() == 0:
                    os.chown(name, NOBODY, NOBODY)
        try:
            self.alone("--version")
        except PermissionError as e:
            self.skipTest(f"the program can't be started by another user: {e}")

    def alone(self, *arguments):
        return self.run_program(*arguments, preexec_fn=no_threads)

    def test_verbs_do_the_same_work(self):
        status, _, err = self.alone("train", "mlp", "data", "--out", "alone", "-q", "--seed", "1", "--workers", "2")
        self.assertEqual(status, 0, err)
        self.assertRegex(err, rf"\A{self.WARNING}\Z")
        for name in ("last.safetensors", "best.safetensors"):
            self.assertEqual((self.folder / "alone" / name).read_bytes(), (self.folder / "run" / name).read_bytes())
        for arguments in (["eval", "--weights", "run"], ["train", "mlp", "data", "--evaluate", "--resume", "run"],
                          ["train", "--resume", "run", "--epochs", "2", "-q"]):
            status, _, err = self.alone(*arguments)
            self.assertEqual(status, 0, err)
            self.assertRegex(err, rf"\A{self.WARNING}\Z")
        for arguments in (["predict", "--weights", "run"], ["export", "--weights", "run", "--onnx", "x.onnx"],
                          ["bench", "mlp", "--steps", "1", "--warmup", "0"]):
            self.assertEqual(self.alone(*arguments)[::2], (0, ""))

    def test_a_device_that_needs_a_thread_says_so(self):
        status, _, err = self.alone("train", "mlp", "data", "--no-out", "-q", "--device", "sim")
        self.assertEqual(status, 1, err)
        self.assertIn("a queue needs a thread, and none could be started: Resource temporarily unavailable", err)


if __name__ == "__main__":
    unittest.main()
