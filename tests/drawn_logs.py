"""Adds logs of trajectories that are drawn by hand to a step folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import MANIFEST_NAME, Artifact, CaptureResult, HostClock
from verl_profiling.run_files import read_manifest, write_json_atomically
from verl_profiling.trajectory_log import LOG_SUFFIX, TrajectoryLog, write_log


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
