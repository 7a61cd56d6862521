"""A wait is not work: of drawn limits, services and waits, none is offered, blamed or first."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import pytest
from drawn_logs import DrawnLog, recorded
from drawn_steps import Worker, drawn_inputs, engine, ns
from step_folders import rewrite_worker

from verl_profiling import span, trajectory
from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError
from verl_profiling.manifest import Request, StageSpan
from verl_profiling.watch.hang_kinds import culprit
from verl_profiling.watch.hangs import HangReporter, ProcessState

LATENCY = 0.0003  # from the release of a slot to the next acquire (s)
KINDS = (
    "limit",
    "limit without a span",
    "limit until the tool ends",
    "limits in each other",
    "service",
    "service in a wait",
    "unknown",
)
HANDED = "limits hand over hand"
Spans = list[tuple[str, float, float]]


class Plan(NamedTuple):
    """Drawn trajectories: slots by limit, turns, and times (s) of generation, tool, scoring,
    unknown wait.
    """

    kind: str
    wait: str
    tool: str
    slots: dict[str, int]
    turns: int
    times: list[list[float]]


def drawn_plan(seed: int, kind: str) -> Plan:
    drawn = random.Random(seed)
    count = drawn.randint(8, 24)
    slots = {
        "outer": drawn.randint(1, count // 3),
        "inner": 1 if "service" in kind else drawn.randint(1, 3),
    }
    spread = drawn.choice((0.001, 0.5))
    times = [
        [drawn.choice((0.1, 0.3)) * drawn.lognormvariate(0, spread) for _ in range(4)]
        for _ in range(count)
    ]
    wait = f"wait:{drawn.choice(('slot', 'quota', 'permit'))}"
    tool = f"tool:{drawn.choice(('search', 'sandbox', 'browser'))}"
    return Plan(kind, wait, tool, slots, drawn.randint(1, 3), times)


def parts_of(plan: Plan, number: int, factor: float) -> list[tuple[str, str, float]]:
    """Return what a trajectory does: spans with their time, and slots that it takes and frees."""
    generate, tool, score, unknown = plan.times[number]
    call = [("span", plan.tool, tool * factor)]
    if "service" in plan.kind or "each other" in plan.kind:
        wait = "" if plan.kind == "service" else f"{plan.wait}2"
        call = [("take inner", wait, 0.0), *call, ("free inner", "", 0.0)]
    turns = [("span", "generate", generate), *call] * plan.turns
    reward = ("span", "reward", score)
    if plan.kind == "unknown":
        return [("span", plan.wait, unknown), *turns, reward]
    if "limit" not in plan.kind:
        return [*turns, reward]
    take, free = (
        ("take outer", "" if "without" in plan.kind else plan.wait, 0.0),
        ("free outer", "", 0.0),
    )
    if plan.kind == HANDED:  # the outer slot is released when the inner one is acquired
        between = ("take inner", f"{plan.wait}2", 0.0)
        return [take, turns[0], between, free, turns[1], reward, ("free inner", "", 0.0)]
    return [take, *turns, free, reward] if "until" in plan.kind else [take, *turns, reward, free]


def played(plan: Plan, factor: float = 1.0) -> list[Spans]:
    """Play the plan, with slots in the order of requests; return each trajectory's spans,
    itself last.
    """
    parts = [parts_of(plan, number, factor) for number in range(len(plan.times))]
    begins = [0.1 + number / 1000 for number in range(len(parts))]
    events = [(begin, number) for number, begin in enumerate(begins)]
    free, waiting = dict(plan.slots), {name: deque[tuple[int, str, float]]() for name in plan.slots}
    spans: list[Spans] = [[] for _ in parts]
    while events:
        now, number = heappop(events)
        while parts[number]:
            kind, name, seconds = parts[number].pop(0)
            action, _, limit = kind.partition(" ")
            if action == "span":
                spans[number].append((name, now, now + seconds))
                heappush(events, (now + seconds, number))
                break
            if action == "take" and not free[limit]:
                waiting[limit].append((number, name, now))
                break
            if action == "take":
                free[limit] -= 1
                spans[number] += [(name, now, now)] if name else []
            elif waiting[limit]:
                other, name, since = waiting[limit].popleft()
                spans[other] += [(name, since, now + LATENCY)] if name else []
                heappush(events, (now + LATENCY, other))
            else:
                free[limit] += 1
        else:
            spans[number].append(("", begins[number], now))
    return spans


def end_of(trajectories: list[Spans]) -> float:
    return max(spans[-1][2] for spans in trajectories) + 0.05


def drawn_step(folder: Path, plan: Plan, factor: float = 1.0) -> float:
    """Draw the step of a plan; return its duration (s)."""
    trajectories = played(plan, factor)
    rollout = end_of(trajectories)
    log = DrawnLog(end=rollout + 1)
    for spans in trajectories:
        log.trajectory(*spans[-1][1:], *spans[:-1])
    drawn_inputs(
        folder,
        [("rollout", 0, rollout), ("update_actor", rollout, rollout + 0.4)],
        [],
        rollout + 0.4,
    )
    log.add_to(folder)
    return rollout + 0.4


@pytest.mark.parametrize(
    ("seed", "kind"), [*enumerate(KINDS * 4), *((seed, HANDED) for seed in range(8))]
)
def test_a_wait_is_no_work(
    tmp_path: Path, seed: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predictions hold the truth; a wait is never offered, the first finding,
    or a cause of a difference.
    """
    plan = drawn_plan(seed, kind)
    before, after = tmp_path / "a", tmp_path / "b"
    for folder, factor in ((before, 1.0), (after, 0.4)):
        folder.mkdir()
        drawn_step(folder, plan, factor)
    step = open_step(before)
    for factor in (0.4, 0.7, 1.6):
        found = step.what_if(tools={plan.tool: f"{factor}x"})
        truth = end_of(played(plan, factor)) + 0.4
        if found.low_us is None or found.high_us is None:
            assert found.predicted_us == pytest.approx(truth * 1e6, rel=0.01)
        else:
            assert found.low_us <= truth * 1e6 <= found.high_us
        assert any("a limit of" in said or "is not known" in said for said in found.assumed)
    options = [row.option for row in step.what_if().what_would_help]
    assert not any("wait:" in option for option in options)
    half = next(
        (row for row in step.what_if().what_would_help if row.option.endswith("=0.5x")), None
    )
    assert half is None or "wait" not in half.change
    name = plan.wait.removeprefix("wait:")
    assert not any(f"wait `{name}`" in finding.text for finding in step.report().findings[:1])
    assert main(["what-if", str(before), "--tools", f"{plan.wait}=0.1s"]) == 2
    capsys.readouterr()
    assert main(["diff", str(before), str(after)]) == 0
    (_, explained, *_) = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "wait:" not in explained


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_take_no_time_have_no_limit(tmp_path: Path, seed: int) -> None:
    """Calls of microseconds behind pauses of the trajectory's own code,
    as a tokenizer's in real verl.
    """
    drawn = random.Random(seed)
    log = DrawnLog(end=3.0)
    for _ in range(drawn.randint(4, 20)):
        call = drawn.uniform(0.2, 1.5)
        log.trajectory(
            0.1, 2.0, ("generate", 0.1, 0.15), ("tokenize", call, call + drawn.uniform(0, 1e-4))
        )
    drawn_inputs(tmp_path, [("rollout", 0, 2.1), ("update_actor", 2.1, 2.4)], [], 2.4)
    log.add_to(tmp_path)
    report = open_step(tmp_path).report()
    assert report.coverage.missing == []
    assert report.critical_path


