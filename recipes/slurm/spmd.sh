#!/usr/bin/env bash
# One program on every rank: srun --ntasks-per-node=1 recipes/slurm/spmd.sh RANKS_PER_NODE MODULE [OVERRIDES...]
set -euo pipefail
ranks=$1
shift
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 10000))" -m "$@" "profiling.run_id=slurm_$SLURM_JOB_ID"
