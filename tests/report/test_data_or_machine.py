"""How much of a rank's lead its data explain, and how much is its machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from drawn_steps import Worker, drawn_inputs
from msgspec.structs import replace

from verl_profiling.analysis import open_step
from verl_profiling.errors import ConfigError
from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.manifest import MANIFEST_NAME, Work
from verl_profiling.report.model import Finding, Report
from verl_profiling.slices.lead_fit import LEAST_RUNS, Explained, Runs, explained

REDUCE = "ncclDevKernel_AllReduce_Sum"


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
        tokens_more = leader.tokens.sum() - np.mean([peer.tokens.sum() for peer in peers])
        squares_more = leader.squares.sum() - np.mean([peer.squares.sum() for peer in peers])
        truth_s = 1e-6 * tokens_more + 1e-9 * squares_more
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
    unsure = explained(more, [same])
    assert isinstance(unsure, Explained)
    assert not unsure.within(0.1 * 12).tells(0.1 * 12)
    assert unsure.unsure == "cannot tell: the work of its peers was the same in all runs"
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
    assert paused.data_s == pytest.approx(quiet.data_s, abs=quiet.error_s)


def captured(
    folder: Path, tokens: Sequence[Sequence[int]], slow: Sequence[float], *, passed: bool = True
) -> Report:
    """Return the report of ranks that meet in a collective at the end of each micro-batch.

    A micro-batch takes 20 ms, and 100 ms a thousand tokens.
    """
    at, spans, kernels = 0.0, [], [[] for _ in tokens]
    for of_ranks in zip(*tokens, strict=True):
        own_s = [factor * (0.02 + many / 1e4) for many, factor in zip(of_ranks, slow, strict=True)]
        end = at + max(own_s) + 0.001
        for rank, took_s in enumerate(own_s):
            kernels[rank] += [("gemm", at, at + took_s), (REDUCE, at + took_s, end)]
        spans.append(("micro_batch", at, end, 1))
        at = end
    ranks = list(range(len(tokens)))
    stages = [("update_actor", 0, at), *spans]
    workers = [
        Worker("actor", rank, stages=stages, kernels=kernels[rank], groups=[ranks])
        for rank in ranks
    ]
    inputs = drawn_inputs(folder, stages[:1], workers, at)
    if passed:
        each = [
            replace(worker, stages=with_work(worker.stages, of_rank))
            for worker, of_rank in zip(inputs.manifest.workers, tokens, strict=True)
        ]
        write_json_atomically(folder / MANIFEST_NAME, replace(inputs.manifest, workers=each))
    return open_step(folder).report()


def with_work(spans: list, tokens: Sequence[int]) -> list:
    """Return the spans of a rank, its micro-batches with these tokens."""
    left = iter(tokens)
    return [
        replace(span, work=Work(tokens=next(left))) if span.name == "micro_batch" else span
        for span in spans
    ]


def of_slow_rank(report: Report) -> Finding:
    [finding] = [one for one in report.findings if one.rule == "straggler"]
    return finding


@pytest.mark.parametrize(
    ("ranks", "data", "machine"), [(2, 2.0, 1.0), (4, 2.0, 1.0), (2, 1.0, 2.0), (4, 1.5, 1.5)]
)
def test_the_finding_of_a_slow_rank_names_both_parts(
    ranks: int, data: float, machine: float, tmp_path: Path
) -> None:
    """Waits in collectives do not count; the parts are what the drawn times give."""
    chance = np.random.default_rng(3)
    tokens = chance.integers(500, 1500, (ranks, 12))
    tokens[1] = data * tokens[0]
    slow = [machine if rank == 1 else 1.0 for rank in range(ranks)]
    report = captured(tmp_path, tokens.tolist(), slow)
    [row] = [row for row in report.stragglers if row.stage == "update_actor"]
    others = np.delete(tokens, 1, axis=0).sum(axis=1).mean()
    assert row.slowest == "actor_rank1"
    assert row.data_us == pytest.approx(1e2 * (tokens[1].sum() - others), abs=2e4)
    assert row.tokens == pytest.approx(tokens[1].sum() / others)
    assert row.fitted == f"{12 * ranks} runs of micro_batch"
    assert re.search(
        r" It is last by .* are its data \([\d.]+ times the tokens\), .* the machine, give or ",
        of_slow_rank(report).text,
    )


def test_the_inner_one_of_as_many_runs_is_named_and_ranks_without_the_stage_do_not_count(
    tmp_path: Path,
) -> None:
    """A mini-batch of one micro-batch, and a rank that joined after the stage."""
    tokens = np.random.default_rng(3).integers(500, 1500, (3, 12))
    captured(tmp_path, tokens.tolist(), [1.0, 2.0, 1.0])
    manifest = read_manifest(tmp_path)
    workers = []
    for worker in manifest.workers:
        around = [
            replace(span, name="mini_batch") for span in worker.stages if span.work is not None
        ]
        inside = [replace(span, depth=span.depth + 1) for span in worker.stages if span.work]
        stages = sorted([worker.stages[0], *around, *inside], key=lambda span: span.begin_ns)
        workers.append(replace(worker, stages=stages))
    workers[2] = replace(workers[2], stages=[])
    write_json_atomically(tmp_path / MANIFEST_NAME, replace(manifest, workers=workers))
    [row] = [row for row in open_step(tmp_path).report().stragglers if row.stage == "update_actor"]
    assert row.workers == 2
    assert row.fitted == "24 runs of micro_batch"


def test_a_slow_rank_without_enough_facts_has_a_sentence_on_what_is_missing(tmp_path: Path) -> None:
    """Too few runs say so; without any fact the advice has the line of code."""
    few = [[1000, 900, 1200], [2000, 1800, 2400]]
    (tmp_path / "few").mkdir()
    assert of_slow_rank(captured(tmp_path / "few", few, [1, 1])).text.endswith(
        " Data or machine: cannot tell: 3 runs of its peers, 8 are needed."
    )
    (tmp_path / "none").mkdir()
    finding = of_slow_rank(captured(tmp_path / "none", few, [1, 1], passed=False))
    assert finding.advice.endswith('with stage("update_actor").given(lengths=lengths)')
    assert "data" not in finding.text


@pytest.mark.parametrize("machine", [1.0, 1.5])
def test_balanced_work_leaves_a_slow_machine_slow(machine: float, tmp_path: Path) -> None:
    """By work, each rank has the mean of each micro-batch; dealt, the longest ones meet."""
    tokens = np.random.default_rng(3).integers(500, 1500, (2, 12))
    tokens[1] = 2 * tokens[0]
    captured(tmp_path, tokens.tolist(), [1.0, machine])
    step = open_step(tmp_path)
    work_s = 0.02 + tokens / 1e4
    mean_s = machine * work_s.mean(axis=0).sum()
    longest = np.sort(work_s, axis=None)[::-1].reshape(-1, 2)
    for way, expected_s in (("work", mean_s), ("longest-first", machine * longest[:, 0].sum())):
        found = step.what_if(balance=[f"update_actor={way}"])
        assert found.predicted_us / 1e6 == pytest.approx(expected_s + 0.012, rel=0.05)


def test_work_that_is_unknown_cannot_be_balanced(tmp_path: Path) -> None:
    """The error has the line of code; another way is refused with the ways that there are."""
    tokens = [[1000, 900, 1200], [2000, 1800, 2400]]
    captured(tmp_path, tokens, [1, 1], passed=False)
    with pytest.raises(ConfigError, match=r'stage\("update_actor"\)\.given\(lengths=lengths\)'):
        open_step(tmp_path).what_if(balance=["update_actor=work"])
    with pytest.raises(ConfigError, match=r"no way to divide work; .*longest-first"):
        open_step(tmp_path).what_if(balance=["update_actor=shortest"])
