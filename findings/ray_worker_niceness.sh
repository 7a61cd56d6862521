#!/usr/bin/env bash
# Ray adds 15 to the niceness of each worker, so whatever else computes on a node takes the CPUs of the training workers.
#
# Version:   ray 2.60.0
# Behaviour: The core worker calls `nice(RAY_worker_niceness)`, 15 by default, which adds to what it inherits of the
#            raylet, and the raylet of the program that started it. So a worker has neither the niceness of its driver nor
#            a fixed one, and threads that libraries start later have the worker's. On a CPU that an actor shares with its
#            driver, or with a server in the same container, the actor gets some 3%. RAY_worker_niceness=0 in the
#            environment of the driver, or of `ray start`, switches it off.
# Seen:      ray 2.60.0: a driver at 0 has an actor at 15, one at 3 an actor at 18; with RAY_worker_niceness=0, one at 3 an
#            actor at 3; of a CPU shared with its driver, the actor at 15 got 4%
# Fails if the niceness differs, or the actor gets more than 20%.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet ray==2.60.0
cd "$folder"
cat > driver.py <<'PYTHON'
import os
import sys
import time

import ray


def computed(seconds):
    begin, end = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return time.process_time() - begin


@ray.remote(num_cpus=0)
class Actor:
    def niceness(self):
        return os.nice(0)

    def computed(self, cpu, seconds):
        os.sched_setaffinity(0, {cpu})
        return computed(seconds)


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
actor = Actor.remote()
print(os.nice(0), ray.get(actor.niceness.remote()))
if "share" in sys.argv:
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    mine = actor.computed.remote(cpu, 5)
    own = computed(5)
    share = ray.get(mine) / (ray.get(mine) + own)
    print(f"{share:.0%}")
    assert share < 0.2, share
PYTHON
run() { env "$1" nice -n "$2" env/bin/python driver.py "$folder/$3" ${4:+"$4"} 2>errors.txt || { cat errors.txt >&2; exit 1; }; }
own=$(nice)
added=$(run RAY_x=1 3 a)
off=$(run RAY_worker_niceness=0 3 b)
{ read -r plain; read -r share; } < <(run RAY_x=1 0 c share)
echo "ray 2.60.0: driver and actor at $plain, at $added, and at $off with RAY_worker_niceness=0; the actor got $share of a CPU"
most() { echo $(($1 < 19 ? $1 : 19)); }
[[ $plain == "$own $(most $((own + 15)))" ]]
[[ $added == "$(most $((own + 3))) $(most $((own + 18)))" ]]
[[ $off == "$(most $((own + 3))) $(most $((own + 3)))" ]]
