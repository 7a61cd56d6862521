#!/usr/bin/env bash
# FSDP on Ascend NPUs, every stage of a profiled step by itself. Variables as in run_e2e.sh.
set -euo pipefail

exec "$(dirname "$0")/run_e2e.sh" profiling=discrete "$@"
