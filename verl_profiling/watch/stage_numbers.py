"""Exposed time: how long the step's critical path is in each stage of the loop.

Also finds the leader of each stage: the slowest process, if the others waited for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.step_summary import ExposedStage, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.slices.slices import Floats, Ints, Slices, joined
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.watch.step_slices import StepSlices

TIED = 0.05
"""Tolerance, as a share of a stage's longest duration, within which processes count as tied."""

LATE = 0.08
"""Minimum lateness to collectives that makes a process the leader, as a share of the stage."""

_lane = attrgetter("lane")


class Standing(NamedTuple):
    """Comparison of the processes of one role in one stage of the loop.

    Attributes:
        role: The role.
        lanes: Lanes of the role's processes.
        durations: Nanoseconds that each process spent in the stage.
        longest_ns: The longest of these durations.
        leader: Lane of the process that was waited for; empty if unknown.
        lead_ns: The leader's time in the stage minus the median of the others; 0 if the leader
            waited for the others.
        imbalance: Longest duration over the mean of all.
        clear: Whether the others waited for the leader; also ``True`` for a single process.
        ran: Names of the workers' own stages inside the loop's stage; empty for processes of the
            loop.
    """

    role: str
    lanes: Sequence[str]
    durations: Floats
    longest_ns: float
    leader: str
    lead_ns: int
    imbalance: float
    clear: bool
    ran: tuple[str, ...] = ()

    def by_lane(self) -> dict[str, float]:
        """Return the durations (ns) by lane."""
        return dict(zip(self.lanes, self.durations.tolist(), strict=True))

    def unclear(self) -> Standing:
        """Return the standing without a leader."""
        return self._replace(leader="", lead_ns=0, clear=False)


def compared(role: str, lanes: Sequence[str], slices: Slices, group: Ints) -> list[Standing]:
    """Return the standing of a role's processes in each group of slices.

    All ranks leave a collective together, and the rank that arrives first spends the most time in
    it. So a rank whose stage ends together with the others' is no leader by its duration. The last
    rank to enter leads, if its lateness is known. Engines have no collectives.

    Args:
        role: Role of the processes.
        lanes: Lanes of the processes.
        slices: The slices, without overlap within a process.
        group: Number of each slice's group, from 0.
    """
    many, groups = len(lanes), int(group.max(initial=-1)) + 1
    place = group * many + slices.who
    durations = np.bincount(place, slices.took, groups * many).reshape(groups, many).astype(float)
    longest_ns = durations.max(axis=1)
    if many == 1:
        return [
            Standing(role, lanes, took, float(took[0]), lanes[0], 0, 1.0, True)
            for took in durations
        ]
    last_ends = np.full(groups * many, -np.inf)
    np.maximum.at(last_ends, place, slices.end)
    ends = last_ends.reshape(groups, many)
    tied_ns = TIED * longest_ns
    near = ends >= (ends.max(axis=1) - tied_ns)[:, None]
    leader = np.where(near, durations, -1.0).argmax(axis=1)
    lead_ns = _leads(durations, leader)
    clear = (near.sum(axis=1) == 1) & (lead_ns > tied_ns)
    if role != ROLLOUT_ROLE:
        clear &= _ended_last(ends, leader, lead_ns)
    lead_ns = np.where(clear, lead_ns, 0.0)
    work = durations
    if slices.late.any():
        lateness = np.zeros(groups * many)
        np.maximum.at(lateness, place, slices.late)
        work = durations.copy()
        for row in range(groups):
            late = lateness.reshape(groups, many)[row]
            late_ns, least_ns = float(late.max()), LATE * float(longest_ns[row])
            if late_ns > max(least_ns, lead_ns[row]):
                leader[row] = late.argmax()
                lead_ns[row] = late_ns - np.delete(late, leader[row]).max()
                clear[row] = lead_ns[row] > least_ns
                work[row] = max(0.0, float(longest_ns[row]) - late_ns) + late
    ratios = np.maximum(many * work.max(axis=1) / np.maximum(work.sum(axis=1), 1.0), 1.0)
    columns = (
        longest_ns.tolist(),
        map(lanes.__getitem__, leader.tolist()),
        np.round(lead_ns).astype(int).tolist(),
        ratios.tolist(),
        clear.tolist(),
    )
    return [*map(partial(Standing, role, lanes), durations, *columns)]


def _leads(values: Floats, leader: Ints) -> Floats:
    """Return each leader's value minus the median of the others in its row; at least 0."""
    value = values[np.arange(leader.size), leader]
    return np.asarray(np.maximum(value - _median_of_others(values, leader), 0.0))


def _ended_last(ends: Floats, leader: Ints, lead_ns: Floats) -> NDArray[np.bool_]:
    """Return whether each leader ended later than the median of the others that ran, by half of its
    lead or more.
    """
    end = ends[np.arange(leader.size), leader]
    return np.asarray(2 * (end - _median_of_others(ends, leader)) >= lead_ns)


