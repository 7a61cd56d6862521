"""Where a step's time went: exposed time, stage by stage, and who led in each.

The method is that of StageFrontier (arXiv 2606.06751): how far each rank is after each stage, by its own
durations; the rank that is furthest along; and by how much each stage moved that. Where the loop is one
process that calls workers, each of its stages is refined by what they did inside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.step_summary import ExposedStage, RankUse, StepSummary
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.watch.advance import Advance, Standing, frontier, way_of
from verl_profiling.watch.roles import working_in

__all__ = ["exposed", "standings"]


def exposed(
    summary: StepSummary, before: StepSummary | None = None, has_workers: bool = True
) -> list[ExposedStage]:
    """Return where a step's time went, in order of the loop's stages; the last row lies in no stage.

    ``C_r(s)`` is how far process ``r`` of the loop is after stage ``s``, ``F(s)`` the largest of them, and
    the exposed time ``F(s) - F(s-1)``. A frontier beyond the end of the step is cut off there, so the rows
    add up to the step to the nanosecond, whatever the summary holds.

    Args:
        summary: The summary of the step.
        before: That of the step before, whose workers may have gone on in this one.
        has_workers: Whether the loop calls any, so that they are missing where the summary has none.
    """
    duration_ns = summary.duration_ns
    advances = _advances(_loop_of(summary))
    standing_in = _standings(summary, advances, before, has_workers)
    rows: list[ExposedStage] = []
    before_ns = 0
    for advance in advances:
        front_ns = min(advance.front_ns, duration_ns)
        first = standing_in[advance.name][0]
        rows.append(
            ExposedStage(
                name=advance.name,
                exposed_ns=front_ns - before_ns,
                role=first.role,
                leader=first.leader if first.clear else "",
                lead_ns=first.lead_ns if first.clear else 0,
                imbalance=first.imbalance,
            )
        )
        before_ns = front_ns
    if before_ns < duration_ns:
        role = summary.loop[0].role if summary.loop else "controller"
        rows.append(ExposedStage(name="", exposed_ns=duration_ns - before_ns, role=role))
    return rows


def standings(summary: StepSummary, before: StepSummary | None = None) -> dict[str, list[Standing]]:
    """Return, for each stage of the loop, how those who worked in it stand; whom its row names, first."""
    return _standings(summary, _advances(_loop_of(summary)), before)


def _standings(
    summary: StepSummary,
    advances: Iterable[Advance],
    before: StepSummary | None,
    has_workers: bool = True,
) -> dict[str, list[Standing]]:
    found = {advance.name: [advance.standing] for advance in advances}
    if len(summary.loop) != 1 or not (summary.workers or has_workers):
        return found
    [loop] = _loop_of(summary)
    if not summary.workers:
        return {name: [own._replace(clear=False)] for name, [own] in found.items()}
    working = working_in(loop.stages, summary.workers, before.workers if before is not None else ())
    # When trajectories in no stage were is not known: engines, and the loop, may have waited for them.
    unknown = any(not use.stages and TRAJECTORY in (one.name for one in use.spans) for use in summary.workers)
    unclear = {ROLLOUT_ROLE, loop.role} if unknown else set()
    for name, [own] in found.items():
        first, *others = (
            one._replace(leader="", lead_ns=0, clear=False) if one.role in unclear else one
            for one in working.get(name, [own])
        )
        found[name] = [first._replace(clear=own.clear and first.clear), *others]
    return found


def _loop_of(summary: StepSummary) -> list[RankUse]:
    """Return the processes of the loop without what runs beside its steps: that is exposed as waiting."""
    return [
        msgspec.structs.replace(
            use, stages=[stage for stage in use.stages if stage.name not in summary.beside]
        )
        if summary.beside
        else use
        for use in summary.loop
    ]


def _advances(uses: Sequence[RankUse]) -> list[Advance]:
    """Return what each stage of some processes did to their frontier."""
    ways = [way_of(use.lane, use.stages) for use in uses]
    covered = {
        stage.name
        for use, way in zip(uses, ways, strict=True)
        for stage in use.stages
        if way.durations[stage.name] < stage.duration_ns
    }
    return [
        advance._replace(standing=advance.standing._replace(clear=False))
        if advance.name in covered
        else advance
        for advance in frontier(uses[0].role if uses else "", ways)
    ]
