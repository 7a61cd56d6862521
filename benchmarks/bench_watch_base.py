"""What the watch takes from the loop's process, against an earlier commit.

Run: ``python benchmarks/bench_watch_base.py [--rounds 7]``. Each round runs the same loops with the
package of :data:`~results.BASE_COMMIT` and with this one, in processes of their own. The loops have
a clock of their own, and workers whose answers are made before, so that only the loop's process is
measured: CPU time of its thread for the hooks, and of the watch's work for the answers.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from results import BASE_COMMIT, ROOT, base_worktree, record, row

from verl_profiling import ProfilingCallback, clock
from verl_profiling.identity import ProcessId, WorkerIdentity

try:
    from verl_profiling.watch.process_sums import Begun, StageSums, WatchQuestion, WatchReading
except ImportError:  # the earlier commit has them under another name
    from verl_profiling.watch.sums import (  # type: ignore[import-not-found, no-redef]
        Begun,
        StageSums,
        WatchQuestion,
        WatchReading,
    )

STAGES = ("old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor")
BEGIN_NS, MS = 1_790_000_000 * 10**9, 10**6
READS = 8
LOOPS = {
    "5 workers, 10 steps of 0.1 s in a read": ({"actor": 4, "reward": 1}, 10),
    "1,024 workers, 20 steps in a read": ({"actor": 1_024}, 20),
    "a loop alone, 20 steps in a read": ({}, 20),
}


class Answering:
    """A worker that gives the same answer to every read, in a process of its own by name."""

    def __init__(self, role: str, rank: int) -> None:
        self._identity = WorkerIdentity(role=role, rank=rank)
        self._process = ProcessId(
            host=role, clock_domain=self._identity.clock_domain, pid=10**6 + rank
        )
        self.sums = StageSums(320)
        self._answers: dict[int, WatchReading] = {}

    def start_capture(self, request: Any) -> None:
        """Do nothing."""

    def read_watch(self, question: WatchQuestion) -> WatchReading | None:
        """Answer; an answer is made once for a number of steps: the first read has the start-up."""
        many = len(question.steps)
        if many and many not in self._answers:
            made = self.sums.read(self._identity, question)
            fields = {name: getattr(made, name) for name in made.__struct_fields__}
            self._answers[many] = WatchReading(**{**fields, "process": self._process})
        return self._answers.get(many)


def run_loop(name: str, folder: str) -> tuple[float, float]:
    """Run a loop; return the CPU time of a step (us): of its hooks, and of the read."""
    now = [BEGIN_NS]
    clock.now_ns = lambda: now[0]
    clock.follow = lambda: None
    roles, steps = LOOPS[name]
    callback = ProfilingCallback(
        {"enable": True, "save_path": folder, "schedule": {"steps": []}, "watch": {"enable": True}}
    )
    workers = [Answering(role, rank) for role, many in roles.items() for rank in range(many)]
    for role in roles:
        callback.add_workers(role, [each for each in workers if each._identity.role == role])
    watch: Any = callback.watch
    hooks, reads = [], []
    for number in range(READS):
        watch._most_ended = watch._next_s = float("inf")  # it is read here, on this thread
        (watch.sums.ended if hasattr(watch.sums, "ended") else watch.sums._ended).clear()
        now[0] = BEGIN_NS + 10**9
        begin = time.thread_time_ns()
        for step in range(1, steps + 1):
            run_step(callback, number * steps + step, now, [] if number else workers)
        middle = time.thread_time_ns()
        watch._is_due = True
        watch._run()
        hooks.append((middle - begin) / steps / 1e3)
        reads.append((time.thread_time_ns() - middle) / steps / 1e3)
    callback.on_train_end()
    return statistics.median(hooks[1:]), statistics.median(reads[1:])


def run_step(
    callback: ProfilingCallback, step: int, now: list[int], workers: list[Answering]
) -> None:
    """Run the stages of a step, in the loop and in workers."""
    callback.on_step_begin(step)
    callback.on_rollout_begin()
    now[0] += 30 * MS
    callback.on_rollout_end()
    for name in STAGES:
        with callback.stage(name):
            begin_ns = now[0]
            now[0] += 14 * MS
            for number, worker in enumerate(workers):
                worker.sums.end(Begun(name, begin_ns + 7 * number), now[0] - 37 * number % 10**5)
    callback.on_step_end()


def measured(name: str, package: str) -> tuple[float, float]:
    """Run a loop with one of the packages, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--loop", name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    hooks_us, read_us = json.loads(done.stdout)
    return hooks_us, read_us


def main() -> None:
    """Measure all loops, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--rounds", type=int, default=7, help="runs of each loop and package")
    parser.add_argument("--loop", choices=LOOPS, help="run this loop here, and print its times")
    given = parser.parse_args()
    if given.loop:
        logging.basicConfig(level=logging.WARNING)  # an answer that is refused costs nothing
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_loop(given.loop, folder)))
        return
    before_package = str(base_worktree())
    rows = []
    for name in LOOPS:
        pairs = [
            (measured(name, before_package), measured(name, str(ROOT))) for _ in range(given.rounds)
        ]
        for number, what in enumerate(("hooks", "read and judged")):
            base, mine = ([values[number] for values in each] for each in zip(*pairs, strict=True))
            before = f"{name}: {what}, {BASE_COMMIT}"
            rows.append(row(before, base, "us"))
            rows.append(row(f"{name}: {what}", mine, "us", against=before, of=base))
    method = f"CPU time of a step; {given.rounds} rounds in turn, medians of {READS - 1} reads."
    record("watch_base", rows, method=method, peers={})


if __name__ == "__main__":
    main()
