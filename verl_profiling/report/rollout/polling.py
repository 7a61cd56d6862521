"""What the trainer's polling costs: how long a rollout goes on although its last response is there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import POLLING
from verl_profiling.report.intervals import Spans, intersection, length, spans_of
from verl_profiling.report.lanes import Step
from verl_profiling.report.rollout.rows import Polling

__all__ = ["polling_of"]


def polling_of(step: Step, rollout: Spans, ends: NDArray[np.int64]) -> Polling | None:
    """Return what polling in a rollout cost; ``None`` where the trainer did not poll.

    Of each part of the rollout, the time that it polls after the last trajectory that ended there is lost:
    nothing that ended later is in its batch. Before that, it waits for trajectories and loses nothing.

    Args:
        step: The step.
        rollout: When the rollout ran.
        ends: When trajectories of training ended.
    """
    within = [
        (span.begin_ns, span.end_ns)
        for span in step.stages
        if span.name == POLLING and len(intersection(rollout, spans_of([(span.begin_ns, span.end_ns)])))
    ]
    if not within:
        return None
    polling = intersection(rollout, spans_of(within))
    late_ns = 0
    for begin, end in rollout.tolist():
        there = ends[(begin <= ends) & (ends <= end)]
        if len(there):
            late_ns += length(intersection(polling, spans_of([(int(there.max()), end)])))
    return Polling(
        pauses=len(within),
        interval_s=float(np.median([end - begin for begin, end in within])) / 1e9,
        seconds=length(polling) / 1e9,
        late_s=late_ns / 1e9,
        late_share=late_ns / max(step.span_ns, 1),
    )
