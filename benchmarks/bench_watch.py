"""What the watch costs: the hooks with it on and off, a stage that it keeps, and a read of 1,024 workers.

Run: ``python benchmarks/bench_watch.py [--record]``. The first two are instructions under callgrind, which no
other work on the machine changes; the read is CPU time of the loop's thread, without what a transport takes.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import bench_hooks
from bench_instructions import FEW, MANY, count, measured
from results import record, row

from verl_profiling import ProfilingCallback, span, trajectory
from verl_profiling.capture.stage import Stage
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.trajectories.spans import keep_trajectories, total_spans
from verl_profiling.watch.reading import WatchReading, read_ring
from verl_profiling.watch.ring import StageRing
from verl_profiling.watch.span_tally import SpanTally

WORKERS, STEPS, ROUNDS = 1_024, 20, 5
STAGES = ("old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor")
COUNTED = (
    *("hooks, off", "hooks, on", "idle stage", "stage that is kept", "stage inside of one"),
    *("span, off", "span that is added up", "trajectory, off", "trajectory that is added up"),
)
CODE = (
    "verl_profiling/watch/ring.py",
    "verl_profiling/watch/span_tally.py",
    "verl_profiling/trajectories/spans.py",
    "verl_profiling/controller/watch.py",
    "verl_profiling/controller/callback.py",
    "verl_profiling/controller/controller.py",
)


class Owner:
    """An owner of stages."""

    def __init__(self, ring: StageRing | None) -> None:
        self.sink = ring

    def entering(self) -> Callable[[], None]:
        """Return what enters and leaves a stage of it."""
        stage = Stage(self, "update_actor")

        def enter() -> None:
            with stage:
                pass

        return enter


def count_all() -> None:
    """Be the process whose instructions are counted."""
    for watch in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            schedule = {"steps": [10**9]}
            config = {"enable": True, "save_path": folder, "schedule": schedule, "watch": {"enable": watch}}
            callback = ProfilingCallback(config)
            count(lambda callback=callback: bench_hooks.hooks_of_a_step(callback))  # type: ignore[misc]
            callback.on_train_end()
    count(Owner(None).entering())
    owner = Owner(StageRing(3_200))
    count(owner.entering())
    with Stage(owner, "outer"):
        count(owner.entering())
    keep_trajectories()
    count(a_span)
    total_spans(SpanTally())
    count(a_span)
    total_spans(None)
    count(a_trajectory)
    total_spans(SpanTally())
    count(a_trajectory)


def a_span() -> None:
    """Enter a span."""
    with span("tool:search"):
        pass


def a_trajectory() -> None:
    """Enter a trajectory."""
    with trajectory(group="a", sample=1):
        pass


class Fake:
    """A worker of which only its ring is asked, in a process of its own by name."""

    def __init__(self, rank: int) -> None:
        self._identity = WorkerIdentity(role="actor", rank=rank)
        self._process = ProcessId(host="fake", clock_domain=self._identity.clock_domain, pid=10**6 + rank)
        self._ring = StageRing(STEPS * len(STAGES))
        self.bytes = 0

    def start_capture(self, request: Any) -> None:
        """Do nothing."""

    def work(self, begin_ns: int, end_ns: int) -> None:
        """Have run each stage once in a step."""
        part_ns = (end_ns - begin_ns) // len(STAGES)
        for place, name in enumerate(STAGES):
            self._ring.add(name, begin_ns + place * part_ns, begin_ns + (place + 1) * part_ns)

    def read_watch(self, since_ns: int) -> WatchReading:
        """Answer as a worker does, through what a transport would carry."""
        found = read_ring(self._ring, self._identity, since_ns)
        carried = pickle.dumps(WatchReading(**{**_fields(found), "process": self._process}))
        self.bytes = len(carried)
        reading: WatchReading = pickle.loads(carried)
        return reading


def _fields(reading: WatchReading) -> dict[str, Any]:
    return {name: getattr(reading, name) for name in reading.__struct_fields__}


def read_of_many() -> tuple[list[float], int]:
    """Return the CPU milliseconds of a read with the accounts of its steps, and the bytes of an answer."""
    found = []
    for _ in range(ROUNDS):
        fakes = [Fake(rank) for rank in range(WORKERS)]
        with tempfile.TemporaryDirectory() as folder:
            watch = {"enable": True, "every": 10**6}
            callback = ProfilingCallback(
                {"enable": True, "save_path": folder, "schedule": {"steps": [10**9]}, "watch": watch}
            )
            callback.add_workers("actor", fakes)
            assert callback.watch is not None
            for step in range(STEPS):
                begin_ns = time.time_ns()
                callback.on_step_begin(step)
                time.sleep(0.002)
                callback.on_step_end()
                for fake in fakes:
                    fake.work(begin_ns, begin_ns + 2_000_000)
            callback.watch.read_soon()
            callback.on_step_begin(STEPS)
            begin = time.thread_time_ns()
            callback.on_step_end()
            found.append((time.thread_time_ns() - begin) / 1e6)
            assert len(callback.watch.accounts[0].workers) == WORKERS
            callback.on_train_end()
    return found, fakes[0].bytes


def main() -> int:
    """Print what was counted and measured; return the exit code."""
    rows = []
    if shutil.which("valgrind") is None:
        print("SKIPPED: instructions are not counted, because valgrind is not installed")
    else:
        for name, each in zip(COUNTED, measured(__file__, len(COUNTED)), strict=False):
            print(f"  {name:26}{each.instructions:10.0f} instructions {each.system_calls:6.2f} system calls")
            rows.append(row(f"{name} (instructions)", [each.instructions], ""))
    milliseconds, size = read_of_many()
    median = sorted(milliseconds)[ROUNDS // 2]
    print(f"  a read of {WORKERS:,} workers, and {STEPS} accounts: {median:.0f} ms of CPU time")
    print(f"  an answer of {STEPS * len(STAGES)} stages: {size:,} bytes")
    rows += [row("a read of 1,024 workers", milliseconds, "ms"), row("an answer (bytes)", [size], "")]
    if sys.argv[1:] == ["--record"]:
        method = f"Instructions of one call, of {MANY - FEW:,} under callgrind; CPU time, {ROUNDS} rounds."
        record("watch", rows, method=method, code=CODE, peers={})
    return 0


if __name__ == "__main__":
    sys.exit(count_all() if sys.argv[1:] == ["count"] else main())
