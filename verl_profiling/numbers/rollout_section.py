"""Builds the section "Rollout" of a step's report from the logs of its trajectories."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from verl_profiling.manifest import Request
from verl_profiling.numbers.report_columns import (
    BlockRow,
    CallRow,
    CauseRow,
    FailureRow,
    GroupRow,
    Rollout,
    StatusRow,
    VersionRow,
)
from verl_profiling.numbers.rollout_tail import last_trajectories, part_rows
from verl_profiling.numbers.stage_rows import polling
from verl_profiling.numbers.taught_nothing import taught_nothing
from verl_profiling.slices.intervals import (
    Axes,
    Ints,
    Sharing,
    grouped,
    overlaps,
    percentiles,
    spans_of,
    union,
)
from verl_profiling.steps.causes import Explanation, Pieces
from verl_profiling.steps.read import Content
from verl_profiling.steps.trajectory_columns import (
    BEFORE,
    LOOP_LAG,
    UNEXPLAINED,
    Records,
    Trajectory,
)
from verl_profiling.units import shortened

_MOST_GROUPS = 20


def rollout_of(content: Content) -> tuple[Rollout, Explanation] | None:
    """Return the report's section "Rollout", and an object that divides any time by cause.

    Return ``None`` if the step has no recorded trajectories.

    Args:
        content: What was read of the step.
    """
    step, records, pieces = content.step, content.records, content.pieces
    trajectories = records.trajectories
    if step.manifest is None or not (trajectories or len(records.spans.begin)):
        return None
    explanation = Explanation(
        pieces, content.of_processes, step.stages, union(*step.served.values())
    )
    columns = [
        (
            trajectory.begin_ns,
            trajectory.end_ns,
            trajectory.validate,
            trajectory.cut_begin,
            trajectory.cut_end,
        )
        for trajectory in trajectories
    ]
    begin, end, validate, cut_begin, cut_end = np.array(columns, dtype=np.int64).reshape(-1, 5).T
    is_cut = cut_begin | cut_end
    training = np.flatnonzero(validate == 0)
    p50, p99 = percentiles((end - begin)[(validate == 0) & (is_cut == 0)] / 1e9, 50, 99)
    shares = Sharing(pieces.begin, pieces.end, pieces.owner).shares()
    window = step.rollout
    if not len(window):
        window = spans_of([(int(begin.min(initial=step.end_ns)), int(end.max(initial=0)))])
    time = part_rows(explanation.of(window))
    first_ns = int(begin[training].min(initial=step.end_ns))
    last_ns = int(end[training].max(initial=first_ns))
    is_lag = pieces.cause == pieces.causes.index(LOOP_LAG)
    rollout = Rollout(
        trajectories=len(training),
        validation=int(validate.sum()),
        cut=int(is_cut.sum()),
        seconds=float((end - begin)[training].sum()) / 1e9,
        p50_s=p50,
        p99_s=p99,
        wall_s=(last_ns - first_ns) / 1e9,
        causes=[
            *_causes(pieces, shares, validate == 0, validate=False),
            *_causes(pieces, shares, validate == 1, validate=True),
        ],
        time=time,
        explained=sum(part.share for part in time if part.cause not in (BEFORE, UNEXPLAINED)),
        last=last_trajectories(
            training,
            begin[training],
            end[training],
            (cut_begin[training], cut_end[training]),
            pieces,
        ),
        calls=_call_rows(records),
        blocks=_block_rows(records, pieces.of(np.flatnonzero(is_lag))),
        **_groups(trajectories, pieces, step.begin_ns),
        **_versions(records, content.served, step.manifest.policy_version),
        statuses=_status_rows(records),
        failures=_failure_rows(trajectories),
        polling=polling(step, end[training]),
        **taught_nothing(trajectories),
    )
    return rollout, explanation


def _causes(
    pieces: Pieces, shares: NDArray[np.float64], members: NDArray[np.bool_], *, validate: bool
) -> list[CauseRow]:
    """Return a row per cause (tool, queue, ...) of the members' time; they add up to all of it."""
    rows = np.flatnonzero(members[pieces.owner] & (shares > 0))
    pairs = np.unique(pieces.owner[rows] * len(pieces.causes) + pieces.cause[rows])
    sizes = np.bincount(pairs % len(pieces.causes), minlength=len(pieces.causes))
    by_name = dict(zip(pieces.causes, sizes.tolist(), strict=True))
    return [
        CauseRow(validate=validate, trajectories=by_name[part.cause], **structs.asdict(part))
        for part in part_rows(pieces.of(rows).seconds(shares[rows]))
    ]


