"""The logs of trajectories of a step, read whole, without the records that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.step import Source, StepInputs
from verl_profiling.trajectory_log import (
    NO_SPAN,
    LaterFates,
    TrajectoryLog,
    read_log,
)

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """One log of a step.

    Attributes:
        source: The file, its lane, and in ``offset_ns`` what to subtract from its times.
        log: Its records, on the clock of the process that wrote them; ``None`` if it cannot be read. No
            number repeats, nothing ends before it begins, trajectories and parents are there, a parent is
            of the same trajectory, and fates are the last that any log of the step has.
        problems: What could not be read, or was not recorded, as sentences that name the file.
    """

    source: Source
    log: TrajectoryLog | None
    problems: list[str] = []


def read_logs(inputs: StepInputs) -> Iterator[ReadLog]:
    """Yield the logs of a step, in the order of their lanes; each is in memory while it is used."""
    fates = LaterFates.of((source.path, source.offset_ns) for source in inputs.logs)
    for source in inputs.logs:
        try:
            log = mended_log(source, inputs.limits, fates)
        except TraceFormatError as error:
            yield ReadLog(source=source, log=None, problems=[str(error)])
            continue
        yield ReadLog(
            source=source, log=log, problems=[f"{source.path.name}: {said}" for said in log.problems]
        )


def mended_log(source: Source, limits: Limits, fates: LaterFates) -> TrajectoryLog:
    """Read one log, and leave out or correct the records that contradict others.

    Raises:
        TraceFormatError: It is not a log of trajectories, or cannot be read.
    """
    log = read_log(source.path, limits.reached)
    shape = shape_of(*tables(log))
    log.trajectories = [
        t if (fate := fates.of_trajectory(t)) == t.fate else msgspec.structs.replace(t, fate=fate)
        for t, stands in zip(log.trajectories, shape.trajectories.tolist(), strict=True)
        if stands
    ]
    mended = []
    for span, stands, owner, parent in zip(
        log.spans, shape.spans.tolist(), shape.owner.tolist(), shape.parent.tolist(), strict=True
    ):
        trajectory = span.trajectory if owner >= 0 else NO_SPAN
        around = span.parent if parent >= 0 else NO_SPAN
        if (trajectory, around) != (span.trajectory, span.parent):
            span = msgspec.structs.replace(span, trajectory=trajectory, parent=around)
        if stands:
            mended.append(span)
    log.spans = mended
    log.blocks = [block for block in log.blocks if block.begin_ns <= block.end_ns]
    log.problems += shape.problems
    return log


def tables(log: TrajectoryLog) -> tuple[Ints, Ints]:
    """Return number, begin and end of trajectories; number, trajectory, parent, begin and end of spans."""
    trajectories = [(t.id, t.begin_ns, t.end_ns) for t in log.trajectories]
    spans = [(s.id, s.trajectory, s.parent, s.begin_ns, s.end_ns) for s in log.spans]
    return np.array(trajectories, np.int64).reshape(-1, 3), np.array(spans, np.int64).reshape(-1, 5)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a log that stand, and what they belong to, by their place in it.

    Attributes:
        trajectories: Whether each trajectory stands.
        spans: Whether each span stands.
        owner: Place of each span's trajectory, or -1.
        parent: Place of the span around it, in the same trajectory, or -1.
        root: Place of its outermost span, which may be itself.
        depth: Number of spans around it.
        problems: What contradicts itself, as sentences.
    """

    trajectories: Mask
    spans: Mask
    owner: Ints
    parent: Ints
    root: Ints
    depth: Ints
    problems: list[str]


def shape_of(trajectories: Ints, spans: Ints) -> Shape:
    """Return what stands of a log.

    A record that ends before it begins, or has the number of an earlier one, does not. A span whose
    trajectory is not there belongs to the process; one whose parents go in a circle has none.

    Args:
        trajectories: Number, begin and end of each, in rows.
        spans: Number, trajectory, parent, begin and end of each, in rows.
    """
    standing = _first_of_each(trajectories[:, 0]) & (trajectories[:, 1] <= trajectories[:, 2])
    kept = _first_of_each(spans[:, 0]) & (spans[:, 3] <= spans[:, 4])
    owner = _place(spans[:, 1], trajectories[:, 0], standing)
    parent = _place(spans[:, 2], spans[:, 0], kept)
    parent[(parent >= 0) & (owner[parent] != owner)] = -1
    root, depth, circling = _ancestry(parent)
    if circling.any():
        parent[circling] = -1
        root, depth, _ = _ancestry(parent)
    wrong = int((~standing).sum() + (~kept).sum())
    lost = int((kept & (spans[:, 1] >= 0) & (owner < 0)).sum())
    counts = (
        (wrong, "left out, because they end before they begin or repeat a number"),
        (lost, "spans of trajectories that are not in the log, which count as the process's"),
        (int((kept & circling).sum()), "spans around themselves, which count as outermost"),
    )
    problems = [f"{what}: {count:,}" for count, what in counts if count]
    return Shape(
        trajectories=standing,
        spans=kept,
        owner=owner,
        parent=parent,
        root=root,
        depth=depth,
        problems=problems,
    )


def _first_of_each(numbers: Ints) -> Mask:
    first = np.zeros(len(numbers), bool)
    first[np.unique(numbers, return_index=True)[1]] = True
    return first


def _place(wanted: Ints, numbers: Ints, standing: Mask) -> Ints:
    """Return where each wanted number stands, or -1."""
    places = np.flatnonzero(standing)
    if not len(places):
        return np.full(len(wanted), -1)
    places = places[np.argsort(numbers[places])]
    found = np.searchsorted(numbers[places], wanted)
    candidates = places[np.minimum(found, len(places) - 1)]
    return np.where(numbers[candidates] == wanted, candidates, -1)


def _ancestry(parent: Ints) -> tuple[Ints, Ints, Mask]:
    """Return the outermost span of each, how many are around it, and which lead into a circle."""
    up = parent.copy()
    root = np.where(up < 0, np.arange(len(up)), up)
    depth = (up >= 0).astype(np.int64)
    for _ in range(len(up).bit_length()):
        inner = np.flatnonzero(up >= 0)
        if not len(inner):
            break
        above = up[inner]
        depth[inner] += depth[above]
        root[inner] = root[above]
        up[inner] = up[above]
    return root, depth, up >= 0
