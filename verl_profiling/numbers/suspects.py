"""Compares the suspects of a requested capture with their peers.

A suspect is a lane or worker that may be the cause of a slow step, e.g. ``actor_rank3``. Its peers
are e.g. the other ranks of its role.

Workers that communicate end a stage together, so a rank's duration of the stage does not show its
own work. Compared are the time in the stage without waits for other ranks, and the parts of the
stage: computing, communicating, waiting, and idle by cause. Both sides of a row cover the same
stage or step.

The request also says whether the step has what was noticed, and what its own start did to waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from statistics import fmean, median
from typing import Any

from msgspec.structs import asdict, replace

from verl_profiling.capture_request import Trigger
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_signs import sign_of, usual_of
from verl_profiling.manifest import StageSpan
from verl_profiling.numbers.capture_rows import measures_of
from verl_profiling.numbers.collectives import last_to
from verl_profiling.numbers.idle_causes import cause_name
from verl_profiling.numbers.report_columns import Kind, RequestedCapture, SuspectRow
from verl_profiling.slices.intervals import (
    Spans,
    intersection,
    length,
    subtract,
    time_of,
    union,
)
from verl_profiling.steps.calls import Calls
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.requests import per_token_us
from verl_profiling.units import local_time

_SMALL = 0.01
"""Least time of a row of the comparison, as a share of the step; shorter times are left out."""
_KERNELS = 5
_MOST_SUSPECTS = 4
# without suspects: least wait for one rank, as a share of the stage, that is worth a name
_OF_A_STAGE_OF_ALL = 0.2
_OF_STAGE = "stage"
"""Kind of the rows with the time in a stage without waits for other ranks."""


def requested_of(
    step: Step, calls: Sequence[Calls]
) -> tuple[RequestedCapture | None, list[SuspectRow]]:
    """Return the request of a capture, and rows that compare its suspects with peers.

    A capture of the schedule alone has neither.
    """
    manifest = step.manifest
    if manifest is None:
        return None, []
    trigger = manifest.trigger
    if trigger.kind == "schedule" and not (trigger.sign or trigger.request):
        return None, []
    facts = asdict(trigger)
    facts["peers"], rows = _compared(trigger, step)
    last, waited_s = _last_rank(trigger, step, calls)
    request = RequestedCapture(
        **facts,
        only=_recorded_stages(trigger, step),
        when=local_time(manifest.begin_ns),
        last=last,
        waited_s=waited_s,
        late_start_s=late_start_s(last, step),
    )
    return request, rows


def _last_rank(trigger: Trigger, step: Step, calls: Sequence[Calls]) -> tuple[str, float]:
    """Return the rank that was last in the collectives of the slow stage, and the others' wait (s).

    Empty if the request names neither a stage nor a sign of all ranks.
    """
    if not trigger.stage and not sign_of(trigger).of_ranks:
        return "", 0.0
    least = _SMALL
    if trigger.sign and not trigger.suspects:
        least = _OF_A_STAGE_OF_ALL
    return last_to(trigger.stage, step, calls, least)


def _compared(trigger: Trigger, step: Step) -> tuple[list[str], list[SuspectRow]]:
    """Return the names of the peers, and the rows that compare each suspect with its peers."""
    suspects = list(_named(trigger.suspects[:_MOST_SUSPECTS], step))
    peers = _peers(trigger, suspects, step)
    rows: list[SuspectRow] = []
    for suspect in suspects:
        others = [p for p in peers if p.role == suspect.role and p.worker != suspect.worker]
        if others:
            rows += _Comparison(suspect, others, trigger.stage).rows()
    return [peer.name for peer in peers], rows


def _peers(trigger: Trigger, suspects: Sequence[_Process], step: Step) -> list[_Process]:
    """Return the peers that the request names, else all other workers of the suspects' roles.

    Only recorded processes count.
    """
    roles = {suspect.role for suspect in suspects}
    suspected = {suspect.worker for suspect in suspects}
    others = []
    for worker in step.workers:
        if worker.identity.role in roles and worker.name not in suspected:
            others.append(worker.name)
    for names in (trigger.peers, others):
        peers = [process for process in _named(names, step) if process.recorded]
        if peers:
            break
    return peers


def _recorded_stages(trigger: Trigger, step: Step) -> list[str]:
    """Return the stages that a capture of selected stages recorded, the request's stage first.

    Empty for a capture of the whole step.
    """
    recorded = set()
    for worker in step.workers:
        for artifact in worker.artifacts:
            if artifact.stage:
                recorded.add(artifact.stage)
    if not trigger.stage or not recorded:
        return []
    return [trigger.stage, *sorted(recorded - {trigger.stage})]


def _named(names: Sequence[str], step: Step) -> Iterator[_Process]:
    """Yield the process of each name of a captured lane or worker; other names are left out."""
    workers = {}
    if step.stages:
        workers["controller"] = "controller"
    for worker in step.workers:
        workers[worker.identity.lane()] = worker.name
        for artifact in worker.artifacts:
            workers[artifact.lane] = worker.name
    for worker in step.workers:
        workers[worker.name] = worker.name
    for name in dict.fromkeys(names):
        if name in workers:
            yield _Process(name, workers[name], step)


class _Process:
    """A process of a capture, with its stages and the work of its lanes.

    Attributes:
        name: Name of the worker, or of one of its lanes; then only this lane is compared.
        worker: Name of the worker, or ``controller``.
        step: The captured step.
        results: Results of the worker in the manifest; empty for the controller.
        stages: Runs of the process's stages.
    """

    def __init__(self, name: str, worker: str, step: Step) -> None:
        self.name = name
        self.worker = worker
        self.step = step
        self.results = [result for result in step.workers if result.name == worker]
        self.stages = step.stages
        if self.results:
            self.stages = list(self._all("stages"))

    def _all(self, field: str) -> Iterator[Any]:
        """Return the items of a list that each result of the worker has."""
        return chain.from_iterable(map(attrgetter(field), self.results))

    @property
    def role(self) -> str:
        """Role of the process."""
        if self.results:
            return self.results[0].identity.role
        return self.worker

    @cached_property
    def lanes(self) -> list[Lane]:
        """The lanes of the process, without lanes whose device's work is unknown."""
        lanes = self.step.lanes_of(self.worker)
        named = [lane for lane in lanes if self.name in (lane.name, lane.source.lane)]
        return [lane for lane in named or lanes if not lane.is_unknown]

    @property
    def recorded(self) -> bool:
        """Whether the process has stages, a lane with known work or an artifact that is ``ok``.

        Without these, only its memory could be compared.
        """
        is_written = "ok" in map(attrgetter("status"), self._all("artifacts"))
        return bool(self.stages or self.lanes) or is_written

    @cached_property
    def ended(self) -> list[StageSpan]:
        """Runs of the process's stages that ended in the capture."""
        return [span for span in self.stages if not self.step.cut_off(span)]

    def ran(self, stage: str) -> bool:
        """Return whether the process completed a stage of its own with this name."""
        return stage in map(attrgetter("name"), self.ended)

    def window(self, stage: str) -> Spans:
        """Return the process's time in a stage (``""``: in the step), without starts and stops of
        tools.

        If the process never ran the stage, the time is that of the loop's stage.
        """
        time = time_of(self.ended, stage)
        if not len(time):
            time = self.step.whole
            if stage:
                time = self.step.during(stage)
        return subtract(time, time_of(self._all("tool_spans")))

    def worked_s(self, stage: str) -> float | None:
        """Return the seconds that the process worked in a stage: without waits for other ranks.

        For a process that never ran the stage, return the busy time of its lanes meanwhile.
        """
        window = self.window(stage)
        if self.ran(stage):
            waits = [length(intersection(window, lane.waiting)) for lane in self.lanes]
            return (length(window) - fmean(waits or [0])) / 1e9
        busy = [length(intersection(lane.busy, window)) for lane in self.lanes]
        if busy:
            return fmean(busy) / 1e9
        return None

    def parts_s(self, stage: str) -> dict[str, float]:
        """Return the seconds in a stage by use, e.g. communicating, as the mean of the lanes.

        The sum is the observed time.
        """
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
            for cause, idle in lane.idle.items():
                parts[f"idle: {cause_name(cause)}"] = idle
            for name, time in parts.items():
                totals[name] += length(intersection(time, window))
        return self._means_s(totals)

    def _means_s(self, totals_ns: Counter[str]) -> dict[str, float]:
        return {name: ns / len(self.lanes) / 1e9 for name, ns in totals_ns.items()}

    def kernels_s(self, stage: str) -> dict[str, float]:
        """Return the self time (s) of each kernel in a stage (``""``: in the step), as the lanes'
        mean.
        """
        totals: Counter[str] = Counter()
        for lane in self.lanes:
            for (place, name), (_, self_ns) in lane.ops.items():
                if self_ns and stage in ("", place):
                    totals[name] += self_ns
        return self._means_s(totals)

    def requests_s(self) -> dict[str, float]:
        """Return the median seconds of an engine's requests, and of a token of their responses.

        Failed requests, and those whose end is unknown, are left out.
        """
        times_s = defaultdict[str, list[float]](list)
        for request in self._all("requests"):
            if request.failed or request.ends_with_batch:
                continue
            times_s["a request"].append((request.end_ns - request.begin_ns) / 1e9)
            token_us = per_token_us(request)
            if token_us is not None:
                times_s["a token"].append(token_us / 1e6)
        return {name: median(times) for name, times in times_s.items()}

    def peaks(self, stage: str) -> dict[str, float]:
        """Return the process's memory peaks (bytes) by name: in the stage if known, else in any."""
        measures = chain.from_iterable(map(measures_of, self.results))
        rows = [row for row in measures if row.unit == "bytes"]
        peaks: dict[str, float] = {}
        for row in [row for row in rows if row.stage == stage] or rows:
            peaks[row.name] = max(row.value, peaks.get(row.name, row.value))
        return peaks


