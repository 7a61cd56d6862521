"""Compares the suspects of a requested capture with their peers, e.g. other ranks of the role.

Workers that communicate end a stage together, so a rank's duration of the stage does not show its
own work. Compared are the time in the stage without waits for other ranks, and the parts of the
stage: computing, communicating, waiting, and idle by cause. Both sides of a row cover the same
stage or step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, median

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.numbers.capture_rows import measures_of
from verl_profiling.numbers.collectives import last_to
from verl_profiling.numbers.columns import SuspectRow
from verl_profiling.numbers.lost import cause_name
from verl_profiling.numbers.sections import Asked
from verl_profiling.slices.intervals import (
    EMPTY,
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
"""Minimum time in the comparison, as a share of the step."""
_KERNELS = 5
_MOST_SUSPECTS = 4
# least wait for one process, as a share of a stage in which nobody is suspected
_OF_A_STAGE_OF_ALL = 0.2


def asked_of(step: Step, calls: Sequence[Calls]) -> tuple[Asked | None, list[SuspectRow]]:
    """Return the request of a capture, and rows of suspects and peers;
    nothing if nobody requested it.
    """
    manifest = step.manifest
    trigger = manifest.trigger if manifest is not None else Trigger()
    if manifest is None or (trigger.kind == "schedule" and not (trigger.sign or trigger.request)):
        return None, []
    peers, rows = _compared(trigger, step)
    last, waited_s = "", 0.0
    if trigger.stage or trigger.sign in ("slow_step", "leader"):
        is_of_all = bool(trigger.sign) and not trigger.suspects
        last, waited_s = last_to(
            trigger.stage, step, calls, _OF_A_STAGE_OF_ALL if is_of_all else _SMALL
        )
    fields = {
        **msgspec.structs.asdict(trigger),
        "peers": peers,
        "only": _recorded_stages(trigger, step),
    }
    return Asked(**fields, when=local_time(manifest.begin_ns), last=last, waited_s=waited_s), rows


def _compared(trigger: Trigger, step: Step) -> tuple[list[str], list[SuspectRow]]:
    """Return the names of the peers, and the rows of the suspects;
    other captured workers may be peers.
    """
    suspects = list(_named(trigger.suspects[:_MOST_SUSPECTS], step))
    roles, suspected = {one.role for one in suspects}, {one.worker for one in suspects}
    others = [w.name for w in step.workers if w.identity.role in roles and w.name not in suspected]
    found = ([p for p in _named(names, step) if p.recorded] for names in (trigger.peers, others))
    peers = next(filter(None, found), [])
    rows: list[SuspectRow] = []
    for suspect in suspects:
        if beside := [p for p in peers if p.role == suspect.role and p.worker != suspect.worker]:
            rows += _suspect_rows(suspect, beside, trigger.stage)
    return [peer.name for peer in peers], rows


def _recorded_stages(trigger: Trigger, step: Step) -> list[str]:
    """Return the stages of a capture that is limited to a stage; empty for other captures."""
    recorded = {
        artifact.stage for worker in step.workers for artifact in worker.artifacts if artifact.stage
    }
    return (
        [trigger.stage, *sorted(recorded - {trigger.stage})] if trigger.stage and recorded else []
    )


def _named(names: Sequence[str], step: Step) -> Iterator[_Process]:
    """Yield the captured processes with these names of lanes or workers."""
    workers = {"controller": "controller"} if step.stages else {}
    for worker in step.workers:
        lanes = (worker.identity.lane(), *(artifact.lane for artifact in worker.artifacts))
        workers |= dict.fromkeys(lanes, worker.name)
    workers |= {worker.name: worker.name for worker in step.workers}
    for name in dict.fromkeys(names):
        if name in workers:
            yield _Process(name, workers[name], step)


class _Process:
    """A process of a capture, with its stages and the work of its lanes.

    Attributes:
        name: Name of the worker, or of one of its lanes, which then represents the process.
        worker: The worker, or ``controller``.
        lanes: The process's lanes with known work.
        role: Role of the process.
        step: The step.
        ended: The process's stages that ended in the capture.
        outermost: Names of the process's outermost stages.
        recorded: Whether a number can be compared. A process without stages and operators has
            memory alone.
    """

    def __init__(self, name: str, worker: str, step: Step) -> None:
        self.name, self.worker, self.step = name, worker, step
        of_worker = [lane for lane in step.lanes if lane.source.worker == worker]
        named = [lane for lane in of_worker if name in (lane.name, lane.source.lane)]
        self.lanes: list[Lane] = [lane for lane in named or of_worker if not lane.is_unknown]
        self._results = [result for result in step.workers if result.name == worker]
        self.role = self._results[0].identity.role if self._results else worker
        stages = (
            [span for one in self._results for span in one.stages] if self._results else step.stages
        )
        self.outermost = dict.fromkeys(span.name for span in stages if span.depth == 0)
        self.ended = [span for span in stages if not step.cut_off(span)]
        artifacts = [artifact for result in self._results for artifact in result.artifacts]
        self.recorded = bool(stages or self.lanes) or any(one.status == "ok" for one in artifacts)

    def ran(self, stage: str) -> bool:
        """Return whether the process completed a stage of its own with this name."""
        return any(span.name == stage for span in self.ended)

    def window(self, stage: str) -> Spans:
        """Return the time in a stage without starts and stops of tools; without a name, that of the
        step.

        If the process never ran the stage, the time is that of the loop's stage.
        """
        step = self.step
        own = time_of(self.ended, stage)
        if not len(own):
            own = step.during(stage) if stage else step.whole
        return subtract(
            own, time_of(span for result in self._results for span in result.tool_spans)
        )

    def worked_s(self, stage: str) -> float | None:
        """Return the time in a stage without waits,
        or the busy time meanwhile without the stage (s).
        """
        window = self.window(stage)
        if self.ran(stage):
            waits = [lane.waiting for lane in self.lanes] or [EMPTY]
            return (
                length(window) - fmean(length(intersection(window, wait)) for wait in waits)
            ) / 1e9
        busy = [length(intersection(lane.busy, window)) for lane in self.lanes]
        return fmean(busy) / 1e9 if busy else None

    def parts_s(self, stage: str) -> dict[str, float]:
        """Return the parts of the lanes' time in a stage, on average;
        the sum is the observed time.
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
            parts |= {f"idle: {cause_name(name)}": of for name, of in lane.idle.items()}
            totals.update({name: length(intersection(of, window)) for name, of in parts.items()})
        return {name: ns / len(self.lanes) / 1e9 for name, ns in totals.items()}

    def kernels_s(self, stage: str) -> dict[str, float]:
        """Return the self time by name of the process's kernels that began in a stage,
        or in the step.
        """
        totals: Counter[str] = Counter()
        for lane in self.lanes:
            for (place, name), (_, self_ns) in lane.ops.items():
                totals[name] += self_ns if stage in ("", place) else 0
        return {name: ns / len(self.lanes) / 1e9 for name, ns in totals.items() if ns}

    def requests_s(self) -> dict[str, float]:
        """Return the medians over an engine's requests: a whole request,
        and a token of its response.
        """
        whole = [one for result in self._results for one in result.requests if not one.failed]
        tokens_us = [us for one in whole if (us := per_token_us(one)) is not None]
        times_s = {
            "a request": [(one.end_ns - one.begin_ns) / 1e9 for one in whole],
            "a token": [us / 1e6 for us in tokens_us],
        }
        return {name: median(each) for name, each in times_s.items() if each}

    def peaks(self, stage: str) -> dict[str, float]:
        """Return the process's memory peaks, in the slow stage if known, else in any stage."""
        own = [
            row for result in self._results for row in measures_of(result) if row.unit == "bytes"
        ]
        peaks: dict[str, float] = {}
        for row in [row for row in own if row.stage == stage] or own:
            peaks[row.name] = max(row.value, peaks.get(row.name, row.value))
        return peaks


