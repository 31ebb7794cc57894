# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmarks/run.py. Standard library only."""
