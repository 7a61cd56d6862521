"""Compares the suspects of an aimed capture with their peers, and the step with those before it.

Workers that communicate end a stage together, so how long a rank was in one says nothing of it. What is
compared is its time in the stage less the time in which it waited for other ranks in collectives, and that
time's parts: computing, communicating, waiting, and idle by cause. Where the step or the stage took at most
a tenth more than the median before, or at most a quarter is left of what it took more when that was noticed,
or where the suspect worked at most a tenth longer than its peers, the capture shows nothing of it.
What the loop waited for in a stage that no worker runs may have begun before the capture: see ``awaited``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from statistics import median

import msgspec

from verl_profiling.report.anatomy import capture_time
from verl_profiling.report.asked import Asked, Shows, SuspectRow, Unit, in_unit
from verl_profiling.report.awaited import awaited, ran_elsewhere
from verl_profiling.report.compared_process import Activities, ComparedProcess
from verl_profiling.report.intervals import Spans, length, spans_of, subtract
from verl_profiling.report.lanes import Step
from verl_profiling.report.rows import MeasureRow
from verl_profiling.trigger import Sign, Trigger
from verl_profiling.units import duration

__all__ = ["asked_of"]

_SAME = 0.1
_LEFT = 0.25
_SMALL = 0.01
_KERNELS = 5
_MOST_SUSPECTS = 4
_UNITS: Mapping[Sign, Unit] = {"leader": "share", "memory": "bytes"}
_STEP = "the step"


def asked_of(
    step: Step, measures: Sequence[MeasureRow], activities: Activities
) -> tuple[Asked, list[SuspectRow]] | None:
    """Return who asked for a capture, and the suspects beside their peers; ``None`` for the schedule alone.

    Args:
        step: The step.
        measures: Numbers that its workers recorded.
        activities: What its lanes did.
    """
    manifest = step.manifest
    trigger = manifest.trigger if manifest is not None else Trigger()
    if manifest is None or (trigger.kind == "schedule" and not (trigger.sign or trigger.request)):
        return None
    found = _Comparison(step, trigger, measures, activities)
    shows, verdict = found.verdict() if trigger.sign else ("unknown", "")
    began = time.localtime(manifest.begin_ns / 1e9)
    asked = Asked(
        kind=trigger.kind,
        reason=trigger.reason,
        by=trigger.by,
        request=trigger.request,
        when=time.strftime("%Y-%m-%d %H:%M:%S", began),
        sign=trigger.sign,
        noticed=trigger.noticed,
        stage=trigger.stage,
        suspects=trigger.suspects,
        peers=[peer.name for peer in found.peers],
        unit=_UNITS.get(trigger.sign, "s"),
        value=trigger.value,
        median=trigger.median,
        history=trigger.history,
        shows=shows,
        verdict=verdict,
    )
    return asked, found.rows


class _Comparison:
    """The suspects of a trigger beside their peers."""

    def __init__(
        self, step: Step, trigger: Trigger, measures: Sequence[MeasureRow], activities: Activities
    ) -> None:
        self._step, self._trigger, self._measures = step, trigger, measures
        self._activities = activities
        self.suspects = [self._process(name) for name in trigger.suspects[:_MOST_SUSPECTS]]
        named = [peer for name in trigger.peers if (peer := self._process(name)) and peer.recorded]
        self.peers = named or self._others()

    def _process(self, name: str) -> ComparedProcess | None:
        """Return the process that a trigger names by its lane or as a worker, if the capture has it."""
        workers = {worker.name for worker in self._step.workers}
        if name in workers or (name == "controller" and self._step.stages):
            return ComparedProcess(name, name, self._step, self._activities)
        of_lane = {a.lane: worker.name for worker in self._step.workers for a in worker.artifacts}
        return ComparedProcess(name, of_lane[name], self._step, self._activities) if name in of_lane else None

    def _others(self) -> list[ComparedProcess]:
        """Return the other processes of the suspects' roles that recorded."""
        known = [one for one in self.suspects if one is not None]
        roles, suspected = {one.role for one in known}, {one.worker for one in known}
        others = dict.fromkeys(
            worker.name
            for worker in self._step.workers
            if worker.identity.role in roles and worker.name not in suspected
        )
        return [
            peer
            for name in others
            if (peer := ComparedProcess(name, name, self._step, self._activities)).recorded
        ]

    @cached_property
    def rows(self) -> list[SuspectRow]:
        """The suspects' numbers beside their peers'."""
        known = [one for one in self.suspects if one is not None and one.recorded]
        return [row for one in known if (peers := self._of_role(one)) for row in self._rows(one, peers)]

    def _of_role(self, suspect: ComparedProcess) -> list[ComparedProcess]:
        return [peer for peer in self.peers if peer.role == suspect.role and peer.worker != suspect.worker]

    def _rows(self, suspect: ComparedProcess, peers: Sequence[ComparedProcess]) -> Iterator[SuspectRow]:
        """Yield each quantity of a suspect, with the median of its peers'."""
        whose = peers[0].name if len(peers) == 1 else f"median of {len(peers)}"
        blank = SuspectRow(
            suspect=suspect.name, peers=whose, kind="stage", name="", value=0.0, peer_value=None
        )
        stage = self._trigger.stage
        names = dict.fromkeys([*([stage] if stage else []), *suspect.outermost()]) or [""]
        worked = {name: seconds for name in names if (seconds := suspect.worked_s(name)) is not None}
        of_peers = [{name: peer.worked_s(name) for name in names} for peer in peers]
        rows = _beside(msgspec.structs.replace(blank, kind="stage"), worked, of_peers)
        yield from (row for row in rows if row.name == (stage or _STEP) or self._matters(row))
        parts = [peer.parts_s(stage) for peer in peers]
        rows = _beside(msgspec.structs.replace(blank, kind="time"), suspect.parts_s(stage), parts)
        yield from (row for row in rows if self._matters(row))
        if of_kernels := [peer.kernels_s(stage) for peer in peers if peer.lanes]:
            every = dict.fromkeys(name for of in of_kernels for name in of) | suspect.kernels_s(stage)
            own = {name: seconds or 0.0 for name, seconds in every.items()}
            theirs = [{name: of.get(name, 0.0) for name in own} for of in of_kernels]
            rows = _beside(msgspec.structs.replace(blank, kind="kernel"), own, theirs)
            found = sorted(rows, key=lambda row: -abs(row.difference or 0.0))[:_KERNELS]
            yield from (row for row in found if row.difference)
        peaks = msgspec.structs.replace(blank, kind="memory", unit="bytes")
        yield from _beside(peaks, self._memory(suspect), [self._memory(peer) for peer in peers])

    def _matters(self, row: SuspectRow) -> bool:
        """Return whether a time is more than a hundredth of the step, of the suspect or of its peers."""
        return max(row.value, row.peer_value or 0.0) > _SMALL * self._step.span_ns / 1e9

    def _memory(self, process: ComparedProcess) -> dict[str, float]:
        """Return a process's peaks: in the stage that was slow where they are known, else in any."""
        own = [m for m in self._measures if m.worker == process.worker and m.name.endswith("_bytes")]
        chosen = [m for m in own if m.stage == self._trigger.stage] or own
        peaks: dict[str, float] = {}
        for measure in chosen:
            peaks[measure.name] = max(measure.value, peaks.get(measure.name, measure.value))
        return peaks

    def verdict(self) -> tuple[Shows, str]:
        """Return whether the capture shows what was noticed, and a sentence on it."""
        past, sentence = self._against_history()
        found = list(map(self._against_peers, self._trigger.suspects, self.suspects))
        states = {state for state, _ in found}
        told = [sentence, *(said for _, said in found)]
        if past == "nothing" or (past == "unknown" and "nothing" in states and "difference" not in states):
            return "nothing", _text("The capture shows nothing of what was noticed:", *told)
        if past == "difference" and "nothing" in states and "difference" not in states:
            return "difference", _text(*told, "So the cause is not that process alone.")
        if "difference" in (past, *states):
            return "difference", _text(*told)
        return "unknown", _text(*told, "Whether it is still there is not known.")

    def _against_history(self) -> tuple[Shows, str]:
        """Compare the step, or the stage that was slow, with the steps before."""
        trigger = self._trigger
        if trigger.sign not in ("slow_step", "slow_stage") or trigger.median <= 0:
            return "unknown", ""
        whole = spans_of([(self._step.begin_ns, self._step.end_ns)])
        what, now = _STEP, whole
        if trigger.sign == "slow_stage" and not trigger.stage:
            what, now = "what lies in no stage", subtract(whole, self._step.during())
        elif trigger.sign == "slow_stage":
            what, now = trigger.stage, self._longest_window()
            if not len(now):
                return "unknown", f"{what} did not run in the captured step."
        now_s = length(subtract(now, capture_time(self._step))) / 1e9
        ratio = now_s / trigger.median
        took = f"{what} took {duration(now_s)}"
        usual = duration(trigger.median)
        if ratio <= 1 + _SAME:
            return "nothing", f"{took}, and the median before was {usual}: it was gone."
        if now_s - trigger.median <= _LEFT * (trigger.value - trigger.median):
            noticed = f"{duration(trigger.value)} when it was noticed"
            return "nothing", f"{took}, {noticed}, and the median before was {usual}: it was gone."
        return "difference", f"{took}, {ratio:.2f} times the median before ({duration(trigger.median)})."

    def _longest_window(self) -> Spans:
        """Return when the slow stage ran where it ran longest: in the loop, or on one of its ranks."""
        stage = self._trigger.stage
        of_workers = (
            spans_of((s.begin_ns, s.end_ns) for s in self._step.stages_of(worker) if s.name == stage)
            for worker in self._step.workers
        )
        return max((self._step.during(stage), *of_workers), key=length)

    def _against_peers(self, name: str, suspect: ComparedProcess | None) -> tuple[Shows, str]:
        """Compare one suspect with its peers."""
        if suspect is None:
            return "unknown", f"{name} is not in this capture."
        if not suspect.recorded:
            return "unknown", f"{name} recorded nothing."
        rows = [row for row in self.rows if row.suspect == name and row.difference is not None]
        if self._trigger.sign == "memory":
            return _memory_verdict(rows, name, self._trigger)
        if ran_elsewhere(self._step, self._trigger.stage, suspect):
            found = awaited(self._step, self._trigger.stage, suspect, self._of_role(suspect))
            return ("unknown", found) if isinstance(found, str) else _stage_verdict(found, rows)
        stages = [row for row in rows if row.kind == "stage"]
        if not stages:
            return "unknown", f"No peer of {name} recorded what it is compared by."
        aimed = [row for row in stages if row.name == self._trigger.stage]
        focus = (aimed or sorted(stages, key=lambda row: -(row.difference or 0.0)))[0]
        return _stage_verdict(focus, rows)


