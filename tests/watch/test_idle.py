"""Who waits for whom: against a stopwatch in loops whose ratio is set, and what is said of it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import ray
from quiet_steps import with_stages
from step_folders import build_step

from verl_profiling import (
    AsyncProfilingCallback,
    ProfilingCallback,
    ProfilingConfig,
    stage,
    trajectory,
)
from verl_profiling.capture.session import Session, process_session
from verl_profiling.cli import main
from verl_profiling.files.step_summary import Idle, RankUse, SpanTotal, StepSummary
from verl_profiling.report.phrases import waits
from verl_profiling.trajectories import count
from verl_profiling.watch.idle import idle_in, made_in
from verl_profiling.watch.log_writer import WatchLog, values_of
from verl_profiling.watch.stage_numbers import exposed
from verl_profiling.watch.step_slices import StepSlices
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RolloutCaptureMixin,
)

STEP_S = 0.5
SET = (0.0, 0.0, 0.2, 0.5, 0.8)
"""The first step is not compared: the run's folder is claimed in it."""

NEAR = 0.02
BEGIN_NS, MS = 1_700_000_000_000_000_000, 1_000_000


class Trainer(CaptureMixin):
    """Trains, and generates where it is colocated;
    returns the seconds that it took by a stopwatch.
    """

    def set_up(self, config: ProfilingConfig, rank: int = 0) -> None:
        process_session().reset()
        self.init_capture(config, role="actor", rank=rank, world_size=2)

    def run(self, seconds: float, name: str = "update_actor") -> float:
        begin_s = time.perf_counter()
        if seconds:
            with stage(name):
                time.sleep(seconds)
        return time.perf_counter() - begin_s


class Engine(RolloutCaptureMixin):
    """Answers requests."""

    def set_up(self, config: ProfilingConfig) -> None:
        process_session().reset()
        self.requests = RequestLog()
        self.init_capture(config, requests=self.requests)

    async def generate(self, seconds: float, requests: int = 2) -> tuple[float, float]:
        begin_s = time.perf_counter()
        if seconds:
            await asyncio.gather(*(self._answer(seconds) for _ in range(requests)))
        return begin_s, time.perf_counter()

    async def _answer(self, seconds: float) -> None:
        with self.requests.open(prompt_tokens=8):
            await asyncio.sleep(seconds)


class Agents(AgentLoopCaptureMixin):
    """Runs trajectories, of which each calls the engine and then a tool."""

    def set_up(self, config: ProfilingConfig, engine: Any) -> None:
        process_session().reset()
        self.engine = engine
        self.init_capture(config)

    async def roll_out(self, generate_s: float, tool_s: float) -> float:
        plays = (self._play(generate_s, tool_s) for _ in range(3))
        begins, ends = zip(*await asyncio.gather(*plays), strict=True)
        return float(max(ends) - min(begins))  # the calls overlap, and begin apart

    async def _play(self, generate_s: float, tool_s: float) -> tuple[float, float]:
        async with trajectory(group="prompt", prompt_tokens=8) as made:
            period: tuple[float, float] = await self.engine.generate.remote(generate_s, 1)
            await asyncio.sleep(tool_s)
            made.add(response_tokens=4)
            count("ready", 2)
        return period


class Truth(NamedTuple):
    """A step by the stopwatch: how long it was, and for how long each side was at work in it."""

    step_s: float
    trainer_s: float
    rollout_s: float


class Actors(NamedTuple):
    """The processes of a loop."""

    trainers: list[Any]
    engine: Any
    agents: Any

    def set_up(self, config: ProfilingConfig) -> None:
        """Set all up for a loop, and pay what a first call costs."""
        ray.get([one.set_up.remote(config, rank) for rank, one in enumerate(self.trainers)])
        ray.get([self.engine.set_up.remote(config), self.agents.set_up.remote(config, self.engine)])
        ray.get([*(one.run.remote(0) for one in self.trainers), self.agents.roll_out.remote(0, 0)])
        time.sleep(0.05)  # spans are summed in slices of 20 ms: none of these is in the first step


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[Actors]:
    remote = ray.remote(num_cpus=0)
    found = Actors(
        [remote(Trainer).remote() for _ in range(2)],
        remote(Engine).remote(),
        remote(Agents).remote(),
    )
    yield found
    for one in (*found.trainers, found.engine, found.agents):
        ray.kill(one)


