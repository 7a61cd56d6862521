"""Memory of a process at the begins and ends of its outermost stages, and while they run."""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.files.device_use import PARTS, DeviceUse, device_use, parts_of
from verl_profiling.files.machine import own_bytes, process_peak_bytes
from verl_profiling.files.step_summary import BEGIN, END, INSIDE, DeviceReadings, Period

LONG_NS = 20_000_000
"""After a stage of this length or longer, memory is always read."""

PAUSE_NS = 50_000_000
"""Minimum time between memory readings, after a short stage named like the one before the last
reading; ten times as long after other short stages.
"""

_POLL_NS = 10**9

_PARTS_NS = 10**9
"""Minimum time between two readings of a process's parts, which take 2 ms for a large model."""

_MOST = 256  # readings of the steps that the watch has not read yet


class OpenedStage(Protocol):
    """A stage that has begun."""

    name: str
    begin_ns: int


class StageMemory:
    """Reads the memory of this process; of its device if it has used one, else of the host.

    Attributes:
        owners: Functions that return the objects whose modules and optimizers are the parts of the
            memory of the device.
        last: The last reading of the device; ``None`` before.
    """

    def __init__(self) -> None:
        self.owners: list[Callable[[], object]] = []
        self.last: DeviceUse | None = None
        self._readings: deque[tuple[DeviceUse, str, int]] = deque(maxlen=_MOST)
        self._began_ns = self._measured_ns = 0
        self._measured_after = ""
        self._parts: dict[str, int] = {}
        self._parts_ns = self._parts_of = 0

    def begins(self, stage: OpenedStage) -> None:
        """Read the device at the begin of a stage, unless that was done a moment ago."""
        if abs(stage.begin_ns - self._began_ns) >= PAUSE_NS:
            self._began_ns = stage.begin_ns
            self.read(stage.name, BEGIN)

    def ended(self, stage: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return peak and held memory at the end of a stage (bytes); zeros after a short stage."""
        waited_ns = abs(end_ns - self._measured_ns)  # the clock may be set back
        pause_ns = PAUSE_NS if stage == self._measured_after else 10 * PAUSE_NS
        if end_ns - begin_ns < LONG_NS and waited_ns < pause_ns:
            return 0, 0
        self._measured_ns, self._measured_after = end_ns, stage
        use = self.read(stage, END)
        if use is None:
            return process_peak_bytes(), own_bytes() or 0
        return use.peak_bytes, use.allocated_bytes

    def polled(self, stage: str) -> DeviceUse | None:
        """Return a reading of now or of the last second; ``None`` before the first stage has ended,
        as only the thread of a stage knows its device.
        """
        if self.last is None or clock.now_ns() - self.last.at_ns < _POLL_NS:
            return self.last
        return self.read(stage, INSIDE)

    def read(self, stage: str, edge: int) -> DeviceUse | None:
        """Read the device, and keep the reading for the watch.

        Args:
            stage: The stage; empty for none.
            edge: :data:`BEGIN` or :data:`END` of the stage, or :data:`INSIDE`.
        """
        use = device_use()
        if use is None:
            return None
        is_due = edge != INSIDE and use.at_ns - self._parts_ns >= _PARTS_NS
        if self.owners and is_due:
            self._parts_ns, self._parts_of = use.at_ns, use.allocated_bytes
            with suppress(Exception):  # attributes of user code may be proxies of anything
                self._parts = parts_of(self.owners, use.kind)
        if use.allocated_bytes == self._parts_of:  # else, something was allocated or freed since
            use = replace(use, parts=self._parts)
        self.last = use
        self._readings.append((use, stage, edge))
        return use

    def of_steps(self, steps: Sequence[Period], ahead_ns: int) -> list[DeviceReadings | None]:
        """Return the readings in each step; ``None`` for none.

        Args:
            steps: Begin and end of each step, in order, on the clock of the loop's process.
            ahead_ns: Clock offset: this process's clock minus the loop's.
        """
        readings = [*self._readings]
        if not readings:
            return [None] * len(steps)
        return [self._in(readings, begin_ns, end_ns, ahead_ns) for begin_ns, end_ns in steps]

    def _in(
        self, readings: Sequence[tuple[DeviceUse, str, int]], begin_ns: int, end_ns: int, ahead: int
    ) -> DeviceReadings | None:
        names: dict[str, int] = {}
        rows: list[int] = []
        for use, stage, edge in readings:
            at_ns = use.at_ns - ahead
            if begin_ns <= at_ns <= end_ns:
                number = names.setdefault(stage, len(names))
                rows += at_ns, number, edge, use.free_bytes
                rows += use.allocated_bytes, use.reserved_bytes, use.peak_bytes
                rows += [use.parts.get(part, 0) for part in PARTS]
        if not rows or self.last is None:
            return None
        stages, packed = "\n".join(names), array("q", rows).tobytes()
        last = self.last
        return DeviceReadings(last.device, os.getpid(), last.total_bytes, stages, packed)
