"""The part of a process's lead that its data explain.

The lead is the time by which a process takes longer in a stage than its peers do on average. For
example, a rank takes longer in ``update_actor`` if it has more tokens, or if its GPU is slower.

A fit to the peers' runs of the stage gives the time of a run. It is a sum of a constant, a time per
token, and a time per squared sequence length. The time that the leader's additional work would take
its peers is the part of its data. The rest is the part of its machine.
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
"""Answer if the error is so large that either part, data or machine, may be the larger one."""

# Runs further from the first fit are left out: three standard deviations, estimated by the median.
# An example is a run in which the process once stood still.
_OUTLIER = 3.0 * 1.48
# Largest spread of the runs, as a share of their mean time. Of 150 simulated leads, 0 to 3 were
# wrong below it, and 15 above.
_NOISY = 0.4
_ERRORS = 3.0  # standard errors in the bound: 95 to 100 of 100 simulated leads lie within
# A fit is ruled out if its squared residuals exceed the best fit's by more than this many squared
# spreads. Two more columns gain less than that by chance in 95% of cases.
_LIKELY = 6.0
_SAME = 1e-3  # largest share of the leader's work that is no combination of its peers' work


class Runs(NamedTuple):
    """Runs of a stage in one process, as columns.

    Attributes:
        seconds: Time of each run (s), without known waits for other ranks.
        tokens: Number of tokens in each run.
        squares: Sum of the squared sequence lengths in each run; 0 if unknown.
    """

    seconds: Floats
    tokens: Floats
    squares: Floats


class Explained(NamedTuple):
    """The part of a process's lead that its data explain; the rest is the part of its machine.

    Attributes:
        data_s: Seconds that the process's additional work would take its peers.
        error_s: Error bound of ``data_s``.
        tokens: Tokens of the process, as a multiple of its peers' mean.
        runs: Number of runs in the fit.
    """

    data_s: float
    error_s: float
    tokens: float
    runs: int

    def tells(self, lead_s: float) -> bool:
        """Return whether the fit says enough about a lead.

        Either the larger part, data or machine, is certain, or the error is at most a quarter of
        the lead.
        """
        is_certain = abs(self.data_s - lead_s / 2) > self.error_s
        return is_certain or self.error_s <= lead_s / 4


def explained(leader: Runs, peers: Sequence[Runs], earlier: Sequence[Runs] = ()) -> Explained | str:
    """Return the part of a lead that the leader's data explain, or a sentence why it is unknown.

    Args:
        leader: Runs of the slowest process, or of the slow step.
        peers: Runs of each other process, or of each step before; the lead is over their mean.
        earlier: Further runs for the fit, e.g. of the other processes in earlier steps.
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
    """Return whether the leader's work is a linear combination of its peers' runs.

    Only then can a fit predict its time. Peers with the same tokens in all runs do not show the
    time of a token.
    """
    combination = np.linalg.lstsq(work.T, own, rcond=_SAME)[0]
    rest = own - work.T @ combination
    return bool(np.abs(rest).max() <= _SAME * np.abs(own).max())


class _Fit(NamedTuple):
    """A least-squares fit: the seconds that peers take for a stage, by columns of its work.

    Attributes:
        columns: Indexes of the columns in the fit: 0 is the constant, 1 tokens, 2 squared lengths.
        times: Seconds per unit of each column.
        covariance: Covariance of ``times``, in units of ``spread_s`` squared.
        rest: Sum of the squared residuals.
        spread_s: Standard deviation of the residuals (s), of the best of all fits.
    """

    columns: list[int]
    times: NDArray[np.floating[Any]]
    covariance: NDArray[np.floating[Any]]
    rest: float
    spread_s: float = 0.0

    def time_of(self, work: Floats) -> tuple[float, float]:
        """Return the time that a work takes by this fit, and the error bound of that time (s)."""
        work = work[self.columns]
        error_s = _ERRORS * self.spread_s * sqrt(max(0.0, float(work @ self.covariance @ work)))
        return float(work @ self.times), error_s


def _fits(work: Floats, seconds: Floats) -> list[_Fit]:
    """Return the fits that the runs do not rule out, the best fit first.

    Fits with negative times are left out, because more work never takes less time. With noisy runs,
    a fit without the squared lengths may be as good as one with them. The two predict different
    times for a leader with more work than any peer, so both are returned.
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
