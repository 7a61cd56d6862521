"""The part of a process's lead that its work explains: the time of work, fitted over its peers.

The peers' runs of a stage give the time of a run as a sum of a constant, a time for each token, and
a time for each squared length. What the leader's additional work would have taken its peers is the
part of its data; the rest is its machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.slices import Floats

LEAST_RUNS = 8
"""Fewest runs of the peers for a fit: three coefficients, their spread, and some to spare."""

UNSURE = "cannot tell: runs of the same work took too different times"
"""Answer where the error leaves open which part is the larger one."""

_OUTLIER = 3.0 * 1.48  # three deviations, by the median: a process that stood still once
_NOISY = 0.4  # of a run: 0 to 3 of 150 drawn leads were wrong below it, 15 above
_ERRORS = 3.0  # standard errors: 95 to 100 of 100 drawn leads lie within
_LIKELY = 6.0  # of the squared spread: 95% of what two columns gain by chance
_SAME = 1e-3  # of the leader's work, that may lie outside of all that its peers did


class Runs(NamedTuple):
    """Runs of a stage in one process, as columns.

    Attributes:
        seconds: Time of each run without waits.
        tokens: Tokens of each run.
        squares: Sum of the squared lengths of each run; 0 if unknown.
    """

    seconds: Floats
    tokens: Floats
    squares: Floats


class Explained(NamedTuple):
    """The lead of a process over the mean of its peers.

    Attributes:
        data_s: The part of its work.
        error_s: Error bound of this part.
        tokens: Its tokens as a multiple of the peers' mean.
        runs: Number of runs that the fit is from.
    """

    data_s: float
    error_s: float
    tokens: float
    runs: int

    def tells(self, lead_s: float) -> bool:
        """Return whether the larger part of a lead is certain, or both parts are to a quarter."""
        is_certain = abs(self.data_s - lead_s / 2) > self.error_s
        return is_certain or self.error_s <= lead_s / 4


def explained(leader: Runs, peers: Sequence[Runs], earlier: Sequence[Runs] = ()) -> Explained | str:
    """Return the part of a lead that the leader's work explains, or why it cannot be told.

    Args:
        leader: Runs of the leader.
        peers: Runs of each peer, over whose mean it leads.
        earlier: Further runs of the peers for the fit.
    """
    work = np.concatenate([_columns(runs) for runs in (*peers, *earlier)])
    seconds = np.concatenate([runs.seconds for runs in (*peers, *earlier)])
    if len(seconds) < LEAST_RUNS:
        return f"cannot tell: {len(seconds)} runs of its peers, {LEAST_RUNS} are needed"
    scale = np.maximum(np.abs(work).max(axis=0), 1.0)
    work, own = work / scale, _columns(leader).sum(axis=0) / scale
    if not _is_within(own, work):
        return "cannot tell: the work of its peers was the same in all runs"
    more = own - sum(_columns(runs).sum(axis=0) for runs in peers) / len(peers) / scale
    first = _fits(work, seconds)[0]
    distance = np.abs(seconds - work[:, first.columns] @ first.times)
    kept = distance <= max(_OUTLIER * float(np.median(distance)), 1e-9)
    fits = _fits(work[kept], seconds[kept])
    if fits[0].spread_s > _NOISY * float(seconds[kept].mean()):
        return UNSURE
    parts = [fit.time_of(more) for fit in fits]
    data_s, _ = parts[0]
    mean_tokens = sum(float(runs.tokens.sum()) for runs in peers) / len(peers)
    return Explained(
        data_s=data_s,
        error_s=max(abs(other_s - data_s) + error_s for other_s, error_s in parts),
        tokens=float(leader.tokens.sum()) / max(mean_tokens, 1.0),
        runs=int(kept.sum()),
    )


def _columns(runs: Runs) -> Floats:
    return np.stack([np.ones_like(runs.seconds), runs.tokens, runs.squares], axis=1)


def _is_within(own: Floats, work: Floats) -> bool:
    """Return whether a work is a combination of the peers' works, so that its time follows."""
    combination = np.linalg.lstsq(work.T, own, rcond=_SAME)[0]
    rest = own - work.T @ combination
    return bool(np.abs(rest).max() <= _SAME * np.abs(own).max())


class _Fit(NamedTuple):
    """A fit of some columns of the work.

    Attributes:
        columns: The columns.
        times: Time of each column.
        covariance: Covariance of the times, in units of ``spread_s`` squared.
        rest: Sum of the squared distances of the runs.
        spread_s: Spread of the runs around the best fit (s).
    """

    columns: list[int]
    times: NDArray[np.floating[Any]]
    covariance: NDArray[np.floating[Any]]
    rest: float
    spread_s: float = 0.0

    def time_of(self, work: Floats) -> tuple[float, float]:
        """Return the time of some work, and its error bound."""
        work = work[self.columns]
        error_s = _ERRORS * self.spread_s * sqrt(max(0.0, float(work @ self.covariance @ work)))
        return float(work @ self.times), error_s


def _fits(work: Floats, seconds: Floats) -> list[_Fit]:
    """Return the fits that the runs do not rule out, the best one first.

    More work never takes less time. A fit without a column may be as good as one with it where the
    runs are noisy, and predicts another time for more work than any of them had: neither is ruled
    out.
    """
    found = []
    for number in range(1, 1 << work.shape[1]):
        columns = [column for column in range(work.shape[1]) if number >> column & 1]
        part = work[:, columns]
        times = np.linalg.lstsq(part, seconds, rcond=None)[0]
        if (times >= 0).all() and part.any(axis=0).all():
            rest = float(np.square(seconds - part @ times).sum())
            found.append(_Fit(columns, times, np.linalg.pinv(part.T @ part), rest))
    found.sort(key=lambda fit: fit.rest)
    best = found[0]
    spread_s = sqrt(best.rest / max(1, len(seconds) - len(best.columns)))
    most = best.rest + _LIKELY * spread_s**2
    return [fit._replace(spread_s=spread_s) for fit in found if fit.rest <= most]
