"""What the watch costs: the hooks with it on and off, a stage that it keeps, and a read of 1,024
workers.

Run: ``python benchmarks/bench_watch.py``. The first two are instructions under callgrind, which no
other work on the machine changes; the read is CPU time, without what a transport takes.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import bench_hooks
from bench_instructions import FEW, MANY, begin_counting, count, measured
from results import record, row

from verl_profiling import ProfilingCallback, span, trajectory
from verl_profiling.capture.stage_spans import SpanLog, Stage
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.trajectories.spans import keep_trajectories, total_spans
from verl_profiling.watch.process_sums import (
    Begun,
    SpanSums,
    StageSums,
    WatchQuestion,
    WatchReading,
)

WORKERS, STEPS, ROUNDS = 1_024, 20, 5
STAGES = ("old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor")
COUNTED = {
    "the four hooks of a step that is not captured, watch off": "",
    "the same with its summary, watch on": "the four hooks of a step that is not captured, "
    "watch off",
    "a stage, watch off": "",
    "a stage that is kept": "a stage, watch off",
    "a stage inside of it": "a stage, watch off",
    "a span that nobody records, watch off": "",
    "a span that is added up": "a span that nobody records, watch off",
    "a trajectory that nobody records, watch off": "",
    "a trajectory that is added up": "a trajectory that nobody records, watch off",
}
"""What is counted, in the order of :func:`count_all`, and with what it is compared."""


class Owner:
    """An owner of stages."""

    def __init__(self, sums: StageSums | None) -> None:
        self.sink = None if sums is None else SpanLog(self, sums, None)

    def entering(self) -> Callable[[], None]:
        """Return what enters and leaves a stage of it."""
        stage = Stage(self, "update_actor")

        def enter() -> None:
            with stage:
                pass

        return enter


def count_all() -> None:
    """Be the process whose instructions are counted."""
    begin_counting()
    for watch in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            schedule = {"steps": [10**9]}
            config = {
                "enable": True,
                "save_path": folder,
                "schedule": schedule,
                "watch": {"enable": watch},
            }
            callback = ProfilingCallback(config)
            count(lambda callback=callback: bench_hooks.hooks_of_a_step(callback))  # type: ignore[misc]
            callback.on_train_end()
    count(Owner(None).entering())
    owner = Owner(StageSums(3_200))
    count(owner.entering())
    with Stage(owner, "outer"):
        count(owner.entering())
    keep_trajectories()
    count(a_span)
    total_spans(SpanSums())
    count(a_span)
    total_spans(None)
    count(a_trajectory)
    total_spans(SpanSums())
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
    """A worker of which only its stages are asked, in a process of its own by name.

    Attributes:
        bytes: Length of its answer.
        making_ns: CPU time to make and pack it, which is the worker's.
        unpacking_ns: CPU time to unpack it, which a transport spends in the loop's process.
    """

    def __init__(self, rank: int) -> None:
        self._identity = WorkerIdentity(role="actor", rank=rank)
        self._process = ProcessId(
            host="fake", clock_domain=self._identity.clock_domain, pid=10**6 + rank
        )
        self._sums = StageSums(STEPS * len(STAGES))
        self.bytes = self.making_ns = self.unpacking_ns = 0

    def start_capture(self, request: Any) -> None:
        """Do nothing."""

    def work(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Have run a stage."""
        self._sums.end(Begun(name, begin_ns), end_ns)

    def read_watch(self, question: WatchQuestion) -> WatchReading:
        """Answer, as through a transport."""
        begin = time.thread_time_ns()
        found = self._sums.read(self._identity, question)
        fields = {name: getattr(found, name) for name in found.__struct_fields__}
        carried = pickle.dumps(WatchReading(**{**fields, "process": self._process}))
        made = time.thread_time_ns()
        answer: WatchReading = pickle.loads(carried)
        if question.steps:  # the last call, at the end of the training, asks for none
            self.unpacking_ns = time.thread_time_ns() - made
            self.bytes, self.making_ns = len(carried), made - begin
        return answer


class Read(NamedTuple):
    """What a read of all workers took, CPU time in milliseconds.

    Attributes:
        making: The answers, in the workers.
        unpacking: The answers, in the loop's process.
        thread: On the watch's thread: asking, taking the answers, and the summaries of the steps,
            without the two before.
        longest: The longest hook, on the loop's thread.
        bytes: Length of an answer.
    """

    making: float
    unpacking: float
    thread: float
    longest: float
    bytes: int


def read_of_many() -> Read:
    """Run steps, and have all workers asked when they have ended."""
    fakes = [Fake(rank) for rank in range(WORKERS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("verl_profiling.controller.watch.LEAST_PAUSE_S", 1e6),
    ):
        watch = {"enable": True, "every": STEPS}
        callback = ProfilingCallback(
            {"enable": True, "save_path": folder, "schedule": {"steps": []}, "watch": watch}
        )
        callback.add_workers("actor", fakes)
        assert callback.watch is not None
        whole: list[StepSummary] = []
        ended: list[int] = []
        callback.watch.listeners.append(whole.append)
        callback.watch.listeners.append(lambda summary: ended.append(time.thread_time_ns()))
        hooks = []
        for step in range(1, STEPS + 1):
            callback.on_step_begin(step)
            run_stages(callback, fakes)
            begin = time.thread_time_ns()
            callback.on_step_end()
            hooks.append((time.thread_time_ns() - begin) / 1e6)
        while len(whole) < STEPS:
            time.sleep(0.01)
        callback.on_train_end()
    assert len(whole[0].workers) == WORKERS
    making = sum(fake.making_ns for fake in fakes) / 1e6
    unpacking = sum(fake.unpacking_ns for fake in fakes) / 1e6
    own = ended[STEPS - 1] / 1e6 - making - unpacking
    return Read(making, unpacking, own, max(hooks), fakes[0].bytes)


def run_stages(callback: ProfilingCallback, fakes: Sequence[Fake]) -> None:
    """Let a step's stages take half a millisecond each, in the loop and in the workers."""
    for name in STAGES:
        with callback.stage(name):
            begin_ns = time.time_ns()
            time.sleep(0.0005)
            end_ns = time.time_ns()
        for number, fake in enumerate(fakes):
            fake.work(name, begin_ns, end_ns - number)


def main() -> None:
    """Count and measure, and write the table."""
    rows = []
    if shutil.which("valgrind") is None:
        print("SKIPPED: instructions are not counted, because valgrind is not installed")
    else:
        counts = measured(__file__, len(COUNTED))
        found = {name: each.instructions for name, each in zip(COUNTED, counts, strict=False)}
        for name, against in COUNTED.items():
            of = [found[against]] if against else []
            rows.append(row(name, [found[name]], "instructions", against=against, of=of))
    reads = [read_of_many() for _ in range(ROUNDS)]
    rows += [
        row(f"an answer: {STEPS * len(STAGES)} stages of {STEPS} steps", [reads[0].bytes], "bytes"),
        row("making it, in a worker", [1e3 * read.making / WORKERS for read in reads], "us"),
        row(f"unpacking those of {WORKERS:,} workers", [read.unpacking for read in reads], "ms"),
        row(
            f"{STEPS} summaries from them, on the watch's thread",
            [read.thread for read in reads],
            "ms",
        ),
        row("the longest hook meanwhile", [read.longest for read in reads], "ms"),
    ]
    method = (
        f"Instructions of one call, of {MANY - FEW:,} under callgrind; CPU time of {ROUNDS} rounds."
    )
    record("watch", rows, method=method, peers={})


if __name__ == "__main__":
    if sys.argv[1:] == ["count"]:
        count_all()
    else:
        main()
