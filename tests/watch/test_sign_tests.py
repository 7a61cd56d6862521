"""What the watch notices: once, in the step in which it begins,
with the processes that it comes from.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import pytest
from quiet_steps import CONTROLLER, MS, RANKS, USUAL, longer, summary, with_stages

from verl_profiling.files.step_summary import RankUse, SpanTotal, StepSummary
from verl_profiling.settings.config import Anomaly
from verl_profiling.watch.sign_tests import Detector
from verl_profiling.watch.stage_numbers import exposed
from verl_profiling.watch.suspicion import Suspicion


def noticed(detector: Detector, summaries: Iterable[StepSummary]) -> dict[int, Suspicion]:
    """Let a detector see steps; return what it says, by step."""
    each = {summary.step: detector.observe(summary) for summary in summaries}
    return {step: found for step, found in each.items() if found}


def quiet(detector: Detector, steps: int = 30, first: int = 1) -> int:
    """Let a detector see quiet steps; return the number of the next."""
    assert not noticed(detector, map(summary, range(first, first + steps)))
    return first + steps


def settled() -> Detector:
    """Return a detector that has seen the quiet steps 1 to 30."""
    detector = Detector(Anomaly())
    quiet(detector)
    return detector


def slow_twice(detector: Detector, step: int, **given: Any) -> Suspicion | None:
    """Let a detector see a step and the next, alike; return what it says of the second alone."""
    assert detector.observe(summary(step, **given)) is None
    return detector.observe(summary(step + 1, **given))


def lasting(stage: str, ratio: float, steps: Iterable[int]) -> list[StepSummary]:
    """Return steps in each of which a stage is so many times as long."""
    return [summary(step, longer(stage, ratio)) for step in steps]


def test_a_slow_replica_is_noticed_in_its_second_step() -> None:
    """With the stage, the replica first, a healthy one to compare it with, and what was before."""
    found = slow_twice(settled(), 31, slow={"rollout2_rank0": 2.5})
    assert (found.sign, found.stage, found.noticed) == ("slow_stage", "rollout", 32)
    assert found.suspects == ["rollout2_rank0"]
    assert found.peers == ["rollout1_rank0"]
    assert found.value == pytest.approx(1.2535)
    assert found.median == pytest.approx(0.5025, abs=0.002)
    assert len(found.history) == 21
    assert found.history[-1] == found.value
    assert found.reason == (
        "step 32: stage rollout took 1.25 s of the step, 2.5 times the median of 20 steps before; "
        "longest there: rollout2_rank0"
    )


def test_a_step_that_is_slow_everywhere_is_a_slow_step() -> None:
    """No stage makes up half of the difference; the one that grew most is named."""
    times = {"rollout": 850.0, "reward": 180.0, "update_actor": 570.0, "update_weights": 190.0}
    [found] = noticed(settled(), (summary(step, times) for step in range(31, 39))).values()
    assert (found.sign, found.stage, found.suspects) == ("slow_step", "rollout", [])
    assert found.reason.endswith("no process was longer there than the others")


def test_a_host_that_is_busy_for_some_steps_is_no_news() -> None:
    """Engines, training ranks and the loop itself are slower at once: the fault of none of them."""
    busy = {stage: usual * 1.8 for stage, usual in USUAL.items()}
    times = {step: busy if step % 30 < 3 else USUAL for step in range(31, 121)}
    assert not noticed(settled(), map(summary, times, times.values()))


def test_a_short_fault_hides_no_later_one() -> None:
    """Nor does a slow warm-up, which is in the past that is compared with."""
    detector = settled()
    assert slow_twice(detector, 31, times=longer("update_actor", 3)) is not None
    assert detector.observe(summary(33)) is None
    assert [*noticed(detector, lasting("update_actor", 2, range(34, 71)))] == [36]
    noise, steps = random.Random(7), []
    for step in range(1, 40):
        slow = 3.0 if step <= 3 else 1.6 if step >= 30 else 1.0
        times = {
            name: usual * slow * noise.lognormvariate(0, 0.03) for name, usual in USUAL.items()
        }
        steps.append(summary(step, times))
    assert 30 < min(noticed(Detector(Anomaly(leader=None)), steps)) < 38


@pytest.mark.parametrize("window", [3, 4, 20])
def test_a_first_step_that_warms_up_hides_no_fault(window: int) -> None:
    """It is ten times as long; half a window later a stage is three times as long."""
    detector = Detector(Anomaly(window=window))
    times = {stage: usual * 10 for stage, usual in USUAL.items()}
    assert detector.observe(summary(1, times)) is None
    step = quiet(detector, max(3, window // 2), first=2)
    assert slow_twice(detector, step, times=longer("update_actor", 3)) is not None


def test_what_goes_on_is_noticed_once() -> None:
    """With who leads in it; a stage that stays slow becomes the usual."""
    found = noticed(
        settled(), (summary(step, slow={"rollout2_rank0": 2.5}) for step in range(31, 43))
    )
    assert {step: each.suspects for step, each in found.items()} == {32: ["rollout2_rank0"]}
    detector = settled()
    assert [*noticed(detector, lasting("reward", 4, range(31, 71)))] == [32]
    assert len(noticed(detector, lasting("reward", 12, range(71, 79)))) == 1


def test_what_is_usual_is_no_news() -> None:
    """Small stages that vary, a stage that begins after a warm-up of the critic."""
    critic = {stage: usual for stage, usual in USUAL.items() if stage != "update_actor"}
    for steps in (
        [summary(step, {**USUAL, "log": 2.0 if step % 3 else 10.0}) for step in range(1, 40)],
        [summary(step, critic if step < 25 else USUAL) for step in range(1, 100)],
    ):
        assert not noticed(Detector(Anomaly()), steps)
    for stage, scale, expected in (
        ("rollout", 1e-4, []),
        ("rollout", 1e-2, [32]),
        ("", 1e-4, []),
    ):
        steps = [short(step, USUAL, scale) for step in range(1, 31)]
        steps += [short(step, {**USUAL, stage: 1_000}, scale) for step in (31, 32)]
        assert [*noticed(Detector(Anomaly()), steps)] == expected, (stage, scale)


@pytest.mark.parametrize("period", [7, 25])
def test_a_checkpoint_now_and_then_is_no_news(period: int) -> None:
    """A stage that runs seldom is no part of what a step is compared by, from the first time on."""
    saving = {**USUAL, "save_checkpoint": 4_000.0}
    steps = (summary(step, USUAL if step % period else saving) for step in range(1, 150))
    assert not noticed(Detector(Anomaly()), steps)


@pytest.mark.parametrize("runs", [3, 5])
def test_a_checkpoint_that_becomes_slow_is_noticed_in_its_second_slow_time(runs: int) -> None:
    """After few runs, which vary; those that are slow are no past of each other."""
    chance, found = random.Random(5), []
    detector = Detector(Anomaly())
    for step in range(1, 6 * (runs + 4)):
        saving_ms = 400 * chance.lognormvariate(0, 0.05) * (3 if step > 6 * runs + 5 else 1)
        times = USUAL if step % 6 else {**USUAL, "save_checkpoint": saving_ms}
        found.append(detector.observe(summary(step, times)))
    [one] = filter(None, found)
    assert (one.stage, one.noticed) == ("save_checkpoint", 6 * (runs + 2))


@pytest.mark.parametrize("period", [6, 60])
def test_what_is_slow_now_and_then_is_no_news(period: int) -> None:
    """A stall that comes back is over when it could be captured;
    one that lasts for two steps is not.
    """
    detector = settled()
    for step in range(31, 200):
        late = longer("update_actor", 1 if step % period else 4)
        assert detector.observe(summary(step, late)) is None
    assert detector.observe(summary(200)) is None
    found = [*noticed(detector, lasting("update_actor", 4, range(201, 207)))]
    assert found == [203 if period == 60 else 206], "rare or not"


def test_what_is_slow_in_every_third_step_is_noticed_in_the_third_time() -> None:
    """A slowness that comes back so often is there when it is captured."""
    steps = (summary(31 + at, longer("update_actor", 1 if at % 3 else 4)) for at in range(9))
    assert [*noticed(settled(), steps)] == [37]


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.07])
def test_a_stage_that_is_longer_by_a_third_is_noticed_within_eight_steps(spread: float) -> None:
    """In nineteen of twenty runs, and in none before,
    where the stage itself varies by less than a tenth.
    """
    noise = random.Random(3)
    first: list[int] = []
    for _ in range(40):
        detector = Detector(Anomaly(leader=None))
        for step in range(1, 39):
            ratio = noise.lognormvariate(0, spread) * (1.3 if step > 30 else 1.0)
            if detector.observe(short(step, longer("rollout", ratio), 1.0)):
                first.append(step)
                break
    assert min(first) > 30
    assert len(first) >= 38


def test_hiccups_in_the_past_hide_no_fault() -> None:
    """Every sixth step is three times as long; a stage that is 1.55 times
    as long is noticed all the same.
    """
    noise, missed = random.Random(5), 0
    for _ in range(20):
        steps = []
        for step in range(1, 69):
            ratio = 3.0 if step % 6 == 5 else 1.55 if step > 60 else noise.lognormvariate(0, 0.05)
            steps.append(short(step, longer("rollout", ratio), 1.0))
        found = noticed(Detector(Anomaly(leader=None)), steps)
        assert all(step > 60 for step in found)
        missed += not found
    assert missed <= 1


@pytest.mark.parametrize("seed", [11, 14, 15])
def test_a_stage_that_drifts_is_quiet(seed: int) -> None:
    """Steps each of a length like that of the step before."""
    noise, drift = random.Random(seed), 0.0
    detector = Detector(Anomaly(leader=None))
    for step in range(1, 601):
        drift = 0.9 * drift + noise.gauss(0, 0.1 * math.sqrt(1 - 0.9**2))
        assert detector.observe(short(step, longer("rollout", math.exp(drift)), 1.0)) is None


def leading() -> Detector:
    """Return a detector of nothing but processes that lead."""
    return Detector(Anomaly(slow_step=None, slow_stage=None))


def test_a_large_lead_is_noticed_in_its_third_step() -> None:
    """Also where a change that was noticed before it goes on."""
    found = noticed(leading(), (summary(step, slow={"actor_rank3": 4.0}) for step in range(1, 4)))
    assert {step: each.suspects for step, each in found.items()} == {3: ["actor_rank3"]}


def test_of_two_leads_the_larger_is_noticed_first() -> None:
    """The other one in the next step."""
    for slow in (
        {"actor_rank2": 2.0, "rollout3_rank0": 1.5},
        {"actor_rank2": 1.6, "rollout3_rank0": 1.5},
    ):
        found = noticed(leading(), (summary(step, slow=slow) for step in range(1, 9)))
        named = [lane for each in found.values() for lane in each.suspects]
        assert named == sorted(slow, reverse=slow["actor_rank2"] < 2.0)


def test_a_process_that_leads_now_and_then_is_not_noticed() -> None:
    """As in stages of trajectories, where each agent loop leads in some steps."""
    slow = [{"actor_rank3": 1.6} if at % 7 in (0, 1, 3) else {} for at in range(70)]
    assert not noticed(leading(), (summary(at + 1, slow=each) for at, each in enumerate(slow)))


def test_a_process_that_leads_five_times_is_noticed() -> None:
    """Though no step is slow: the others have waited for it all along. Once."""
    detector = leading()
    found = noticed(detector, (summary(step, slow={"actor_rank3": 1.6}) for step in range(1, 30)))
    [(step, first)] = found.items()
    assert step == 5
    assert (first.sign, first.stage) == ("leader", "update_actor")
    assert (first.suspects, first.peers) == (["actor_rank3"], ["actor_rank1"])
    assert 0.1 < first.value < 0.2
    assert first.reason.startswith("step 5: actor_rank3 was in stage update_actor")
    assert first.reason.count("actor_rank3") == 1
    larger = (summary(step, slow={"actor_rank3": 2.5}) for step in range(40, 45))
    assert [*noticed(detector, larger)] == [42]


@pytest.mark.parametrize(("ratio", "step"), [(1.6, 7), (4.0, 4)])
@pytest.mark.parametrize("other", ["", "actor_rank1"])
def test_a_step_without_a_leader_is_unknown(ratio: float, step: int, other: str) -> None:
    """Who was late there is not known, so it ends no row; a step that another one leads does."""
    leads = {"actor_rank3": ratio}
    row = [leads, leads, {other: 2 * ratio} if other else {}]
    found = noticed(leading(), (summary(at, slow=row[(at - 1) % 3]) for at in range(1, 25)))
    shown = [at for at, each in found.items() if each.suspects == ["actor_rank3"]]
    assert shown[:1] == ([] if other else [step])
    assert all(min(found[at].history) > 0 for at in shown)


def test_memory_that_grows_is_noticed() -> None:
    """By a fifth in 14 readings; a process that gives it back, or that warms up, is none."""
    steps = []
    for step in range(1, 40):
        held = {f"actor_rank{rank}": 1_000_000_000 for rank in range(RANKS)}
        held["actor_rank1"] += step * 20_000_000
        held["actor_rank2"] += (step % 11) * 90_000_000
        steps.append(summary(step, held=held))
    [first] = noticed(Detector(Anomaly()), steps).values()
    assert (first.sign, first.suspects, first.noticed) == ("memory", ["actor_rank1"], 14)
    assert first.peers == ["actor_rank0"]
    assert first.reason == (
        "step 14: memory of actor_rank1 has grown by 240 MB since step 1, to 1.26 GB"
    )
    detector = Detector(Anomaly())
    for step in range(1, 60):
        held = {f"actor_rank{rank}": int(1e9 * (2 - math.exp(-step / 10))) for rank in range(RANKS)}
        assert detector.observe(summary(step, held=held)) is None


def test_memory_that_grows_in_all_processes_of_a_role_is_noticed_once() -> None:
    """They run the same code: it is one piece of news in a window."""
    steps = []
    for step in range(1, 42):
        held = {
            f"actor_rank{rank}": 1_000_000_000 + step * (20_000_000 + rank) for rank in range(RANKS)
        }
        steps.append(summary(step, held=held))
    [first] = noticed(Detector(Anomaly()), steps).values()
    assert (first.sign, first.suspects, first.noticed) == ("memory", ["actor_rank3"], 14)


def short(step: int, times: Mapping[str, float], scale: float) -> StepSummary:
    """Return a step of a loop that has no workers; its times are so many times as long."""
    begin_ns, now_ns = step * 10**9, step * 10**9
    stages: dict[str, list[tuple[int, int]]] = {}
    for stage, usual in times.items():
        end_ns = now_ns + int(usual * scale * MS)
        stages |= {stage: [(now_ns, end_ns)]} if stage else {}
        now_ns = end_ns
    loop = [with_stages(CONTROLLER, stages)]
    found = StepSummary(step=step, begin_ns=begin_ns, end_ns=now_ns, loop=loop)
    return msgspec.structs.replace(found, exposed=exposed(found))


def test_there_is_no_verdict_without_a_past() -> None:
    """Not before half of the window and three steps; captured steps and empty ones are none."""
    for window, needed in ((20, 10), (3, 3)):
        for before in range(needed + 1):
            detector = Detector(Anomaly(window=window))
            quiet(detector, before)
            found = slow_twice(detector, before + 1, times=longer("rollout", 5))
            assert (found is not None) == (before >= needed), (window, before)
    detector = settled()
    for step in range(31, 71):
        captured = summary(step, longer("rollout", 9), captured="step_000031")
        assert detector.observe(captured) is None
    assert slow_twice(detector, 71, times=longer("rollout", 9)) is not None
    numbers = (1, 2, 3, 2, 1, 0, -1)
    for steps in (
        [StepSummary(step=step, begin_ns=step, end_ns=step) for step in numbers],
        [summary(step, {}) for step in numbers],
    ):
        assert not noticed(Detector(Anomaly(window=3)), steps)


@pytest.mark.parametrize(("steps", "spread", "read"), [(300, 0.05, True), (1_500, 0.2, False)])
def test_noise_alone_is_quiet(steps: int, spread: float, read: bool) -> None:
    """Hundreds of steps in which everything varies, also by a fifth: nothing is noticed."""
    noise = random.Random(7)
    detector = Detector(Anomaly())
    for step in range(1, steps + 1):
        times = {stage: usual * noise.lognormvariate(0, spread) for stage, usual in USUAL.items()}
        assert detector.observe(summary(step, times, noise=noise, read=read)) is None


def test_one_step_that_hangs_is_logged_and_is_over() -> None:
    """With the process that the others waited for; it comes again within a window,
    and is no news.
    """
    detector = settled()
    found = detector.observe(summary(31, slow={"rollout2_rank0": 121.0}))
    assert found is not None
    assert (found.sign, found.stage, found.is_over) == ("slow_step", "rollout", True)
    assert found.suspects == ["rollout2_rank0"]
    assert found.reason.startswith(
        "step 31 took 61.1 s, of which 60.1 s more than usual in stage rollout: "
    )
    quiet(detector, 9, 32)
    assert detector.observe(summary(41, slow={"rollout2_rank0": 121.0})) is None
    quiet(detector, 9, 42)


def become_slow(step: Callable[[int, float], StepSummary], usual: float, slow: float) -> Suspicion:
    """Return what is noticed in the second slow step after 30 usual ones, and nothing before."""
    steps = [step(number, usual) for number in range(1, 31)]
    [(number, found)] = noticed(
        Detector(Anomaly()), [*steps, step(31, slow), step(32, slow)]
    ).items()
    assert number == 32
    return found


def test_time_in_no_stage_is_the_loop_s_own_unless_a_worker_is_in_a_stage() -> None:
    """A worker may run what the loop has marked as no stage."""

    def step(number: int, own_ms: float, of_worker: bool) -> StepSummary:
        found = summary(number)
        end_ns = found.end_ns + int(own_ms * MS)
        if of_worker:
            last = found.workers[-1]
            stages = {
                name: [(begin_ns, until_ns)] for name, begin_ns, until_ns, _ in last.each_run()
            }
            found.workers[-1] = with_stages(last, {**stages, "save": [(found.end_ns, end_ns)]})
        later = msgspec.structs.replace(found, end_ns=end_ns)
        return msgspec.structs.replace(later, exposed=exposed(later))

    for of_worker, suspects in ((False, ["controller"]), (True, [])):
        found = become_slow(partial(step, of_worker=of_worker), 50, 500)
        assert (found.sign, found.stage, found.suspects) == ("slow_stage", "", suspects)


@pytest.mark.parametrize("services", [1, 3])
def test_a_span_names_its_process_instead_of_the_loop_that_waited_for_it(services: int) -> None:
    """Reward services mark no stage; the loop's stage has nobody else at work."""

    def step(number: int, of_first_ms: float) -> StepSummary:
        found = summary(number, {**USUAL, "reward": of_first_ms})
        took = [of_first_ms, *[50.0] * (services - 1)]
        for rank, own_ms in enumerate(took):
            spans = [SpanTotal("reward", 8, int(own_ms * MS))]
            found.workers.append(
                RankUse(lane=f"reward_rank{rank}", role="reward", rank=rank, spans=spans)
            )
        return msgspec.structs.replace(found, exposed=exposed(found))

    found = become_slow(step, 50.0, 400.0)
    assert (found.stage, found.suspects) == ("reward", ["reward_rank0"])
    assert "longest there: reward_rank0; reward of reward took" in found.reason


