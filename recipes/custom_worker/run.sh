#!/usr/bin/env bash
# A worker of one's own on verl's single controller. Arguments are Hydra overrides: run.sh profiling=discrete
#   PYTHON=...   interpreter of the environment (`make env-verl`)
#   DRY_RUN=1    print the composed configuration only
set -euo pipefail
cd "$(dirname "$0")/../.."

export RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
arguments=("$@")
if [[ ${DRY_RUN:-0} == 1 ]]; then
    arguments+=(--cfg job)
fi
exec "${PYTHON:-.venv-verl/bin/python}" -m recipes.custom_worker.score "${arguments[@]}"
