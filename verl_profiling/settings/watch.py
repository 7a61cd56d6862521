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
    """Thresholds from which the watch requests a capture. ``None`` switches a threshold off.

    Attributes:
        slow_step: Approximate ratio of a slow step's duration to the median of the window; ``null``: off.
        slow_stage: Approximate ratio of a slow stage's exposed time to its median; ``null``: off.
        leader: Share of the step by which one process leads in a stage, in most of five steps in a row;
            ``null``: off.
        memory: Share by which a process's memory grows over the window, with growth at every reading;
            ``null``: off.
        window: Number of earlier steps that a step is compared with. It may exceed ``watch.steps``.
        cooldown: Steps after a capture in which the watch requests no further capture.
        max_captures: Maximum number of captures that the watch requests in a run.
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
        enable: Switches the watch on.
        steps: Number of steps whose summaries are kept.
        every: Number of steps between readings of the workers; fewer if steps are long. Workers are also read
            after every capture. 0: only then.
        trigger: Thresholds from which the watch requests a capture; ``null``: it requests none.
        sinks: Receivers of each step's numbers besides ``watch.jsonl``; add your own to ``watch.listeners``.
    """

    enable: bool = False
    steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    every: NotNegative = 5
    trigger: Anomaly | None = None
    sinks: tuple[Literal["tensorboard"], ...] | None = None

    def cautions(self, records_every_step: bool) -> list[str]:
        """Return warnings about settings that have no effect.

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
