#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All checks and benchmarks of the plug-in for NVIDIA GPUs, in under ten minutes, on a machine that has one; the results go to
# benchmarks/results/gpu-DATE.md and .jsonl. scripts/gpu_checks.sh --help lists the options, --dry-run the plan.
set -euo pipefail
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_checks.py" "$@"
