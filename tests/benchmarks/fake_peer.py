#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A program to time that needs no framework: `time/X` takes X milliseconds, and some cases misbehave.

  error    answers with an error                 die      ends with status 3, after a last word on standard error
  hang     does not answer                       garbage  answers something else than JSON
  wrong    answers for another case              --broken on the command line: ends before its first line
`facts CASE` says the process's number and a number of images. Every other case takes 1 ms.
"""
import json
import os
import sys
import time


def answer(case: str, repetitions: int) -> str:
    if case == "garbage":
        return "Segmentation fault"
    if case == "error":
        return json.dumps({"case": case, "error": "RuntimeError: not today"})
    ms = float(case[5:]) if case.startswith("time/") else 1.0
    return json.dumps({"case": "time/9" if case == "wrong" else case, "calls": 10, "times_ms": [ms] * repetitions,
                       "operations": 1e6, "bytes": 0 if "multiply" in case else 2e6})


def main() -> None:
    if "--broken" in sys.argv:
        sys.exit("fake_peer: no module named nothing")
    print(json.dumps({"peer": "fake", "version": "1.5", "cpu": "A Processor", "isa": "none", "bf16_units": False,
                      "f16_units": False, "cases": ["time/1", "time/2"]}), flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            break
        if words[0] == "die":
            print("fake_peer: out of memory", file=sys.stderr, flush=True)
            sys.exit(3)
        if words[0] == "hang":
            time.sleep(60)
        if words[0] == "facts":
            print(json.dumps({"case": words[1], "facts": "none" if words[1] == "garbage" else {"pid": os.getpid(), "images": 4}}), flush=True)
            continue
        print(answer(words[0], int(words[1])), flush=True)


if __name__ == "__main__":
    main()