def _median_of_others(values: Floats, leader: Ints) -> Floats:
    """Return the median of the finite values of each row without its leader; -inf without any."""
    rows = np.arange(leader.size)
    others = values.copy()
    others[rows, leader] = -np.inf
    others.sort(axis=1)
    last = others.shape[1] - 1
    middle = (others == -np.inf).sum(axis=1) + last  # twice the median's index
    high = np.minimum((middle + 1) // 2, last)
    return np.asarray((others[rows, middle // 2] + others[rows, high]) / 2)


def exposed(summary: StepSummary, has_workers: bool = True) -> list[ExposedStage]:
    """Return the exposed times of one step, see :func:`exposed_in`."""
    return exposed_in(StepSlices([summary]), has_workers)[0]


def exposed_in(
    slices: StepSlices, has_workers: bool, is_silent: bool = False
) -> list[list[ExposedStage]]:
    """Return the exposed time of the loop's stages in each step, in order; a last row holds the
    time in no stage.

    The exposed time of a stage is the length of the critical path in it. The rows add up to the
    step, to the nanosecond.

    Args:
        slices: The slices of the steps.
        has_workers: Whether the loop calls workers. Then a summary without workers has no clear
            leader.
        is_silent: Whether no worker of a role has answered. Such a role may have worked in a stage
            in which no other did.
    """
    path_ns = _path_by_stage(slices)
    each = standings_in(slices, has_workers, is_silent)
    return [_rows(slices.summaries[step], each[step], path_ns, step) for step in range(len(each))]


def _rows(
    summary: StepSummary,
    each: dict[str, list[Standing]],
    path_ns: Mapping[tuple[int, str], float],
    step: int,
) -> list[ExposedStage]:
    """Return the exposed times of a step, from its standings and ``path_ns`` of its stages."""
    left_ns, rows = summary.duration_ns, []
    for name, [standing, *_] in each.items():
        if not standing.clear:
            standing = standing.unclear()
        exposed_ns = min(int(path_ns[step, name]), left_ns)
        left_ns -= exposed_ns
        rows.append(
            ExposedStage(
                name=name,
                exposed_ns=exposed_ns,
                role=standing.role,
                leader=standing.leader,
                lead_ns=standing.lead_ns,
                imbalance=standing.imbalance,
            )
        )
    if left_ns:
        role = summary.loop[0].role if summary.loop else "controller"
        rows.append(ExposedStage(name="", exposed_ns=left_ns, role=role))
    return rows


def _path_by_stage(slices: StepSlices) -> Mapping[tuple[int, str], float]:
    """Return the time of the critical path in each stage of the loop (ns), by step and stage."""
    spine = slices.spine
    took_ns = spine.took  # a loop of one process has all of its stages on the path
    if len(slices.summaries[0].loop) > 1:
        paths = slices.paths
        row_ns = np.bincount(paths.row, paths.called_ns + paths.own_ns, spine.who.size)
        # A row that stands for several runs was in the stage for a part of its time only.
        took_ns = row_ns * spine.took / (spine.end - spine.begin)
    of_name = np.bincount(spine.name, took_ns, len(slices.ends) * len(slices.names))
    return dict(zip(slices.stages(np.arange(of_name.size)), of_name.tolist(), strict=True))


def standings(summary: StepSummary) -> dict[str, list[Standing]]:
    """Return the standings of the roles at work in each stage, first the role of the leader."""
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
            ordered = [standing if may_lead else standing._replace(clear=False)]
            if stage in works:
                slack_ns = TIED * standing.longest_ns
                ordered = _by_path(works[stage], path_ns[stage], slack_ns)
            if unclear:
                ordered = [work.unclear() if work.role in unclear else work for work in ordered]
            each[name] = ordered
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
    names, group = np.unique(loop.name, return_inverse=True)
    order = [*dict.fromkeys(group.tolist())]
    if len(uses) > 1:
        order.sort(key=partial(_median_begin, loop._replace(name=group)))
    own = loop._replace(who=loop.who % slices.many)
    each = compared(uses[0].role, [*map(_lane, uses)], own, group)
    for number, (step, name) in zip(order, slices.stages(names[order]), strict=True):
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
        lanes = [*map(_lane, slices.processes[first:last])]
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
    """Join a role's standings in its own stages inside one stage of the loop.

    The leader is that of the stage with the largest lead.
    """
    [first, *others] = parts.values()
    names = tuple(parts)
    if not others:
        return first._replace(ran=names)
    totals: Floats = sum((part.durations for part in others), first.durations)
    longest_ns = float(totals.max())
    tied_ns = TIED * longest_ns
    most = max(
        parts.values(),
        key=lambda part: (part.lead_ns if part.lead_ns > tied_ns else 0, part.longest_ns),
    )
    uneven_ns = most.longest_ns * (1.0 - 1.0 / most.imbalance)
    imbalance = longest_ns / max(longest_ns - uneven_ns, 1.0)
    return most._replace(
        durations=totals, longest_ns=longest_ns, imbalance=max(imbalance, 1.0), ran=names
    )


def _by_path(
    works: list[Standing], path_ns: Mapping[str, float], slack_ns: float
) -> list[Standing]:
    """Return the standings of roles in a stage of the loop, by their time on the critical path.

    If another role worked beside it, off this path, no process of the first role leads.
    """
    if len(works) == 1:
        return works
    first, *others = sorted(
        works, key=lambda work: (path_ns[work.role], work.longest_ns), reverse=True
    )
    is_beside = any(work.longest_ns - path_ns[work.role] > slack_ns for work in others)
    return [first._replace(clear=first.clear and not is_beside), *others]


def _unclear_roles(summary: StepSummary) -> set[str]:
    """Return the roles in which a slow process is no leader, as agent loops may be the cause.

    They may have sent more requests to one engine. Without stages of their own, they may also have
    kept the loop waiting.
    """
    with_spans = [*filter(attrgetter("spans"), summary.workers)]
    agents = [use for use in with_spans if TRAJECTORY in [total.name for total in use.spans]]
    if any(not use.stages for use in agents):
        return {ROLLOUT_ROLE, *(use.role for use in summary.loop)}
    if agents and any(use.has_spans for use in with_spans if use.role == ROLLOUT_ROLE):
        return {ROLLOUT_ROLE}
    return set()