@pytest.mark.parametrize(
    ("slow", "named"),
    [("reward", "reward_rank1"), ("generate", "rollout1_rank0"), ("tool", "agent_loop_rank0")],
)
def test_the_process_that_does_the_work_comes_before_the_agent_loop_that_waits(
    slow: str, named: str
) -> None:
    """Agent loops have a span of what they wait for;
    an engine with more requests alone is not blamed.
    """

    def step(number: int, ratio: float) -> StepSummary:
        by = {"reward": 1.0, "generate": 1.0, "tool": 1.0, slow: ratio}
        begin_ns, took_ms = number * 10**10, 100 * sum(by.values())
        spans = [SpanTotal(name, 8, int(800 * many * MS)) for name, many in by.items()]
        spans.append(SpanTotal("trajectory", 8, int(8 * took_ms * MS)))
        agents = RankUse(lane="agent_loop_rank0", role="agent_loop", spans=spans)
        workers = [
            with_stages(agents, {"trajectories": [(begin_ns, begin_ns + int(took_ms * MS))]})
        ]
        for name, role, lane in (
            ("generate", "rollout", "rollout{}_rank0"),
            ("reward", "reward", "reward_rank{}"),
        ):
            for rank, (many, calls) in enumerate(((1.0, 1 if ratio == 1 else 9), (by[name], 3))):
                did = SpanTotal(name, calls, int(100 * many * calls * MS))
                end_ns = begin_ns + int(90 * many * MS)
                stages = {name: [(begin_ns, end_ns)]} if role == "rollout" else {}
                use = RankUse(lane=lane.format(rank), role=role, rank=rank, spans=[did])
                workers.append(with_stages(use, stages))
        found = StepSummary(
            step=number,
            begin_ns=begin_ns,
            end_ns=begin_ns + int((took_ms + 5) * MS),
            loop=[with_stages(CONTROLLER, {"rollout": [(begin_ns, begin_ns + int(took_ms * MS))]})],
            workers=workers,
        )
        return msgspec.structs.replace(found, exposed=exposed(found))

    found = become_slow(step, 1.0, 5.0)
    assert found.suspects[0] == named
    assert {*found.suspects} <= {named, "agent_loop_rank0"}


