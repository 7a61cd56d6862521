"""The last trajectories of a rollout, and what they waited for when all others were done."""

from __future__ import annotations

import numpy as np

from verl_profiling.report.rollout.axes import Ints, Sharing
from verl_profiling.report.rollout.pieces import Pieces
from verl_profiling.report.rollout.rows import LastTrajectories, PartRow

__all__ = ["NONE_RAN", "last_trajectories"]

NONE_RAN = "no trajectory"
"""Time of the tail in which its trajectories had not begun, or were done."""

_MOST_PARTS = 20


def last_trajectories(
    numbers: Ints, begin: Ints, end: Ints, pieces: Pieces, step_ns: int
) -> LastTrajectories | None:
    """Return the tail: the last ``k`` trajectories, after all others were done.

    Of ``n`` trajectories, ``k`` is at most ``n / 2``, and the number for which the tail's share of the
    rollout exceeds ``k / n`` by most: where the curve of finished trajectories bends.

    Args:
        numbers: Numbers of the trajectories.
        begin: Their begins (ns).
        end: Their ends (ns).
        pieces: What all trajectories waited for.
        step_ns: Begin of the step.
    """
    if not len(numbers):
        return None
    order = np.argsort(end, kind="stable")
    ends, first = end[order], int(begin.min())
    done = np.concatenate(([first], ends[:-1]))[::-1]  # when all but the last 1, 2, ... were
    sizes = np.arange(1, len(ends) + 1)
    wall = max(int(ends[-1]) - first, 1)
    gain = (ends[-1] - done) / wall - sizes / len(ends)
    size = int(gain[: max(len(ends) // 2, 1)].argmax()) + 1
    since, until = int(done[size - 1]), int(ends[-1])
    mine = np.isin(pieces.owner, numbers[order[len(order) - size :]]) & (pieces.end > since)
    tail = pieces.of(np.flatnonzero(mine))
    window = np.array([[since, until]], dtype=np.int64)
    took = Sharing(np.zeros_like(tail.owner), tail.begin, tail.end).shares(window)
    by_cause = np.bincount(tail.cause, weights=took, minlength=len(pieces.causes)) / 1e9
    seconds = (until - since) / 1e9
    parts = [(pieces.causes[cause], float(by_cause[cause])) for cause in np.argsort(-by_cause, kind="stable")]
    parts = [(cause, spent) for cause, spent in parts[:_MOST_PARTS] if spent > 0]
    rest = seconds - float(by_cause.sum())
    if rest > 1e-9:
        parts.append((NONE_RAN, rest))
    return LastTrajectories(
        trajectories=size,
        of=len(ends),
        begin_s=(since - step_ns) / 1e9,
        seconds=seconds,
        share=(until - since) / wall,
        parts=[
            PartRow(cause=cause, seconds=spent, share=spent / seconds if seconds else 0.0)
            for cause, spent in parts
        ],
    )
