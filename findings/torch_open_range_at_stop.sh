#!/usr/bin/env bash
# A record_function range that is open when a profiler stops is cut there, and the next capture does not have it.
#
# Version:   torch 2.13.0
# Behaviour: The first capture shows the range with the stop as its end, without a mark that it went on. A second
#            capture that starts while the range is still open has no event of it, not even its end. So the time of a
#            long range between two captures looks as if it had no name.
# Seen:      torch 2.13.0: the first capture has the range, cut at its stop; the second has none
# Fails if the range is absent from the first capture, or present in the second.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
env/bin/python - <<'PYTHON' 2>errors.txt || { cat errors.txt >&2; exit 1; }
import json
import time

import torch


def capture():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def ranges(profiler, name):
    profiler.export_chrome_trace(name)
    events = json.load(open(name))["traceEvents"]
    return [event["dur"] for event in events if event.get("name") == "update_actor"], len(events)


first, second = capture(), capture()
first.start()
stage = torch.profiler.record_function("update_actor")
stage.__enter__()
torch.ones(2) + 1
time.sleep(0.1)
first.stop()
time.sleep(0.4)
second.start()
torch.ones(3) + 1
stage.__exit__(None, None, None)
torch.ones(4) + 1
second.stop()
durations, _ = ranges(first, "first.json")
others, events = ranges(second, "second.json")
assert len(durations) == 1, durations
assert durations[0] < 400_000, f"the range is not cut at the stop: {durations[0]} us"
assert others == [], others
assert events > 5, events
print(f"torch {torch.__version__}: the first capture has the range, cut at its stop; the second has none")
PYTHON
