#!/usr/bin/env bash
# On gloo, a reduce-scatter is called `gloo:all_reduce` in traces and in the flight recorder, which never sees it end.
#
# Version:   torch 2.13.0, backend gloo, two ranks
# Behaviour: `reduce_scatter_tensor`, with which FSDP2 reduces its gradients, is shown on gloo's thread as `gloo:all_reduce`,
#            and as that in torch's flight recorder. Whoever sums bytes by the name of the collective counts twice as many
#            as a reduce-scatter moves. The recorder's entries stay in the state `scheduled`, with no time of a start or an
#            end, also when the collective is over; only `pg_status.last_completed_collective` tells.
# Seen:      torch 2.13.0: trace ['gloo:all_reduce', 'gloo:barrier']; recorder gloo:all_reduce, scheduled, but completed
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
cat > ranks.py <<'PYTHON'
import json
import os
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

rank = int(sys.argv[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=2)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(8))
    dist.barrier()
profiler.export_chrome_trace(f"rank{rank}.json")
if rank == 0:
    events = json.load(open("rank0.json"))["traceEvents"]
    names = sorted({event["name"] for event in events if event.get("name", "").startswith("gloo:")})
    record = json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    entry = record["entries"][0]
    completed = int(record["pg_status"]["0"]["last_completed_collective"])
    assert names == ["gloo:all_reduce", "gloo:barrier"], names
    assert (entry["profiling_name"], entry["state"]) == ("gloo:all_reduce", "scheduled"), entry
    assert completed >= entry["collective_seq_id"], record["pg_status"]
    print(
        f"torch {torch.__version__}: trace {names}; recorder {entry['profiling_name']}, {entry['state']}, "
        "but completed"
    )
dist.barrier()
dist.destroy_process_group()
PYTHON
port=$((20000 + RANDOM % 20000))
export OMP_NUM_THREADS=1
env/bin/python ranks.py 1 "$port" 2>/dev/null &
env/bin/python ranks.py 0 "$port" 2>/dev/null
wait $!