def settings(tmp_path: Path) -> ProfilingConfig:
    return ProfilingConfig.from_any(
        {
            "enable": True,
            "save_path": str(tmp_path),
            "schedule": {"steps": []},
            "watch": {"enable": True, "every": 2},
        }
    )


def check(kind: str, found: Sequence[StepSummary], truths: Sequence[Truth]) -> None:
    """Compare with the stopwatch; the table of the truth is in the output of the test."""
    assert len(found) == len(truths) == len(SET)
    for set_to, summary, truth in [*zip(SET, found, truths, strict=True)][1:]:
        for side, idle, busy_s in (
            ("trainer", summary.trainer_idle, truth.trainer_s),
            ("rollout", summary.rollout_idle, truth.rollout_s),
        ):
            true = 1 - busy_s / truth.step_s
            if idle is None:  # nothing of it was in the step
                assert busy_s < NEAR, (kind, side)
                continue
            print(f"{kind} | {set_to:.0%} | {side} | {true:.1%} | {idle.share:.1%} | {idle.cause}")
            assert abs(idle.share - true) < NEAR, (kind, side, set_to, true, idle)
            assert idle.cause_share <= idle.share


def causes(found: Sequence[StepSummary]) -> set[tuple[str, str]]:
    """Return the causes of idle time that is most of a step, whatever else the machine does."""
    return {
        (side, idle.cause)
        for summary in found
        for side, idle in (("trainer", summary.trainer_idle), ("rollout", summary.rollout_idle))
        if idle is not None and idle.share > 0.4
    }


def test_of_a_controller_with_ray_workers(tmp_path: Path, actors: Actors) -> None:
    """Synchronous: the trainer waits for generation, the engines for training and in tools."""
    config = settings(tmp_path)
    trainers, engine, agents = actors
    actors.set_up(config)
    callback, found, truths = ProfilingCallback(config), list[StepSummary](), list[Truth]()
    callback.add_workers("actor", trainers)
    callback.add_rollout([engine])
    callback.add_workers("agent_loop", [agents])
    assert callback.watch is not None
    callback.watch.listeners.append(found.append)
    with callback:
        for number, share in enumerate(SET, 1):
            callback.on_step_begin(number)
            begin_s = time.perf_counter()
            made_s = 0.0
            if share:
                callback.on_rollout_begin()
                made_s = ray.get(agents.roll_out.remote(0.7 * share * STEP_S, 0.3 * share * STEP_S))
                callback.on_rollout_end()
            with callback.stage("update_actor"):
                took_s = ray.get([one.run.remote((1 - share) * STEP_S) for one in trainers])
            truths.append(Truth(time.perf_counter() - begin_s, sum(took_s) / 2, made_s))
            callback.on_step_end({"samples": 2 if share else 0, "tokens": 24.0})
    check("controller", found, truths)
    assert causes(found) == {
        ("trainer", "rollout"),
        ("rollout", "training"),
        ("rollout", "nothing to generate"),
    }
    assert [summary.samples for summary in found] == [0, 0, 3, 3, 3]
    for summary, truth in [*zip(found, truths, strict=True)][2:]:
        rates = {"samples": 3, "tokens": 36, "samples_taken": 2, "tokens_taken": 24}
        true = {f"{name}_per_s": many / truth.step_s for name, many in rates.items()}
        assert summary.rates == pytest.approx(true, rel=NEAR)
    assert found[-1].counts == {"ready": 2.0}