@pytest.mark.parametrize("seed", range(20))
def test_a_free_slot_is_taken_sooner_if_no_tool_blocks_the_loop(tmp_path: Path, seed: int) -> None:
    """Each drawn trajectory frees its slot, and then blocks the event loop: the next one goes on
    once the block is over.
    """
    drawn = random.Random(seed)
    slots, turns = drawn.randint(2, 4), drawn.randint(4, 6)
    count, search = slots * turns, drawn.uniform(0.5, 1.0)
    block = search * drawn.uniform(0.1, 0.2)
    score = drawn.uniform(0.8, 1.0)  # longer than a block, so it is not late

    def end_of_last(block: float, log: DrawnLog | None = None) -> float:
        """Return the end of the rollout; slots go on in turns that end together."""
        now = 0.0001
        for first in range(0, count, slots):
            numbers = range(first, min(first + slots, count))
            free = now + search
            for number in numbers if log else ():
                is_last = number == numbers[-1]
                end = free + block * is_last
                trajectory = log.trajectory(0, end + score, ("reward", end, end + score))
                log.span("wait:slot", 0, now, trajectory)
                log.span("tool:search", now, free, trajectory)
                if is_last:
                    sandbox = log.span("tool:sandbox", free, end, trajectory)
                    log.block(free, end, sandbox, "agent.run (agent.py:7)")
            now = free + block
        return now + score

    end = end_of_last(block)
    log = DrawnLog(end=end + 1)
    end_of_last(block, log)
    drawn_inputs(tmp_path, [("rollout", 0, end), ("update_actor", end, end + 1)], [], end + 1)
    log.add_to(tmp_path)
    step = open_step(tmp_path)
    halved = step.what_if(tools={"sandbox": "0.5x"})
    assert halved.predicted_us == pytest.approx((end_of_last(block / 2) + 1) * 1e6, rel=1e-3)
    unblocked = step.what_if(unblock=["sandbox"])
    assert unblocked.predicted_us == pytest.approx(
        (turns * search + block + score + 1) * 1e6, rel=2e-3
    )
    assert unblocked.low_us is None


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_may_wait_for_each_other_make_an_interval(tmp_path: Path, seed: int) -> None:
    """Drawn ranks do unequal work and leave the stage together;
    what each of them did is not recorded.
    """
    drawn = random.Random(seed)
    works = [drawn.uniform(0.2, 3.0) for _ in range(drawn.randint(2, 6))]
    together = max(works)
    stage = drawn.choice(("update_actor", "ref_log_prob", "values"))
    ends = [together * drawn.uniform(0.98, 1) for _ in works]
    workers = [
        Worker("actor", rank, stages=[(stage, 1.0, 1 + end)]) for rank, end in enumerate(ends)
    ]
    drawn_inputs(tmp_path, [("rollout", 0, 1), (stage, 1.0, 1 + together)], workers, 1 + together)
    for worker in workers:
        rewrite_worker(tmp_path, f"actor_rank{worker.rank}", artifacts=[])
    step = open_step(tmp_path)
    found = step.what_if(balance=[stage])
    assert found.low_us is not None
    assert found.high_us is not None
    assert found.low_us <= (1 + sum(works) / len(works)) * 1e6 <= found.high_us
    assert not any("--balance" in row.option for row in step.what_if().what_would_help)


