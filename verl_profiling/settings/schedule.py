"""The schedule: the settings that choose the captured steps, and what they choose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from itertools import count, islice
from typing import Any

from verl_profiling.capture_request import CaptureSelection, Trigger
from verl_profiling.errors import ConfigError
from verl_profiling.typed_values import NotNegative, Positive

MOST_CAPTURES = 10
"""Number of listed captures for a run of unknown length."""
_FAR = 100_000
"""Number of steps that a plan looks at."""


class Action(Enum):
    """An action of the profiler in one step."""

    OFF = "off"
    WARMUP = "warmup"
    RECORD = "record"


@dataclass(frozen=True)
class StepRange:
    """The consecutive steps that one capture covers, both ends included.

    Attributes:
        first: First step; the step folder has its number.
        last: Last step.
        action: ``RECORD``, or ``WARMUP`` for a capture that is discarded.
    """

    first: int
    last: int
    action: Action = Action.RECORD


@dataclass(frozen=True)
class Decision:
    """The decision to capture one or more steps.

    Attributes:
        step_range: The steps to capture.
        trigger: The requester of the capture, and the reason.
        selection: Overrides of the settings, e.g. other ranks; ``None`` without overrides.
    """

    step_range: StepRange
    trigger: Trigger
    selection: CaptureSelection | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Chooses steps in one of three ways: listed, every N, or in cycles.

    Cycles have the meaning of ``torch.profiler.schedule``, counted in RL steps: after
    ``skip_first`` steps, each cycle waits, warms up and records; ``repeat`` cycles in all.
    With nothing set, every step from 1 on is captured.

    Attributes:
        steps: Steps to capture; may be empty with ``watch.enable``. Excludes ``every`` and the
            cycle fields.
        every: Captures the steps divisible by this number, 0 included. Excludes the cycle fields.
        skip_first: Steps before the first cycle, from step 1 on.
        wait: Steps of a cycle that are not profiled.
        warmup: Steps of a cycle with a discarded recording.
        active: Steps of a cycle that are captured.
        repeat: Number of cycles; 0 for no end.
        continuous: Consecutive captured steps form one capture.
    """

    steps: tuple[NotNegative, ...] | None = None
    every: Positive | None = None
    skip_first: NotNegative = 0
    wait: NotNegative = 0
    warmup: NotNegative = 0
    active: Positive = 1
    repeat: NotNegative = 0
    continuous: bool = False

    def __post_init__(self) -> None:
        ways = [name for name in self._given() if name != "continuous"]
        if len(ways) > 1 and ways[0] in ("steps", "every"):
            raise ConfigError(ways[0], f"excludes schedule.{ways[1]}; remove one of them")
        if self.continuous and self.records_every_step:
            raise ConfigError(
                "continuous", "would be one capture without an end; bound it with steps or repeat"
            )

    def _given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by name."""
        given = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value != setting.default:
                given[setting.name] = value
        return given

    @property
    def records_every_step(self) -> bool:
        """Whether every step after ``skip_first`` is captured."""
        if self.every is not None:
            return self.every == 1
        return self.steps is None and self.wait == self.warmup == self.repeat == 0

    @cached_property
    def _listed(self) -> frozenset[int]:
        return frozenset(self.steps or ())

    def action(self, step: int) -> Action:
        """Return the profiler's action in ``step``."""
        if self.steps is not None:
            return Action.RECORD if step in self._listed else Action.OFF
        if self.every is not None:
            return Action.RECORD if step >= 0 and step % self.every == 0 else Action.OFF
        index = step - 1 - self.skip_first
        cycle, position = divmod(index, self.wait + self.warmup + self.active)
        if index < 0 or (self.repeat and cycle >= self.repeat) or position < self.wait:
            return Action.OFF
        return Action.WARMUP if position < self.wait + self.warmup else Action.RECORD

    def in_words(self) -> str:
        """Return the settings that differ from their defaults, e.g. ``schedule.every=10``."""
        if self.steps == ():
            return "schedule.steps is empty: only captures on request"
        given = [f"schedule.{name}={value}" for name, value in self._given().items()]
        return ", ".join(given) or "the schedule has every step from step 1 on"

    def last_step(self, limit: int | None = None) -> int | None:
        """Return the last step that may be captured; ``None`` for a schedule without an end.

        Args:
            limit: The last step of the loop, if known.
        """
        ends = [] if limit is None else [limit]
        if self.steps is not None:
            ends.append(max(self.steps, default=0))
        elif self.every is None and self.repeat:
            cycle = self.wait + self.warmup + self.active
            ends.append(self.skip_first + self.repeat * cycle)
        return min(ends, default=None)

    def step_range(self, step: int) -> StepRange | None:
        """Return the capture that ``step`` belongs to, or ``None``."""
        action = self.action(step)
        if action is Action.OFF:
            return None
        first = last = step
        while self.continuous and self.action(first - 1) is action:
            first -= 1
        while self.continuous and self.action(last + 1) is action:
            last += 1
        return StepRange(first, last, action)


def planned_captures(
    schedule: Schedule, steps: int | None
) -> tuple[list[tuple[int, int]], list[int], bool]:
    """Return the captures, the warm-up steps, and whether more captures follow.

    A capture is a pair of its first and its last step. For a run of unknown length, the first
    captures are returned.

    Args:
        schedule: The schedule.
        steps: The last step of the loop, if known.
    """
    captures: list[tuple[int, int]] = []
    warm_ups: list[int] = []
    last = schedule.last_step(steps)
    most = MOST_CAPTURES if last is None else _FAR
    candidates: Iterable[int] = count(
        schedule.every or 1 + schedule.skip_first, schedule.every or 1
    )
    if schedule.steps is not None:
        candidates = sorted(set(schedule.steps))
    for step in islice(candidates, _FAR):
        if last is not None and step > last:
            return captures, warm_ups, False
        if captures and step <= captures[-1][1]:
            continue
        step_range = schedule.step_range(step)
        if step_range is None:
            continue
        if step_range.action is Action.WARMUP:
            warm_ups.append(step)
            continue
        if len(captures) == most:
            return captures, warm_ups, True
        captures.append((step, step_range.last if last is None else min(step_range.last, last)))
    return captures, warm_ups, schedule.steps is None
