# SPDX-License-Identifier: Apache-2.0
"""The loop that torch_bench.py and jax_bench.py share: answers timing requests line by line.

Protocol. The script is started as `torch_bench.py --threads N` (N threads for its kernels; default 2) and talks over standard
input and output, one line at a time, so that a driver can take turns with it (A B A B) on a quiet machine:

  on start    {"peer": "torch", "version": "...", "threads": N, "cases": ["mlp/f32/sgd/b64", ...]}
  CASE [REPETITIONS [MIN_MS]]    ->   {"case": CASE, "calls": K, "times_ms": [...], "median_ms": x, "min_ms": y}
  facts CASE                     ->   {"case": CASE, "facts": {NAME: NUMBER, ...}}    what is known of it besides times
  anything that fails            ->   {"case": CASE, "error": "..."}
  quit, or the end of input      ->   the script ends, exit status 0

One repetition is K calls in a row, K chosen on the case's first request so that a repetition lasts at least MIN_MS (default 20);
times are milliseconds for one call. The first request sets the case up and warms it up; its state (weights, compiled functions)
is kept until another family of cases is asked for, so later turns only measure. While waiting for a line the script uses no CPU.
Facts are `peak_bytes`, the most memory the process ever had (a case's own only where no other was asked for), `before_bytes`, what
it had before the case was set up, and what the case itself has to say (docs/reference/performance.md).
Standard error is free for the peer's own messages. Other work on the same cores makes the peers' thread barriers ten to a hundred
times slower (PyTorch's above all): times taken then say nothing, not even as ratios.
"""
import argparse
import json
import resource
import statistics
import sys
import time
import traceback


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Server:
    def __init__(self, peer, version, threads, factories):
        """factories: case name -> function that sets the case up and returns a callable for one call."""
        self.factories = factories
        self.ready = {}  # case -> (callable, calls)
        self.before = {}  # case -> bytes this process had before it
        self.say({"peer": peer, "version": version, "threads": threads, "cases": sorted(factories)})

    def say(self, answer):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    def prepare(self, case, min_ms):
        if case not in self.ready:
            family = case.split("/")[0]
            for other in [c for c in self.ready if c.split("/")[0] != family]:
                del self.ready[other]
            if family == "optimizer":  # 100 to 400 MB each
                self.ready.clear()
            self.before[case] = resident_bytes()
            call = self.factories[case]()
            elapsed, total = 1.0, 0.0
            for count in range(5):  # warm up: at least two calls, five where they are quick
                elapsed = self.run(call, 1)
                total += elapsed
                if count >= 1 and total > 0.5:
                    break
            calls = 1
            while elapsed * 1e3 < min_ms and calls < 10**6:
                calls = max(calls + 1, min(calls * 10, int(calls * 1.2 * min_ms / max(elapsed * 1e3, 1e-3))))
                elapsed = self.run(call, calls)
            self.ready[case] = (call, calls)
        return self.ready[case]

    @staticmethod
    def run(call, calls):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    def facts(self, case):
        call, _ = self.prepare(case, 20.0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # before finding out more adds to it
        more = getattr(call, "facts", dict)()
        return {"before_bytes": self.before[case], "peak_bytes": peak, **more}

    def lines(self):
        return sys.stdin

    def serve(self):
        for line in self.lines():
            words = line.split()
            if not words:
                continue
            if words[0] == "quit":
                break
            wants_facts = words[0] == "facts" and len(words) == 2
            if wants_facts:
                words = words[1:]
            try:
                if words[0] not in self.factories:
                    raise ValueError("no such case")
                if wants_facts:
                    self.say({"case": words[0], "facts": self.facts(words[0])})
                    continue
                repetitions = int(words[1]) if len(words) > 1 else 5
                call, calls = self.prepare(words[0], float(words[2]) if len(words) > 2 else 20.0)
                calls_in_all = calls * getattr(call, "calls", 1)  # a callable may make several calls at once
                times = [self.run(call, calls) * 1e3 / calls_in_all for _ in range(repetitions)]
                self.say({"case": words[0], "calls": calls_in_all, "times_ms": times, "median_ms": statistics.median(times),
                          "min_ms": min(times)})
            except Exception as error:  # the driver goes on with the other cases
                traceback.print_exc(file=sys.stderr)
                self.say({"case": words[0], "error": f"{type(error).__name__}: {error}".splitlines()[0]})


def arguments_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    return parser


def arguments():
    return arguments_parser().parse_args()
