#!/usr/bin/env bash
# Metadata added to torch's profiler while its schedule waits is dropped without a word.
#
# Version:   torch 2.13.0
# Behaviour: `add_metadata_json` in a `wait` step of `schedule(wait=1, warmup=1, active=1)` returns as usual, and no trace
#            has the key. In `warmup` and active steps it lands in the trace of that cycle alone. `preset_metadata_json`
#            lands in the trace of each cycle. So a trainer that notes its step number at the begin of the cycle loses it.
# Seen:      torch 2.13.0: cycle 1 has steps [1, 2], cycle 2 has steps [4, 5]; the steps that wait, 0 and 3, are in neither
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
env/bin/python - <<'PYTHON' 2>errors.txt || { cat errors.txt >&2; exit 1; }
import json

import torch

cycles = []


def keep(profiler):
    profiler.export_chrome_trace("trace.json")
    trace = json.load(open("trace.json"))
    assert trace["preset"] == "in each cycle", trace.keys()
    cycles.append(sorted(int(key[5:]) for key in trace if key.startswith("step_")))


profiler = torch.profiler.profile(
    activities=[torch.profiler.ProfilerActivity.CPU],
    schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2),
    on_trace_ready=keep,
)
profiler.preset_metadata_json("preset", '"in each cycle"')
profiler.start()
for step in range(6):
    profiler.add_metadata_json(f"step_{step}", '"noted"')
    torch.ones(2) + 1
    profiler.step()
profiler.stop()
assert cycles == [[1, 2], [4, 5]], cycles
print(
    f"torch {torch.__version__}: cycle 1 has steps {cycles[0]}, cycle 2 has steps {cycles[1]}; "
    "the steps that wait, 0 and 3, are in neither"
)
PYTHON
