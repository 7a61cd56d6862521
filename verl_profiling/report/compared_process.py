"""One process of a capture, and how it spent a stage: what a suspect is compared with its peers by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from verl_profiling.manifest import StageSpan
from verl_profiling.report.intervals import EMPTY, Spans, intersection, length, spans_of, subtract, union
from verl_profiling.report.lanes import Lane, Step

__all__ = ["Activities", "ComparedProcess"]


@dataclass(frozen=True)
class Activities:
    """What lanes did beyond their own events.

    Attributes:
        idle: Idle spans of each lane by cause.
        waiting: When each lane waited for other ranks.
    """

    idle: Mapping[str, Mapping[str, Spans]]
    waiting: Mapping[str, Spans]


class ComparedProcess:
    """A process of a capture: its stages, its lanes, and what these did.

    Args:
        name: What it is called: a worker, or one of its lanes, which then stands for it.
        worker: The worker, or ``controller``.
        step: The step.
        activities: What its lanes did.

    Attributes:
        name: What it is called.
        worker: The worker.
        lanes: Its lanes of which something is known.
        role: Its role.
        stages: Its own stages, on the controller's clock.
        ended: Those of them that ended before the capture did.
    """

    def __init__(self, name: str, worker: str, step: Step, activities: Activities) -> None:
        self.name = name
        self.worker = worker
        self._step = step
        self._activities = activities
        of_worker = [lane for lane in step.lanes if lane.source.worker == worker]
        named = [lane for lane in of_worker if name in (lane.name, lane.source.lane)]
        self.lanes: list[Lane] = [lane for lane in named or of_worker if not lane.activity.is_unknown]
        results = [result for result in step.workers if result.name == worker]
        self._tools = spans_of(
            (span.begin_ns, span.end_ns) for result in results for span in step.tool_spans_of(result)
        )
        self.role = results[0].identity.role if results else worker
        self.stages: list[StageSpan] = (
            [span for result in results for span in step.stages_of(result)] if results else step.stages
        )
        self.ended = [span for span in self.stages if not step.cut_off(span)]

    @property
    def recorded(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.stages or self.lanes)

    def window(self, stage: str) -> Spans:
        """Return when it was in a stage, its own or else the loop's, or in the step where none is named.

        The starts and stops of its tools are no part of it.
        """
        own = spans_of((span.begin_ns, span.end_ns) for span in self.ended if span.name == stage)
        if not len(own):
            whole = spans_of([(self._step.begin_ns, self._step.end_ns)])
            own = self._step.during(stage) if stage else whole
        return subtract(own, self._tools)

    def worked_s(self, stage: str) -> float | None:
        """Return its time in a stage without waiting; of what has no such stage, the time it was busy."""
        if stage and any(span.name == stage for span in self.ended):
            return self.worked_in_s(self.window(stage))
        if not self.lanes:
            return None
        window = self.window(stage)
        return _mean(length(intersection(lane.activity.busy, window)) for lane in self.lanes) / 1e9

    def worked_in_s(self, spans: Spans) -> float:
        """Return how much of some spans it did not wait for other ranks, on average over its lanes."""
        waits = [self._activities.waiting.get(lane.name, EMPTY) for lane in self.lanes]
        waited = _mean(length(intersection(spans, waiting)) for waiting in waits)
        return (length(spans) - waited) / 1e9

    def parts_s(self, stage: str) -> dict[str, float]:
        """Return what its lanes did in a stage, on average; the parts add up to what was observed of it."""
        totals: dict[str, list[int]] = {}
        for lane in self.lanes:
            window = intersection(self.window(stage), lane.observed)
            activity = lane.activity
            work = union(activity.compute, activity.memory, activity.unrecognised)
            exposed = subtract(activity.communication, work)
            waiting = intersection(self._activities.waiting.get(lane.name, EMPTY), exposed)
            parts = {
                "computing and copying": work,
                "communicating": subtract(exposed, waiting),
                "waiting for other ranks": waiting,
                **{
                    f"idle: {cause.replace('_', ' ')}": spans
                    for cause, spans in self._activities.idle.get(lane.name, {}).items()
                },
            }
            for name, spans in parts.items():
                totals.setdefault(name, []).append(length(intersection(spans, window)))
        return {name: fmean(ns) / 1e9 for name, ns in totals.items()}

    def kernels_s(self, stage: str) -> dict[str, float]:
        """Return the self time of its kernels in a stage; of all if none began in one of that name."""
        by_lane = [lane.activity.ops for lane in self.lanes]
        told = any(place == stage for ops in by_lane for place, _ in ops)
        totals: dict[str, float] = {}
        for ops in by_lane:
            for (place, name), (_, self_ns) in ops.items():
                if not told or place == stage:
                    totals[name] = totals.get(name, 0.0) + self_ns / len(by_lane) / 1e9
        return totals

    def outermost(self) -> list[str]:
        """Return the names of its outermost stages."""
        return list(dict.fromkeys(span.name for span in self.stages if span.depth == 0))


def _mean(values: Iterator[int]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
