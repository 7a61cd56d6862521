"""Real verl with its own tool agent loop: what is recorded equals what verl counts
and times itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from integrations.counted_tools import FILE
from integrations.verl_runs import PLUGINS, ROOT, Run, run_verl
from verl_profiling.files.trajectory_log import SpanRecord, TrajectoryLog, TrajectoryRecord

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]

SCRIPT = ROOT / "recipes/verl_agent_cpu/run.sh"
ADDED = "recipes.verl_agent_cpu.chosen_calls,integrations.counted_tools"
PROMPTS, SAMPLES, LOOPS = 8, 2, 2
CLOSE = 0.02


@dataclass(frozen=True)
class AgentRun:
    """A run, and the names of all tools that ran in it."""

    run: Run
    tools: list[str]

    def logs(self, step: int) -> list[TrajectoryLog]:
        return [self.run.trajectories(step, rank=rank) for rank in range(LOOPS)]

    def trajectories(self, step: int) -> list[TrajectoryRecord]:
        return [t for log in self.logs(step) for t in log.trajectories]

    def spans(self, step: int, name: str) -> list[SpanRecord]:
        """Return their spans of a name; of all tools for ``tool``."""
        found = [span for log in self.logs(step) for span in log.spans]
        return [span for span in found if name in (span.name, span.name.partition(":")[0])]


def agent_run(folder: Path, *overrides: str) -> AgentRun:
    counted = folder / "tools.txt"
    counted.touch()
    run = run_verl(
        folder, *overrides, script=SCRIPT, PLUGINS=f"{PLUGINS},{ADDED}", **{FILE: str(counted)}
    )
    assert run.code == 0, run.output[-4000:]
    return AgentRun(run, counted.read_text().split())


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> AgentRun:
    return agent_run(tmp_path_factory.mktemp("v1"), "profiling.schedule.steps=[1,2,3]")


@pytest.fixture(scope="module")
def v0(tmp_path_factory: pytest.TempPathFactory) -> AgentRun:
    """The V0 trainer, which logs what its agent loops measured."""
    return agent_run(tmp_path_factory.mktemp("v0"), "trainer.use_v1=false")


@pytest.fixture(params=["v1", "v0"])
def run(request: pytest.FixtureRequest) -> AgentRun:
    found: AgentRun = request.getfixturevalue(request.param)
    return found


def seconds(spans: Iterable[SpanRecord]) -> float:
    return sum(span.end_ns - span.begin_ns for span in spans) / 1e9


@pytest.mark.parametrize("step", [2, 3])
def test_trajectories_and_turns_are_those_that_verl_counts(run: AgentRun, step: int) -> None:
    """Every sample of every prompt is a trajectory that is done, with verl's number of turns."""
    found = run.trajectories(step)
    assert len(found) == PROMPTS * SAMPLES
    assert {t.status for t in found} == {"done"}
    assert Counter(Counter(t.group for t in found).values()) == {SAMPLES: PROMPTS}
    turns = [t.facts["turns"] for t in found]
    metrics = run.run.manifest(step).metrics
    told = {
        name.removeprefix("training/"): value
        for name, value in metrics.items()
        if "num_turns/" in name
    }
    assert sum(turns) / len(turns) == pytest.approx(told["num_turns/mean"])  # type: ignore[arg-type]
    assert (min(turns), max(turns)) == (told["num_turns/min"], told["num_turns/max"])  # type: ignore[type-var]
    lengths = [t.facts["response_tokens"] for t in found]
    assert sum(lengths) / len(lengths) == pytest.approx(metrics["response_length/mean"])  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [2, 3])
def test_each_turn_of_the_model_is_a_request_of_the_engine(run: AgentRun, step: int) -> None:
    """Half of verl's turns are the model's; each asked for what the engine got under
    that very id.
    """
    turns = sum(t.facts["turns"] for t in run.trajectories(step))  # type: ignore[misc]
    asked = {span.request: span for span in run.spans(step, "generate")}
    assert len(asked) == turns / 2
    served = {request.id: request for request in run.run.worker(step, "rollout").requests}
    assert asked.keys() == served.keys()
    for name, request in served.items():
        span = asked[name]
        assert (
            span.begin_ns
            <= request.arrival_ns
            <= request.scheduled_ns
            <= request.end_ns
            <= span.end_ns
        )


def test_tool_calls_are_those_that_the_tools_count(v1: AgentRun) -> None:
    """Each tool ran as often as it has spans, and as the trajectories say;
    each sandbox was started.
    """
    calls = Counter(
        span.name.removeprefix("tool:") for step in (1, 2, 3) for span in v1.spans(step, "tool")
    )
    assert calls == Counter(v1.tools)
    assert len(calls) == 5
    said = sum(t.facts.get("tool_calls", 0) for step in (1, 2, 3) for t in v1.trajectories(step))  # type: ignore[misc]
    assert said == len(v1.tools)
    started = sum(len(v1.spans(step, "environment:start")) for step in (1, 2, 3))
    assert started == calls["sandbox"]


@pytest.mark.parametrize("step", [2, 3])
def test_seconds_are_those_that_verl_measures(v0: AgentRun, step: int) -> None:
    """Generating, tools and scoring of a trajectory take what verl's own metrics say,
    within 2 %.
    """
    metrics = v0.run.manifest(step).metrics
    for ours, verls in (
        ("generate_sequences", "generate_sequences"),
        ("tool_calls", "tool_calls"),
        ("reward", "compute_score"),
    ):
        mean = seconds(v0.spans(step, ours)) / (PROMPTS * SAMPLES)
        assert mean == pytest.approx(metrics[f"timing_s/agent_loop/{verls}/mean"], rel=CLOSE), ours
    mean = seconds(v0.spans(step, "generate")) / (PROMPTS * SAMPLES)
    assert mean == pytest.approx(metrics["timing_s/agent_loop/generate_sequences/mean"], rel=CLOSE)


def test_the_blocking_tool_is_named(run: AgentRun) -> None:
    """Where an event loop stood still for a tenth of a second,
    the record names the tool and its function.
    """
    blocked = [
        (log.spans[block.span].name, block.function)
        for step in (2, 3)
        for log in run.logs(step)
        for block in log.blocks
        if block.span >= 0 and block.end_ns - block.begin_ns > 100_000_000
    ]
    parses = [function for name, function in blocked if name == "tool:parse"]
    assert parses
    assert all(".parse (tools.py:" in function for function in parses)