@pytest.mark.parametrize("seed", range(20))
def test_a_tail_that_began_before_the_step_is_not_left_out(tmp_path: Path, seed: int) -> None:
    """Of drawn trajectories, the last ones began in the step before,
    so a shorter tail is refused.
    """
    drawn = random.Random(seed)
    count = drawn.randint(10, 20)
    before = drawn.randint(1, 4)
    log = DrawnLog(end=6)
    for number in range(count):
        is_last = number < before
        begin = drawn.uniform(-3, -0.1) if is_last else drawn.uniform(0.1, 1)
        end = drawn.uniform(4, 5) if is_last else drawn.uniform(1.5, 3)
        log.trajectory(begin, end, ("tool:search", begin + 0.01, end))
    drawn_inputs(tmp_path, [("rollout", 0, 5.1), ("update_actor", 5.1, 6)], [], 6)
    log.add_to(tmp_path)
    step = open_step(tmp_path)
    with pytest.raises(ConfigError, match="--no-tail: the tail began before the step"):
        step.what_if(no_tail=100 * (count - before) / count - 0.1)
    assert not any("--no-tail" in row.option for row in step.what_if().what_would_help)


@pytest.mark.parametrize("seed", range(20))
def test_a_paused_engine_has_requests_in_its_queue(tmp_path: Path, seed: int) -> None:
    """While all requests are queued, the host is not at work; idle time and critical path agree."""
    drawn = random.Random(seed)
    pause, rest = drawn.uniform(0.3, 3.0), drawn.uniform(0.5, 2.0)
    begin = drawn.uniform(1, 3)
    resumed = begin + pause
    end = resumed + rest
    worker = engine(0, (0.1, begin), (resumed, end), logged=True)
    drawn_inputs(
        tmp_path,
        [("rollout", 0, end + 0.1), ("update_actor", end + 0.1, end + 1)],
        [worker],
        end + 1,
    )
    times = [
        (0.1, 0.1, begin),
        *((begin, resumed, end - number / 10) for number in range(drawn.randint(1, 5))),
    ]
    requests = [
        Request(
            replica=0,
            id=str(number),
            begin_ns=ns(arrived),
            arrival_ns=ns(arrived),
            scheduled_ns=ns(scheduled),
            first_token_ns=ns(scheduled + 0.01),
            end_ns=ns(ended),
            prompt_tokens=9,
            response_tokens=9,
        )
        for number, (arrived, scheduled, ended) in enumerate(times)
    ]
    rewrite_worker(tmp_path, "rollout0", requests=requests)
    report = open_step(tmp_path).report()
    (row,) = report.workers
    assert row.lost_us["queued"] == pytest.approx(pause * 1e6, abs=10)
    assert row.lost_us.get("host_bound", 0.0) < 1e4
    assert sum(
        part.duration_us for part in report.critical_path if part.kind == "queued"
    ) == pytest.approx(pause * 1e6, abs=10)


