"""The spans and the processes behind a slowdown: what grew along with a stage, and who ran it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from msgspec.structs import replace

from verl_profiling.files.step_summary import SpanTotal, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import WEIGHT_SYNC
from verl_profiling.shifts import Series
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.watch.exposed import alone_ns, standings
from verl_profiling.watch.span_past import GENERATE, NEWS, SpanKey, SpanPast, by_role, worker_role
from verl_profiling.watch.standing import Standing
from verl_profiling.watch.suspicion import Suspicion, healthiest

_MOST_SPANS_NAMED = 2  # in a reason, which is one line of the log


def explained(
    suspicion: Suspicion, summary: StepSummary, spans: SpanPast, outside: Series | None
) -> Suspicion:
    """Return the suspicion, with the spans in its reason that grew along with its stage,
    or the loop.

    Args:
        suspicion: The suspicion.
        summary: The step.
        spans: The past of each span.
        outside: The past of the time in no stage, if there is any.
    """
    totals = by_role(summary)
    grown = _grown(suspicion, totals, summary, spans)
    sentences = [*grown.values()][:_MOST_SPANS_NAMED]
    if grown:
        sentences += spans.longer(totals)
        suspicion = _by_growth(suspicion, summary, [*grown], totals)
    elif not suspicion.stage and _loop_was_alone(summary, outside):
        sentences.append(
            "meanwhile no process was in a stage, so the loop's own code took the time"
        )
        loop = [use.lane for use in summary.loop]
        suspicion = replace(suspicion, suspects=loop[:1])
    reason = "; ".join([suspicion.reason, *suspicion.who, *sentences])
    return replace(suspicion, reason=reason)


def _loop_was_alone(summary: StepSummary, outside: Series | None) -> bool:
    """Return whether half of the growth outside of stages is time in which no process ran."""
    return outside is not None and 2e-9 * alone_ns(summary) >= outside.value + outside.past.usual


def _grown(
    suspicion: Suspicion,
    totals: dict[SpanKey, SpanTotal],
    summary: StepSummary,
    spans: SpanPast,
) -> dict[SpanKey, str]:
    """Return the spans that grew by at least half of the excess, of roles that worked in the
    stage.

    A trajectory is returned only if none of its spans is. In a weight sync, a generation counts
    only if it ran there.
    """
    working = standings(summary).get(suspicion.stage, [])
    roles = _roles_at_work(working, summary)
    ran = {name for standing in working for name in standing.ran}
    least_ns = (suspicion.value - suspicion.median) * 1e9 / 2
    grown = {}
    for (role, name), sentence in spans.grown(totals, least_ns).items():
        is_inside = name in ran or name.startswith(WEIGHT_SYNC)
        if role in roles and (is_inside or suspicion.stage != WEIGHT_SYNC):
            grown[role, name] = sentence
    parts = {key: sentence for key, sentence in grown.items() if key[1] != TRAJECTORY}
    return parts or grown


def _roles_at_work(working: Iterable[Standing], summary: StepSummary) -> set[str]:
    """Return the roles that worked in a stage.

    Roles without stages count if only engines, the loop or other roles with spans worked.
    """
    lanes = {lane for standing in working for lane in standing.lanes}
    busy = [use for use in summary.processes if use.lane in lanes]
    for use in busy:
        if not (use.has_spans or use in summary.loop or use.role == ROLLOUT_ROLE):
            return {use.role for use in busy}
    return {use.role for use in summary.processes}


def _by_growth(
    suspicion: Suspicion,
    summary: StepSummary,
    grown: list[SpanKey],
    totals: Mapping[SpanKey, SpanTotal],
) -> Suspicion:
    """Return the suspicion with the processes that do the work of the grown spans as first
    suspects.

    Agent loops wait for the process that does the work of a span, if it has one of that name.
    """
    name = GENERATE if grown[0][1] == TRAJECTORY else grown[0][1]
    doing = [key for key in grown if key[1] == name and (key[0], TRAJECTORY) not in totals]
    first = {use.lane for use in summary.workers if use.role == worker_role(name)}
    suspects = sorted(suspicion.suspects, key=lambda lane: lane not in first)
    suspicion = replace(suspicion, suspects=suspects)
    if doing or {*suspects} <= {use.lane for use in summary.loop}:
        return with_span(suspicion, summary, *[*doing, *grown][0])
    return suspicion


def with_span(suspicion: Suspicion, summary: StepSummary, role: str, span: str) -> Suspicion:
    """Return the suspicion with the process of a grown span as first suspect, without the loop if
    it waits.

    Calls take longer in that process than in other processes of the role. An agent loop's
    ``generate`` and whole trajectories do not count, because an agent loop waits in them.
    """
    took = {}
    for use in summary.workers:
        for total in use.spans:
            if use.role == role and total.name == span:
                took[use.lane] = total.duration_ns / max(total.runs, 1)
    is_wait = span == TRAJECTORY or (span == GENERATE and role != ROLLOUT_ROLE)
    slowest = "" if is_wait else _slowest(took)
    others = {use.lane for use in summary.loop if use.role != role}
    suspects = [lane for lane in suspicion.suspects if lane not in (slowest, *others)]
    if not slowest:
        return replace(suspicion, suspects=suspects, ran=[])
    has_stages = any(use.stages for use in summary.workers if use.lane == slowest)
    return replace(
        suspicion,
        suspects=[slowest, *suspects],
        peers=[*healthiest(took, [slowest]), *suspicion.peers],
        ran=suspicion.ran if has_stages else [],
    )


def _slowest(took: Mapping[str, float]) -> str:
    """Return the lane whose value exceeds the median of the others; empty if none does."""
    slowest = max(took, key=took.__getitem__, default="")
    others = [took[lane] for lane in took if lane != slowest]
    if others and took[slowest] < NEWS * median(others):
        return ""
    return slowest
