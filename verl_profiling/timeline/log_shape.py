"""What belongs to what in a log of trajectories: of any log, also one whose records contradict each other.

Arrays of numbers stand for the records, so that a log of any size takes some hundred bytes for each.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "Mask", "Shape", "shape_of"]

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


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
