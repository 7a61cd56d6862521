"""Compares the suspects of an aimed capture with their peers.

Workers that communicate end a stage together, so how long a rank was in one says nothing of it. What is
compared is its time in the stage less the time in which it waited for other ranks in collectives, and that
time's parts: computing, communicating, waiting, and idle by cause. Both sides of a row are of one range.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.report.capture_rows import measures
from verl_profiling.report.collectives import Calls, last_to
from verl_profiling.report.intervals import EMPTY, Spans, intersection, length, spans_of, subtract, union
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.report.model import Asked
from verl_profiling.report.rows import MeasureRow, SuspectRow

_SMALL = 0.01
"""Share of the step under which a time is left out."""
_KERNELS = 5
_MOST_SUSPECTS = 4


class _Activities(NamedTuple):
    """The step, and what its lanes did beyond their own events.

    Attributes:
        step: The step.
        idle: Idle spans of each lane by cause.
        waiting: When each lane waited for other ranks, by its name.
        measures: Numbers that workers recorded.
    """

    step: Step
    idle: Mapping[Lane, Mapping[str, Spans]]
    waiting: Mapping[str, Spans]
    measures: Sequence[MeasureRow]


def asked_of(
    step: Step,
    idle: Mapping[Lane, Mapping[str, Spans]],
    waiting: Mapping[str, Spans],
    calls: Sequence[Calls],
) -> tuple[Asked | None, list[SuspectRow]]:
    """Return who asked for a capture, and the suspects beside their peers; nothing for the schedule alone.

    Args:
        step: The step.
        idle: Idle spans of each lane by cause.
        waiting: When each lane waited for other ranks, by its name.
        calls: The collectives.
    """
    manifest = step.manifest
    trigger = manifest.trigger if manifest is not None else Trigger()
    if manifest is None or (trigger.kind == "schedule" and not (trigger.sign or trigger.request)):
        return None, []
    known = _Activities(step, idle, waiting, measures(manifest))
    suspects = list(_named(trigger.suspects[:_MOST_SUSPECTS], known))
    roles, suspected = {one.role for one in suspects}, {one.worker for one in suspects}
    others = [
        worker.name
        for worker in step.workers
        if worker.identity.role in roles and worker.name not in suspected
    ]
    found = [[p for p in _named(names, known) if p.recorded] for names in (trigger.peers, others)]
    peers = found[0] or found[1]
    rows: list[SuspectRow] = []
    for suspect in suspects:
        if beside := [p for p in peers if p.role == suspect.role and p.worker != suspect.worker]:
            rows += _rows(suspect, beside, trigger.stage)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.begin_ns / 1e9))
    last, waited_s = "", 0.0
    if trigger.stage or trigger.sign in ("slow_step", "leader"):
        last, waited_s = last_to(trigger.stage, step, calls)
    fields = {**msgspec.structs.asdict(trigger), "peers": [peer.name for peer in peers]}
    return Asked(**fields, when=when, last=last, waited_s=waited_s), rows


def _named(names: Sequence[str], known: _Activities) -> Iterator[_Process]:
    """Yield the processes that a trigger names by their lanes or as workers, if the capture has them."""
    step = known.step
    workers = {worker.name: worker.name for worker in step.workers}
    workers |= {"controller": "controller"} if step.stages else {}
    lanes = {worker.identity.lane(): worker.name for worker in step.workers}
    lanes |= {a.lane: worker.name for worker in step.workers for a in worker.artifacts}
    for name in dict.fromkeys(names):
        if worker := workers.get(name) or lanes.get(name):
            yield _Process(name, worker, known)


class _Process:
    """A process of a capture: its stages, its lanes, and what these did.

    Attributes:
        name: What it is called: a worker, or one of its lanes, which then stands for it.
        worker: The worker, or ``controller``.
        lanes: Its lanes of which something is known.
        role: Its role.
        recorded: Whether there is anything to compare: of a process without stages and operators, its memory.
    """

    def __init__(self, name: str, worker: str, known: _Activities) -> None:
        self.name, self.worker = name, worker
        self._known, step = known, known.step
        of_worker = [lane for lane in step.lanes if lane.source.worker == worker]
        named = [lane for lane in of_worker if name in (lane.name, lane.source.lane)]
        self.lanes: list[Lane] = [lane for lane in named or of_worker if not lane.is_unknown]
        results = [result for result in step.workers if result.name == worker]
        self.role = results[0].identity.role if results else worker
        spans = [span for result in results for span in result.stages] if results else step.stages
        self.outermost = dict.fromkeys(span.name for span in spans if span.depth == 0)
        self._ended = [span for span in spans if not step.cut_off(span)]
        tools = [span for result in results for span in result.tool_spans]
        self._tools = spans_of((span.begin_ns, span.end_ns) for span in tools)
        self.recorded = bool(spans or self.lanes) or any(
            artifact.status == "ok" for result in results for artifact in result.artifacts
        )

    def ran(self, stage: str) -> bool:
        """Return whether it ran a stage of its own of that name to its end."""
        return any(span.name == stage for span in self._ended)

    def worked_s(self, stage: str) -> float | None:
        """Return its time in a stage without waiting; of what has no such stage, the time it was busy."""
        window = self._window(stage)
        if self.ran(stage):
            waits = [self._known.waiting.get(lane.name, EMPTY) for lane in self.lanes]
            waited = [length(intersection(window, waiting)) for waiting in waits]
            return (length(window) - (fmean(waited) if waited else 0)) / 1e9
        busy = [length(intersection(lane.busy, window)) for lane in self.lanes]
        return fmean(busy) / 1e9 if busy else None

    def parts_s(self, stage: str) -> dict[str, float]:
        """Return what its lanes did in a stage, on average; the parts add up to what was observed of it."""
        totals: dict[str, float] = {}
        for lane in self.lanes:
            window = intersection(self._window(stage), lane.observed)
            work = union(lane.compute, lane.memory, lane.unrecognised)
            exposed = subtract(lane.communication, work)
            waiting = intersection(self._known.waiting.get(lane.name, EMPTY), exposed)
            idle = self._known.idle[lane]
            parts = {
                "computing and copying": work,
                "communicating": subtract(exposed, waiting),
                "waiting for other ranks": waiting,
                **{f"idle: {cause.replace('_', ' ')}": spans for cause, spans in idle.items()},
            }
            for name, spans in parts.items():
                took_s = length(intersection(spans, window)) / 1e9
                totals[name] = totals.get(name, 0.0) + took_s / len(self.lanes)
        return totals

    def kernels_s(self, stage: str = "") -> dict[str, float]:
        """Return the self time of its kernels that began in a stage, or in the whole step, by name."""
        totals: dict[str, float] = {}
        for lane in self.lanes:
            for (place, name), (_, self_ns) in lane.ops.items():
                if stage in ("", place):
                    totals[name] = totals.get(name, 0.0) + self_ns / len(self.lanes) / 1e9
        return totals

    def peaks(self, stage: str) -> dict[str, float]:
        """Return its peaks of memory: in the stage that was slow where they are known, else in any."""
        own = [m for m in self._known.measures if m.worker == self.worker and m.unit == "bytes"]
        peaks: dict[str, float] = {}
        for measure in [m for m in own if m.stage == stage] or own:
            peaks[measure.name] = max(measure.value, peaks.get(measure.name, measure.value))
        return peaks

    def _window(self, stage: str) -> Spans:
        """Return when it was in a stage, its own or else the loop's, or in the step where none is named.

        The starts and stops of its tools are no part of it.
        """
        own = spans_of((span.begin_ns, span.end_ns) for span in self._ended if span.name == stage)
        if not len(own):
            step = self._known.step
            own = step.during(stage) if stage else spans_of([(step.begin_ns, step.end_ns)])
        return subtract(own, self._tools)


def _rows(suspect: _Process, peers: Sequence[_Process], stage: str) -> Iterator[SuspectRow]:
    """Yield each quantity of a suspect, with the median of its peers'; small times are left out."""
    whose = peers[0].name if len(peers) == 1 else f"median of {len(peers)}"
    blank = SuspectRow(suspect=suspect.name, peers=whose, kind="stage", name="", value=0.0, peer_value=None)
    names = dict.fromkeys([*([stage] if stage else []), *suspect.outermost]) or [""]
    worked = {name: seconds for name in names if (seconds := suspect.worked_s(name)) is not None}
    of_peers = [
        {name: peer.worked_s(name) for name in names if peer.ran(name) == suspect.ran(name)} for peer in peers
    ]
    rows = _beside(blank, worked, of_peers)
    alike = [peer for peer in peers if peer.lanes and peer.ran(stage) == suspect.ran(stage)]
    parts = [peer.parts_s(stage) for peer in alike]
    rows += _beside(msgspec.structs.replace(blank, kind="time"), suspect.parts_s(stage), parts)
    if suspect.lanes and alike:
        where = stage if any(one.kernels_s(stage) for one in (suspect, *alike)) else ""
        found = [one.kernels_s(where) for one in (suspect, *alike)]
        every = {name: 0.0 for of in found for name in of}
        own, *theirs = ({**every, **of} for of in found)
        kernels = _beside(msgspec.structs.replace(blank, kind="kernel"), own, theirs)
        kernels.sort(key=lambda row: -abs(row.difference or 0.0))
        rows += [row for row in kernels[:_KERNELS] if row.difference]
    least_s = _SMALL * suspect._known.step.span_ns / 1e9
    yield from (row for row in rows if max(row.value, row.peer_value or 0.0) >= least_s)
    peaks = [peer.peaks(stage) for peer in peers]
    memory = msgspec.structs.replace(blank, kind="memory", unit="bytes")
    yield from _beside(memory, suspect.peaks(stage), peaks)


def _beside(
    blank: SuspectRow, own: Mapping[str, float], peers: Sequence[Mapping[str, float | None]]
) -> list[SuspectRow]:
    """Return a row for each of a suspect's numbers, beside the median of the peers that have it."""
    rows = []
    for name, value in own.items():
        known = [number for of in peers if (number := of.get(name)) is not None]
        beside = median(known) if known else None
        rows.append(msgspec.structs.replace(blank, name=name or "the step", value=value, peer_value=beside))
    return rows
