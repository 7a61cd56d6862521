"""The start-up of a job as a step: from its submission to the begin of the first step."""

from __future__ import annotations

import logging
from pathlib import Path

from verl_profiling import clock
from verl_profiling.files.process_marks import START_UP, SUBMIT, created_ns, submitted_ns
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.watch.process_sums import Begun, StageSums
from verl_profiling.watch.start_marks import add_marks

logger = logging.getLogger(__name__)

_has_started = False


class StartUp:
    """The start-up, which the watch reads from all processes as it reads a step.

    Only the first loop of a process starts with the process.

    Attributes:
        run: Folder of the run; ``None`` in a process that does not log steps.
    """

    def __init__(self) -> None:
        self.run: Path | None = None
        self._begin_ns = clock.now_ns()
        self._is_over = False
        self._is_first = not _has_started

    def end(self, step: int, sums: StageSums) -> list[StepSummary]:
        """Return the start-up as a step, at the begin of the first step; nothing later on.

        Args:
            step: Number of the first step.
            sums: The stages of the loop's process.
        """
        global _has_started
        if self._is_over:
            return []
        self._is_over = _has_started = True
        if self._is_first:
            self._begin_ns = created_ns() or self._begin_ns
            submitted = submitted_ns()
            if submitted is not None and submitted < self._begin_ns:
                sums.end(Begun(SUBMIT, submitted), self._begin_ns)
                self._begin_ns = submitted
        end_ns = clock.now_ns()
        add_marks(sums, end_ns)
        summary = StepSummary(step=step - 1, begin_ns=self._begin_ns, end_ns=end_ns)
        summary.is_start_up = True
        return [summary]

    def written(self, steps: list[StepSummary]) -> list[StepSummary]:
        """Write the start-up into the folder of the run; return the other steps."""
        if not steps or not steps[0].is_start_up:
            return steps
        if self.run is not None:
            try:
                write_json_atomically(self.run / START_UP, steps[0])
            except OSError as error:
                logger.warning("the start-up is not written: %s", error)
        return steps[1:]
