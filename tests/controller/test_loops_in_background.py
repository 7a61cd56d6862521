"""The loops of docs/asynchronous-loops.md, run as they stand, against a stopwatch inside them."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from verl_profiling.analysis import open_step
from verl_profiling.capture.session import Session
from verl_profiling.files.step_summary import StepSummary

PAGE = Path(__file__).parents[2] / "docs" / "asynchronous-loops.md"
LOOPS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
STEPS = 9
Period = tuple[int, int]


class Stopwatch:
    """Sleeps for drawn times in place of the work of a loop, and notes when it did."""

    def __init__(self, seed: str, awaits: bool) -> None:
        self.draw, self.awaits = random.Random(seed), awaits
        self.periods: dict[str, list[Period]] = {}

    def work(self, name: str, longest_s: float) -> Callable[..., Any]:
        """Return the stand-in of a part of the loop."""

        def sleep(*_: object) -> float:
            begin_ns = time.time_ns()
            time.sleep(self.draw.uniform(0.2, 1) * longest_s)
            self.periods.setdefault(name, []).append((begin_ns, time.time_ns()))
            return 0.5

        async def sleep_in_a_task(*_: object) -> float:
            begin_ns = time.time_ns()
            await asyncio.sleep(self.draw.uniform(0.2, 1) * longest_s)
            self.periods.setdefault(name, []).append((begin_ns, time.time_ns()))
            return 0.5

        return sleep_in_a_task if self.awaits else sleep

    def in_step(self, step: Period, *names: str) -> float:
        """Return the seconds of a step in which any of these parts ran."""
        covered_ns, last_ns = 0, step[0]
        periods = [period for name in names for period in self.periods[name]]
        for begin_ns, end_ns in sorted(periods):
            begin_ns, end_ns = max(begin_ns, last_ns), min(end_ns, step[1])
            covered_ns += max(0, end_ns - begin_ns)
            last_ns = max(last_ns, end_ns)
        return covered_ns / 1e9


def off(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the median difference, which a moment without a CPU does not change."""
    return median(abs(given - true) for given, true in pairs)


def check_step(summary: StepSummary, watch: Stopwatch) -> dict[str, tuple[float, float]]:
    """Return what a line of the log says, as shares of the step, each beside the truth."""
    step = summary.begin_ns, summary.end_ns
    seconds, exposed = summary.seconds, summary.exposed_s
    update = watch.in_step(step, "update_actor")
    sync = watch.in_step(step, "update_weights")
    rollout = watch.in_step(step, "rollout")
    assert summary.trainer_idle is not None
    idle = summary.rollout_idle  # unknown in a step in which nothing was generated
    assert (idle is None) == (rollout == 0)
    return {
        "update_actor": (exposed["update_actor"] / seconds, update / seconds),
        "update_weights": (exposed["update_weights"] / seconds, sync / seconds),
        "wait": (exposed["wait:rollout"] / seconds, 1 - (update + sync) / seconds),
        "trainer": (summary.trainer_idle.share, 1 - (update + sync) / seconds),
        "rollout": (1.0 if idle is None else idle.share, 1 - rollout / seconds),
    }


@pytest.mark.parametrize("slower", ["rollout", "update_actor"])
@pytest.mark.parametrize("loop", [0, 1], ids=["one step off", "fully asynchronous"])
def test_a_loop_of_the_page(tmp_path: Path, session: Session, loop: int, slower: str) -> None:
    """Exposed time and idle shares of each step, and the report of a captured one, are those of
    the stopwatch, whichever side is slower.
    """
    watch = Stopwatch(f"{loop} {slower}", awaits=loop == 1)
    captured = watch.draw.randrange(3, STEPS)
    names = {
        "config": {
            "enable": True,
            "tool": "spans",
            "save_path": str(tmp_path),
            "schedule": {"steps": [captured]},
            "watch": {"enable": True},
        },
        "prompts": [],
        "steps": STEPS,
        "rollout": watch.work("rollout", (1 + loop) * 0.6 if slower == "rollout" else 0.15),
        "update": watch.work("update_actor", 0.3),
        "send_weights": watch.work("update_weights", 0.1),
    }
    exec(compile(LOOPS[loop], PAGE.name, "exec"), names)
    lines = (tmp_path / "watch.jsonl").read_text().splitlines()
    summaries = [msgspec.json.decode(line, type=StepSummary) for line in lines]
    assert [summary.step for summary in summaries] == list(range(1, STEPS + 1))
    found = [check_step(summary, watch) for summary in summaries]
    for name in found[0]:
        assert off(step[name] for step in found) < 0.02, (name, found)
    waits = sum(step["wait"][0] for step in found) / STEPS
    assert (waits > 0.15) == (slower == "rollout")

    report = open_step(tmp_path / f"step_{captured:06}").report()
    summary = summaries[captured - 1]
    step = summary.begin_ns, summary.end_ns
    rows = {row.name: row.duration_us / 1e6 for row in report.stages}
    assert off((rows[name], watch.in_step(step, name)) for name in watch.periods) < 0.01
