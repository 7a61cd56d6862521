"""The input of the analysis: the trace files of one step, each with its place on the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from verl_profiling.manifest import Manifest
from verl_profiling.timeline.limits import Limits

__all__ = ["TIMELINE_NAME", "Source", "StepInputs", "sorted_sources"]

TIMELINE_NAME = "timeline.json.gz"

_ROLE_ORDER = ("controller", "actor", "critic", "ref", "reward", "rollout")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One trace file of one lane.

    Attributes:
        path: The trace file.
        lane: Lane it fills, e.g. ``actor_rank0``.
        worker: Name of the worker it belongs to (``rollout0`` for each lane of a replica).
        role: Role of the worker.
        rank: Rank inside the role, or inside the replica.
        replica: Index of the rollout replica.
        topology: Coordinates in named parallel dimensions.
        offset_ns: Subtracted from its times, gives the controller's.
        error_ns: Bound of that offset's error.
        stage: Stage it holds, in discrete mode.
    """

    path: Path
    lane: str
    worker: str
    role: str
    rank: int = 0
    replica: int | None = None
    topology: dict[str, int] = {}
    offset_ns: int = 0
    error_ns: int = 0
    stage: str | None = None

    @property
    def title(self) -> str:
        """Name of the lane in the timeline: ``actor_rank1 [tp1 pp0]``."""
        where = " ".join(f"{dimension}{index}" for dimension, index in self.topology.items())
        return f"{self.lane} [{where}]" if where else self.lane


class StepInputs(msgspec.Struct, kw_only=True):
    """Everything found of one step.

    Attributes:
        directory: Folder that results are written to.
        step: Number of the step, if known.
        manifest: The manifest, where the folder has one.
        controller: The controller's trace, where there is one.
        sources: Trace files, sorted by lane.
        absent: What is missing or cannot be put on a timeline, as sentences.
        limits: How much of each trace is read.
        communication: Regular expressions of kernels that communicate, besides those that are known.
        unfinished: Why the step is not whole, where its capture has begun and was never written.
    """

    directory: Path
    step: int | None = None
    manifest: Manifest | None = None
    controller: Path | None = None
    sources: list[Source] = []
    absent: list[str] = []
    unfinished: str = ""
    limits: Limits = Limits()
    communication: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """``step 12``, or the folder's name."""
        return f"step {self.step}" if self.step is not None else self.directory.name


def sorted_sources(sources: Iterable[Source]) -> list[Source]:
    """Return sources in the order of their lanes: by role, replica, rank, then file name."""

    def key(source: Source) -> tuple[int, str, int, int, str]:
        order = _ROLE_ORDER.index(source.role) if source.role in _ROLE_ORDER else len(_ROLE_ORDER)
        return order, source.role, source.replica or 0, source.rank, source.path.name

    return sorted(sources, key=key)
