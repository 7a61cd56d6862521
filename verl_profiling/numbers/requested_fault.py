"""Whether a requested capture has what was noticed, and what its own start did to the waits."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_signs import sign_of, usual_of
from verl_profiling.numbers.report_columns import RequestedCapture, SuspectRow
from verl_profiling.slices.intervals import intersection, length, subtract, time_of
from verl_profiling.steps.lanes import Step

_OF_STAGE = "stage"
"""Kind of the rows with the time in a stage without waits for other ranks."""


def late_start_s(name: str, step: Step) -> float:
    """Return how long other workers of a role worked while this one still started to record (s).

    Ranks that each drive a loop of their own do not wait for each other's start: the first
    collective does, and the rank that started last seems to be slow. The times of the others are
    added up, as their waits are.

    Args:
        name: Name of a worker, or of one of its lanes.
        step: The captured step.
    """
    late_ns = 0
    for worker in step.workers:
        if name != worker.name and not name.startswith(f"{worker.name} "):
            continue
        starts = time_of(worker.tool_spans, "start")
        for other in step.workers:
            if other.identity.role == worker.identity.role and other.name != worker.name:
                worked = subtract(time_of(other.stages), time_of(other.tool_spans, "start"))
                late_ns += length(intersection(starts, worked))
    return late_ns / 1e9


def with_fault(
    request: RequestedCapture | None,
    suspects: Sequence[SuspectRow],
    watched: StepSummary | None,
    log: Sequence[StepSummary],
) -> RequestedCapture | None:
    """Return the request with the length of what was noticed, then and in the captured step.

    Args:
        request: The request of the capture; ``None`` if the schedule chose the step.
        suspects: Its suspects, compared with their peers.
        watched: The watch's summary of the captured step; ``None`` if unknown.
        log: The log of the watch.
    """
    if request is None or watched is None:
        return request
    sign = sign_of(request)
    seconds = sign.unit.seconds
    if not request.sign or seconds is None:  # of no length
        return request
    value = sign.value_in(request, watched)
    lengths_s = [] if value is None else [seconds(value, watched.seconds)]
    noticed = [line for line in log if line.step == request.noticed and line.noticed is not None]
    step_s = noticed[-1].seconds if noticed else 0.0
    if sign.is_of_process:
        if not noticed:  # the lead is a share of that step
            return request
        # A trace tells waits from work. The watch often cannot, and then knows no leader.
        for row in suspects:
            if (row.kind, row.name) == (_OF_STAGE, request.stage) and row.difference is not None:
                lengths_s.append(row.difference)
    return replace(
        request,
        noticed_s=seconds(request.value, step_s),
        usual_s=usual_of(request),
        seen_s=max(lengths_s, default=None),
    )
