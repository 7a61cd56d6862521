"""The last trajectories of a rollout: the time in which only a few still ran."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl_profiling.numbers.report_columns import LastTrajectories, PartRow
from verl_profiling.slices.intervals import Ints, Sharing
from verl_profiling.steps.causes import Pieces

_NONE_RAN = "no trajectory"  # time of the tail in which none of its trajectories ran


def last_trajectories(
    numbers: Ints, begin: Ints, end: Ints, is_cut: tuple[Ints, Ints], pieces: Pieces
) -> LastTrajectories | None:
    """Return the tail: the time in which only the last ``k`` of ``n`` trajectories still ran.

    ``k`` is at most ``n / 2``, and maximizes the tail's share of the rollout minus ``k / n``.
    There, the curve of finished trajectories bends. If the last 4 of 100 take 30% of the time, the
    difference is 0.26. The ``n`` trajectories are a batch: beside the training, the rollout for the
    next step begins after the last trajectory from before.

    Args:
        numbers: Indices of the training trajectories.
        begin: Begin of each trajectory (unix ns).
        end: End of each trajectory (unix ns).
        is_cut: Whether each trajectory began before the step or the recording, and whether it
            ended after it.
        pieces: Time of all trajectories by cause.
    """
    if not len(numbers):
        return None
    wall = max(int(end.max() - begin.min()), 1)
    cut_begin, cut_end = is_cut
    tails = [_Tail(batch, begin, end, wall) for batch in _batches(begin, end, cut_begin)]
    tail = max(tails, key=lambda tail: tail.gain)
    seen = pieces.of(np.flatnonzero(np.isin(pieces.owner, numbers[tail.members])))
    sharing = Sharing(seen.begin, seen.end)
    parts = seen.seconds(sharing.shares(np.array([[tail.since, tail.until]])))
    seconds = (tail.until - tail.since) / 1e9
    if (rest := seconds - sum(parts.values())) > 1e-9:
        parts[_NONE_RAN] = rest
    return LastTrajectories(
        trajectories=len(tail.members),
        of=tail.of,
        seconds=seconds,
        share=(tail.until - tail.since) / wall,
        is_over=not cut_end[tail.members].any(),
        parts=part_rows(parts),
    )


class _Tail:
    """The tail of a batch of trajectories.

    Attributes:
        gain: Its share of the rollout minus its share of the batch.
        since: Begin of the tail (unix ns).
        until: Its end (unix ns).
        members: Indices of the trajectories in it.
        of: Number of trajectories in the batch.
    """

    def __init__(self, batch: Ints, begin: Ints, end: Ints, wall: int) -> None:
        order = batch[np.argsort(end[batch], kind="stable")]
        ends = end[order]
        # time at which all but the last 1, 2, ... had ended
        done = np.concatenate(([int(begin[batch].min())], ends[:-1]))[::-1]
        sizes = np.arange(1, len(ends) + 1)
        gain = (ends[-1] - done) / wall - sizes / len(ends)
        size = int(gain[: max(len(ends) // 2, 1)].argmax()) + 1
        self.gain = float(gain[size - 1])
        self.since, self.until = int(done[size - 1]), int(ends[-1])
        self.members, self.of = order[-size:], len(ends)


def _batches(begin: Ints, end: Ints, cut_begin: Ints) -> list[Ints]:
    """Return the indices of trajectories by batch: those from before the step, and those that began
    after the last of these had ended; one batch if some began earlier.
    """
    before, later = np.flatnonzero(cut_begin), np.flatnonzero(cut_begin == 0)
    if len(before) and len(later) and begin[later].min() > end[before].max():
        return [before, later]
    return [np.arange(len(begin))]


def part_rows(seconds: Mapping[str, float]) -> list[PartRow]:
    """Return rows of seconds by cause, with shares that add up to 1."""
    whole = sum(seconds.values()) or 1.0
    return [
        PartRow(cause=cause, seconds=took, share=took / whole) for cause, took in seconds.items()
    ]
