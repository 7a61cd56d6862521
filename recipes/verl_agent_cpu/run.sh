#!/usr/bin/env bash
# A multi-turn agent loop with tools in real verl, on CPU. Variables and arguments as in ../verl_grpo_cpu/run.sh.
set -euo pipefail

folder=$(cd "$(dirname "$0")" && pwd)
plugins=recipes.verl_grpo_cpu.cpu_platform,verl_profiling.integrations.verl,recipes.verl_agent_cpu.chosen_calls
export PLUGINS=${PLUGINS:-$plugins}
exec "$folder/../verl_grpo_cpu/run.sh" \
    "hydra.searchpath=[pkg://verl_profiling.conf,file://$folder]" +agent=cpu "agent_folder=$folder" "$@"
