"""The settings of the watch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated

import msgspec

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.settings.typed_values import NotNegative

SINKS = ("tensorboard",)
"""What gets the numbers of each step besides ``watch.jsonl``."""


_BOUNDS = {
    "slow_step": (1, inf, "a ratio above 1"),
    "slow_stage": (1, inf, "a ratio above 1"),
    "leader": (0, 1, "a share of the step, between 0 and 1"),
    "memory": (0, inf, "a share above 0"),
}


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """Thresholds from which the watch requests a capture. ``None`` switches one of the signs off.

    Attributes:
        slow_step: Steps last longer than the median of the window by about this ratio; ``null``: no sign.
        slow_stage: The exposed time of a stage is above its median by about this ratio; ``null``: no sign.
        leader: One process leads in a stage by this share of the step, in three steps of a few; ``null``: no
            sign.
        memory: Memory that a process holds grows in every step of the window, by this share in all;
            ``null``: no sign.
        window: Number of steps before that a step is compared with. It may be more than ``watch.steps``.
        cooldown: Steps after a capture in which the watch requests none.
        max_captures: The most captures that the watch requests in a run.
    """

    slow_step: float | None = 1.3
    slow_stage: float | None = 1.3
    leader: float | None = 0.1
    memory: float | None = 0.2
    window: Annotated[int, msgspec.Meta(ge=3)] = 20
    cooldown: NotNegative = 50
    max_captures: NotNegative = 3

    def __post_init__(self) -> None:
        for name, (low, high, meaning) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise ConfigError(name, f"is {meaning}, not {value}; null switches it off")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Summaries of every step, and captures on request while the run goes on.

    Attributes:
        enable: Switches it on.
        steps: Number of steps that are kept.
        every: Workers are read after so many steps, sooner where steps are long, and after every capture.
            0: after captures alone.
        trigger: Thresholds from which the watch requests a capture; ``null``: it requests none.
        sinks: Other receivers of each step's numbers than ``watch.jsonl``: ``tensorboard``.
    """

    enable: bool = False
    steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    every: NotNegative = 5
    trigger: Anomaly | None = None
    sinks: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.sinks or ():
            if name not in SINKS:
                hint = choices_hint(name, SINKS)
                raise ConfigError(
                    "sinks", f"unknown sink {name!r}; {hint}; for others, append to watch.listeners"
                )

    @property
    def idle(self) -> str:
        """The settings that do nothing because the watch is off; empty if there are none."""
        given = [f"watch.{name}" for name in ("trigger", "sinks") if getattr(self, name) is not None]
        return "" if self.enable else " and ".join(given)

    def cautions(self, records_every_step: bool) -> list[str]:
        """Return what is allowed here, and does not do what it says.

        Args:
            records_every_step: The schedule captures all steps.
        """
        if self.idle:
            return [f"{self.idle}: does nothing, as watch.enable is false; set it to true"]
        if self.enable and self.trigger is not None and records_every_step:
            return [
                "watch.trigger: never asks for a capture, as the schedule captures every step, and captured "
                "steps are not judged; set schedule.steps=[] to capture only what is asked for, or "
                "schedule.every"
            ]
        return []
