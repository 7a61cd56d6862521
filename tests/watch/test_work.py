"""The work of each step in the watch, and what its notices say of data and machine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from example_loops import settings
from quiet_steps import MS, USUAL, summary, with_stages

from verl_profiling import clock, stage
from verl_profiling.capture.session import Session
from verl_profiling.capture.stage_spans import add_work
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Work
from verl_profiling.settings.config import Anomaly
from verl_profiling.watch.process_sums import WatchQuestion
from verl_profiling.watch.sign_tests import Detector
from verl_profiling.watch.stage_numbers import exposed
from verl_profiling.watch.suspicion import Suspicion

ACTOR = WorkerIdentity(role="actor")
UPDATE = "update_actor"
WATCHED = {"enable": True, "tool": "spans", "watch": {"enable": True, "steps": 10}}


def test_the_work_of_outermost_stages_is_read_step_by_step(session: Session) -> None:
    """Summed over the runs of a stage; parts that a plugin adds count in the stage around them."""
    session.register(settings(**WATCHED), ACTOR)
    marks = [clock.now_ns()]
    for lengths in ([3, 5], [7]):
        with stage(UPDATE).given(lengths=lengths):
            pass
        with stage("values"):
            for part in lengths:
                with stage("mini_batch"):
                    add_work({"micro_batches": 2}, [part])
        with stage("reward"), stage("inside").given(samples=1):
            pass
        with stage("reward"):
            pass
        marks.append(clock.now_ns())
    steps = [*pairwise(marks)]
    question = WatchQuestion(steps=steps, offsets_ns={clock.domain(): 0})
    first, second = session.read_watch(ACTOR, question).uses()
    of_first = Work(samples=2, tokens=8, tokens_squared=34)
    assert first.work == {
        UPDATE: of_first,
        "values": msgspec.structs.replace(of_first, micro_batches=4),
    }
    assert second.work[UPDATE] == Work(samples=1, tokens=7, tokens_squared=49)
    step = StepSummary(step=1, begin_ns=0, workers=[first, second])
    step.add_up()
    assert step.work[UPDATE] == Work(samples=3, tokens=15, tokens_squared=83)


def step_of(
    step: int, chance: random.Random, data: float = 1.0, machine: float = 1.0, leader: str = ""
) -> StepSummary:
    """Return a step whose update took 50 ms and 1 ms a thousand tokens on each rank.

    Args:
        step: Number of the step.
        chance: The noise.
        data: Factor of the tokens, of the leader or else of all ranks.
        machine: Factor of the time for them.
        leader: The only rank with these factors; empty for all.
    """
    made = summary(step, {**USUAL, UPDATE: 1.0}, noise=chance)
    workers, longest_ns = [], 0
    for use in made.workers:
        if use.role == "actor":
            is_slow = not leader or use.lane == leader
            tokens = int((data if is_slow else 1.0) * chance.uniform(200_000, 300_000))
            own_ms = (machine if is_slow else 1.0) * (50 + tokens / 1000) * chance.gauss(1.0, 0.01)
            longest_ns = max(longest_ns, int(own_ms * MS))
            times = {
                name: [(begin, begin + int(own_ms * MS) if name == UPDATE else end)]
                for name, begin, end, _ in use.each_run()
            }
            use = msgspec.structs.replace(
                with_stages(use, times), work={UPDATE: Work(tokens=tokens)}
            )
        workers.append(use)
    times = {
        name: [(begin, begin + longest_ns + MS if name == UPDATE else end)]
        for name, begin, end, _ in made.loop[0].each_run()
        if name != "update_weights"
    }
    made = msgspec.structs.replace(
        made,
        end_ns=made.end_ns + longest_ns,
        loop=[with_stages(made.loop[0], times)],
        workers=workers,
    )
    made = msgspec.structs.replace(made, exposed=exposed(made))
    made.add_up()
    return made


def noticed(quiet: int, chance: random.Random, **fault: float) -> Suspicion:
    """Return what a detector says of slow steps after some quiet ones."""
    detector = Detector(Anomaly())
    for step in range(quiet):
        assert detector.observe(step_of(step, chance)) is None
    for step in range(quiet, quiet + 8):
        found = detector.observe(step_of(step, chance, **fault))
        if found is not None:
            return found
    pytest.fail("nothing was noticed")


def parts_of(suspicion: Suspicion) -> tuple[float, float]:
    """Return the parts of data and machine that a notice names, in ms."""
    sentence = suspicion.reason.rpartition("; ")[2]
    found = re.fullmatch(
        r"of [\d.]+ m?s more, ([\d.]+) m?s are its data \([\d.]+ times the tokens\), "
        r"([\d.]+) m?s the machine",
        sentence,
    )
    assert found is not None, sentence
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("seed", range(5))
def test_a_notice_says_whether_a_stage_is_slow_by_its_data_or_its_machine(seed: int) -> None:
    """The larger part is nine tenths, as planted."""
    chance = random.Random(seed)
    by_data = noticed(30, chance, data=2.5)
    assert by_data.stage == UPDATE
    data_ms, machine_ms = parts_of(by_data)
    assert data_ms > 9 * machine_ms
    data_ms, machine_ms = parts_of(noticed(30, chance, machine=2.5))
    assert machine_ms > 9 * data_ms


@pytest.mark.parametrize(("ranks", "data"), [(4, 2.0), (4, 1.0), (2, 2.0)])
def test_a_process_that_leads_is_compared_with_its_peers(ranks: int, data: float) -> None:
    """Over the steps so far; two ranks have too few runs when the lead is noticed."""
    detector, chance = Detector(Anomaly()), random.Random(1)
    found = None
    for step in range(20):
        made = step_of(step, chance, leader="actor_rank1", data=data, machine=2.0 / data)
        lanes = {f"actor_rank{rank}" for rank in range(ranks)}
        workers = [use for use in made.workers if use.role != "actor" or use.lane in lanes]
        made = msgspec.structs.replace(made, workers=workers)
        made = msgspec.structs.replace(made, exposed=exposed(made))
        found = found or detector.observe(made)
    assert found is not None
    assert (found.sign, found.suspects) == ("leader", ["actor_rank1"])
    if ranks == 2:
        assert re.search(r"; data or machine: cannot tell: \d steps$", found.reason)
        return
    data_ms, machine_ms = parts_of(found)
    assert (data_ms > machine_ms) == (data > 1)


def led(change: Callable[[StepSummary], StepSummary]) -> Suspicion:
    """Return the notice of a rank whose machine becomes slow, from steps that were changed."""
    detector, chance = Detector(Anomaly(slow_stage=None, slow_step=None)), random.Random(2)
    for step in range(30):
        leader = "actor_rank1" if step >= 20 else "nobody"
        made = change(step_of(step, chance, leader=leader, machine=2.0))
        made = msgspec.structs.replace(made, exposed=exposed(made))
        made.add_up()
        found = detector.observe(made)
        if found is not None:
            assert (found.sign, found.suspects) == ("leader", ["actor_rank1"])
            return found
    pytest.fail("nothing was noticed")


def without_a_peer(made: StepSummary) -> StepSummary:
    """Leave a peer out in two of three steps."""
    missing = "actor_rank2" if made.step % 3 else ""
    workers = [use for use in made.workers if use.lane != missing]
    return msgspec.structs.replace(made, workers=workers)


def with_work_of_the_loop(made: StepSummary) -> StepSummary:
    """Pass the work of all ranks in the controller, too."""
    tokens = sum(use.work[UPDATE].tokens for use in made.workers if use.work)
    loop = msgspec.structs.replace(made.loop[0], work={UPDATE: Work(tokens=tokens)})
    return msgspec.structs.replace(made, loop=[loop])


@pytest.mark.parametrize("change", [without_a_peer, with_work_of_the_loop])
def test_a_leader_is_compared_with_the_same_peers_in_all_steps(
    change: Callable[[StepSummary], StepSummary],
) -> None:
    """A reading may lack a process, and the loop is no peer of a worker."""
    data_ms, machine_ms = parts_of(led(change))
    assert machine_ms > 4 * data_ms
    assert machine_ms > 200


def test_nothing_is_said_of_work_without_tokens() -> None:
    """The number of micro-batches tells nothing of the data."""

    def without_tokens(made: StepSummary) -> StepSummary:
        work = {UPDATE: Work(micro_batches=4)}
        workers = [msgspec.structs.replace(use, work=use.work and work) for use in made.workers]
        return msgspec.structs.replace(made, workers=workers)

    assert "data" not in led(without_tokens).reason


def test_without_work_a_notice_is_as_it_was() -> None:
    """A stage whose work nobody passed has no sentence on it."""
    detector = Detector(Anomaly())
    chance = random.Random(0)
    for step in range(30):
        detector.observe(summary(step, noise=chance))
    found = [
        detector.observe(summary(30 + at, {**USUAL, UPDATE: 900.0}, noise=chance)) for at in (0, 1)
    ]
    [suspicion] = [one for one in found if one is not None]
    assert "data" not in suspicion.reason
