"""The settings of the watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from verl_profiling.settings.typed_values import NotNegative

Ratio = Annotated[float, msgspec.Meta(gt=1, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Growth = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]


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

    slow_step: Ratio | None = 1.3
    slow_stage: Ratio | None = 1.3
    leader: Share | None = 0.1
    memory: Growth | None = 0.2
    window: Annotated[int, msgspec.Meta(ge=3)] = 20
    cooldown: NotNegative = 50
    max_captures: NotNegative = 3


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Summaries of every step, and captures on request while the run goes on.

    Attributes:
        enable: Switches it on.
        steps: Number of steps that are kept.
        every: Workers are read after so many steps, sooner where steps are long, and after every capture.
            0: after captures alone.
        trigger: Thresholds from which the watch requests a capture; ``null``: it requests none.
        sinks: Other receivers of each step's numbers than ``watch.jsonl``; more by ``watch.listeners``.
    """

    enable: bool = False
    steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    every: NotNegative = 5
    trigger: Anomaly | None = None
    sinks: tuple[Literal["tensorboard"], ...] | None = None

    def cautions(self, records_every_step: bool) -> list[str]:
        """Return what is allowed here, and does not do what it says.

        Args:
            records_every_step: The schedule captures all steps.
        """
        if not self.enable and (self.trigger is not None or self.sinks is not None):
            return ["watch.trigger and watch.sinks: do nothing, as watch.enable is false; set it to true"]
        if self.trigger is not None and records_every_step:
            return [
                "watch.trigger: never asks for a capture, as the schedule captures every step, and captured "
                "steps are not judged; set schedule.steps=[] to capture only what is asked for, or "
                "schedule.every"
            ]
        return []