def test_a_change_that_becomes_much_larger_is_noticed_again() -> None:
    """Soon after the small one, and once."""
    steps = lasting("reward", 4, range(31, 36)) + lasting("reward", 12, range(36, 61))
    assert [*noticed(settled(), steps)] == [32, 37]


@pytest.mark.parametrize("seed", range(24))
def test_a_repaired_fault_hides_no_later_one(seed: int) -> None:
    """Both are noticed within eight steps, in whatever stage, of whatever length;
    nothing else is.
    """
    drawn = random.Random(seed)
    noise = drawn.uniform(0.01, 0.05)
    stages = drawn.sample([*USUAL, ""], k=2) if seed % 2 else [drawn.choice([*USUAL, ""])] * 2
    usual = {**USUAL, "reward": 150.0, "": 120.0}
    begins, faults, end = [], [], drawn.randint(26, 90)
    for stage in stages:
        begins.append(end)
        faults.append((stage, end, end + drawn.randint(12, 70), drawn.uniform(1.7, 4.0)))
        end = faults[-1][2] + drawn.randint(24, 64)
    steps = []
    for step in range(1, faults[-1][2]):
        times = {name: ms * drawn.lognormvariate(0, noise) for name, ms in usual.items()}
        for stage, begin, until, ratio in faults:
            times[stage] *= ratio if begin <= step < until else 1.0
        steps.append(short(step, times, 1.0))
    found = noticed(Detector(Anomaly(leader=None)), steps)
    assert len(found) == 2, faults
    assert all(begin <= step < begin + 8 for begin, step in zip(begins, found, strict=True)), faults


