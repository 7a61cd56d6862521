#!/usr/bin/env bash
# verl's asynchronous trainers, on CPU. Variables and arguments as in ../verl_grpo_cpu/run.sh.
#   TRAINER=...  one_step_off (the default) or fully_async
set -euo pipefail

folder=$(cd "$(dirname "$0")" && pwd)
TRAINER=${TRAINER:-one_step_off}
case $TRAINER in
    one_step_off) MAIN=verl.experimental.one_step_off_policy.main_ppo ;;
    fully_async) MAIN=verl.experimental.fully_async_policy.fully_async_main ;;
    *) echo "TRAINER=$TRAINER: write one_step_off or fully_async" >&2; exit 2 ;;
esac
export MAIN
exec "$folder/../verl_grpo_cpu/run.sh" \
    "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_profiling.conf,file://$folder]" \
    "+asynchronous=$TRAINER" "$@"