@pytest.mark.parametrize("seed", range(20))
def test_a_tool_of_a_rollout_from_before_the_step(tmp_path: Path, seed: int) -> None:
    """One step off: each rollout begins beside an update, and the loop waits for it in the next
    step. It may be a stage of the loop and of the agents, and the tool may be inside a turn.
    """
    drawn = random.Random(seed)
    generate, tool, update = (
        drawn.uniform(0.05, 0.1),
        drawn.uniform(0.6, 1.0),
        drawn.uniform(0.15, 0.3),
    )
    end, waited = generate + tool, generate + tool - update
    log = DrawnLog(end=end)
    has_turns, count = drawn.random() < 0.5, drawn.randint(1, 12)
    for number in range(count):
        log.trajectory(-update, waited, ("generate", -update, generate - update))
        begin, turn = generate - update, -1
        if has_turns:
            turn = log.span("turn", begin, waited, number)
        log.span("tool:search", begin, waited, number, turn)
    for _ in range(count):
        log.trajectory(waited, end + 1, ("generate", waited, end + 1), status="running")
    stages = [("wait:rollout", 0, waited), ("update_actor", waited, end)]
    rollouts = [("rollout", 0, waited), ("rollout", waited, end)]
    is_stage = drawn.random() < 0.5
    drawn_inputs(tmp_path, [*stages, *rollouts] if is_stage else stages, [], end)
    log.add_to(tmp_path)
    if is_stage:
        of_agents = StageSpan(name="rollout", begin_ns=ns(0), end_ns=ns(waited))
        rewrite_worker(tmp_path, "agent_loop_rank0", stages=[of_agents])
    for factor in (0.5, drawn.uniform(0.4, 1.5)):
        found = open_step(tmp_path).what_if(tools={"search": f"{factor}x"})
        assert found.predicted_us == pytest.approx((generate + tool * factor) * 1e6, rel=0.02)


@pytest.mark.parametrize("waits_s", [0.00001, 0.2])
def test_a_wait_of_a_rollout_from_before_the_step(tmp_path: Path, waits_s: float) -> None:
    """The turn that began before the step may be over before the next step begins. A wait of a
    moment makes nothing uncertain.
    """
    log = DrawnLog(end=1)
    for _ in range(4):
        spans = [("generate", -0.3, 0.01), ("wait:slot", 0.01, 0.01 + waits_s)]
        log.trajectory(-0.3, 0.7, *spans, ("tool:search", 0.01 + waits_s, 0.7))
        log.trajectory(0.7, 2, ("generate", 0.7, 2), status="running")
    stages = [("wait:rollout", 0, 0.7), ("update_actor", 0.7, 1)]
    drawn_inputs(tmp_path, [*stages, ("rollout", 0, 0.7), ("rollout", 0.7, 1)], [], 1)
    log.add_to(tmp_path)
    found = open_step(tmp_path).what_if(scale={"rollout": 0.5})
    assert found.predicted_us == pytest.approx(0.5e6, rel=0.02)
    if waits_s < 0.1:
        assert found.low_us is None
    else:
        assert found.low_us is not None
        assert found.high_us is not None
        assert found.low_us <= found.predicted_us <= found.high_us