@pytest.mark.parametrize("slower", ["rollout", "trainer"])
def test_of_a_loop_that_is_one_step_off(tmp_path: Path, actors: Actors, slower: str) -> None:
    """Either side waits for the other by the ratio that is set; both are at work at once."""

    async def run() -> None:
        async with AsyncProfilingCallback(config) as callback:
            callback.add_workers("actor", [trainer])
            callback.add_rollout([engine])
            assert callback.watch is not None
            callback.watch.listeners.append(found.append)
            for number, share in enumerate(SET, 1):
                faster_s = (1 - share) * STEP_S
                generate_s, train_s = (
                    (STEP_S, faster_s) if slower == "rollout" else (faster_s, STEP_S)
                )
                await callback.on_step_begin(number)
                begin_s = time.perf_counter()
                await callback.on_rollout_begin(in_background=True)
                made = asyncio.ensure_future(generation(callback, generate_s))
                with callback.stage("update_actor"):
                    took_s = await trainer.run.remote(train_s)
                with callback.stage("wait:rollout"):
                    made_s = await made
                truths.append(Truth(time.perf_counter() - begin_s, took_s, made_s))
                await callback.on_step_end()

    async def generation(callback: AsyncProfilingCallback, seconds: float) -> float:
        callback.on_generation_begin()
        begin_s, end_s = await engine.generate.remote(seconds)
        callback.on_generation_end()
        return float(end_s - begin_s)

    config, found, truths = settings(tmp_path), list[StepSummary](), list[Truth]()
    [trainer, _], engine, _ = actors
    actors.set_up(config)
    asyncio.run(run())
    check(f"one step off, {slower} slower", found, truths)
    waiting = ("trainer", "rollout") if slower == "rollout" else ("rollout", "training")
    assert causes(found) == {waiting}


@pytest.mark.parametrize("where", ["worker", "loop"])
def test_of_one_process_that_trains_and_generates(
    tmp_path: Path, session: Session, where: str
) -> None:
    """Its time in the rollout is idle for training, and the rest for the rollout."""
    config = settings(tmp_path)
    callback, found, truths = ProfilingCallback(config), list[StepSummary](), list[Truth]()
    worker = Trainer() if where == "worker" else None
    if worker is not None:
        worker.set_up(config)
        callback.add_workers("actor", worker)
    assert callback.watch is not None
    callback.watch.listeners.append(found.append)
    with callback:
        for number, share in enumerate(SET, 1):
            callback.on_step_begin(number)
            begin_s, took_s = time.perf_counter(), []
            for name, seconds in (
                ("rollout", share * STEP_S),
                ("update_actor", (1 - share) * STEP_S),
            ):
                if seconds:
                    since_s = time.perf_counter()
                    with callback.stage(name):
                        time.sleep(seconds) if worker is None else worker.run(seconds, name)
                    took_s.append(time.perf_counter() - since_s)
            truths.append(Truth(time.perf_counter() - begin_s, took_s[-1], sum(took_s[:-1])))
            callback.on_step_end()
    check(f"one process, stages of the {where}", found, truths)
    assert causes(found) == {("trainer", "rollout"), ("rollout", "training")}


def use(lane: str, *stages: tuple[str, int, int], spans: Sequence[SpanTotal] = ()) -> RankUse:
    """Return a process with stages: name, begin and length in milliseconds."""
    times = {
        name: [(BEGIN_NS + begin * MS, BEGIN_NS + (begin + length) * MS)]
        for name, begin, length in stages
    }
    role = lane.partition("_")[0].rstrip("0123456789")
    return with_stages(RankUse(lane=lane, role=role, spans=tuple(spans)), times)


def judged(
    loop: Sequence[RankUse],
    *workers: RankUse,
    background: tuple[str, ...] = (),
    engines: Sequence[str] = (),
) -> StepSummary:
    """Return the summary of a step of a second."""
    made = StepSummary(
        step=1, begin_ns=BEGIN_NS, end_ns=BEGIN_NS + 1000 * MS, background=background
    )
    made.loop, made.workers = list(loop), list(workers)
    made.exposed = exposed(made, bool(workers))
    made.trainer_idle, made.rollout_idle = idle_in(StepSlices([made]), True, engines)[0]
    made.samples, made.tokens = made_in(made)
    return made