def _call_rows(records: Records) -> list[CallRow]:
    """Return one row per process role and span name, the largest total time first.

    Durations include nested spans, and are clipped to the step.
    """
    roles = list(dict.fromkeys(records.roles))
    role_of = np.array([roles.index(role) for role in records.roles], dtype=np.int64)
    keys = role_of[records.spans.process] * len(records.names) + records.spans.name
    rows = []
    for key in np.unique(keys).tolist():
        role, name = divmod(key, len(records.names))
        rows.append(
            _call_row(roles[role], records.names[name], np.flatnonzero(keys == key), records)
        )
    return sorted(rows, key=lambda row: -row.seconds)


def _call_row(role: str, name: str, rows: Ints, records: Records) -> CallRow:
    begin, end = records.spans.begin[rows], records.spans.end[rows]
    took = (end - begin) / 1e9
    p50, p90, p99 = percentiles(took, 50, 90, 99)
    return CallRow(
        role=role,
        name=name,
        calls=len(rows),
        failed=int(records.spans.failed[rows].sum()),
        seconds=float(took.sum()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        longest_s=float(took.max()),
    )


def _block_rows(records: Records, lag: Pieces) -> list[BlockRow]:
    """Return the functions and spans that blocked event loops, longest first, with the delayed
    trajectories.

    Args:
        records: The recorded trajectories.
        lag: Intervals in which trajectories were delayed by a blocked event loop.
    """
    blocks = records.blocks
    axes = Axes(int(blocks.loop.max(initial=0)) + 1, blocks.begin, blocks.end, lag.begin, lag.end)
    held = axes.put(blocks.loop, blocks.begin, blocks.end)
    stood = axes.put(lag.loop, lag.begin, lag.end)
    rows = []
    for what, (lane, name, function) in enumerate(records.blockers):
        mine = blocks.what == what
        took = (blocks.end - blocks.begin)[mine]
        still = overlaps(stood, union(held[mine]))
        rows.append(
            BlockRow(
                lane=lane,
                what=name,
                function=function,
                blocks=len(took),
                seconds=int(took.sum()) / 1e9,
                longest_s=int(took.max()) / 1e9,
                trajectories=len(np.unique(lag.owner[still > 0])),
                stood_still_s=int(still.sum()) / 1e9,
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def _groups(trajectories: Sequence[Trajectory], pieces: Pieces, begin_ns: int) -> dict[str, Any]:
    """Return the fields of ``Rollout`` on groups: training trajectories of one prompt, two or more.

    Groups are sorted by the time for which members waited for the last member. The spread of a
    group is the time from the first end of a member to the last end.

    Args:
        trajectories: All trajectories.
        pieces: Time of the trajectories by cause.
        begin_ns: Begin of the step (unix ns).
    """
    training = [number for number, trajectory in enumerate(trajectories) if not trajectory.validate]
    by_name = grouped(training, lambda number: trajectories[number].said.group)
    by_name.pop("", None)
    groups = [
        _Group(name, members, trajectories) for name, members in by_name.items() if members[1:]
    ]
    groups.sort(key=lambda group: (-group.waited_ns, group.name))
    rows = []
    for group in groups[:_MOST_GROUPS]:
        last = pieces.of(np.flatnonzero(pieces.owner == group.slowest))
        causes = last.seconds(np.maximum(last.end - np.maximum(last.begin, group.first_ns), 0))
        row = GroupRow(
            group=shortened(group.name),
            members=len(group.members),
            first_s=(group.first_ns - begin_ns) / 1e9,
            last_s=(group.last_ns - begin_ns) / 1e9,
            waited_s=group.waited_ns / 1e9,
            last_cause=max(causes, key=lambda cause: causes[cause], default=""),
            whole=not any(trajectories[member].cut_end for member in group.members),
        )
        rows.append(row)
    spreads_s = [(group.last_ns - group.first_ns) / 1e9 for group in groups] or [0.0]
    return {
        "groups": rows,
        "groups_seen": len(groups),
        "group_waited_s": sum(group.waited_ns for group in groups) / 1e9,
        "group_spread_p50_s": median(spreads_s),
        "group_spread_max_s": max(spreads_s),
    }


class _Group:
    """Training trajectories of one prompt.

    Attributes:
        name: Name of the group.
        members: Indices of the trajectories.
        first_ns: First end of a member.
        last_ns: Last end of a member.
        slowest: Index of the member that ended last.
        waited_ns: Total time for which members waited for the last trajectory.
    """

    def __init__(self, name: str, members: list[int], trajectories: Sequence[Trajectory]) -> None:
        ends = [trajectories[member].end_ns for member in members]
        self.name = name
        self.members = members
        self.first_ns = min(ends)
        self.last_ns = max(ends)
        self.slowest = members[ends.index(self.last_ns)]
        self.waited_ns = self.last_ns * len(ends) - sum(ends)


def _status_rows(records: Records) -> list[StatusRow]:
    """Return one row per status, training before validation, the largest total time first."""
    whole_ns = Counter[bool]()
    for trajectory in records.trajectories:
        whole_ns[trajectory.validate] += trajectory.took_ns
    by_status = grouped(records.trajectories, attrgetter("validate", "status"))
    rows = []
    for (validate, status), members in by_status.items():
        ns = sum(map(attrgetter("took_ns"), members))
        row = StatusRow(
            validate=validate,
            status=status,
            trajectories=len(members),
            seconds=ns / 1e9,
            share=ns / (whole_ns[validate] or 1),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (row.validate, -row.seconds))


def _failure_rows(trajectories: Sequence[Trajectory]) -> list[FailureRow]:
    """Return the errors of failed and cancelled trajectories, the most frequent first,
    validation last.
    """
    failed = [trajectory for trajectory in trajectories if trajectory.failed_in is not None]
    errors = grouped(failed, _failure)
    rows = []
    for (validate, status, error, span), of in sorted(errors.items()):
        first = of[0].said
        sample = "" if first.sample is None else f"/{first.sample}"
        row = FailureRow(
            validate=validate,
            status=status,
            error=error,
            trajectories=len(of),
            example=shortened(f"{first.group}{sample}"),
            span=span,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (row.validate, -row.trajectories))


def _failure(trajectory: Trajectory) -> tuple[bool, str, str, str]:
    """Return what failures of one row share: validation, status, error and failed span."""
    error = shortened(" ".join(trajectory.said.error.split()))
    return trajectory.validate, trajectory.said.status, error, trajectory.failed_in or ""


def _versions(
    records: Records, served: Mapping[int, Request], trained: int | None
) -> dict[str, Any]:
    """Return the fields of ``Rollout`` on the policy versions of training trajectories.

    Versions come from the loop (``min_version``, ``max_version``), else from the trajectory's
    requests.

    Args:
        records: The recorded trajectories.
        served: The engine's request of each ``generate`` span, by the number of the span.
        trained: Policy version that the step trains, if known.
    """
    segments = Counter[int]()
    tokens = Counter[int]()
    of_requests = defaultdict[int, set[int]](set)
    for span, request in served.items():
        owner = int(records.spans.trajectory[span])
        version = request.policy_version
        if version is not None and owner >= 0 and not records.trajectories[owner].validate:
            of_requests[owner].add(version)
            segments[version] += 1
            tokens[version] += request.response_tokens
    oldest = Counter[int]()
    newest = Counter[int]()
    partial = 0
    for number, trajectory in enumerate(records.trajectories):
        logged = (trajectory.number("min_version"), trajectory.number("max_version"))
        versions = {version for version in logged if version is not None} or of_requests[number]
        if versions and not trajectory.validate:
            oldest[min(versions)] += 1
            newest[max(versions)] += 1
            partial += min(versions) < max(versions)
    rows = [
        VersionRow(
            version=version,
            behind=None if trained is None else trained - version,
            oldest=oldest[version],
            newest=newest[version],
            segments=segments[version],
            segment_tokens=tokens[version],
        )
        for version in sorted({*oldest, *newest, *segments}, reverse=True)
    ]
    return {"versions": rows, "versioned": oldest.total(), "partial": partial}
