#!/usr/bin/env bash
# FSDP on Ascend NPUs, each profiled step as a whole. Further arguments are Hydra overrides.
#   ROLLOUT=sglang   another engine
#   PYTHON=...       interpreter of verl's environment
#   DRY_RUN=1        print the command and check its configuration only
set -euo pipefail

ROLLOUT=${ROLLOUT:-vllm}
PYTHON=${PYTHON:-python3}
module=verl.trainer.main_ppo
if [[ ${DRY_RUN:-0} == 1 ]]; then
    module=verl_profiling.integrations.verl.dry_run
fi
exec "$PYTHON" -m "$module" --config-dir "$(cd "$(dirname "$0")" && pwd)" --config-name grpo_npu \
    actor_rollout_ref.rollout.name="$ROLLOUT" "$@"
