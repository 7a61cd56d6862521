"""Compares ranks: their calls of collectives, how long they wait for whom, stragglers and suspects.

The ranks of a process group leave a collective together. So the last rank to enter a call has the shortest
run, and the length of this run is the cost of the call. Any other rank waits first, for as long as its run
exceeds the cost:

    waiting of a rank = union, over its calls, of [begin, end - cost)

Concurrent waits of a rank count once. Waiting lies inside the calls, so it never exceeds the rank's
communication. Only durations are compared between ranks, so clock offsets have no influence.

If some ranks of a group are not captured, the result is a lower bound of the waits, and the last rank is
unknown. A collective of unknown group yields nothing.

The suspects of a requested capture are compared with their peers. Workers that communicate end a stage
together, so a rank's duration of the stage does not show its own work. Compared are the time in the stage
without waits for other ranks, and the parts of the stage: computing, communicating, waiting, and idle by
cause. Both sides of a row cover the same stage or step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.capture_request import Trigger
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import StageSpan
from verl_profiling.report.capture_rows import measures_of, per_token_us
from verl_profiling.report.intervals import (
    EMPTY,
    Spans,
    holding,
    intersection,
    length,
    subtract,
    time_of,
    union,
)
from verl_profiling.report.kinds import Group
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.report.lost import cause_name, until_last
from verl_profiling.report.model import Asked, CollectiveRow, StragglerRow, SuspectRow
from verl_profiling.units import local_time

_TOP_COLLECTIVES = 20
_SMALL = 0.01  # share of the step or stage, below which times are left out
_LATE_SHARE = 0.8  # of the waiting, from which on one rank is the last one


class Calls(NamedTuple):
    """All calls of one collective by the ranks of a process group.

    Attributes:
        role: Role of the ranks.
        name: The collective.
        group: The group.
        lanes: Lanes of the captured ranks.
        runs: Begin and end (ns) of each rank's run of each call, shape (ranks, calls, 2).
        cost: Length of the shortest run of each call (ns).
        last: Index of the rank that entered each call last.
    """

    role: str
    name: str
    group: Group
    lanes: list[Lane]
    runs: NDArray[np.int64]
    cost: NDArray[np.int64]
    last: NDArray[np.intp]

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the group were captured."""
        return len(self.lanes) == self.group.size

    def waiting(self, rank: int, calls: Any = slice(None)) -> Spans:
        """Return the spans in which a rank waited in calls; spans may overlap."""
        begins = self.runs[rank, calls, 0]
        return np.stack((begins, self.runs[rank, calls, 1] - self.cost[calls]), axis=1)


def matched_calls(step: Step) -> list[Calls]:
    """Return the collectives that all ranks of a group called equally often; the nth runs form a call.

    If the numbers of calls differ, runs cannot be matched, and the collective is left out. Groups of
    different replicas have the same name, but are different groups.
    """
    called = defaultdict(list)
    for lane in step.lanes:
        for call in lane.collectives:
            called[lane.source.role, lane.source.replica, call].append(lane)
    found = []
    for (role, _, (name, group)), lanes in called.items():
        of_lanes = [lane.collectives[name, group] for lane in lanes]
        if 1 < len(lanes) <= (group.size or len(lanes)) and len(set(map(len, of_lanes))) == 1:
            runs = np.stack(of_lanes)
            took = runs[:, :, 1] - runs[:, :, 0]
            found.append(Calls(role, name, group, lanes, runs, took.min(axis=0), took.argmin(axis=0)))
    return found