def _beside(
    blank: SuspectRow, own: Mapping[str, float], peers: Sequence[Mapping[str, float | None]]
) -> list[SuspectRow]:
    """Return a row for each of a suspect's numbers, beside the median of the peers that have it."""
    rows = []
    for name, value in own.items():
        known = [number for of in peers if (number := of.get(name)) is not None]
        row = msgspec.structs.replace(
            blank, name=name or _STEP, value=value, peer_value=median(known) if known else None
        )
        rows.append(row)
    return rows


def _text(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _because(rows: Sequence[SuspectRow], more: float) -> str:
    """Return the part and the kernel in which most of a difference is."""
    causes = []
    for kind in ("time", "kernel"):
        found = [row for row in rows if row.kind == kind and "waiting" not in row.name]
        best = max(found, key=lambda row: row.difference or 0.0, default=None)
        if best is not None and (best.difference or 0.0) > _SAME * more:
            causes.append(f"{best.name} {duration(best.difference or 0.0, signed=True)}")
    return f", most of it {', '.join(causes)}" if causes else ""


def _stage_verdict(focus: SuspectRow, rows: Sequence[SuspectRow]) -> tuple[Shows, str]:
    """Compare how long a suspect and its peers worked in a stage; the other rows say what at."""
    more, theirs = focus.difference or 0.0, focus.peer_value or 0.0
    worked = (
        f"{focus.suspect} worked {duration(focus.value)} in {focus.name}, {focus.peers} {duration(theirs)}"
    )
    if more <= _SAME * theirs:
        return "nothing", f"{worked}: no more than a tenth longer."
    return "difference", f"{worked} ({duration(more, signed=True)}){_because(rows, more)}."


def _memory_verdict(rows: Sequence[SuspectRow], name: str, trigger: Trigger) -> tuple[Shows, str]:
    """Compare peaks: what was noticed is memory that a process held, which no capture records.

    A process can hold more and more below a peak that it reached before, so equal peaks acquit nobody.
    """
    peaks = [row for row in rows if row.kind == "memory"]
    if not peaks:
        return "unknown", f"No memory of {name} and a peer was measured."
    most = max(peaks, key=lambda row: row.difference or 0.0)
    value, theirs = in_unit(most.value, "bytes"), in_unit(most.peer_value or 0.0, "bytes")
    text = (
        f"{name} held {in_unit(trigger.value, 'bytes')} when it was noticed. The capture has peaks, not what "
        f"was held: {most.name} of {name} is {value}, of {most.peers} {theirs}."
    )
    more = most.value > (1 + _SAME) * (most.peer_value or 0.0)
    return ("difference" if more else "unknown"), text
