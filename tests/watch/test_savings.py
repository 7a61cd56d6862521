"""The change that would help most: what it would save is what the changed loop takes less."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import pytest
from quiet_steps import MS, with_stages

from verl_profiling.cli import main
from verl_profiling.controller.judgement import judge
from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.watch.log_writer import WatchLog, values_of
from verl_profiling.watch.savings import times_in
from verl_profiling.watch.step_slices import StepSlices

CALL_MS, BEGIN_NS = 2, 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Loop:
    """A loop that generates, scores by itself, and trains; times in milliseconds."""

    engines: tuple[int, ...]
    ranks: tuple[int, ...]
    reward: int
    in_background: bool

    def step(self, number: int = 1) -> StepSummary:
        """Return one of its steps, which are all alike."""
        generation = max(self.engines) + 2 * CALL_MS
        update = max(self.ranks) + 2 * CALL_MS
        training = self.reward + update
        wait = max(generation - training, 1) if self.in_background else generation
        first = "wait:rollout" if self.in_background else "rollout"
        stages = {first: (0, wait), "reward": (wait, self.reward)}
        stages["update_actor"] = (wait + self.reward, update)
        workers = [
            use("actor", rank, "update_actor", wait + self.reward, took)
            for rank, took in enumerate(self.ranks)
        ]
        step_ms = wait + training
        if self.in_background:  # each batch begins when the one before has ended
            stages["rollout"] = (wait, min(generation, step_ms - wait))
        else:
            workers += [
                use("rollout", rank, "generate", 0, took) for rank, took in enumerate(self.engines)
            ]
        loop = RankUse(lane="controller", role="controller")
        periods = {name: [period(*times)] for name, times in stages.items()}
        if self.in_background and generation > training:
            periods["rollout"] = [period(0, step_ms)]
        made = StepSummary(
            step=number,
            begin_ns=BEGIN_NS,
            end_ns=BEGIN_NS + step_ms * MS,
            background=("rollout",) if self.in_background else (),
        )
        made.loop, made.workers = [with_stages(loop, periods)], workers
        judge([made], True)
        return made


def period(begin: int, length: int) -> tuple[int, int]:
    return BEGIN_NS + begin * MS, BEGIN_NS + (begin + length) * MS


def use(role: str, rank: int, name: str, begin: int, length: int) -> RankUse:
    process = RankUse(lane=f"{role}{rank}_rank0", role=role, rank=rank)
    return with_stages(process, {name: [period(begin + CALL_MS, length)]})


def drawn(draw: random.Random, in_background: bool) -> Loop:
    def times() -> tuple[int, ...]:
        return tuple(draw.sample(range(100, 900, 50), draw.randint(1, 4)))

    return Loop(times(), times(), draw.randint(20, 300), in_background)


def scaled(times: Sequence[int], factor: float) -> tuple[int, ...]:
    return tuple(round(factor * took) for took in times)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_saving_is_what_the_changed_loop_takes_less(in_background: bool) -> None:
    """Of 40 drawn loops, with each stage shorter, longer, or even over its processes."""
    draw = random.Random(43)
    for _ in range(40):
        loop, factor = drawn(draw, in_background), draw.choice([0.25, 0.5, 2.0])
        step = loop.step()
        [times] = times_in(StepSlices([step]))
        changes = [
            ({"rollout": factor}, [], replace(loop, engines=scaled(loop.engines, factor))),
            ({"update_actor": factor}, [], replace(loop, ranks=scaled(loop.ranks, factor))),
            ({"reward": factor}, [], replace(loop, reward=round(factor * loop.reward))),
        ]
        if len(loop.ranks) > 1:
            even = (round(fmean(loop.ranks)),) * len(loop.ranks)
            changes.append(({}, ["update_actor"], replace(loop, ranks=even)))
        for scale, balance, changed in changes:
            saved_ms = times.saved_ns(scale, balance) / MS
            truth_ms = (step.duration_ns - changed.step().duration_ns) / MS
            assert saved_ms == pytest.approx(truth_ms, abs=3 + 0.02 * abs(truth_ms))
        best = max(times.saved_ns({name: 0.5}) for name in ("rollout", "update_actor", "reward"))
        assert (step.helps is None) == (best < 0.01 * step.duration_ns)
        assert step.helps is None or step.helps.saves_ns >= round(best)


@pytest.mark.parametrize("other", ["actor", "critic"])
def test_even_saves_time_of_the_uneven_part_alone(other: str) -> None:
    """In one stage of the loop, ranks run a second stage, or another role does."""
    draw = random.Random(43)
    for _ in range(20):
        second = draw.randint(50, 250)
        times = [draw.randint(300, 500), *draw.choices(range(100, 200), k=draw.randint(1, 4))]
        begins = times if other == "actor" else times[:1]
        stages = [
            ("actor", rank, {"a": [period(CALL_MS, took)]}) for rank, took in enumerate(times)
        ]
        if other == "critic":
            stages.append((other, 0, {}))
        for (*_, periods), begin in zip(stages[-len(begins) :], begins, strict=True):
            periods["b"] = [period(CALL_MS + begin, second)]
        workers = [
            with_stages(RankUse(lane=f"{role}_rank{rank}", role=role, rank=rank), periods)
            for role, rank, periods in stages
        ]
        step = step_of({"train": [period(0, times[0] + second + 2 * CALL_MS)]}, workers)
        [saved] = times_in(StepSlices([step]))
        truth_ms = times[0] - fmean(times)
        assert saved.saved_ns({}, ["train"]) / MS == pytest.approx(truth_ms, abs=1)


def test_of_a_step_whose_workers_were_not_read_nothing_is_said() -> None:
    """Their work is not known, so neither is what a stage would save: as in the last step."""
    step = Loop((600,), (300,), 100, in_background=True).step()
    assert step.helps is not None
    step.workers = []
    judge([step], True)
    assert step.helps is None


def test_of_several_waits_for_generation_nothing_is_said() -> None:
    """They are not one wait from the first to the last."""
    periods = {
        "wait:rollout": [period(0, 5), period(50, 5)],
        "update_actor": [period(5, 45), period(55, 45)],
        "rollout": [period(0, 4), period(4, 48), period(60, 40)],
    }
    assert step_of(periods, [], background=("rollout",)).helps is None


def step_of(
    periods: dict[str, list[tuple[int, int]]],
    workers: list[RankUse],
    background: tuple[str, ...] = (),
) -> StepSummary:
    """Return a step of a controller, which ends with its last stage."""
    end_ns = max(end for times in periods.values() for _, end in times)
    step = StepSummary(step=1, begin_ns=BEGIN_NS, end_ns=end_ns, background=background)
    step.loop = [with_stages(RankUse(lane="controller", role="controller"), periods)]
    step.workers = workers
    judge([step], True)
    return step


def test_it_is_shown_with_every_watched_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In top, the log and trackers; not where the loop waits for what is not known."""
    step = Loop((200, 600), (300, 100), 50, False).step(number=3)
    WatchLog(tmp_path)(step)
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "most would help: rollout in half of its time, 300 ms (31%) less a step" in (
        capsys.readouterr().out
    )
    assert values_of(step)["profiling/watch/rollout/half_saves_s"] == 0.3
    unknown = Loop((200, 600), (300, 100), 50, True).step()
    unknown.background = ()
    judge([unknown], True)
    assert unknown.helps is None
