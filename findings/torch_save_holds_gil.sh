#!/usr/bin/env bash
# torch's profiler holds the GIL while it writes a trace, so a thread that exports lets training stand still all the same.
#
# Version:   torch 2.13.0
# Behaviour: `export_chrome_trace` and `kineto_results.save` are native, and touch no Python object while they write, but
#            they do not release the GIL (pytorch/pytorch#191699 proposes it). While a thread exports, no other one runs a
#            line of Python, as at `stop()`, so the pause only moves.
# Seen:      torch 2.13.0: another thread ran 1 times while the trace was written, and 510 times in as long a sleep
# Fails if another thread runs more than a fifth as often while torch writes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
env/bin/python - <<'PYTHON' 2>errors.txt || { cat errors.txt >&2; exit 1; }
import threading
import time

import torch

profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
profiler.start()
for _ in range(40_000):
    torch.ones(2) + 1
profiler.stop()


def turns_of_another_thread(work):
    """Return how often a thread that sleeps for a millisecond runs beside work, and the work's seconds."""
    turns, ended = 0, threading.Event()

    def count():
        nonlocal turns
        while not ended.is_set():
            time.sleep(0.001)
            turns += not ended.is_set()

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.monotonic()
    work()
    took = time.monotonic() - begun
    ended.set()
    thread.join()
    return turns, took


held, took = turns_of_another_thread(lambda: profiler.profiler.kineto_results.save("trace.json"))
free, _ = turns_of_another_thread(lambda: time.sleep(took))
print(
    f"torch {torch.__version__}: another thread ran {held} times while the trace was written, "
    f"and {free} times in as long a sleep"
)
assert 5 * held < free, (held, free)
PYTHON
