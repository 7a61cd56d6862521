"""The light suite, ``pytest -p tests.light``: a test
that needs what is not installed is skipped, by name.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest

DISPENSABLE = ("torch", "ray", "transformers", "matplotlib", "tensorboard", "viztracer", "nvtx")
# In what a test says when it fails: its own import may be meant, or one of a process that it
# started.
_ABSENT = re.compile(rf"No module named '({'|'.join(DISPENSABLE)})\b|\bneeds (torch)\b")


def _skip_without(report: pytest.CollectReport | pytest.TestReport, path: Path, line: int) -> None:
    if report.failed and (found := _ABSENT.search(report.longreprtext)):
        report.outcome = "skipped"
        report.longrepr = (str(path), line, f"Skipped: {found[1] or found[2]} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _skip_without(report, collector.path, 0)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _skip_without(report, item.path, item.location[1] or 0)
    return report
