"""The lanes of a timeline: their names, their order, and the trace file that fills each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = ["Source", "sorted_sources"]

_ROLE_ORDER = ("controller", "actor", "critic", "ref", "reward", "rollouter", "agent_loop", "rollout")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one lane: a trace, or a log of trajectories.

    Attributes:
        path: The file.
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


def sorted_sources(sources: Iterable[Source]) -> list[Source]:
    """Return sources in the order of their lanes: by role, replica, rank, then file name."""

    def key(source: Source) -> tuple[int, str, int, int, str]:
        order = _ROLE_ORDER.index(source.role) if source.role in _ROLE_ORDER else len(_ROLE_ORDER)
        return order, source.role, source.replica or 0, source.rank, source.path.name

    return sorted(sources, key=key)