def _suspect_rows(suspect: _Process, peers: Sequence[_Process], stage: str) -> Iterator[SuspectRow]:
    """Yield each quantity of a suspect with the median of its peers; small times are left out."""
    only = peers[0].name if len(peers) == 1 else ""
    blank = SuspectRow(
        suspect=suspect.name, peers=only, kind="stage", name="", value=0.0, peer_value=None
    )
    names = [name for name in dict.fromkeys([stage, *suspect.outermost]) if name] or [""]
    worked = {name: seconds for name in names if (seconds := suspect.worked_s(name)) is not None}
    of_peers = [
        {n: one.worked_s(n) for n in names if one.ran(n) == suspect.ran(n)} for one in peers
    ]
    rows = _beside(blank, "stage", worked, of_peers)
    alike = [peer for peer in peers if peer.lanes and peer.ran(stage) == suspect.ran(stage)]
    rows += _beside(blank, "time", suspect.parts_s(stage), [peer.parts_s(stage) for peer in alike])
    if suspect.lanes and alike:
        own, *theirs = _kernels((suspect, *alike), stage)
        kernels = _beside(blank, "kernel", own, theirs)
        kernels.sort(key=lambda row: -abs(row.difference or 0.0))
        rows += [row for row in kernels[:_KERNELS] if row.difference]
    least_s = _SMALL * suspect.step.span_ns / 1e9
    yield from (row for row in rows if max(row.value, row.peer_value or 0.0) >= least_s)
    yield from _beside(
        blank, "request", suspect.requests_s(), [peer.requests_s() for peer in peers]
    )
    memory = msgspec.structs.replace(blank, unit="bytes")
    yield from _beside(
        memory, "memory", suspect.peaks(stage), [peer.peaks(stage) for peer in peers]
    )


def _kernels(processes: Sequence[_Process], stage: str) -> list[dict[str, float]]:
    """Return the self time by kernel of each process, in the stage if any kernel ran there (s)."""
    of_stage = [process.kernels_s(stage) for process in processes]
    seconds = of_stage if any(of_stage) else [process.kernels_s("") for process in processes]
    names = dict.fromkeys(chain(*seconds), 0.0)
    return [names | of_process for of_process in seconds]


def _beside(
    blank: SuspectRow,
    kind: str,
    own: Mapping[str, float],
    peers: Sequence[Mapping[str, float | None]],
) -> list[SuspectRow]:
    """Return a row for each number of a suspect,
    with the median of the peers that have the number.
    """
    blank = msgspec.structs.replace(blank, kind=kind)
    rows = []
    for name, value in own.items():
        known = [number for of in peers if (number := of.get(name)) is not None]
        fields = {
            "name": name or "the step",
            "value": value,
            "peer_value": median(known) if known else None,
        }
        rows.append(
            msgspec.structs.replace(blank, peers=blank.peers or f"median of {len(known)}", **fields)
        )
    return rows
