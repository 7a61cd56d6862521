#!/usr/bin/env bash
# The same on GPUs, with a model that asks for tools itself. Variables and arguments as in ../verl_grpo_gpu/run_e2e.sh.
set -euo pipefail

folder=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$folder/../..${PYTHONPATH:+:$PYTHONPATH}
exec "$folder/../verl_grpo_gpu/run_e2e.sh" \
    "hydra.searchpath=[file://$folder]" +agent=gpu "agent_folder=$folder" \
    profiling.save_path=outputs/verl_agent_gpu "$@"
