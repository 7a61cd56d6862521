"""The end of a rollout: its last response, compared with others, and its last trajectories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from statistics import fmean

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.numbers.report_columns import LastTrajectories, LateResponse, PartRow
from verl_profiling.slices.intervals import Ints, Sharing, holding
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.lanes import Step

_NONE_RAN = "no trajectory"  # time of the tail in which none of its trajectories ran
SENT, LENGTH, SPEED = "sent later", "more tokens", "slower tokens"
"""Reasons that are no part of a request; the others are, such as ``queued``."""
_GENERATING = ("decode", "generate")  # parts of a request that make its tokens


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


def late_response(step: Step) -> LateResponse | None:
    """Return the response that ended last, compared with the last ones of the other replicas.

    Of one replica, it is compared with all its other responses. ``None`` if there are none.
    """
    requests = chain.from_iterable(map(attrgetter("requests"), step.workers))
    served = [one for one in requests if not (one.failed or one.ends_with_batch)]
    begins = np.array([request.begin_ns for request in served], np.int64)
    served = list(compress(served, holding(step.rollout, begins)))
    if len(served) < 2:
        return None
    served.sort(key=attrgetter("end_ns"))
    last = served.pop()
    last_of = {request.replica: request for request in served}
    last_of.pop(last.replica, None)
    peers = list(last_of.values()) or served
    usual_tokens = fmean(map(attrgetter("response_tokens"), peers))
    last_s, usual_s = _parts([last], step.begin_ns), _parts(peers, step.begin_ns)
    more = {name: last_s[name] - usual_s[name] for name in {**last_s, **usual_s}}
    pace_s = sum(usual_s[name] for name in _GENERATING) / max(usual_tokens, 1.0)
    more[LENGTH] = (last.response_tokens - usual_tokens) * pace_s
    more[SPEED] = sum(more.pop(name, 0.0) for name in _GENERATING) - more[LENGTH]
    late_s = sum(more.values())
    return LateResponse(
        replica=last.replica,
        seconds=late_s,
        others=len(peers),
        one_per_replica=bool(last_of),
        tokens=last.response_tokens,
        usual_tokens=usual_tokens,
        preemptions=last.preemptions or 0,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        parts=[
            PartRow(cause=cause, seconds=seconds, share=seconds / (late_s or 1.0))
            for cause, seconds in sorted(more.items(), key=lambda item: -item[1])
        ],
    )


def _parts(requests: Sequence[Request], begin_ns: int) -> defaultdict[str, float]:
    """Return the mean time of each part of requests, from the begin of the step (s)."""
    sums = defaultdict[str, float](float)
    for request in requests:
        for name, since_ns, until_ns in ((SENT, begin_ns, request.begin_ns), *request.parts()):
            sums[name] += (until_ns - since_ns) / 1e9 / len(requests)
    return sums
