"""When a span was the innermost one: open, with no span open inside it."""

from __future__ import annotations

import numpy as np

from verl_profiling.report.rollout.axes import Axes, Ints

__all__ = ["innermost"]


def innermost(owner: Ints, begin: Ints, end: Ints, parent: Ints) -> tuple[Ints, Ints, Ints]:
    """Return when spans have no other one open inside them: numbers of the spans, begins and ends.

    A span inside another that has ended is inside the one around that. A parent that comes later, or of
    another owner, is none, so there are no circles.

    Args:
        owner: Whose span each is: of which trajectory, or process.
        begin: Begins (ns); those of one owner are in order.
        end: Ends (ns).
        parent: Number of the span around each, or -1.
    """
    inside = np.flatnonzero(parent >= 0)
    around, reach = _nested(owner, begin, end, parent, inside)
    held = around >= 0
    children, parents = inside[held], around[held]
    axes = Axes(len(begin), begin, end, reach)
    whole = axes.put(np.arange(len(begin)), begin, end)
    return axes.left(whole, axes.put(parents, begin[children], reach[children]))


def _nested(owner: Ints, begin: Ints, end: Ints, parent: Ints, inside: Ints) -> tuple[Ints, Ints]:
    """Return the open span around each of some, and until when something is open in each span."""
    begins, ends, reach = begin.tolist(), end.tolist(), end.tolist()
    up, owners = np.where(parent < np.arange(len(parent)), parent, -1).tolist(), owner.tolist()
    found = []
    for child in inside.tolist():
        # An ended span stays ended for all that begin later, so the way past it is shortened for them.
        around, way = up[child], []
        while around >= 0 and ends[around] <= begins[child]:
            way.append(around)
            around = up[around]
        for passed in way:
            up[passed] = around
        found.append(around if around >= 0 and owners[around] == owners[child] else -1)
        up[child] = found[-1]
    for child, around in zip(reversed(inside.tolist()), reversed(found), strict=True):
        if around >= 0 and reach[child] > reach[around]:
            reach[around] = reach[child]
    return np.array(found, dtype=np.int64), np.array(reach, dtype=np.int64)
