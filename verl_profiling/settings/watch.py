"""The settings of the watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from verl_profiling.typed_values import NotNegative, Seconds

Ratio = Annotated[float, msgspec.Meta(gt=1, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Growth = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """Thresholds from which the watch requests a capture. ``None`` switches a threshold off.

    Attributes:
        slow_step: Approximate ratio of a slow step's duration to the median of the window;
            ``null``: off.
        slow_stage: Approximate ratio of a slow stage's exposed time to its median; ``null``: off.
        slow_span: Approximate ratio of a span's mean time per call to its median; ``null``: off.
        leader: Share of the step by which one process is slower than the others in a stage, in most
            of five steps; ``null``: off.
        memory: Share by which a process's memory grows over the window, with growth at every
            reading; ``null``: off.
        window: Number of earlier steps to compare a step with; may exceed ``watch.steps``.
        cooldown: Number of steps after a capture of the watch without further requests of the
            watch.
        max_captures: Maximum number of captures that the watch requests in a run.
    """

    slow_step: Ratio | None = 1.3
    slow_stage: Ratio | None = 1.3
    slow_span: Ratio | None = 1.5
    leader: Share | None = 0.1
    memory: Growth | None = 0.2
    window: Annotated[int, msgspec.Meta(ge=3)] = 20
    cooldown: NotNegative = 50
    max_captures: NotNegative = 3


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Summaries of every step, and captures on request during the run.

    Attributes:
        enable: Switches the watch on.
        steps: Number of steps whose summaries are kept.
        every: Number of steps between readings of the workers; fewer if steps are long. Workers are
            also read after every capture; with 0, only then.
        trigger: Thresholds from which the watch requests a capture; ``null``: no requests.
        hang_s: Minimum time without any progress after which a step hangs; longer in stages that
            usually take more than a third of it.
        first_hang_s: The same for stages whose usual duration is not known yet.
        sinks: Receivers of each step's numbers besides ``watch.jsonl``; add your own to
            ``watch.listeners``.
    """

    enable: bool = False
    steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    # 10: a reading costs the loop as much as ten summaries; steps over 0.1 s are read each second.
    every: NotNegative = 10
    trigger: Anomaly | None = None
    hang_s: Seconds = 30.0
    first_hang_s: Seconds = 600.0
    sinks: tuple[Literal["tensorboard"], ...] | None = None

    def cautions(self, records_every_step: bool) -> list[str]:
        """Return warnings about settings that have no effect.

        Args:
            records_every_step: Whether the schedule captures all steps.
        """
        if not self.enable and (self.trigger is not None or self.sinks is not None):
            return ["watch.trigger and watch.sinks have no effect without watch.enable=true"]
        if self.trigger is not None and records_every_step:
            return [
                "watch.trigger: never requests a capture, as the schedule captures every step, "
                "and the watch does not judge captured steps; set schedule.steps=[] to capture "
                "only on request, or schedule.every"
            ]
        return []