@pytest.mark.parametrize(("factor", "seconds"), [("3x", 1.0), (0.9, 1.0), ("0.5x", 1.0)])
def test_a_call_from_before_the_capture_makes_an_interval(
    tmp_path: Path, factor: float | str, seconds: float
) -> None:
    """Without the watch, what a trajectory of the last step was in when the capture began is not
    known; it may be the call that changes.
    """
    log = DrawnLog(end=1)
    for _ in range(4):
        log.trajectory(-0.3, 0.7)
        log.trajectory(0.7, 0.95, ("generate", 0.7, 0.75), ("tool:search", 0.75, 0.95))
        log.trajectory(0.7, 2, ("generate", 0.7, 2), status="running")
    stages = [("wait:rollout", 0, 0.7), ("update_actor", 0.7, 1)]
    drawn_inputs(tmp_path, [*stages, ("rollout", 0, 0.7), ("rollout", 0.7, 1)], [], 1)
    log.add_to(tmp_path)
    found = open_step(tmp_path).what_if(tools={"search": factor})
    assert found.predicted_us == pytest.approx(seconds * 1e6, rel=0.02)
    assert found.low_us is not None
    assert found.high_us is not None
    if factor == "0.5x":
        assert found.low_us < 0.8e6
    else:
        assert found.high_us > 1.5e6


@pytest.mark.parametrize("seed", range(20))
def test_no_hang_is_a_trajectory_that_queues(seed: int) -> None:
    """Whatever waits, and however long: the process is in another span that is open."""
    drawn = random.Random(seed)
    names = [
        f"wait:{drawn.choice(('slot', 'server', 'quota'))}" for _ in range(drawn.randint(1, 90))
    ]
    culprits = drawn.sample(("tool:search", "environment:step", "reward"), drawn.randint(1, 3))
    names += culprits
    if drawn.random() < 0.5:
        drawn.shuffle(names)

    async def in_span(number: int, name: str, ended: asyncio.Event) -> None:
        async with trajectory(group=f"g{number}", sample=0), span(name):
            await ended.wait()

    async def state() -> ProcessState:
        ended = asyncio.Event()
        tasks = [asyncio.ensure_future(in_span(*one, ended)) for one in enumerate(names)]
        await asyncio.sleep(0)
        reporter = HangReporter(("", 1.0), "agent_loop_rank0", "agent_loop", list)
        found = reporter.state(1)
        ended.set()
        await asyncio.gather(*tasks)
        return found

    states: list[ProcessState] = []
    recorded(lambda: states.append(asyncio.run(state())), 1_000)
    (agents,) = states
    loop = ProcessState("controller", "controller", calls="ray")
    lane, reason, _ = culprit([loop, agents], "rollout")
    assert lane == "agent_loop_rank0"
    assert any(name in reason for name in culprits), reason


def drawn_service(folder: Path, seed: int, factor: float = 1.0) -> float:
    """Draw trajectories that are scored by a process of its own, one at a time; return the step's
    duration (s).
    """
    drawn = random.Random(seed)
    arrivals = sorted(0.1 + drawn.random() for _ in range(8))
    log, scored, free = DrawnLog(end=20), [], 0.0
    for arrival in arrivals:
        begin = max(arrival + LATENCY, free)
        free = begin + factor * drawn.uniform(0.1, 0.4)
        scored.append(("reward", begin, free))
        spans = [("generate", 0.05, arrival), ("reward", arrival, free + LATENCY)]
        log.trajectory(0.05, free + LATENCY, *spans)
    rollout = free + 0.05
    folder.mkdir()
    stages = [("rollout", 0, rollout), ("update_actor", rollout, rollout + 0.4)]
    drawn_inputs(folder, stages, [Worker("reward", 0, stages=scored)], rollout + 0.4)
    log.add_to(folder)
    return rollout + 0.4


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("factor", [0.3, 0.5, 2])
def test_calls_wait_for_a_service_that_serves_one_at_a_time(
    tmp_path: Path, seed: int, factor: float
) -> None:
    """The service's own stages say which part of a call is a wait for the calls before."""
    recorded = drawn_service(tmp_path / "recorded", seed)
    truth = drawn_service(tmp_path / "changed", seed, factor)
    step = open_step(tmp_path / "recorded")
    found = step.what_if(tools={"reward": f"{factor}x"})
    assert found.span_us == pytest.approx(recorded * 1e6)
    assert found.predicted_us == pytest.approx(truth * 1e6, abs=0.01e6)
    if factor < 1:
        assert "--tools reward=0.5x" in {row.option for row in step.what_if().what_would_help}
