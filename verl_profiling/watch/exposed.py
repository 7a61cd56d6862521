"""Exposed time: the part of the step's path in each stage of the loop, and the slowest process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import numpy as np

from verl_profiling.files.step_summary import ExposedStage, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.slices.slices import Floats, Slices, joined
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.watch.standing import TIED, Standing, compared
from verl_profiling.watch.step_slices import StepSlices


def exposed(summary: StepSummary, has_workers: bool = True) -> list[ExposedStage]:
    """Return the exposed times of one step, see :func:`exposed_in`."""
    return exposed_in(StepSlices([summary]), has_workers)[0]


def exposed_in(
    slices: StepSlices, has_workers: bool, is_silent: bool = False
) -> list[list[ExposedStage]]:
    """Return the exposed time of the loop's stages in each step, in order; a last row holds the
    time in no stage.

    The exposed time of a stage is the length of the path in it. The rows add up to the step, to
    the nanosecond.

    Args:
        slices: The slices of the steps.
        has_workers: Whether the loop calls workers. Then a summary without workers has no clear
            leader.
        is_silent: Whether no worker of a role has answered. It may have worked where no other did.
    """
    path_ns = _path_by_stage(slices)
    return [
        _rows(summary, each, {name: path_ns[step, name] for name in each})
        for step, (summary, each) in enumerate(
            zip(slices.summaries, standings_in(slices, has_workers, is_silent), strict=True)
        )
    ]


def _rows(
    summary: StepSummary, each: dict[str, list[Standing]], path_ns: Mapping[str, float]
) -> list[ExposedStage]:
    """Return the exposed times of a step, from the standings and the path's time in each stage."""
    left_ns, rows = summary.duration_ns, []
    for name, [standing, *_] in each.items():
        exposed_ns = min(int(path_ns[name]), left_ns)
        left_ns -= exposed_ns
        rows.append(
            ExposedStage(
                name=name,
                exposed_ns=exposed_ns,
                role=standing.role,
                leader=standing.leader if standing.clear else "",
                lead_ns=standing.lead_ns if standing.clear else 0,
                imbalance=standing.imbalance,
            )
        )
    if left_ns:
        role = summary.loop[0].role if summary.loop else "controller"
        rows.append(ExposedStage(name="", exposed_ns=left_ns, role=role))
    return rows


def _path_by_stage(slices: StepSlices) -> Mapping[tuple[int, str], float]:
    """Return the time of the path in each stage of the loop (ns), by step and stage."""
    spine = slices.spine
    # A row that stands for several runs was in the stage for a part of its time only.
    share = (spine.took / (spine.end - spine.begin)).tolist()
    stages = slices.stages(spine.name)
    found = defaultdict[tuple[int, str], float](float)
    for part in slices.path:
        if part.row >= 0:
            found[stages[part.row]] += share[part.row] * (part.end - part.begin)
    return found


def standings(summary: StepSummary) -> dict[str, list[Standing]]:
    """Return the standings of the working roles for each stage, first the role of the leader."""
    return standings_in(StepSlices([summary]), True)[0]


def alone_ns(summary: StepSummary) -> float:
    """Return the time of a step in which no process was in a stage (ns);
    0 for a loop of several ranks.
    """
    if len(summary.loop) != 1:
        return 0.0
    slices = StepSlices([summary])
    everyone = joined([slices.whole_loop, slices.workers])
    busy = everyone._replace(name=np.zeros_like(everyone.name)).by_name()
    return summary.duration_ns - float((busy.end - busy.begin).sum())


def standings_in(
    slices: StepSlices, has_workers: bool, is_silent: bool = False
) -> list[dict[str, list[Standing]]]:
    """Return the standings for each stage of the loop in each step, in order; first the role that
    was waited for.

    Args:
        slices: The slices of the steps.
        has_workers: Whether the loop calls workers.
        is_silent: Whether no worker of a role has answered.
    """
    has_replies = slices.many > len(slices.summaries[0].loop)
    calls = len(slices.summaries[0].loop) == 1 and (has_replies or has_workers)
    may_lead = not calls or (has_replies and not is_silent)
    works, path_ns = _works(slices), slices.path_in_calls
    found = []
    for step, (summary, of_loop) in enumerate(zip(slices.summaries, _of_loop(slices), strict=True)):
        unclear = _unclear_roles(summary)
        each: dict[str, list[Standing]] = {}
        for name, standing in of_loop.items():
            stage = step, name
            ordered = [standing._replace(clear=standing.clear and may_lead)]
            if stage in works:
                slack_ns = TIED * float(standing.durations.sum())
                ordered = _by_path(works[stage], path_ns[stage], slack_ns)
            each[name] = [
                standing.unclear() if standing.role in unclear else standing for standing in ordered
            ]
        found.append(each)
    return found


