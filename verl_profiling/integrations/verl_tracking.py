"""Logs the numbers of the reports to verl's own trackers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_profiling.errors import TraceFormatError
from verl_profiling.integrations.verl_watch import ONWARD_ONLY
from verl_profiling.report.build import build_report
from verl_profiling.report.scalars import scalars
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.one_step import one_by_one

__all__ = ["log_reports"]

logger = logging.getLogger(__name__)


def log_reports(tracking: Any, folders: Mapping[int, Path], last_step: int) -> None:
    """Report on the profiled steps, and log the numbers as ``profiling/...`` under their own steps.

    This reads traces, which takes a while, so it is called at the end of training. Trackers that do
    not accept steps before the last one that they saw get the numbers of the last profiled step only.

    Args:
        tracking: The run's ``Tracking``.
        folders: Step folders by step; one of a continuous capture has several.
        last_step: Number of the last step that was logged.
    """
    onward = [name for name in tracking.logger if name in ONWARD_ONLY]
    anywhere = [name for name in tracking.logger if name not in ONWARD_ONLY]
    data: dict[str, float] = {}
    for last, folder in sorted(folders.items()):
        try:
            (capture,) = find_steps(folder)
            for inputs in one_by_one(capture):
                data = {f"profiling/{name}": value for name, value in scalars(build_report(inputs))}
                tracking.log(data, inputs.step, backend=anywhere)
        except (TraceFormatError, OSError) as error:
            logger.warning("step %d cannot be reported on: %s", last, error)
    if data and onward:
        tracking.log(data, last_step, backend=onward)
