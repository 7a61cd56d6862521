#!/usr/bin/env bash
# Ray on the nodes of a job: srun --ntasks-per-node=1 recipes/slurm/ray.sh MODULE [OVERRIDES...]
# The first node runs the loop; the others serve until it has ended, and Slurm ends them.
set -euo pipefail
: "${RAY_AUTH_TOKEN:?export RAY_AUTH_TOKEN=\$(openssl rand -hex 32) before srun: the nodes share it}"
export RAY_AUTH_MODE=token
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS=$head:$((30000 + SLURM_JOB_ID % 10000))
if ((SLURM_PROCID > 0)); then
    until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do sleep 1; done
    exec ray start --address "$RAY_ADDRESS" --block
fi
ray start --head --port "${RAY_ADDRESS#*:}" --include-dashboard=false ${RAY_CPUS:+--num-cpus "$RAY_CPUS"} --block &
trap 'kill %1; wait' EXIT
until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do sleep 1; done
python -m "$@" "profiling.run_id=slurm_$SLURM_JOB_ID"
