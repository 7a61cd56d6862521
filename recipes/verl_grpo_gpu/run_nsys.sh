#!/usr/bin/env bash
# FSDP and vLLM under Nsight Systems, one range for each profiled step. Variables as in run_e2e.sh.
# By stage: run_nsys.sh profiling=discrete 'profiling.select.stages=[update_actor]'
# Afterwards: verl-profiling collect outputs/verl_grpo_gpu --export
set -euo pipefail

exec "$(dirname "$0")/run_e2e.sh" profiling.tool=nsys "$@"
