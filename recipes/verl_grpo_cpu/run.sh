#!/usr/bin/env bash
# Real verl on CPU. Further arguments are Hydra overrides: run.sh profiling=discrete
#   ROLLOUT=...  vllm (the default) or sglang
#   PYTHON=...   interpreter of the environment (`make env-verl`, or `make env-verl ENGINE=sglang`)
#   ASSETS=...   folder of the model and the data; made when it does not exist
#   PLUGINS=...  modules that every process of verl imports, in place of the two that are needed
#   MAIN=...     another main module of verl (../verl_async_cpu)
#   DRY_RUN=1    print the command and check its configuration only
set -euo pipefail
cd "$(dirname "$0")/../.."

ROLLOUT=${ROLLOUT:-vllm}
if [[ $ROLLOUT == sglang ]]; then
    PYTHON=${PYTHON:-.venv-verl-sglang/bin/python}
    PYTHONPATH=$PWD/recipes/sglang_cpu${PYTHONPATH:+:$PYTHONPATH}
fi
PYTHON=${PYTHON:-.venv-verl/bin/python}
ASSETS=${ASSETS:-outputs/verl_grpo_cpu/assets}
MAIN=${MAIN:-verl.trainer.main_ppo}

export VERL_PLATFORM=cpu
# The second is found by verl anyway where this package is installed, and not only checked out.
plugins=recipes.verl_grpo_cpu.cpu_platform,verl_profiling.integrations.verl
export VERL_USE_EXTERNAL_MODULES=${PLUGINS:-$plugins}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
export VLLM_CPU_KVCACHE_SPACE=1 SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1
export VLLM_LOGGING_LEVEL=WARNING RAY_DEDUP_LOGS=0 HYDRA_FULL_ERROR=1

arguments=(
    --config-dir "$PWD/recipes/verl_grpo_cpu" --config-name grpo_cpu
    "assets=$ASSETS" "actor_rollout_ref.rollout.name=$ROLLOUT" "$@"
)
if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec "$PYTHON" -m verl_profiling.integrations.verl.dry_run -m "$MAIN" "${arguments[@]}"
fi
if [[ ! -f $ASSETS/train.parquet ]]; then
    "$PYTHON" -m recipes.verl_grpo_cpu.make_assets "$ASSETS"
fi
exec "$PYTHON" -m "$MAIN" "${arguments[@]}"
