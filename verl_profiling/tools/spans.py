"""The ``spans`` tool, which runs no profiler: stage spans are the whole recording."""

from __future__ import annotations

from verl_profiling.tools.base import Destination, Output, Recording, Tool


class SpansTool(Tool):
    """Writes no artifact: the manifest has the stage spans of every capture."""

    name = "spans"
    suffix = ""

    def start(self, destination: Destination) -> Recording:
        """Start no profiler, because the session records the stage spans."""
        return _SpansRecording()


class _SpansRecording(Recording):
    def stop(self) -> list[Output]:
        return []

    def discard(self) -> None:
        pass
