"""Where the time before the first step went: the path of the start-up, and each process's parts.

The path explains each moment of the loop. In a wait of the loop, it is the part of the process that
was ready last; before the begin of this part, of the one that was ready last of the others. A named
part of the loop is a wait if a process got ready at its end. The parts of the path add up to the
start-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import UNDECODABLE, read_small
from verl_profiling.files.process_marks import IMPORT, PROCESS, START_UP, SUBMIT
from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.units import duration

_OWN = (PROCESS, IMPORT, SUBMIT)
_READY = 0.05  # of a part of the loop: a process that got ready this late ended it
_READY_NS = 200_000_000  # or this late: Ray returns a result, and the loop goes on
_Spans = list[tuple[int, int]]  # a few, for which `top` imports no numerical library
_Part = tuple[str, _Spans]
_MARK = 'mark it: with stage("...") around it'


class StartPart(msgspec.Struct, frozen=True):
    """A part of the start-up.

    Attributes:
        name: Its name; empty for time that nobody marked.
        lane: Its process.
        inside: The part of the loop that waited for it; empty for none.
        seconds: Its share of the start-up (s), or its duration.
    """

    name: str
    lane: str
    inside: str
    seconds: float


class StartUp(msgspec.Struct, frozen=True):
    """The time before the first step.

    Attributes:
        step: The first step.
        seconds: Its duration (s).
        path: The parts that add up to it, the longest first.
        parts: The parts of each process, in order of the processes.
    """

    step: int
    seconds: float
    path: list[StartPart]
    parts: list[StartPart]

    def sentence(self) -> str:
        """Return it as a sentence."""
        largest = "; ".join(map(_clause, self.path[:3]))
        return f"{duration(self.seconds)} before step {self.step}: {largest}"

    def part_seconds(self) -> dict[str, float]:
        """Return the parts of the path by name and process (s), which add up to it."""
        seconds: dict[str, float] = {}
        for part in self.path:
            seconds[_name(part)] = seconds.get(_name(part), 0.0) + part.seconds
        return seconds


def _name(part: StartPart) -> str:
    return f"{part.name} of {part.lane}" if part.name else "unknown"


def _clause(part: StartPart) -> str:
    took = duration(part.seconds)
    if not part.name:
        return f"{took} unknown ({_MARK})"
    waited = f", for which {part.inside} waited" if part.inside else ""
    return f"{took} {_name(part)}{waited}"


def start_up_of(run: Path) -> StartUp | None:
    """Return the start-up of a run; ``None`` if it is not known.

    Args:
        run: Folder of the run.
    """
    try:
        summary = msgspec.json.decode(read_small(run / START_UP), type=StepSummary)
    except (OSError, TraceFormatError, *UNDECODABLE):
        return None
    if not summary.loop:
        return None
    loop, *others = summary.processes
    whole = [(summary.begin_ns, summary.end_ns)]
    processes = [(use.lane, _parts_of(use, whole)) for use in others]
    own = _parts_of(loop, whole)
    unmarked = whole
    for _, spans in own:
        unmarked = _without(unmarked, spans)
    own += [("", [period]) for period in unmarked]
    shares = Counter[tuple[str, str, str]]()
    for name, spans in own:
        for lane, part, share in _explained(name, spans, processes):
            shares[part, lane or loop.lane, name if lane else ""] += _length(share)
    path = [StartPart(*key, ns / 1e9) for key, ns in shares.most_common() if ns]
    parts = []
    for use in summary.processes:
        totals = Counter[str]()
        for name, begin_ns, end_ns, _ in use.each_run():
            totals[name] += end_ns - begin_ns
        parts += [StartPart(name, use.lane, "", ns / 1e9) for name, ns in totals.items()]
    return StartUp(summary.step + 1, summary.duration_ns / 1e9, path, parts)


def _parts_of(use: RankUse, whole: _Spans) -> list[_Part]:
    """Return the parts of a process; a part inside another one goes before it."""
    parts = []
    left = whole
    for name, begin_ns, end_ns, _ in sorted(use.each_run(), key=lambda run: -run[1]):
        spans = _inside(left, [(begin_ns, end_ns)])
        if spans and end_ns < whole[-1][1]:  # else it goes on, and nobody waits for it
            parts.append((name, spans))
            left = _without(left, spans)
    return parts


def _explained(
    name: str, left: _Spans, processes: Sequence[tuple[str, Sequence[_Part]]]
) -> Iterator[tuple[str, str, _Spans]]:
    """Yield what a part of the loop was: lane, name and time; no lane for the loop itself."""
    begin_ns, end_ns = left[0][0], left[-1][1]
    ready = []
    for lane, parts in processes:
        ended = [part for part in parts if begin_ns < part[1][-1][1] <= end_ns]
        if ended:
            ready.append((max(spans[-1][1] for _, spans in ended), lane, ended))
    ready.sort(key=itemgetter(0), reverse=True)
    latest_ns = max(_READY_NS, _READY * _length(left))
    if name in _OWN or (name and ready and end_ns - ready[0][0] > latest_ns):
        ready = []
    for _, lane, ended in ready:
        for part, spans in ended:
            share = _inside(left, spans)
            left = _without(left, share)
            yield lane, part, share
    yield "", name, left


def _length(spans: _Spans) -> int:
    return sum(end_ns - begin_ns for begin_ns, end_ns in spans)


def _inside(spans: _Spans, others: _Spans) -> _Spans:
    """Return the time that is in both."""
    shared = []
    for begin_ns, end_ns in spans:
        for first_ns, last_ns in others:
            if max(begin_ns, first_ns) < min(end_ns, last_ns):
                shared.append((max(begin_ns, first_ns), min(end_ns, last_ns)))
    return shared


def _without(spans: _Spans, others: _Spans) -> _Spans:
    """Return the time that is not in the other times."""
    for first_ns, last_ns in others:
        parts = []
        for begin_ns, end_ns in spans:
            parts += [(begin_ns, min(end_ns, first_ns)), (max(begin_ns, last_ns), end_ns)]
        spans = [part for part in parts if part[0] < part[1]]
    return spans
