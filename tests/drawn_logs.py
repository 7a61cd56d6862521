"""Adds logs of trajectories that are drawn by hand to a step folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
from step_folders import build_step, read_events

from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import MANIFEST_NAME, Artifact, CaptureResult, HostClock, Request
from verl_profiling.run_files import read_manifest, write_json_atomically
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.merge import MergeResult, merge
from verl_profiling.timeline.step import Keep
from verl_profiling.trajectory_log import (
    LOG_SUFFIX,
    Fact,
    LoopRecord,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
    write_log,
)

MS = 1_000_000


def add_log(folder: Path, log: TrajectoryLog, *, rank: int = 0, clock_ns: int = 0) -> Path:
    """Write the log of an agent-loop worker and enter the worker into the step's manifest.

    Args:
        folder: The step folder.
        log: What the worker recorded, on its own clock.
        rank: Its rank.
        clock_ns: How far its clock is ahead of the controller's.
    """
    host = f"agents{rank}"
    identity = WorkerIdentity(role="agent_loop", rank=rank, host=host, clock_domain=host, pid=100 + rank)
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
    changed = msgspec.structs.replace(
        manifest, workers=[*manifest.workers, worker], clocks=[*manifest.clocks, clock]
    )
    write_json_atomically(folder / MANIFEST_NAME, changed)
    return path


class Drawn:
    """A log that is drawn in milliseconds after the step's begin, and added to a step as rank 0's.

    Args:
        run: Where the step goes.
        clock_ms: How far the clock of the log is ahead of the controller's.
    """

    def __init__(self, run: Path, clock_ms: float = 0) -> None:
        self.folder = build_step(run)
        self.begin_ns = read_manifest(self.folder).begin_ns
        self._clock_ns = round(clock_ms * MS)
        self.log = TrajectoryLog(
            lane="agent_loop_rank0",
            begin_ns=self.ns(0),
            end_ns=self.ns(100),
            loops=[LoopRecord(0, 7, "Main")],
        )

    def ns(self, ms: float) -> int:
        """Return an instant on the clock of the log."""
        return self.begin_ns + round(ms * MS) + self._clock_ns

    def trajectory(
        self,
        begin: float,
        end: float,
        group: str = "g",
        sample: int | None = 0,
        fate: str = "done",
        **facts: Fact,
    ) -> int:
        number = len(self.log.trajectories)
        error = "it broke" if fate == "failed" else ""
        record = TrajectoryRecord(number, group, sample, self.ns(begin), self.ns(end), fate, 0, error, facts)
        self.log.trajectories.append(record)
        return number

    def span(
        self,
        name: str,
        begin: float,
        end: float,
        owner: int = -1,
        parent: int = -1,
        request: str = "",
        **facts: Fact,
    ) -> int:
        number = len(self.log.spans)
        record = SpanRecord(
            number, owner, parent, name, self.ns(begin), self.ns(end), 7, 0, False, request, facts
        )
        self.log.spans.append(record)
        return number

    def requests(self, *requests: tuple[str, float, float]) -> None:
        """Give the engine requests, on the controller's clock."""
        manifest = read_manifest(self.folder)
        begin = manifest.begin_ns
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
        workers = [
            msgspec.structs.replace(w, requests=made) if w.name == "rollout0" else w for w in manifest.workers
        ]
        write_json_atomically(self.folder / MANIFEST_NAME, msgspec.structs.replace(manifest, workers=workers))

    def merged(self, keep: Keep | None = None, **options: int) -> tuple[MergeResult, Timeline]:
        """Merge the step."""
        add_log(self.folder, self.log, clock_ns=self._clock_ns)
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
        """Return row, name, begin and end (ms of the step) of the slices of a category, by row and time."""
        found = [
            (self.rows[e["tid"]], e["name"], self.ms(e["ts"]), self.ms(e["ts"] + e["dur"]))
            for e in self.of(category)
        ]
        return sorted(found, key=lambda one: (one[0], one[2]))

    def counter(self, name: str) -> list[tuple[float, float]]:
        """Return instants (ms of the step) and values of a counter, in order."""
        found = [e for e in self.events if e["ph"] == "C" and f"{e['name']} {next(iter(e['args']))}" == name]
        return sorted((self.ms(e["ts"]), next(iter(e["args"].values()))) for e in found)

    def ms(self, ts: float) -> float:
        return round((ts - self._shift_us) / 1000, 6)