def _of_loop(slices: StepSlices) -> list[dict[str, Standing]]:
    """Return the standing of the loop's processes in each stage of each step, in order of the
    median of their first begins.
    """
    loop = slices.loop
    found: list[dict[str, Standing]] = [{} for _ in slices.summaries]
    if not loop.who.size:
        return found
    uses = slices.summaries[0].loop
    order = [*dict.fromkeys(loop.name.tolist())]
    if len(uses) > 1:
        order.sort(key=partial(_median_begin, loop))
    own = loop._replace(who=loop.who % slices.many)
    each = compared(uses[0].role, [use.lane for use in uses], own, loop.name)
    for number, (step, name) in zip(order, slices.stages(np.array(order)), strict=True):
        found[step][name] = each[number]
    return found


def _median_begin(loop: Slices, name: int) -> float:
    """Return the median of the processes' first begins of a stage."""
    rows = loop.name == name
    who, begin = loop.who[rows], loop.begin[rows]
    return float(np.median(begin[np.append(True, who[1:] != who[:-1])]))


def _works(slices: StepSlices) -> Mapping[tuple[int, str], list[Standing]]:
    """Return the standing of each role that worked in each stage of the loop, by step and stage."""
    called, many = slices.called, len(slices.names)
    found = defaultdict[tuple[int, str], list[Standing]](list)
    roles, stages = called.role, slices.spine.name[called.parent]
    keys = stages * many + called.name % max(many, 1)
    for role in {*roles.tolist()}:
        rows = roles == role
        work, is_key = called.at(rows), np.bincount(keys[rows]) > 0
        first, last = np.searchsorted(slices.role_of, (role, role + 1)).tolist()
        lanes = [use.lane for use in slices.processes[first:last]]
        work = work._replace(who=work.who % slices.many - first)
        group = (np.cumsum(is_key) - 1)[keys[rows]]
        parts = defaultdict[int, dict[str, Standing]](dict)
        for key, standing in zip(
            np.flatnonzero(is_key).tolist(),
            compared(slices.roles[role], lanes, work, group),
            strict=True,
        ):
            parts[key // many][slices.names[key % many]] = standing
        for stage, of_stage in zip(slices.stages(np.array([*parts])), parts.values(), strict=True):
            found[stage].append(_joined(of_stage))
    return found


def _joined(parts: dict[str, Standing]) -> Standing:
    """Return the standing of a role in all its stages, led as the one with the largest lead."""
    [first, *others] = parts.values()
    names = tuple(parts)
    if not others:
        return first._replace(ran=names)
    totals: Floats = sum((part.durations for part in others), first.durations)
    tied_ns = TIED * float(totals.max())
    most = max(
        parts.values(),
        key=lambda part: (part.lead_ns if part.lead_ns > tied_ns else 0, part.durations.max()),
    )
    longest_ns = float(totals.max())
    uneven_ns = float(most.durations.max()) * (1.0 - 1.0 / most.imbalance)
    imbalance = longest_ns / max(longest_ns - uneven_ns, 1.0)
    return most._replace(durations=totals, imbalance=max(imbalance, 1.0), ran=names)


def _by_path(
    works: list[Standing], path_ns: Mapping[str, float], slack_ns: float
) -> list[Standing]:
    """Return the standings of roles in a stage of the loop, by their time on the path.

    If another role worked side by side with it, off the path, no process of the first role leads.
    """
    first, *others = sorted(
        works, key=lambda work: (path_ns[work.role], work.durations.max()), reverse=True
    )
    is_beside = any(work.durations.max() - path_ns[work.role] > slack_ns for work in others)
    return [first._replace(clear=first.clear and not is_beside), *others]


def _unclear_roles(summary: StepSummary) -> set[str]:
    """Return the roles of which no process leads: agent loops may have sent more to an engine, and
    without a stage may have kept the loop waiting.
    """
    agents = [use for use in summary.workers if TRAJECTORY in [total.name for total in use.spans]]
    if any(not use.stages for use in agents):
        return {ROLLOUT_ROLE, *(use.role for use in summary.loop)}
    if agents and any(use.has_spans for use in summary.workers if use.role == ROLLOUT_ROLE):
        return {ROLLOUT_ROLE}
    return set()
