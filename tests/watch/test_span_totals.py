"""What spans add up to between captures: by name and step, in bounded memory,
never the program's matter.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from verl_profiling import ProfilingCallback, clock, span, stage, trajectory
from verl_profiling.capture.session import Session
from verl_profiling.cli import EXIT_OK, main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.step_summary import OTHERS, RankUse, SpanTotal, StepSummary
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.tools.trajectories import OpenLog
from verl_profiling.trajectories.spans import count, start_log, stop_log, total_spans
from verl_profiling.watch.process_sums import MOST_NAMES, SpanSums
from verl_profiling.workers import AgentLoopCaptureMixin

MS, S = 1_000_000, 1_000_000_000
WATCHED = {"enable": True, "watch": {"enable": True, "steps": 10}, "schedule": {"steps": [10**6]}}


@pytest.fixture
def tally() -> Iterator[SpanSums]:
    found = SpanSums()
    total_spans(found)
    yield found
    total_spans(None)


def totals(tally: SpanSums, *borders_ns: int) -> list[dict[str, SpanTotal]]:
    found = tally.of_steps([(begin_ns, end_ns - 1) for begin_ns, end_ns in pairwise(borders_ns)], 0)
    return [{total.name: total for total in of_step} for of_step in found]


def everything(tally: SpanSums) -> dict[str, SpanTotal]:
    """Return all that a tally has told nobody yet."""
    return totals(tally, 0, 1 << 62)[0]


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_a_cancelled_trajectory_is_no_sample(tally: SpanSums, error: type[BaseException]) -> None:
    """As where training ends while the next batch runs; its spans took their time."""
    with trajectory(), span("generate"):
        pass
    with suppress(error), trajectory(), span("generate"):
        raise error
    assert {name: total.runs for name, total in everything(tally).items()} == {
        "trajectory": 1,
        "generate": 2,
    }


class Time:
    now_ns = 1_700_000_000 * S

    def passes(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def time_passes() -> Iterator[Time]:
    """A clock that stands still until it is moved."""
    found = Time()
    with clock.replaced(lambda: found.now_ns, "here"):
        yield found


def rollout(time_passes: Time, tool_ns: int, samples: int, failing: int = 0) -> None:
    """Run trajectories one after another, each with two requests and a tool
    that takes some time.
    """
    for sample in range(samples):
        with suppress(KeyError), trajectory(sample=sample) as running:
            for _ in range(2):
                with span("generate", request="r") as generating:
                    generating.request = "r2"
                    time_passes.passes(5 * MS)
                generating.add(tokens=3)
            with span("tool:search"):
                time_passes.passes(tool_ns)
                if sample < failing:
                    raise KeyError("no such page")
            running.add(turns=1)


def test_each_step_has_the_spans_that_ended_in_it(tally: SpanSums, time_passes: Time) -> None:
    """The trajectories have a name of their own; of each name it is known what failed."""
    borders = [time_passes.now_ns]
    for samples, tool_ns, failing in ((2, 3 * MS, 0), (5, 400 * MS, 1), (3, 3 * MS, 3)):
        rollout(time_passes, tool_ns, samples, failing)
        time_passes.passes(60 * MS)
        borders.append(time_passes.now_ns)
    first, second, third = totals(tally, *borders)
    assert first == {
        "generate": SpanTotal("generate", 4, 20 * MS),
        "tool:search": SpanTotal("tool:search", 2, 6 * MS),
        "trajectory": SpanTotal("trajectory", 2, 26 * MS),
    }
    assert second["tool:search"] == SpanTotal("tool:search", 5, 2000 * MS, 1)
    assert second["trajectory"] == SpanTotal("trajectory", 5, 2050 * MS, 1)
    assert third["tool:search"] == SpanTotal("tool:search", 3, 9 * MS, 3)


def test_what_a_capture_records_is_added_up_as_well(tally: SpanSums, time_passes: Time) -> None:
    """A span counts once, whether it began before the capture, in it, or ends after it."""
    log = OpenLog(100)
    with span("before"):
        start_log(log)
        with span("inside"):
            time_passes.passes(MS)
        outlasting = span("outlasting")
        outlasting.__enter__()
    stop_log(log)
    time_passes.passes(MS)
    outlasting.__exit__(None, None, None)
    log.end()
    assert everything(tally) == {
        "before": SpanTotal("before", 1, MS),
        "inside": SpanTotal("inside", 1, MS),
        "outlasting": SpanTotal("outlasting", 1, MS),
    }
    assert [found.name for found in log.spans] == ["before", "inside", "outlasting"]


def test_any_name_is_counted_and_memory_is_bounded(tally: SpanSums) -> None:
    """Names that are no names, cannot be written, or are too many; and no reader for long."""
    for name in (["list"], None, 7, "\ud800", "x" * 10_000):
        with span(name):  # type: ignore[arg-type]
            pass
    found = everything(tally)
    assert set(found) == {OTHERS, "?", "x" * 200}
    assert found[OTHERS].runs == 3
    for number in range(2 * MOST_NAMES):
        tally.add(f"tool:{number}", 0, S, False)
    assert len(everything(tally)) <= MOST_NAMES + 1
    now_ns = 0
    tracemalloc.start()
    for _ in range(20_000):
        now_ns += 100 * MS
        tally.add("tool:1", now_ns - MS, now_ns, False)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 400_000


def test_a_pause_is_no_progress(tally: SpanSums) -> None:
    """A step may hang while the garbage collector runs."""
    assert tally.last_ns() == 0
    tally.add("gc", clock.now_ns() - 20_000_000, clock.now_ns(), False)
    assert tally.last_ns() == 0
    tally.add("tool:search", clock.now_ns() - 20_000_000, clock.now_ns(), False)
    assert tally.last_ns() > 0


def test_odd_values_cost_no_step(tmp_path: Path) -> None:
    """Neither counters that are no numbers nor unknown token counts do."""
    agents = AgentLoopCaptureMixin()
    given = {"save_path": str(tmp_path), "watch": {"enable": True}, "schedule": {"steps": []}}
    callback = ProfilingCallback({"enable": True, **given})
    agents.init_capture(callback.config)
    odd: list[Any] = [float("nan"), float("inf"), 10**400, None, "text"]
    with callback as profiling:
        profiling.add_workers("agent_loop", [agents])
        for step in (1, 2, 3):
            profiling.on_step_begin(step)
            count("queue\ud800", step)
            for value in odd:
                count("queue\ud800", value)
            with trajectory(prompt_tokens=-1, response_tokens=2**70):
                time.sleep(0.05)
            profiling.on_step_end()
    lines = [*WatchLogReader(tmp_path).read()]
    assert [line.step for line in lines] == [1, 2, 3]
    assert lines[-1].counts == {"queue?": 3.0}
    assert all(total.tokens == 0 for line in lines for total in line.spans)


def test_spans_of_one_name_in_two_roles_are_not_counted_twice() -> None:
    """An agent loop waits for the reward that another process gives: both have a span of it."""
    uses = [
        RankUse(
            lane=f"{role}_rank{rank}",
            role=role,
            rank=rank,
            spans=[SpanTotal("reward", 16, seconds)],
        )
        for role, seconds in (("agent_loop", 9), ("reward", 4))
        for rank in range(2)
    ]
    step = StepSummary(step=1, begin_ns=0, end_ns=1, workers=uses)
    step.add_up()
    assert [(total.name, total.duration_ns, total.runs) for total in step.spans] == [
        ("reward", 18, 32),
        ("reward (reward)", 8, 32),
    ]


@pytest.mark.parametrize("slow", ["tool", "update"])
def test_a_tool_that_becomes_slow_in_a_running_loop_is_named(
    tmp_path: Path,
    session: Session,
    time_passes: Time,
    capsys: pytest.CaptureFixture[str],
    slow: str,
) -> None:
    """In the manifest, and so in the report and in ``top``;
    not where it is another stage that is slow.
    """
    worker = AgentLoopCaptureMixin()
    watch = {"enable": True, "every": 4, "trigger": {"window": 6}}
    config = {**WATCHED, "save_path": str(tmp_path), "schedule": {"steps": []}, "watch": watch}
    worker.init_capture(config)
    profiling = ProfilingCallback(config)
    profiling.add_workers("agent_loop", [worker])
    reader, seen = WatchLogReader(tmp_path), list[int]()
    with profiling:
        for step in range(1, 19):
            profiling.on_step_begin(step)
            with profiling.stage("rollout"), stage("trajectories"):
                for sample in range(3):
                    with trajectory(sample=sample):
                        with span("generate"):
                            time_passes.passes(10 * MS)
                        with span("tool:search"):
                            time_passes.passes((100 if slow == "tool" and step > 10 else 5) * MS)
            with profiling.stage("update"):
                time_passes.passes((400 if slow == "update" and step > 10 else 60) * MS)
            profiling.on_step_end()
            deadline_s = time.monotonic() + 60
            while step in (4, 8, 12) and step - 1 not in seen and time.monotonic() < deadline_s:
                seen += [one.step for one in reader.read()]
                time.sleep(0.01)
    [folder] = sorted(tmp_path.glob("step_*"))
    trigger = read_manifest(folder).trigger
    assert (trigger.kind, trigger.stage) == ("anomaly", "rollout" if slow == "tool" else "update")
    named = (
        "; tool:search of agent_loop took 300 ms in 3 calls, usually 15.0 ms in 3" in trigger.reason
    )
    assert named == (slow == "tool"), trigger.reason
    assert "generate of" not in trigger.reason
    assert "trajectory of" not in trigger.reason
    if named:
        for command in (["report", str(folder)], ["top", "--once", str(tmp_path)]):
            assert main(command) == EXIT_OK
            assert "tool:search" in capsys.readouterr().out
