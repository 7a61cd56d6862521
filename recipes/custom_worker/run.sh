#!/usr/bin/env bash
# A worker of one's own on verl's single controller. Arguments are Hydra overrides: run.sh profiling=discrete
#   PYTHON=...   interpreter of the environment (`make env-verl`)
#   DRY_RUN=1    print the command and check its configuration only
set -euo pipefail
cd "$(dirname "$0")/../.."

export RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
command=("${PYTHON:-.venv-verl/bin/python}" -m recipes.custom_worker.score "$@")
if [[ ${DRY_RUN:-0} == 1 ]]; then
    echo "${command[@]}"
    command+=(dry_run=true)
fi
exec "${command[@]}"
