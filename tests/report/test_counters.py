"""Counts over a step, such as the length of a queue: the last, the mean over time and the largest."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn_logs import DrawnLog
from drawn_steps import Worker, drawn_inputs

from verl_profiling.analysis import open_step
from verl_profiling.report.columns import CounterRow
from verl_profiling.report.model import Report
from verl_profiling.trajectory_log import Counted


def counted(folder: Path, *counts: tuple[str, float, float], clock_ns: int = 0) -> Report:
    """Return the report of a step of 10 s in which a process counted, at these seconds."""
    drawn_inputs(folder, [("rollout", 0, 10)], [Worker("actor")])
    log = DrawnLog(clock_ns=clock_ns)
    log.log.counts += [Counted(name, log.ns(at), value) for name, at, value in counts]
    log.add_to(folder)
    return open_step(folder).report()


def row(name: str, samples: int, last: float, mean: float, most: float) -> CounterRow:
    return CounterRow(
        lane="agent_loop_rank0", name=name, samples=samples, last=last, mean=mean, max=pytest.approx(most)
    )


def test_a_count_holds_until_the_next(tmp_path: Path) -> None:
    """On the controller's clock; the mean is over time."""
    report = counted(tmp_path, ("queue", -4, 99), ("queue", -1, 2), ("queue", 5, 6), ("queue", 10.5, 500))
    assert report.counters == [row("queue", 1, 6.0, 4.0, 6.0)]
    report = counted(tmp_path, ("queue", 5, 6), ("in flight", 6, 3), clock_ns=3600 * 10**9)
    assert [(one.name, one.samples, one.mean) for one in report.counters] == [
        ("queue", 1, 6.0),
        ("in flight", 1, 3.0),
    ]
