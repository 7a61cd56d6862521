"""Loop lag: for how long trajectories stood still because another task blocked their event loop.

A block stops every task of its loop, but not what tasks wait for elsewhere: an engine goes on with a
request, a sandbox with its program. So a trajectory stands still in a block

* that is not its own (the span that ran is not one of its spans),
* while it is not in the engine's hands, and
* if what it waited for ended within :data:`DRAIN_NS` after the block, when the loop runs what became due
  meanwhile. What goes on for longer would not have ended any sooner, and keeps its time.

When, inside the block, it became due is not recorded. All of it counts as lag, which is an upper bound,
except where the engine says when it was done.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from verl_profiling.report.intervals import Spans, union
from verl_profiling.report.rollout.axes import Axes, Ints, ragged
from verl_profiling.report.rollout.records import Blocks
from verl_profiling.report.rollout.rows import BlockRow

__all__ = ["DRAIN_NS", "block_rows", "standing_still"]

DRAIN_NS = 50_000_000
"""Time after a block in which a loop runs what became due in it; longer would be a block of its own."""

_TOGETHER_NS = 10_000_000  # between blocks of one turn of the loop, other tasks take a moment
_MOST_PAIRS = 5_000_000
_MOST_NAMES = 20
_MOST_ROWS = 200


def standing_still(
    trajectory: Ints, loop: Ints, begin: Ints, end: Ints, blocks: Blocks
) -> tuple[Ints, Ints, Ints]:
    """Return for which times whose spans stood still: numbers of the spans, begins and ends.

    Args:
        trajectory: Trajectory of each span.
        loop: Event loop of each span, or -1.
        begin: Begin of each span (ns).
        end: End of each span (ns).
        blocks: The blocks of all loops.
    """
    none = np.empty(0, dtype=np.int64)
    on_loop = np.flatnonzero((loop >= 0) & (end > begin))
    if not len(blocks.begin) or not len(on_loop):
        return none, none, none
    loops = int(max(loop.max(), blocks.loop.max())) + 1
    axes = Axes(loops, begin[on_loop], end[on_loop], blocks.begin, blocks.end + _TOGETHER_NS)
    owner, first, last = axes.take(union(axes.put(blocks.loop, blocks.begin, blocks.end + _TOGETHER_NS)))
    last -= _TOGETHER_NS
    starts = Axes(loops, first, end)
    stalls = starts.put(owner, first, first)[:, 0]
    place = np.searchsorted(stalls, starts.put(loop[on_loop], end[on_loop], end[on_loop])[:, 0]) - 1
    near = np.maximum(place, 0)
    low, high = np.maximum(first[near], begin[on_loop]), np.minimum(last[near], end[on_loop])
    waited = (place >= 0) & (owner[near] == loop[on_loop]) & (end[on_loop] <= last[near] + DRAIN_NS)
    waited &= high > low
    return _without_own(on_loop[waited], low[waited], high[waited], trajectory, blocks)


def _without_own(
    number: Ints, low: Ints, high: Ints, trajectory: Ints, blocks: Blocks
) -> tuple[Ints, Ints, Ints]:
    """Take out of the times of each span the blocks of its own trajectory."""
    own = np.flatnonzero(blocks.trajectory >= 0)
    owners = max(len(number), int(trajectory.max(initial=0)) + 1)
    axes = Axes(owners, low, high, blocks.begin, blocks.end)
    of = axes.put(blocks.trajectory[own], blocks.begin[own], blocks.end[own])
    of = of[np.argsort(of[:, 0], kind="stable")]
    asked = axes.put(trajectory[number], low, high)
    reach = np.maximum.accumulate(of[:, 1]) if len(of) else of[:, 1]
    first = np.searchsorted(reach, asked[:, 0], side="right")
    last = np.searchsorted(of[:, 0], asked[:, 1], side="left")
    if np.maximum(last - first, 0).sum() > _MOST_PAIRS:  # of no loop that ran: its blocks do not overlap
        return number, low, high
    block, row = ragged(first, last)
    _, own_begin, own_end = axes.take(of[block])
    index = np.arange(len(number))
    left, begin, end = axes.left(axes.put(index, low, high), axes.put(row, own_begin, own_end))
    return number[left], begin, end


def block_rows(blocks: Blocks, loop: Ints, trajectory: Ints, begin: Ints, end: Ints) -> list[BlockRow]:
    """Return what blocked event loops, longest first, and who stood still meanwhile.

    Of many names, those that blocked the loops of all processes for longest are kept.

    Args:
        blocks: The blocks.
        loop: Event loop of each time for which a trajectory stood still.
        trajectory: Its trajectory.
        begin: Its begin (ns).
        end: Its end (ns).
    """
    took = np.bincount(blocks.what, weights=blocks.end - blocks.begin, minlength=len(blocks.named))
    axes = Axes(int(blocks.loop.max(initial=0)) + 1, blocks.begin, blocks.end, begin, end)
    held, asked = axes.put(blocks.loop, blocks.begin, blocks.end), axes.put(loop, begin, end)
    by_name: dict[str, float] = defaultdict(float)
    for (_, name, _), spent in zip(blocks.named, took.tolist(), strict=True):
        by_name[name] += spent
    most = sorted(by_name, key=lambda name: -by_name[name])[:_MOST_NAMES]
    rows = []
    ranked = [what for what in np.argsort(-took, kind="stable") if blocks.named[what][1] in most]
    for what in ranked[:_MOST_ROWS]:
        mine = blocks.what == what
        beside = np.flatnonzero(np.isin(loop, np.unique(blocks.loop[mine])))
        still = _common(union(held[mine]), asked[beside], axes)
        lane, name, function = blocks.named[what]
        rows.append(
            BlockRow(
                lane=lane,
                what=name,
                function=function,
                blocks=int(mine.sum()),
                seconds=float(took[what]) / 1e9,
                longest_s=int((blocks.end[mine] - blocks.begin[mine]).max()) / 1e9,
                trajectories=len(np.unique(trajectory[beside[still > 0]])),
                stood_still_s=int(still.sum()) / 1e9,
            )
        )
    return rows


def _common(held: Spans, asked: Spans, axes: Axes) -> Ints:
    """Return how much of each span (ns) is in a set of time."""
    _, begin, end = axes.take(held)
    before = np.concatenate(([0], np.cumsum(end - begin)))
    sides = []
    for side in (0, 1):
        begun = np.searchsorted(held[:, 0], asked[:, side], side="right")
        last = np.maximum(begun - 1, 0)
        ahead = np.where(
            (begun > 0) & (held[last, 1] > asked[:, side]), end[last] - axes.time(asked[:, side]), 0
        )
        sides.append(before[begun] - ahead)
    return np.asarray(sides[1] - sides[0], dtype=np.int64)
