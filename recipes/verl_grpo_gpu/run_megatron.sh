#!/usr/bin/env bash
# Megatron with TP=2 and PP=2, and vLLM; one rank of each pipeline stage. Variables as in run_e2e.sh.
set -euo pipefail

exec "$(dirname "$0")/run_e2e.sh" model_engine=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 \
    +profiling.roles.actor.ranks=one_per_pp_stage \
    "$@"
