"""Compares the suspects of an aimed capture with their peers.

Workers that communicate end a stage together, so how long a rank was in one says nothing of it. What is
compared is its time in the stage less the time in which it waited for other ranks in collectives, and that
time's parts: computing, communicating, waiting, and idle by cause. Both sides of a row are of one range.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec

from verl_profiling.report.asked import Asked, SuspectRow, Unit
from verl_profiling.report.compared_process import Activities, ComparedProcess
from verl_profiling.report.lanes import Step
from verl_profiling.report.rows import MeasureRow
from verl_profiling.trigger import Sign, Trigger

__all__ = ["asked_of"]

_SMALL = 0.01
"""Share of the step under which a time is left out."""
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
    )
    return asked, found.rows()


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
        of_lane = {worker.identity.lane(): worker.name for worker in self._step.workers}
        of_lane |= {a.lane: worker.name for worker in self._step.workers for a in worker.artifacts}
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

    def rows(self) -> list[SuspectRow]:
        """Return the suspects' numbers beside their peers'."""
        found: list[SuspectRow] = []
        for suspect in filter(None, self.suspects):
            if peers := [p for p in self.peers if p.role == suspect.role and p.worker != suspect.worker]:
                found += self._rows(suspect, peers)
        return found

    def _rows(self, suspect: ComparedProcess, peers: Sequence[ComparedProcess]) -> Iterator[SuspectRow]:
        """Yield each quantity of a suspect, with the median of its peers'; small times are left out."""
        whose = peers[0].name if len(peers) == 1 else f"median of {len(peers)}"
        blank = SuspectRow(
            suspect=suspect.name, peers=whose, kind="stage", name="", value=0.0, peer_value=None
        )
        stage = self._trigger.stage
        names = dict.fromkeys([*([stage] if stage else []), *suspect.outermost()]) or [""]
        worked = {name: seconds for name in names if (seconds := suspect.worked_s(name)) is not None}
        of_peers = [
            {name: peer.worked_s(name) for name in names if peer.ran(name) == suspect.ran(name)}
            for peer in peers
        ]
        rows = _beside(blank, worked, of_peers)
        alike = [peer for peer in peers if peer.lanes and peer.ran(stage) == suspect.ran(stage)]
        parts = msgspec.structs.replace(blank, kind="time")
        rows += _beside(parts, suspect.parts_s(stage), [peer.parts_s(stage) for peer in alike])
        if suspect.lanes and alike:
            where = stage if any(one.kernels_s(stage) for one in (suspect, *alike)) else ""
            every = dict.fromkeys((name for one in (suspect, *alike) for name in one.kernels_s(where)), 0.0)
            own, *theirs = ({**every, **one.kernels_s(where)} for one in (suspect, *alike))
            kernels = _beside(msgspec.structs.replace(blank, kind="kernel"), own, theirs)
            kernels.sort(key=lambda row: -abs(row.difference or 0.0))
            rows += [row for row in kernels[:_KERNELS] if row.difference]
        least_s = _SMALL * self._step.span_ns / 1e9
        yield from (row for row in rows if max(row.value, row.peer_value or 0.0) >= least_s)
        peaks = msgspec.structs.replace(blank, kind="memory", unit="bytes")
        yield from _beside(peaks, self._memory(suspect), [self._memory(peer) for peer in peers])

    def _memory(self, process: ComparedProcess) -> dict[str, float]:
        """Return a process's peaks: in the stage that was slow where they are known, else in any."""
        own = [m for m in self._measures if m.worker == process.worker and m.name.endswith("_bytes")]
        chosen = [m for m in own if m.stage == self._trigger.stage] or own
        peaks: dict[str, float] = {}
        for measure in chosen:
            peaks[measure.name] = max(measure.value, peaks.get(measure.name, measure.value))
        return peaks


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
