"""How much of a rank's lead its data explain, and how much is its machine."""

from __future__ import annotations

import numpy as np
import pytest

from verl_profiling.slices.work import LEAST_RUNS, Explained, Runs, explained


def runs(
    chance: np.random.Generator, many: int, tokens: float = 1.0, slow: float = 1.0, squared: int = 1
) -> Runs:
    """Return runs that take 5 ms, 1 us a token, and 1 ns a squared length, with 3% of noise."""
    lengths = tokens * chance.uniform(1e4, 3e4, many)
    squares = squared * lengths * chance.uniform(2e2, 6e2, many)
    seconds = slow * (0.005 + 1e-6 * lengths + 1e-9 * squares) * chance.normal(1.0, 0.03, many)
    return Runs(seconds, lengths, squares)


def lead_s(leader: Runs, peers: list[Runs]) -> float:
    return float(leader.seconds.sum()) - np.mean([peer.seconds.sum() for peer in peers])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("tokens", "slow"), [(1.0, 1.5), (1.9, 1.0), (1.9, 1.5)])
@pytest.mark.parametrize("squared", [0, 1])
def test_the_parts_of_data_and_machine_are_those_that_were_planted(
    ranks: int, tokens: float, slow: float, squared: int
) -> None:
    """The part of the data is within its error 19 of 20 times, and within a seventh of the lead."""
    misses, off = 0, []
    for seed in range(100):
        chance = np.random.default_rng(seed)
        peers = [runs(chance, 16, squared=squared) for _ in range(ranks - 1)]
        leader = runs(chance, 16, tokens, slow, squared)
        found = explained(leader, peers)
        assert isinstance(found, Explained)
        own = 0.005 * 16 + float(1e-6 * leader.tokens.sum() + 1e-9 * leader.squares.sum())
        truth_s = own - np.mean([peer.seconds.sum() for peer in peers])
        misses += abs(found.data_s - truth_s) > found.error_s
        off.append(abs(found.data_s - truth_s) / lead_s(leader, peers))
        assert found.tokens == pytest.approx(tokens, rel=0.5)
    assert misses <= 5
    assert max(off) < 1 / 7


def test_nothing_is_told_of_few_runs_or_of_work_that_nobody_else_had() -> None:
    """Too few runs, or peers whose work was the same in each run while the leader's was not."""
    chance = np.random.default_rng(0)
    few = explained(runs(chance, 4), [runs(chance, LEAST_RUNS - 1)])
    assert few == f"cannot tell: {LEAST_RUNS - 1} runs of its peers, {LEAST_RUNS} are needed"
    same = Runs(np.full(12, 0.1), np.full(12, 100.0), np.full(12, 1e4))
    more = Runs(np.full(12, 0.2), np.full(12, 200.0), np.full(12, 4e4))
    assert explained(more, [same]) == "cannot tell: the work of its peers was the same in all runs"
    alike = explained(same, [same, same])
    assert isinstance(alike, Explained)
    assert alike.data_s == pytest.approx(0.0, abs=1e-9)


def test_a_run_in_which_a_peer_stood_still_does_not_count() -> None:
    """A pause of two seconds in one run of a peer leaves the times of its work as they are."""
    chance = np.random.default_rng(1)
    peer, leader = runs(chance, 24), runs(chance, 24, tokens=2.0)
    quiet = explained(leader, [peer])
    peer.seconds[5] += 2.0
    paused = explained(leader, [peer])
    assert isinstance(quiet, Explained)
    assert isinstance(paused, Explained)
    # the mean of the peers has the pause, what the work takes has not
    assert paused.data_s + 2.0 == pytest.approx(quiet.data_s, abs=quiet.error_s)
