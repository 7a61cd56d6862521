"""What a wait of the loop waited for, in a process that runs no stage of that name.

In an asynchronous loop a generation ends while the loop waits for it, and begins steps before. A capture
has the stages that began in it. So what the loop waited for can be compared only where it began in the
capture; what began before it is not known, and that the process is like its peers does not follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from verl_profiling.manifest import StageSpan
from verl_profiling.report.asked import SuspectRow
from verl_profiling.report.compared_process import ComparedProcess
from verl_profiling.report.intervals import Spans, intersection, length, spans_of
from verl_profiling.report.lanes import Step

__all__ = ["awaited", "ran_elsewhere"]

_LATE = 0.05
"""Share of the wait by which what was waited for may end after it: clocks of hosts differ."""
_FILLS = 0.5


def ran_elsewhere(step: Step, stage: str, process: ComparedProcess) -> bool:
    """Return whether the loop was in a stage that a process with stages of its own ran no stage of."""
    during = step.during(stage) if stage else None
    if during is None or not len(during) or not process.stages:
        return False
    return all(span.name != stage for span in process.ended)


def awaited(
    step: Step, stage: str, suspect: ComparedProcess, peers: Sequence[ComparedProcess]
) -> SuspectRow | str:
    """Return how long a suspect worked at what the loop waited for, beside its peers, or why that is unknown.

    Args:
        step: The step.
        stage: The stage in which the loop waited.
        suspect: The process that it may have waited for.
        peers: Others of its role.
    """
    during = step.during(stage)
    runs = _runs(step, stage, suspect)
    names = list(dict.fromkeys(span.name for span in runs))
    if length(intersection(_spans(runs), during)) < _FILLS * length(during):
        why = f"had begun before the capture, or was in no stage of {suspect.name}"
        return f"What the loop waited for in {stage} {why}: how long it took there is not known."
    of_peers = [
        peer.worked_in_s(_spans(of_peer)) for peer in peers if (of_peer := _runs(step, stage, peer, names))
    ]
    if not of_peers:
        return f"What peers of {suspect.name} did for {stage} had begun before the capture: it is not known."
    return SuspectRow(
        suspect=suspect.name,
        peers=peers[0].name if len(peers) == 1 else f"median of {len(of_peers)}",
        kind="stage",
        name=" and ".join(names),
        value=suspect.worked_in_s(_spans(runs)),
        peer_value=median(of_peers),
    )


def _runs(step: Step, stage: str, process: ComparedProcess, names: Sequence[str] = ()) -> list[StageSpan]:
    """Return its outermost runs that ended while the loop waited; of named ones else the last before."""
    during = step.during(stage)
    end_ns = int(during[-1, 1]) + _LATE * length(during)
    runs = [
        span
        for span in process.ended
        if not span.depth and span.end_ns <= end_ns and (not names or span.name in names)
    ]
    inside = [span for span in runs if len(intersection(_spans([span]), during))]
    return inside or (runs[-1:] if names else [])


def _spans(runs: Iterable[StageSpan]) -> Spans:
    return spans_of((span.begin_ns, span.end_ns) for span in runs)