def waits(calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return the time in which each rank waited in any collective."""
    found: defaultdict[Lane, list[Spans]] = defaultdict(list)
    for one in calls:
        for rank, lane in enumerate(one.lanes):
            found[lane].append(one.waiting(rank))
    return {lane: union(*spans) for lane, spans in found.items()}


def _perhaps_waiting(step: Step, calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return the waits in collectives, and exposed communication that may be an unknown wait."""
    told: defaultdict[Lane, list[Spans]] = defaultdict(list)
    for one in calls:
        for lane, runs in zip(one.lanes, one.runs, strict=True):
            told[lane] += [runs] if one.is_whole else []
    return {
        lane: union(lane.waiting, subtract(lane.communication, union(lane.compute, *told[lane])))
        for lane in step.lanes
    }


def last_to(stage: str, step: Step, calls: Iterable[Calls], least: float) -> tuple[str, float]:
    """Return the rank for which others waited in the collectives of a stage, and the total wait (s).

    An empty stage means the whole step. The rank is empty if ranks take turns in being last, or if the
    waiting is less than the share ``least`` of the stage. Only captured ranks count.
    """
    waited: defaultdict[tuple[str, str], list[Spans]] = defaultdict(list)  # by (last rank, waiting rank)
    longest = 0
    for one in calls:
        for index, lane in enumerate(one.lanes):
            own = time_of(lane.stages, stage)
            during = own if len(own) else step.during(stage) if stage else lane.observed
            inside = holding(during, one.runs[index, :, 0]) & (one.last == index)
            longest = max(longest, length(during))
            for rank, other in enumerate(one.lanes):
                waited[lane.name, other.name].append(one.waiting(rank, inside))
    sums: Counter[str] = Counter()
    for (name, _), parts in waited.items():
        sums[name] += length(union(*parts))
    name, most = next(iter(sums.most_common(1)), ("", 0))
    told = most > max(_LATE_SHARE * sums.total(), least * longest)
    return (name, most / 1e9) if told else ("", 0.0)


def collective_rows(calls: Iterable[Calls]) -> list[CollectiveRow]:
    """Return one row per collective and group, for those with the longest waits."""
    rows = []
    for one in calls:
        (late, times), *_ = Counter(one.last.tolist()).most_common(1)
        rows.append(
            CollectiveRow(
                name=one.name,
                role=one.role,
                group=one.group.ranks,
                calls=len(one.cost),
                median_us=float(np.median(one.cost)) / 1000,
                wait_us=sum(length(union(one.waiting(rank))) for rank in range(len(one.lanes))) / 1000,
                late=one.lanes[late].name if one.is_whole else "",
                late_share=times / len(one.cost) if one.is_whole else 0.0,
            )
        )
    return sorted(rows, key=lambda row: -row.wait_us)[:_TOP_COLLECTIVES]


def stragglers(step: Step, calls: Iterable[Calls]) -> list[StragglerRow]:
    """Return, for each stage that several workers of a role ran, how far apart their work is.

    Workers that communicate end a stage together, so how long it lasted says nothing. What a worker
    worked is the time in the stage less the time in which it waited in collectives. A stage that one of
    them was still in when the capture ended is not compared. Nor is one in which another may have worked as
    long, because a worker communicated and it is not known whether it waited. A rank without a trace may
    have waited in any stage that ends together; so it is slow only if it ends later by half of the lead.

    Args:
        step: The step.
        calls: Its collectives.
    """
    perhaps = _perhaps_waiting(step, calls)
    traced = {lane.source.worker for lane in step.lanes}
    rows: list[StragglerRow] = []
    for role in dict.fromkeys(worker.identity.role for worker in step.workers):
        stages: dict[str, dict[str, list[StageSpan]]] = {}  # by stage, then worker
        waited: dict[str, tuple[Spans, ...]] = {}  # by all lanes of a worker: surely, and perhaps
        for worker in (worker for worker in step.workers if worker.identity.role == role):
            lanes = [lane for lane in step.lanes if lane.source.worker == worker.name]
            surely, most = [lane.waiting for lane in lanes], [perhaps[lane] for lane in lanes]
            waited[worker.name] = tuple(reduce(intersection, of) if of else EMPTY for of in (surely, most))
            for span in worker.stages:
                stages.setdefault(span.name, {}).setdefault(worker.name, []).append(span)
        for stage, runs in stages.items():
            if len(runs) > 1 and not any(map(step.cut_off, chain.from_iterable(runs.values()))):
                found = _rows(stage, role, runs, waited)
                rows += (row for row in found if row.slowest in traced or _ends_last(row, runs))
    return sorted(rows, key=lambda row: -row.behind_us)


def _rows(
    stage: str, role: str, runs: dict[str, list[StageSpan]], waited: Mapping[str, tuple[Spans, ...]]
) -> Iterator[StragglerRow]:
    worked, surely, waited_ns = {}, {}, 0
    for name, own in runs.items():
        waiting, perhaps = waited[name]
        time = time_of(own)
        worked[name] = length(subtract(time, waiting)) / 1000
        surely[name] = length(subtract(time, perhaps)) / 1000
        waited_ns += length(intersection(time, waiting)) + length(until_last(own, runs.values()))
    slowest = max(surely, key=lambda name: surely[name])
    worked[slowest] = surely[slowest]
    if surely[slowest] == max(worked.values()):
        yield StragglerRow(
            stage=stage,
            role=role,
            workers=len(worked),
            slowest=slowest,
            slowest_us=worked[slowest],
            median_us=median(worked.values()),
            wait_us=waited_ns / 1000,
            behind_us=sum(worked[slowest] - us for us in worked.values()),
        )


def _ends_last(row: StragglerRow, runs: Mapping[str, Sequence[StageSpan]]) -> bool:
    """Return whether the slowest ends its stage later than the others by at least half of its lead."""
    ends = {name: max(span.end_ns for span in own) / 1000 for name, own in runs.items()}
    others = [us for name, us in ends.items() if name != row.slowest]
    lead_us = row.behind_us / len(others)
    return row.role == ROLLOUT_ROLE or 2 * (ends[row.slowest] - median(others)) >= lead_us


_KERNELS = 5
_MOST_SUSPECTS = 4
_OF_A_STAGE_OF_ALL = 0.2  # where the watch suspects nobody, a little later is no cause


def asked_of(step: Step, calls: Sequence[Calls]) -> tuple[Asked | None, list[SuspectRow]]:
    """Return who asked for a capture, and the suspects beside their peers; nothing for the schedule alone."""
    manifest = step.manifest
    trigger = manifest.trigger if manifest is not None else Trigger()
    if manifest is None or (trigger.kind == "schedule" and not (trigger.sign or trigger.request)):
        return None, []
    suspects = list(_named(trigger.suspects[:_MOST_SUSPECTS], step))
    roles, suspected = {one.role for one in suspects}, {one.worker for one in suspects}
    others = [w.name for w in step.workers if w.identity.role in roles and w.name not in suspected]
    found = ([p for p in _named(names, step) if p.recorded] for names in (trigger.peers, others))
    peers = next(filter(None, found), [])
    rows: list[SuspectRow] = []
    for suspect in suspects:
        if beside := [p for p in peers if p.role == suspect.role and p.worker != suspect.worker]:
            rows += _suspect_rows(suspect, beside, trigger.stage)
    when = local_time(manifest.begin_ns)
    last, waited_s = "", 0.0
    if trigger.stage or trigger.sign in ("slow_step", "leader"):
        is_of_all = bool(trigger.sign) and not trigger.suspects
        last, waited_s = last_to(trigger.stage, step, calls, _OF_A_STAGE_OF_ALL if is_of_all else _SMALL)
    fields = {**msgspec.structs.asdict(trigger), "peers": [peer.name for peer in peers]}
    return Asked(**fields, when=when, last=last, waited_s=waited_s), rows


def _named(names: Sequence[str], step: Step) -> Iterator[_Process]:
    """Yield the processes that a trigger names by their lanes or as workers, if the capture has them."""
    workers = {"controller": "controller"} if step.stages else {}
    for worker in step.workers:
        lanes = (worker.identity.lane(), *(artifact.lane for artifact in worker.artifacts))
        workers |= dict.fromkeys(lanes, worker.name)
    workers |= {worker.name: worker.name for worker in step.workers}
    for name in dict.fromkeys(names):
        if name in workers:
            yield _Process(name, workers[name], step)


class _Process:
    """A process of a capture: its stages, its lanes, and what these did.

    Attributes:
        name: What it is called: a worker, or one of its lanes, which then stands for it.
        worker: The worker, or ``controller``.
        lanes: Its lanes of which something is known.
        role: Its role.
        step: The step.
        ended: Its stages that ended in the capture.
        outermost: Names of its outermost stages.
        recorded: Whether there is anything to compare: of a process without stages and operators, its memory.
    """

    def __init__(self, name: str, worker: str, step: Step) -> None:
        self.name, self.worker, self.step = name, worker, step
        of_worker = [lane for lane in step.lanes if lane.source.worker == worker]
        named = [lane for lane in of_worker if name in (lane.name, lane.source.lane)]
        self.lanes: list[Lane] = [lane for lane in named or of_worker if not lane.is_unknown]
        self._results = [result for result in step.workers if result.name == worker]
        self.role = self._results[0].identity.role if self._results else worker
        stages = [span for one in self._results for span in one.stages] if self._results else step.stages
        self.outermost = dict.fromkeys(span.name for span in stages if span.depth == 0)
        self.ended = [span for span in stages if not step.cut_off(span)]
        artifacts = [artifact for result in self._results for artifact in result.artifacts]
        self.recorded = bool(stages or self.lanes) or any(one.status == "ok" for one in artifacts)

    def ran(self, stage: str) -> bool:
        """Return whether the process completed a stage of its own with this name."""
        return any(span.name == stage for span in self.ended)

    def window(self, stage: str) -> Spans:
        """Return when it was in a stage, its own or else the loop's, or in the step where none is named.

        The starts and stops of its tools are no part of it.
        """
        step = self.step
        own = time_of(self.ended, stage)
        if not len(own):
            own = step.during(stage) if stage else step.whole
        return subtract(own, time_of(span for result in self._results for span in result.tool_spans))

    def worked_s(self, stage: str) -> float | None:
        """Return its time in a stage without waiting; of what has no such stage, the time it was busy."""
        window = self.window(stage)
        if self.ran(stage):
            waits = [lane.waiting for lane in self.lanes] or [EMPTY]
            return (length(window) - fmean(length(intersection(window, wait)) for wait in waits)) / 1e9
        busy = [length(intersection(lane.busy, window)) for lane in self.lanes]
        return fmean(busy) / 1e9 if busy else None

    def parts_s(self, stage: str) -> dict[str, float]:
        """Return what its lanes did in a stage, on average; the parts add up to what was observed of it."""
        totals: Counter[str] = Counter()
        for lane in self.lanes:
            window = intersection(self.window(stage), lane.observed)
            work = union(lane.compute, lane.memory, lane.unrecognised)
            exposed = subtract(lane.communication, work)
            waiting = intersection(lane.waiting, exposed)
            parts = {
                "computing and copying": work,
                "communicating": subtract(exposed, waiting),
                "waiting for other ranks": waiting,
            }
            parts |= {f"idle: {cause_name(name)}": of for name, of in lane.idle.items()}
            totals.update({name: length(intersection(of, window)) for name, of in parts.items()})
        return {name: ns / len(self.lanes) / 1e9 for name, ns in totals.items()}

    def kernels_s(self, stage: str) -> dict[str, float]:
        """Return the self time of its kernels that began in a stage, or in the whole step, by name."""
        totals: Counter[str] = Counter()
        for lane in self.lanes:
            for (place, name), (_, self_ns) in lane.ops.items():
                totals[name] += self_ns if stage in ("", place) else 0
        return {name: ns / len(self.lanes) / 1e9 for name, ns in totals.items() if ns}

    def requests_s(self) -> dict[str, float]:
        """Return the medians over an engine's requests: a whole request, and a token of its response."""
        whole = [one for result in self._results for one in result.requests if not one.failed]
        tokens_us = [us for one in whole if (us := per_token_us(one)) is not None]
        times_s = {
            "a request": [(one.end_ns - one.begin_ns) / 1e9 for one in whole],
            "a token": [us / 1e6 for us in tokens_us],
        }
        return {name: median(each) for name, each in times_s.items() if each}

    def peaks(self, stage: str) -> dict[str, float]:
        """Return its peaks of memory: in the stage that was slow where they are known, else in any."""
        own = [row for result in self._results for row in measures_of(result) if row.unit == "bytes"]
        peaks: dict[str, float] = {}
        for row in [row for row in own if row.stage == stage] or own:
            peaks[row.name] = max(row.value, peaks.get(row.name, row.value))
        return peaks


def _suspect_rows(suspect: _Process, peers: Sequence[_Process], stage: str) -> Iterator[SuspectRow]:
    """Yield each quantity of a suspect with the median of its peers; small times are left out."""
    whose = peers[0].name if len(peers) == 1 else f"median of {len(peers)}"
    blank = SuspectRow(suspect=suspect.name, peers=whose, kind="stage", name="", value=0.0, peer_value=None)
    names = dict.fromkeys([*([stage] if stage else []), *suspect.outermost]) or [""]
    worked = {name: seconds for name in names if (seconds := suspect.worked_s(name)) is not None}
    of_peers = [{n: one.worked_s(n) for n in names if one.ran(n) == suspect.ran(n)} for one in peers]
    rows = _beside(blank, worked, of_peers)
    alike = [peer for peer in peers if peer.lanes and peer.ran(stage) == suspect.ran(stage)]
    parts = [peer.parts_s(stage) for peer in alike]
    rows += _beside(msgspec.structs.replace(blank, kind="time"), suspect.parts_s(stage), parts)
    if suspect.lanes and alike:
        where = stage if any(one.kernels_s(stage) for one in (suspect, *alike)) else ""
        found = [one.kernels_s(where) for one in (suspect, *alike)]
        own, *theirs = ({**dict.fromkeys(chain(*found), 0.0), **of} for of in found)
        kernels = _beside(msgspec.structs.replace(blank, kind="kernel"), own, theirs)
        kernels.sort(key=lambda row: -abs(row.difference or 0.0))
        rows += [row for row in kernels[:_KERNELS] if row.difference]
    least_s = _SMALL * suspect.step.span_ns / 1e9
    yield from (row for row in rows if max(row.value, row.peer_value or 0.0) >= least_s)
    requests = msgspec.structs.replace(blank, kind="request")
    yield from _beside(requests, suspect.requests_s(), [peer.requests_s() for peer in peers])
    memory = msgspec.structs.replace(blank, kind="memory", unit="bytes")
    yield from _beside(memory, suspect.peaks(stage), [peer.peaks(stage) for peer in peers])


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