def test_of_ranks_that_run_the_loop() -> None:
    """Each generates and trains; the mean over the ranks counts, of which one is late."""
    ranks = [
        use(f"actor_rank{rank}", ("rollout", 0, 300), ("update_actor", 300, 500)) for rank in (0, 1)
    ]
    late = use("actor_rank2", ("rollout", 0, 600), ("update_actor", 600, 200))
    made = judged([*ranks, late])
    assert made.trainer_idle == Idle(0.6, "rollout", 0.3)
    assert made.rollout_idle == Idle(0.6, "training", 0.4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scoring", ["reward", "validate"])
def test_a_loop_that_scores_itself_does_not_train_meanwhile(ranks: int, scoring: str) -> None:
    """The slower the scoring on the ranks themselves, the longer the training waits for it."""
    stages = [("rollout", 0, 100), (scoring, 100, 800), ("update_actor", 900, 50)]
    made = judged([use(f"actor_rank{rank}", *stages) for rank in range(ranks)])
    assert made.trainer_idle == Idle(0.95, scoring, 0.8)
    assert made.rollout_idle == Idle(0.9, scoring, 0.8)
    assert next(iter(waits(made))) == f"trainer waits 95%, mostly: {scoring}"


def test_ranks_that_wait_for_a_late_one_wait_for_its_stage() -> None:
    """A trainer that is in the stage itself does not wait."""
    early = [use(f"actor_rank{rank}", ("update_actor", 0, 200)) for rank in range(3)]
    loop = use("controller", ("update_actor", 0, 1000))
    made = judged([loop], *early, use("actor_rank3", ("update_actor", 0, 1000)))
    assert next(iter(waits(made))) == "trainer waits 60%, mostly: update_actor of other processes"


def test_a_training_worker_that_scores_does_not_train_meanwhile() -> None:
    """Its own reward model is what both sides wait for, whatever the loop calls the stage."""
    actor = use("actor_rank0", ("reward", 300, 400), ("update_actor", 700, 300))
    loop = use("controller", ("rollout", 0, 300), ("reward", 300, 400), ("update_actor", 700, 300))
    engine = use("rollout0_rank0", ("generate", 0, 300))
    made = judged([loop], actor, engine)
    assert made.trainer_idle == Idle(0.7, "reward", 0.4)
    assert made.rollout_idle == Idle(0.7, "reward", 0.4)


def test_a_rank_that_is_ahead_is_not_idle() -> None:
    """One ends its step early, and is in the next one; only its rollout is known to be idle."""
    behind = use("actor_rank0", ("rollout", 0, 300), ("update_actor", 300, 700))
    ahead = use("actor_rank1", ("rollout", -200, 300), ("update_actor", 100, 500))
    made = judged([behind, ahead])
    assert made.trainer_idle == Idle(0.2, "rollout", 0.1)
    waits = use(
        "actor_rank1", ("rollout", 0, 300), ("update_actor", 300, 300), ("wait:all", 600, 400)
    )
    made = judged([behind, waits])
    assert made.trainer_idle is not None
    assert made.trainer_idle.share == 0.5


def test_an_engine_without_a_request_in_the_step_is_idle() -> None:
    """If it has generated before; of one that never did, nothing is known."""
    loop = [use("controller", ("update_actor", 0, 1000))]
    workers = use("actor_rank0", ("update_actor", 0, 1000)), use("rollout0_rank0")
    made = judged(loop, *workers, engines=["rollout0_rank0"])
    assert made.rollout_idle == Idle(1.0, "training", 1.0)
    assert judged(loop, *workers).rollout_idle is None


def test_the_cause_is_what_is_open_meanwhile() -> None:
    """Reward and weight sync are no training, and generation
    in the background is behind other stages.
    """
    stages = [("wait:rollout", 0, 200), ("reward", 200, 400), ("update_actor", 600, 400)]
    loop = use("controller", *stages)
    actor = use("actor_rank0", ("update_actor", 600, 400))
    engine = use("rollout0_rank0", ("generate", 0, 100))
    made = judged([loop], actor, engine)
    assert made.trainer_idle == Idle(0.6, "reward", 0.4)
    assert made.rollout_idle == Idle(0.9, "reward", 0.4)
    both = use("controller", ("rollout", 0, 1000), *stages)
    made = judged([both], actor, engine, background=("rollout",))
    assert made.trainer_idle == Idle(0.6, "reward", 0.4)
    sync = use("actor_rank0", ("update_weights", 100, 700), ("update_actor", 800, 200))
    assert judged([use("controller")], sync, engine).rollout_idle == Idle(
        0.9, "update_weights", 0.7
    )
    receives = use("rollout0_rank0", ("generate", 0, 100), ("update_weights", 100, 700))
    assert judged([use("controller")], sync, receives).rollout_idle == Idle(
        0.9, "update_weights", 0.7
    )


def test_engines_that_wait_for_tools_beside_the_training_do_not_wait_for_it() -> None:
    """The trainer waits for the rollout, so that both cannot wait for each other."""
    loop = use(
        "controller", ("rollout", 0, 1000), ("update_actor", 0, 650), ("wait:rollout", 650, 350)
    )
    engine = use("rollout0_rank0", ("generate", 0, 400))
    made = judged(
        [loop], use("actor_rank0", ("update_actor", 0, 650)), engine, background=("rollout",)
    )
    assert made.trainer_idle == Idle(0.35, "rollout", 0.35)
    assert made.rollout_idle is not None
    assert (made.rollout_idle.share, made.rollout_idle.cause) == (0.6, "nothing to generate")


def test_what_is_not_known_is_not_said() -> None:
    """Workers that have not answered, that mark no stage, and a rollout that nobody sees."""
    loop = [use("controller", ("update_actor", 0, 400))]
    assert (judged(loop).trainer_idle, judged(loop).rollout_idle) == (None, None)
    assert judged(loop, use("actor_rank0")).trainer_idle is None
    marks = judged(loop, use("actor_rank0", ("update_actor", 0, 400)), use("critic_rank0"))
    assert (marks.trainer_idle, marks.rollout_idle) == (Idle(0.6, "", 0.6), None)


def test_sentences_name_who_waits_and_what_each_side_could_do() -> None:
    """Samples are trajectories, else requests that did not fail; without any, only the cause is
    said. Samples that the training drops are no rate that it could take.
    """
    requests = [SpanTotal("generate", 211, 1, failed=16)]  # aborted, e.g. to go on later
    loop = use("controller", ("rollout", 0, 300), ("update_actor", 300, 700))
    actor = use("actor_rank0", ("update_actor", 300, 700))
    made = judged([loop], actor, use("rollout0_rank0", ("generate", 0, 300), spans=requests))
    assert list(waits(made)) == [
        "trainer waits 30%: generation makes 195 samples/s, training could take 279",
        "rollout waits 70%: training takes 195 samples/s, generation could make 650",
    ]
    agents = use("agent_loop_rank0", spans=[SpanTotal("trajectory", 39, 1)])
    made = judged(
        [loop], agents, actor, use("rollout0_rank0", ("generate", 0, 300), spans=requests)
    )
    assert "generation makes 39 samples/s" in next(waits(made))
    made.tokens, made.taken, made.counts = 39_000, 28, {"message queue": 11.0}
    assert list(waits(made)) == [
        "trainer waits 30%: generation makes 39 samples/s, 28 of them taken, training could take "
        "40",
        "rollout waits 70%: training takes 28 of 39 samples/s, generation could make 130",
        "generation made 39 samples/s, 39,000 tokens/s; training took 28 samples/s; message "
        "queue 11",
    ]
    made = judged([loop], actor)
    assert list(waits(made)) == [
        "trainer waits 30%, mostly: rollout",
        "rollout waits 70%, mostly: training",
    ]
    assert not list(waits(StepSummary(step=1, begin_ns=BEGIN_NS)))


def test_top_the_page_the_report_and_trackers_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the log of the watch, which has it without the processes;
    the report of a captured step, too.
    """
    folder = build_step(tmp_path, step=12)
    loop = use("controller", ("rollout", 0, 300), ("update_actor", 300, 700))
    engine = use("rollout0_rank0", ("generate", 0, 300), spans=[SpanTotal("generate", 195, 1)])
    made = judged([loop], use("actor_rank0", ("update_actor", 300, 700)), engine)
    WatchLog(tmp_path)(msgspec.structs.replace(made, step=12, captured=folder.name))
    sentence = "trainer waits 30%: generation makes 195 samples/s, training could take 279"
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert sentence in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    assert sentence in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--save"]) == 0
    assert sentence in (folder / "report.html").read_text()
    page = (tmp_path / "index.html").read_text().partition('id="who-waits')[2]
    page = re.sub(r"<[^>]+>", "", page.partition("</section>")[0])
    assert f"In step 12.{sentence}rollout waits 70%" in page
    [watched] = [json.loads((folder / "report.json").read_bytes())["watched"]]
    assert watched["trainer_idle"] == {"share": 0.3, "cause": "rollout", "cause_share": 0.3}
    values = values_of(made)
    assert values["profiling/watch/trainer_idle"] == 0.3
    assert values["profiling/watch/rollout_idle"] == 0.7
    assert values["profiling/watch/samples_per_s"] == 195
