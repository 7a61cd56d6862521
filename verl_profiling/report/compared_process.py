"""One process of a capture, and how it spent a stage: the numbers of the table of suspects."""

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
        recorded: Whether there is anything to compare: of a process without stages and operators, its memory.
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
        self.recorded = bool(self.stages or self.lanes) or any(
            artifact.status == "ok" for result in results for artifact in result.artifacts
        )

    def ran(self, stage: str) -> bool:
        """Return whether it ran a stage of its own of that name to its end."""
        return any(span.name == stage for span in self.ended)

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
        window = self.window(stage)
        if self.ran(stage):
            waits = [self._activities.waiting.get(lane.name, EMPTY) for lane in self.lanes]
            return (length(window) - _mean(length(intersection(window, waiting)) for waiting in waits)) / 1e9
        if not self.lanes:
            return None
        return _mean(length(intersection(lane.activity.busy, window)) for lane in self.lanes) / 1e9

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

    def kernels_s(self, stage: str = "") -> dict[str, float]:
        """Return the self time of its kernels that began in a stage, or in the whole step, by name."""
        totals: dict[str, float] = {}
        for lane in self.lanes:
            for (place, name), (_, self_ns) in lane.activity.ops.items():
                if stage in ("", place):
                    totals[name] = totals.get(name, 0.0) + self_ns / len(self.lanes) / 1e9
        return totals

    def outermost(self) -> list[str]:
        """Return the names of its outermost stages."""
        return list(dict.fromkeys(span.name for span in self.stages if span.depth == 0))


def _mean(values: Iterator[int]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
