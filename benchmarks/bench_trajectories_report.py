"""Reports and critical paths of large rollouts, against those of an earlier commit, in turn.

Run: ``python benchmarks/bench_trajectories_report.py [--runs 7] [--trajectories 10000 30000]``

A step is drawn: 8 processes with 256 trajectories at once each, of 10 spans, three of them nested.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from results import BASE, BASE_COMMIT, ROOT, base_worktree, record, row

from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.files.trajectory_log import (
    LOG_SUFFIX,
    Fact,
    LoopRecord,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
    write_log,
)
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import MANIFEST_NAME, Artifact, CaptureResult, Manifest, StageSpan

BEGIN_NS, MS = 1_790_000_000 * 10**9, 10**6
PROCESSES, AT_ONCE, TURNS = 8, 256, 3
PROGRAM = """
import contextlib, io, json, resource, sys
from verl_profiling.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main([sys.argv[1], sys.argv[2], "--json"])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


def trajectory(log: TrajectoryLog, number: int, begin_ns: int, dice: random.Random) -> int:
    """Add a trajectory with ten spans to a log; return its end (ns)."""
    now_ns = begin_ns

    def add(name: str, parent: int, begin_ns: int, took_ns: int) -> int:
        times = (begin_ns, begin_ns + took_ns)
        log.spans.append(
            SpanRecord(len(log.spans), number, parent, name, *times, 7, 0, False, "", {})
        )
        return len(log.spans) - 1

    took_ns = dice.randrange(5 * MS, 20 * MS)
    add("environment:start", -1, now_ns, took_ns)
    now_ns += took_ns + dice.randrange(200_000)
    for _ in range(TURNS):
        took_ns = dice.randrange(20 * MS, 120 * MS)
        add("generate", -1, now_ns, took_ns)
        now_ns += took_ns + dice.randrange(200_000)
        took_ns = dice.randrange(5 * MS, 60 * MS)
        around = add("tool:search", -1, now_ns, took_ns)
        add("wait:server", around, now_ns + took_ns // 4, took_ns // 2)
        now_ns += took_ns + dice.randrange(200_000)
    facts: dict[str, Fact] = {"validate": False, "turns": TURNS}
    one = TrajectoryRecord(
        number, f"g{log.lane}.{number // 8}", number % 8, begin_ns, now_ns, "done", 0, "", facts
    )
    log.trajectories.append(one)
    return now_ns


def draw(folder: Path, trajectories: int) -> None:
    """Write a step with so many trajectories."""
    dice, workers, last_ns = random.Random(0), list[CaptureResult](), 0
    for rank in range(PROCESSES):
        who = WorkerIdentity(role="agent_loop", rank=rank)
        log = TrajectoryLog(lane=who.lane(), begin_ns=BEGIN_NS, loops=[LoopRecord(0, 7, "Main")])
        seats = [BEGIN_NS + dice.randrange(50 * MS) for _ in range(AT_ONCE)]
        for number in range(trajectories // PROCESSES):
            seat = number % AT_ONCE
            seats[seat] = trajectory(log, number, seats[seat] + dice.randrange(MS), dice)
        log.end_ns = max(seats) + MS
        last_ns = max(last_ns, log.end_ns)
        path = folder / f"{log.lane}{LOG_SUFFIX}"
        artifact = Artifact(
            path=path.name,
            lane=log.lane,
            tool="trajectories",
            status="ok",
            begin_ns=BEGIN_NS,
            end_ns=log.end_ns,
            bytes=write_log(path, log),
        )
        workers.append(CaptureResult(identity=who, tools=["trajectories"], artifacts=[artifact]))
    stages = [
        StageSpan("rollout", BEGIN_NS - 5 * MS, last_ns),
        StageSpan("update_actor", last_ns, last_ns + 2_000 * MS),
    ]
    manifest = Manifest(
        run_id="drawn",
        capture_id="drawn-1",
        step=1,
        steps=[1],
        begin_ns=BEGIN_NS - 10 * MS,
        end_ns=last_ns + 2_050 * MS,
        controller=WorkerIdentity(role="controller"),
        stages=stages,
        workers=workers,
    )
    write_json_atomically(folder / MANIFEST_NAME, manifest)


def measure(package: Path, command: str, step: Path) -> tuple[float, float]:
    """Return CPU seconds and peak MB of a command in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, str(step)],
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=step,  # of two packages, Python would import the one in its folder
        capture_output=True,
        text=True,
        check=True,
    )
    cpu_s, peak_mb = json.loads(done.stdout.splitlines()[-1])
    return cpu_s, peak_mb


def main() -> None:
    """Draw the steps, run both commits in turn, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument("--base", type=Path, default=BASE, help=f"a worktree of {BASE_COMMIT}")
    arguments = parser.parse_args()
    base = base_worktree(arguments.base)
    rows = []
    for many in arguments.trajectories:
        with tempfile.TemporaryDirectory() as scratch:
            step = Path(scratch)
            draw(step, many)
            for command in ("report", "what-if"):
                sides = (base, ROOT)
                rounds = range(arguments.runs)
                found = [[measure(side, command, step) for side in sides] for _ in rounds]
                before, new = ([one[side] for one in found] for side in (0, 1))
                for unit, at in (("CPU s", 0), ("MB", 1)):
                    what = f"`{command}`, {many:,} trajectories"
                    old, values = ([one[at] for one in side] for side in (before, new))
                    against = f"{what}, commit `{BASE_COMMIT}`"
                    rows.append(row(against, old, unit))
                    rows.append(row(what, values, unit, against=against, of=old))
    method = (
        f"Drawn steps of trajectories with 10 spans each, in {PROCESSES} processes. "
        f"{arguments.runs} runs each, in turn, in fresh processes, imports included."
    )
    record("trajectories_report", rows, method=method, peers={})


if __name__ == "__main__":
    main()
