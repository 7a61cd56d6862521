"""The ``spans`` tool: no profiler at all. The session's stage spans are the whole recording."""

from __future__ import annotations

from typing import ClassVar

from verl_profiling.tools.base import Output, Recording, Target, Tool

__all__ = ["SpansTool"]


class _SpansRecording(Recording):
    def stop(self) -> list[Output]:
        return []

    def discard(self) -> None:
        pass


class SpansTool(Tool):
    """Writes no artifact; stage spans go into the manifest with every tool, so with this one too."""

    name: ClassVar[str] = "spans"
    suffix: ClassVar[str] = ""

    def start(self, target: Target) -> Recording:
        """Start nothing."""
        return _SpansRecording()
