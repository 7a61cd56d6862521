"""Notices what a step has that the steps before it had not. It looks at summaries, and at nothing else."""

from __future__ import annotations

from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_summary import StepSummary
from verl_profiling.watch.growth import Growth
from verl_profiling.watch.leading import Leading
from verl_profiling.watch.slowness import Slowness
from verl_profiling.watch.span_growth import SpanGrowth
from verl_profiling.watch.suspicion import Suspicion

__all__ = ["Detector"]


class Detector:
    """Judges the summary of every step by those of the steps before it.

    Steps that are captured are not judged: what that costs is in their times.

    Args:
        options: From where on something is a sign.
    """

    def __init__(self, options: Anomaly) -> None:
        self._slowness = Slowness(options)
        self._leading = Leading(options)
        self._growth = Growth(options)
        self._spans = SpanGrowth(options)
        self._before: StepSummary | None = None

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return what is noticed in a step, if anything is; it costs as much as the window is long."""
        if summary.captured:
            self._before = summary
            return None
        found = self._slowness.observe(summary)
        if found is not None:
            found = found.aimed_with(summary, self._before)
            found = self._spans.explained(found, summary, self._before)
        self._spans.observe(summary)
        leading = self._leading.observe(summary, self._before, quiet=found is not None)
        growing = self._growth.observe(summary, quiet=(found or leading) is not None)
        self._before = summary
        return found or leading or growing