class _Comparison:
    """Compares a suspect with its peers.

    Attributes:
        suspect: The process that may be slow.
        peers: Other processes of its role.
        stage: The slow stage; empty for the whole step.
        alike: The peers with recorded work that ran the stage, if the suspect ran it too; else
            those that did not run it either.
    """

    def __init__(self, suspect: _Process, peers: Sequence[_Process], stage: str) -> None:
        self.suspect = suspect
        self.peers = peers
        self.stage = stage
        ran = suspect.ran(stage)
        self.alike = [peer for peer in peers if peer.lanes and peer.ran(stage) == ran]

    def rows(self) -> Iterator[SuspectRow]:
        """Yield a row per quantity: the suspect's value and its peers' median; no short times."""
        suspect, peers, stage = self.suspect, self.peers, self.stage
        parts = [peer.parts_s(stage) for peer in self.alike]
        of_parts = self._rows("time", suspect.parts_s(stage), parts)
        least_s = _SMALL * suspect.step.span_ns / 1e9
        for row in chain(self._stages(), of_parts, self._kernels()):
            if max(row.value, row.peer_value or 0.0) >= least_s:
                yield row
        yield from self._rows("request", suspect.requests_s(), [p.requests_s() for p in peers])
        peaks = [peer.peaks(stage) for peer in peers]
        for row in self._rows("memory", suspect.peaks(stage), peaks):
            yield replace(row, unit="bytes")

    def _stages(self) -> Iterator[SuspectRow]:
        """Yield rows of the slow stage and the suspect's outermost stages; else of the step."""
        suspect = self.suspect
        outermost = [span.name for span in suspect.stages if span.depth == 0]
        names = list(filter(None, dict.fromkeys([self.stage, *outermost]))) or [""]
        for name in names:
            alike = [peer for peer in self.peers if peer.ran(name) == suspect.ran(name)]
            worked_s = [{name: peer.worked_s(name)} for peer in alike]
            yield from self._rows("stage", {name: suspect.worked_s(name)}, worked_s)

    def _kernels(self) -> list[SuspectRow]:
        """Return rows of the kernels that differ most: in the slow stage, if any ran there."""
        processes = [self.suspect, *self.alike]
        if not (self.suspect.lanes and self.alike):
            return []
        seconds = [process.kernels_s(self.stage) for process in processes]
        if not any(seconds):
            seconds = [process.kernels_s("") for process in processes]
        names = dict.fromkeys(chain(*seconds), 0.0)
        of_suspect, *of_peers = (names | of_process for of_process in seconds)
        rows = [row for row in self._rows("kernel", of_suspect, of_peers) if row.difference]
        return sorted(rows, key=lambda row: -abs(row.difference or 0.0))[:_KERNELS]

    def _rows(
        self,
        kind: Kind,
        numbers: Mapping[str, float | None],
        of_peers: Sequence[Mapping[str, float | None]],
    ) -> Iterator[SuspectRow]:
        """Yield a row for each known number of the suspect, with the median of the peers that have
        the number.
        """
        for name, value in numbers.items():
            if value is None:
                continue
            of_name = [peer.get(name) for peer in of_peers]
            values = [number for number in of_name if number is not None]
            usual = None
            if values:
                usual = median(values)
            peers = self.peers[0].name
            if len(self.peers) > 1:
                peers = f"median of {len(values)}"
            yield SuspectRow(
                suspect=self.suspect.name,
                peers=peers,
                kind=kind,
                name=name or "the step",
                value=value,
                peer_value=usual,
            )


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
