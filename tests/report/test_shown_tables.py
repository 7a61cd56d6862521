"""A table that compares is left out where there is nothing to compare, on the terminal and on the
page alike; a table of news never is.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from drawn_steps import whole_step
from step_outcome import printed

from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return whole_step(tmp_path / "step_000001", ranks=2, replicas=2)


def shown(report: Report, title: str) -> bool:
    """Return whether terminal and page have a table; they agree."""
    on_page = f"<h2>{title}</h2>" in render_html(report)
    assert (f"\n{title} " in printed(report)) == on_page
    return on_page


def alike(report: Report, **change: float) -> Report:
    """Return the report with two equal lanes, but for a change of the second."""
    first = report.workers[0]
    return msgspec.structs.replace(
        report, workers=[first, msgspec.structs.replace(first, name="other", **change)]
    )


def test_peers_are_shown_if_they_differ(report: Report) -> None:
    busy_us = report.workers[0].busy_us
    assert not shown(alike(report), "Workers")
    assert not shown(alike(report, busy_us=0.97 * busy_us), "Workers")
    assert shown(alike(report, busy_us=0.9 * busy_us), "Workers")
    assert "nothing to compare: workers" in printed(alike(report))


def test_one_row_compares_nothing(report: Report) -> None:
    assert shown(report, "Stages")
    only = msgspec.structs.replace(report, stages=report.stages[:1])
    assert not shown(only, "Stages")


def test_one_row_may_be_news(report: Report) -> None:
    """As the one change that would help."""
    one = msgspec.structs.replace(report, what_would_help=report.what_would_help[:1])
    assert shown(one, "What would help")