def test_noise_that_grows_is_learned_and_kept_in_bounds() -> None:
    """The load doubles and varies by a fourth and more, for hundreds of steps:
    few of them are noticed.
    """
    count, sizes = 0, set()
    for seed in range(20):
        drawn = random.Random(seed)
        detector, begin, spread = (
            Detector(Anomaly(leader=None)),
            drawn.randint(60, 120),
            drawn.uniform(0.25, 0.3),
        )
        for step in range(1, begin + 400):
            ratio = (
                drawn.lognormvariate(0, 0.02)
                if step < begin
                else 2 * drawn.lognormvariate(0, spread)
            )
            slow = detector.observe(short(step, longer("rollout", ratio), 1.0))
            count += slow is not None
    assert count <= 20 * 4
    detector = Detector(Anomaly(leader=None))
    for step in range(1, 2_000):
        detector.observe(short(step, longer("rollout", 1 if step < 100 else 2), 1.0))
        sizes |= {len(pickle.dumps(detector)) // 1_000} if step in (900, 1_900) else set()
    assert len(sizes) == 1


def test_a_step_of_the_usual_length_is_not_noticed() -> None:
    """A fault that comes back soon, and is not noticed again, is over:
    the steps after it are normal.
    """
    for seed in range(20):
        drawn = random.Random(seed)
        detector, lasts, gap = (
            Detector(Anomaly(leader=None)),
            drawn.randint(20, 30),
            drawn.randint(6, 14),
        )
        begins = (40, 40 + lasts + gap)
        for step in range(1, 140):
            is_slow = any(begin <= step < begin + lasts for begin in begins)
            times = longer("rollout", (1.6 if is_slow else 1.0) * drawn.lognormvariate(0, 0.02))
            assert detector.observe(short(step, times, 1.0)) is None or is_slow, (seed, step)
