"""Spans are judged by their mean per call, and explain a slow stage only
where they can have run in it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
import pytest
from quiet_steps import CONTROLLER, MS, with_stages

from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.files.step_summary import RankUse, SpanTotal, StepSummary
from verl_profiling.settings.config import Anomaly
from verl_profiling.watch.collectives import RecorderReading
from verl_profiling.watch.sign_tests import Detector
from verl_profiling.watch.stage_numbers import exposed

TOOLS = ("tool:search", "tool:python", "env:step", "judge")


def step_of_agents(
    step: int, noise: random.Random, varies: float, slow: Mapping[str, float], services: int
) -> StepSummary:
    """Return a step with a rollout that varies, tools in it, and services that rate its responses.

    Args:
        step: Its number.
        noise: Draws durations and numbers of calls.
        varies: Standard deviation of the logarithm of the rollout.
        slow: Ratio by which calls take longer, by tool or lane of a service.
        services: Number of processes of the service.
    """
    rollout_ms, rating_ms = 800 * noise.lognormvariate(0, varies), 40.0 * max([1.0, *slow.values()])
    spans = []
    for tool in TOOLS:
        calls = noise.randint(20, 90)
        took_ms = sum(50 * noise.lognormvariate(0, 0.5) for _ in range(calls)) * slow.get(tool, 1.0)
        spans.append(SpanTotal(tool, calls, int(took_ms * MS)))
    spans.append(SpanTotal("wait:slot", 64, int(noise.paretovariate(2) * 64 * MS * 50)))
    whole_ns = sum(span.duration_ns for span in spans) + int(64 * rollout_ms / 2 * MS)
    spans.append(SpanTotal("trajectory", 64, whole_ns))
    workers = [RankUse(lane="agent_loop_rank0", role="agent_loop", spans=tuple(spans))]
    for rank in range(services):
        lane = f"reward_rank{rank}"
        took_ms = 8 * 20 * noise.lognormvariate(0, 0.1) * slow.get(lane, 1.0)
        workers.append(
            RankUse(
                lane=lane,
                role="reward",
                rank=rank,
                spans=(SpanTotal("score", 8, int(took_ms * MS)),),
            )
        )
    begin_ns = step * 10**10
    middle_ns = begin_ns + int(rollout_ms * MS)
    end_ns = middle_ns + int((rating_ms + 500 * noise.lognormvariate(0, 0.03)) * MS)
    loop = with_stages(
        CONTROLLER, {"rollout": [(begin_ns, middle_ns)], "update": [(middle_ns, end_ns)]}
    )
    found = StepSummary(step=step, begin_ns=begin_ns, end_ns=end_ns, loop=[loop], workers=workers)
    return msgspec.structs.replace(found, exposed=exposed(found))


@pytest.mark.parametrize("seed", range(24))
def test_a_slow_span_is_noticed_named_and_captured(seed: int) -> None:
    """A tool in a rollout that varies by up to 40%, or one or all processes of a service;
    within 13 steps.
    """
    drawn = random.Random(seed)
    varies, services = drawn.uniform(0.05, 0.4), drawn.randint(1, 4)
    lanes = [f"reward_rank{rank}" for rank in range(services)]
    tool = drawn.choice(TOOLS) if seed % 2 else ""
    culprits = [tool] if tool else lanes if seed % 4 else [drawn.choice(lanes)]
    ratio = drawn.uniform(2.4, 6.0) * (1 if tool else len(lanes) / len(culprits))
    begin = drawn.randint(30, 70)
    signs = Anomaly(slow_step=None, slow_stage=None, leader=None)
    anomalies = Anomalies(signs, lambda selection: None, RecorderReading())
    decision = None
    for step in range(1, begin + 13):
        slow = dict.fromkeys(culprits, ratio) if step >= begin else {}
        anomalies.listen(summary := step_of_agents(step, drawn, varies, slow, services))
        anomalies.step_begins(step + 1)
        decision = anomalies.asks(step + 1, False)
        assert decision is None or step >= begin, decision
        if decision is not None:
            break
    assert decision is not None
    assert decision.selection is not None
    trigger, role = decision.trigger, "agent_loop" if tool else "reward"
    assert (trigger.sign, trigger.span) == ("slow_span", tool or "score")
    assert trigger.reason.startswith(f"step {step}: {tool or 'score'} of {role} took ")
    assert decision.selection.roles == (role,)
    if len(culprits) == 1 and not tool:
        assert trigger.suspects == culprits
        assert decision.selection.ranks[0] == lanes.index(culprits[0])
    assert summary.noticed == trigger


def stage_of_engine(step: int, slow: str, tokens: int) -> StepSummary:
    """Return a step of agents, an engine and a weight sync,
    in which a stage is three times as long.
    """
    begin_ns = step * 10**10
    loop, mine, now_ns = {}, {}, begin_ns
    for stage in ("rollout", "update_actor", "update_weights"):
        end_ns = now_ns + (900 if stage in slow else 300) * MS
        loop[stage] = mine[stage.replace("rollout", "generate")] = [(now_ns, end_ns)]
        now_ns = end_ns
    ratio = 3 if slow else 1
    spans = [SpanTotal("generate", 64, 64 * 200 * MS * ratio)]
    whole = SpanTotal("trajectory", 64, 64 * 200 * MS * ratio, 0, 64 * tokens)
    del mine["update_actor"]
    workers = [
        RankUse(lane="agent_loop_rank0", role="agent_loop", spans=(*spans, whole)),
        with_stages(
            RankUse(lane="rollout0_rank0", role="rollout", replica=0, spans=tuple(spans)), mine
        ),
    ]
    found = StepSummary(
        step=step,
        begin_ns=begin_ns,
        end_ns=now_ns,
        loop=[with_stages(CONTROLLER, loop)],
        workers=workers,
    )
    return msgspec.structs.replace(found, exposed=exposed(found))


@pytest.mark.parametrize(
    ("slow", "tokens", "says", "never"),
    [
        ("rollout", 3000, "a trajectory of agent_loop has 3,000 tokens, usually 1,000", "weights"),
        ("rollout", 1000, "generate of rollout took 38.4 s", "tokens"),
        ("update_weights", 1000, "stage update_weights took 900 ms", "generate of"),
    ],
)
def test_a_reason_has_lengths_and_only_spans_of_the_stage(
    slow: str, tokens: int, says: str, never: str
) -> None:
    """A slow weight sync names no generation; a rollout of longer responses says so."""
    detector = Detector(Anomaly())
    for step in range(1, 31):
        assert detector.observe(stage_of_engine(step, "", 1000)) is None
    each = [detector.observe(stage_of_engine(step, slow, tokens)) for step in (31, 32, 33)]
    [found] = [suspicion for suspicion in each if suspicion is not None]
    assert (found.sign, found.stage) == ("slow_stage", slow)
    assert says in found.reason
    assert never not in found.reason


def test_a_process_that_was_not_read_did_not_take_no_time() -> None:
    """Spans of two processes grew by nothing where most steps before have those of one."""
    detector, reasons = Detector(Anomaly()), []
    for step in range(1, 34):
        found = stage_of_engine(step, "rollout" * (step > 30), 1000)
        usual, engine = stage_of_engine(step, "", 1000).workers[0], found.workers[1]
        more = [msgspec.structs.replace(usual, lane="agent_loop_rank1", rank=1)] * (step > 24)
        found.workers = [usual, *more, engine]
        suspicion = detector.observe(found)
        reasons += [suspicion.reason] if suspicion else []
    [reason] = reasons
    assert "stage rollout took 900 ms" in reason
    assert "of agent_loop" not in reason
