"""Adds logs of trajectories that are drawn by hand to a step folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawn_steps import BASE, S
from step_folders import build_step, read_events, rewrite, rewrite_worker

from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.trajectory_log import (
    LOG_SUFFIX,
    Block,
    Fact,
    LoopRecord,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
    write_log,
)
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult, HostClock, Request
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.step import Keep
from verl_profiling.timeline.merge import MergeResult, merge
from verl_profiling.tools.trajectories import OpenLog
from verl_profiling.trajectories.spans import start_log, stop_log

MS = 1_000_000


def add_log(folder: Path, log: TrajectoryLog, *, rank: int = 0, clock_ns: int = 0) -> Path:
    """Write the log of an agent-loop worker and enter the worker into the step's manifest."""
    host = f"agents{rank}"
    identity = WorkerIdentity(
        role="agent_loop", rank=rank, host=host, clock_domain=host, pid=100 + rank
    )
    path = folder / f"{identity.lane()}{LOG_SUFFIX}"
    size = write_log(path, log)
    worker = CaptureResult(
        identity=identity,
        tools=["trajectories"],
        artifacts=[
            Artifact(
                path=path.name,
                lane=identity.lane(),
                tool="trajectories",
                status="ok",
                begin_ns=log.begin_ns,
                end_ns=log.end_ns,
                bytes=size,
            )
        ],
    )
    manifest = read_manifest(folder)
    clock = HostClock(host=host, clock_domain=host, offset_ns=clock_ns, error_ns=1_000, samples=8)
    rewrite(folder, workers=[*manifest.workers, worker], clocks=[*manifest.clocks, clock])
    return path


class DrawnLog:
    """The log of an agent-loop worker, drawn in some unit of time after the step's begin."""

    def __init__(
        self,
        rank: int = 0,
        end: float = 10.0,
        *,
        begin_ns: int = BASE,
        unit_ns: int = S,
        clock_ns: int = 0,
        **what: object,
    ) -> None:
        self.rank = rank
        self.begin_ns = begin_ns
        self.clock_ns = clock_ns
        self._unit_ns = unit_ns
        self.log = TrajectoryLog(
            lane=f"agent_loop_rank{rank}",
            begin_ns=self.ns(0),
            end_ns=self.ns(end),
            loops=[LoopRecord(0, 7, "Main"), LoopRecord(1, 8, "Other")],
            **what,
        )

    def ns(self, at: float) -> int:
        """Return an instant on the clock of the log."""
        return self.begin_ns + round(at * self._unit_ns) + self.clock_ns

    def trajectory(
        self,
        begin: float,
        end: float,
        *spans: tuple[str, float, float],
        group: str = "g",
        sample: Any = ...,
        status: str = "done",
        loop: int = 0,
        error: str = "",
        **facts: Fact,
    ) -> int:
        """Add a trajectory with its spans; return its number,
        which is its sample unless one is given.
        """
        number = len(self.log.trajectories)
        sample = number if sample is ... else sample
        record = TrajectoryRecord(
            number, group, sample, self.ns(begin), self.ns(end), status, loop, error, facts
        )
        self.log.trajectories.append(record)
        for span in spans:
            self.span(*span, number)
        return number

    def span(
        self,
        name: str,
        begin: float,
        end: float,
        trajectory: int = -1,
        parent: int = -1,
        *,
        request: str = "",
        loop: int = 0,
        failed: bool = False,
        still_open: bool = False,
        **facts: Fact,
    ) -> int:
        number = len(self.log.spans)
        times = self.ns(begin), self.ns(end)
        self.log.spans.append(
            SpanRecord(
                number,
                trajectory,
                parent,
                name,
                *times,
                7,
                loop,
                failed,
                request,
                facts,
                still_open,
            )
        )
        return number

    def block(
        self, begin: float, end: float, span: int = -1, function: str = "", loop: int = 0
    ) -> None:
        self.log.blocks.append(Block(loop, self.ns(begin), self.ns(end), span, "Task-1", function))

    def add_to(self, folder: Path) -> Path:
        """Add the log to a step; return its path."""
        return add_log(folder, self.log, rank=self.rank, clock_ns=self.clock_ns)


class Drawn(DrawnLog):
    """A log that is drawn in milliseconds, and a real step that it is added to."""

    def __init__(self, run: Path, clock_ms: float = 0) -> None:
        self.folder = build_step(run)
        begin_ns = read_manifest(self.folder).begin_ns
        super().__init__(end=100, begin_ns=begin_ns, unit_ns=MS, clock_ns=round(clock_ms * MS))

    def requests(self, *requests: tuple[str, float, float]) -> None:
        """Give the engine requests, on the controller's clock."""
        begin = self.begin_ns
        made = [
            Request(
                replica=0,
                id=name,
                begin_ns=begin + round(a * MS),
                first_token_ns=begin + round((a + b) / 2 * MS),
                end_ns=begin + round(b * MS),
                prompt_tokens=3,
                response_tokens=9,
            )
            for name, a, b in requests
        ]
        rewrite_worker(self.folder, "rollout0", requests=made)

    def merged(self, keep: Keep | None = None, **options: int) -> tuple[MergeResult, Timeline]:
        self.add_to(self.folder)
        (inputs,) = find_steps(self.folder)
        result = merge(inputs, keep=keep, **options)
        return result, Timeline(result.path, self.begin_ns)


class Timeline:
    """The events of a timeline, with the rows of its trajectories by name."""

    def __init__(self, path: Path, begin_ns: int) -> None:
        self.events = read_events(path)
        self._shift_us = (
            begin_ns - json.loads(gzip.decompress(path.read_bytes()))["baseTimeNanoseconds"]
        ) / 1000
        names = {e["args"]["name"]: e["pid"] for e in self.events if e["name"] == "process_name"}
        self.pid = names.get("agent_loop_rank0 trajectories")
        self.names = names
        rows = [e for e in self.events if e["name"] == "thread_name" and e["pid"] == self.pid]
        self.rows = {e["tid"]: e["args"]["name"] for e in rows}

    def of(self, category: str) -> list[dict]:
        return [event for event in self.events if event.get("cat") == category]

    def shown(self, category: str) -> list[tuple[str, str, float, float]]:
        """Return row, name, begin and end (ms of the step) of the slices of a category,
        by row and time.
        """
        found = [
            (self.rows[e["tid"]], e["name"], self.ms(e["ts"]), self.ms(e["ts"] + e["dur"]))
            for e in self.of(category)
        ]
        return sorted(found, key=lambda one: (one[0], one[2]))

    def counter(self, name: str) -> list[tuple[float, float]]:
        """Return instants (ms of the step) and values of a counter, in order."""
        found = [
            e
            for e in self.events
            if e["ph"] == "C" and f"{e['name']} {next(iter(e['args']))}" == name
        ]
        return sorted((self.ms(e["ts"]), next(iter(e["args"].values()))) for e in found)

    def ms(self, ts: float) -> float:
        return round((ts - self._shift_us) / 1000, 6)


def only(log: TrajectoryLog) -> TrajectoryRecord:
    """Return the only trajectory of a log."""
    (trajectory,) = log.trajectories
    return trajectory


def recorded(body: Callable[[], object], most: int = 1_000) -> TrajectoryLog:
    """Return what this process recorded of trajectories while ``body`` ran."""
    log = OpenLog(most)
    start_log(log)
    try:
        body()
    finally:
        stop_log(log)
        log.end()
        found = log.close("here")
    return found
