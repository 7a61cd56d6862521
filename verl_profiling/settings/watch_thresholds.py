"""The thresholds of the watch's signs, and how often they may request a capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from verl_profiling.typed_values import NotNegative

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
        memory: Share by which the memory of a holder grows steadily, in 14 readings or more;
            ``null``: off.
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
