"""The part of a process's lead that its data explain.

The lead is the time by which a process takes longer in a stage than its peers do on average. For
example, a rank takes longer in ``update_actor`` if it has more tokens, or if its GPU is slower.

The time of a run is taken to be a sum of a constant, a time per token, and a time per squared
sequence length. Their shares of a run are the shape of its time. The leader's runs are alike in
shape, and longer by a factor if its machine is slower. The time that its additional work would take
its peers is the part of its data. The rest is the part of its machine.

Each shape is as likely as the runs fit it, as in Bayes' rule without a preference. So runs that say
little, such as runs with equal work, leave a wide interval instead of a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from verl_profiling.slices.slices import Floats

LEAST_RUNS = 8
"""Fewest runs of the peers for a fit: three coefficients, their spread, and some to spare."""

UNSURE = "cannot tell: runs of the same work took too different times"
"""Answer if the error is so large that either part, data or machine, may be the larger one."""
SAME_WORK = "cannot tell: the work of its peers was the same in all runs"
"""Answer if no run shows how long more work takes."""

_STEPS = 40  # shares are multiples of a fortieth; with a twentieth, errors were too small
_TAIL = 0.005  # probability of a part below the interval, and of one above it
_SHORTEST = 1e-9  # shortest time of a run, as the logarithms of times are compared
# Runs are no nearer to a shape than this share of their time, because shares are multiples.
_NEAREST = 0.01
_EQUAL = 0.05  # largest spread of tokens, as a share of their mean, with which work is the same


class Runs(NamedTuple):
    """Runs of a stage in one process, as columns.

    Attributes:
        seconds: Time of each run (s), without collectives.
        tokens: Number of tokens in each run.
        squares: Sum of the squared sequence lengths in each run; 0 if unknown.
    """

    seconds: Floats
    tokens: Floats
    squares: Floats


class Explained(NamedTuple):
    """The part of a process's lead that its data explain; the rest is the part of its machine.

    Attributes:
        data_s: Seconds that the process's additional work would take its peers; the mean over the
            shapes.
        low_s: Lower bound of ``data_s``.
        high_s: Upper bound of ``data_s``.
        tokens: Tokens of the process, as a multiple of its peers' mean.
        runs: Number of runs in the fit.
        unsure: Reason for a wide interval.
    """

    data_s: float
    low_s: float
    high_s: float
    tokens: float
    runs: int
    unsure: str

    def within(self, lead_s: float) -> Explained:
        """Return the parts of a lead: no part is negative, or longer than the lead."""
        data_s, low_s, high_s = np.clip(self[:3], 0.0, lead_s).tolist()
        return self._replace(data_s=data_s, low_s=low_s, high_s=high_s)

    @property
    def error_s(self) -> float:
        """Error bound of ``data_s``."""
        return max(self.high_s - self.data_s, self.data_s - self.low_s)

    def tells(self, lead_s: float) -> bool:
        """Return whether the fit says enough about a lead.

        Either the larger part, data or machine, is certain, or the error is at most a quarter of
        the lead.
        """
        is_certain = not self.low_s <= lead_s / 2 <= self.high_s
        return is_certain or self.error_s <= lead_s / 4


def explained(leader: Runs, peers: Sequence[Runs], earlier: Sequence[Runs] = ()) -> Explained | str:
    """Return the part of a lead that the leader's data explain, or a sentence why it is unknown.

    Args:
        leader: Runs of the slowest process, or of the slow step.
        peers: Runs of each other process, or of each step before; the lead is over their mean.
        earlier: Further runs for the fit, e.g. of the other processes in earlier steps.
    """
    others = _joined([*peers, *earlier])
    if len(others.seconds) < LEAST_RUNS:
        return f"cannot tell: {len(others.seconds)} runs of its peers, {LEAST_RUNS} are needed"
    usual = np.maximum(_columns(others).mean(axis=0), _SHORTEST)
    paces, of_others = _paces(others, usual)
    likely = _likely(np.concatenate([of_others, _paces(leader, usual)[1]]))
    compared = _joined(peers)
    more = _times(leader, usual).sum(axis=0) - _times(compared, usual).sum(axis=0) / len(peers)
    data_s = paces * more
    order = np.argsort(data_s)
    at = np.searchsorted(np.cumsum(likely[order]), [_TAIL, 1 - _TAIL])
    low_s, high_s = data_s[order][at.clip(max=len(order) - 1)].tolist()
    has_same_work = float(others.tokens.std()) <= _EQUAL * float(others.tokens.mean())
    return Explained(
        data_s=float(data_s @ likely),
        low_s=low_s,
        high_s=high_s,
        tokens=float(leader.tokens.sum()) / max(float(compared.tokens.sum()) / len(peers), 1.0),
        runs=len(others.seconds) + len(leader.seconds),
        unsure=SAME_WORK if has_same_work else UNSURE,
    )


def expected(runs: Sequence[Runs]) -> list[Floats] | None:
    """Return how long each run of each process takes by its work, as a multiple of a usual run.

    ``None`` for too few runs.
    """
    together = _joined(runs)
    if len(together.seconds) < LEAST_RUNS:
        return None
    usual = np.maximum(_columns(together).mean(axis=0), _SHORTEST)
    likely = _likely(np.concatenate([_paces(of_one, usual)[1] for of_one in runs]))
    return [_times(of_one, usual) @ likely for of_one in runs]


def _likely(distances: Floats) -> Floats:
    """Return the probability of each shape, from how far each run is from it."""
    mean = np.maximum(distances.mean(axis=0), _NEAREST)
    evidence = -len(distances) * np.log(mean)
    likely = np.exp(evidence - evidence.max())
    return np.asarray(likely / likely.sum())


@cache
def _shapes() -> Floats:
    """Return all shares of the constant, the tokens and the squares; shape (3, shapes)."""
    shares = [
        (constant, tokens, _STEPS - constant - tokens)
        for constant in range(_STEPS + 1)
        for tokens in range(_STEPS + 1 - constant)
    ]
    transposed: Floats = np.array(shares, np.float64).T / _STEPS
    return transposed


def _joined(runs: Sequence[Runs]) -> Runs:
    return Runs(*(np.concatenate(column) for column in zip(*runs, strict=True)))


def _columns(runs: Runs) -> Floats:
    return np.stack([np.ones_like(runs.seconds), runs.tokens, runs.squares], axis=1)


def _times(runs: Runs, usual: Floats) -> Floats:
    """Return how long each run takes by each shape, as a multiple of a usual run.

    Args:
        runs: The runs.
        usual: Constant, tokens and squares of a usual run.
    """
    times: Floats = np.maximum(_columns(runs) / usual @ _shapes(), _SHORTEST)
    return times


def _paces(runs: Runs, usual: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of a usual run by each shape, and how far each run is from them.

    The median run has a distance of 0, so a process that is slower in all its runs is not farther.
    A run in which the process stood still changes no distance of another run.
    """
    seconds = np.log(np.maximum(runs.seconds, _SHORTEST))
    paces = seconds[:, np.newaxis] - np.log(_times(runs, usual))
    middle = np.median(paces, axis=0)
    return np.exp(middle), np.abs(paces - middle)
