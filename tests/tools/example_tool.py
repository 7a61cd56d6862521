"""A tool of your own: Python's deterministic profiler, one sorted table per recording."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import dataclass
from typing import ClassVar, Literal

from verl_profiling.tools import Destination, Output, Recording, Tool


@dataclass(frozen=True, kw_only=True)
class CProfileOptions:
    """Options of the tool; they are checked like all others, and errors name their keys.

    Attributes:
        sort: What the table is sorted by.
        rows: How many functions it lists.
    """

    sort: Literal["cumulative", "tottime", "calls"] = "cumulative"
    rows: int = 50


class CProfileTool(Tool):
    """Writes ``actor_rank0.cprofile.txt``."""

    name: ClassVar[str] = "cprofile"
    suffix: ClassVar[str] = ".cprofile.txt"
    options_class: ClassVar[type] = CProfileOptions
    # it records the thread that switches it on, and only that one can switch it off
    any_thread = False

    def start(self, destination: Destination) -> Recording:
        """Start the profiler."""
        return _CProfileRecording(destination, self.options)


class _CProfileRecording(Recording):
    def __init__(self, destination: Destination, options: CProfileOptions) -> None:
        self._destination = destination
        self._options = options
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> list[Output]:
        self._profile.disable()
        path = self._destination.path(CProfileTool.suffix)
        part = path.with_name(f".{path.name}.part")
        with part.open("w") as file:
            stats = pstats.Stats(self._profile, stream=file)
            stats.sort_stats(self._options.sort).print_stats(self._options.rows)
        part.replace(path)
        artifact = self._destination.artifact(CProfileTool)
        return [Output(artifact.with_status("ok", bytes=path.stat().st_size))]

    def discard(self) -> None:
        self._profile.disable()
