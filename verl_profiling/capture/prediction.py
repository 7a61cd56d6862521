"""What a recording will take, by what earlier ones of the same stage took; and how it is narrowed to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from verl_profiling import clock
from verl_profiling.manifest import Artifact
from verl_profiling.tools import Footprint, Output, Tool

__all__ = ["Measured", "Predictions"]

_FAR_BEYOND = 2.0


@dataclass
class Measured:
    """What one recording took.

    Attributes:
        begin_ns: When it began.
        end_ns: When it ended.
        until_ns: When it should have ended: later, if it was cut short.
        events: Its events; 0 until they are counted.
        mini_batches: Mini-batches from its begin until it should have ended.
        stopping_s: How long training waited while it was cut short.
        counted: Called once its events are counted.
    """

    begin_ns: int
    counted: Callable[[Measured], None]
    end_ns: int = 0
    until_ns: int = 0
    events: int = 0
    mini_batches: int = 0
    stopping_s: float = 0.0

    @property
    def expected_events(self) -> int:
        """The events that it would have had without being cut short."""
        lasted_ns = self.end_ns - self.begin_ns
        if lasted_ns <= 0:
            return 0
        whole_ns = self.until_ns - self.begin_ns - self.stopping_s * 1e9
        return int(self.events * max(1.0, whole_ns / lasted_ns))

    def counting(self, output: Output) -> Output:
        """Return an output that tells its number of events when it is finished."""
        finish = output.finish

        def finished() -> Artifact:
            assert finish is not None
            artifact = finish()
            self.events += artifact.events or 0
            self.counted(self)
            return artifact

        return output if finish is None else replace(output, finish=finished)


class Predictions:
    """The recordings of this process, the last one of each tool, its options, role and stage."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, ...], Measured] = {}

    def begin(self, tool: Tool, role: str, stage: str | None) -> Measured:
        """Return a new record of a recording that begins."""
        key = _key(tool, role, stage)
        return Measured(clock.now_ns(), lambda counted: self._measured.update({key: counted}))

    def fit(
        self, tool: Tool, role: str, stage: str | None, exceeds: Callable[[Footprint], str]
    ) -> tuple[Tool, str, str]:
        """Return the tool, narrowed if it would exceed the limits.

        Args:
            tool: The tool as configured.
            role: The worker's role.
            stage: The stage, in discrete mode.
            exceeds: Returns why a recording of that size cannot be; empty if it can.

        Returns:
            The tool that is to record; what was narrowed, in words; and why it must not record at all.
        """
        before = self._measured.get(_key(tool, role, stage))
        if before is None or not (events := before.expected_events):
            return tool, "", ""
        footprint = tool.footprint_of(events)
        if footprint is None or not (why := exceeds(footprint)):
            return tool, "", ""
        last = f"the last one would have had {footprint}, and {why}"
        narrowed, words = tool, "the same options"
        for narrowed, share, words in tool.narrowed(before.mini_batches):
            smaller = narrowed.footprint_of(int(events * share))
            if smaller is not None and not exceeds(smaller):
                return narrowed, f"recorded with {words}: {last}", ""
        grown = tool.footprint_of(before.events)
        if grown is not None and exceeds(grown.scaled(1 / _FAR_BEYOND)):
            return tool, "", f"not recorded, because nothing ended the last one in time: {last}"
        return narrowed, f"recorded with {words}, and only as far as it fits: {last}", ""


def _key(tool: Tool, role: str, stage: str | None) -> tuple[str, ...]:
    return tool.name, repr(tool.options), role, stage or ""
