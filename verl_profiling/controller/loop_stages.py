"""The stages of the loop's process: where they are recorded, and the stage ``rollout``."""

from __future__ import annotations

import threading
from contextvars import Context

from verl_profiling.capture.stage import OpenStage, SpanLog, record_pauses
from verl_profiling.controller.watch import Watch
from verl_profiling.files.step_summary import ROLLOUT


class LoopStages:
    """The stages of the loop. Other tasks and threads may end the stage ``rollout``.

    Args:
        watch: The watch, if it is on.

    Attributes:
        sink: Receiver of the stages: the watch, and the log of a capture until the next step; else
            ``None``.
        rollout: The open stage ``rollout``.
        generations: Number of batches that are generated in the background of the steps.
    """

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self.rollout: OpenStage | None = None
        self.generations = 0
        self._lock = threading.Lock()  # guards the stage of generation in the background
        self.sink: SpanLog | None = self.watched()

    def watched(self) -> SpanLog | None:
        """Return the receiver of stages outside of captures; ``None`` without a watch."""
        return None if self._watch is None else SpanLog(self, self._watch.sums, None)

    def pass_to(self, log: SpanLog | None) -> None:
        """Record the stages from now on in a log; ``None`` records nothing."""
        if log is not None and self._watch is not None:
            log.sums = self._watch.sums
        self.sink = log
        self.record_pauses()

    def watch_only(self) -> None:
        """Record the stages from now on in no capture."""
        self.pass_to(self.watched())

    def record_pauses(self) -> None:
        """Record pauses of the process as long as stages are recorded."""
        record_pauses(self, self.sink)

    def record_no_pauses(self) -> None:
        """Record no more pauses, as training ends."""
        record_pauses(self, None)

    def begin_rollout(self, log: SpanLog | None) -> None:
        """Begin the stage ``rollout`` in a log, if there is one."""
        if log is not None:
            self._end(failed=False)
            self.rollout = log.begin(ROLLOUT)

    def end_rollout(self, failed: bool = False) -> None:
        """End the stage ``rollout`` of the loop itself, if it is open."""
        if not self.generations:
            self._end(failed)

    def _end(self, failed: bool) -> None:
        """End the stage ``rollout``, even if another task or thread began it."""
        rollout, self.rollout = self.rollout, None
        if rollout is not None:
            rollout.end(failed)

    def go_to_background(self) -> None:
        """Note that generation overlaps the steps, and the loop does not wait for it."""
        if self._watch is not None:
            self._watch.background = (ROLLOUT,)

    def begin_generation(self, is_captured: bool) -> None:
        """Begin a batch in the background of the steps: the first one opens the stage.

        Args:
            is_captured: Whether a captured step is open; else only the watch records the stage.
        """
        self.go_to_background()
        with self._lock:
            self.generations += 1
            if self.generations == 1:
                self._begin_generation(self.sink if is_captured else self.watched())

    def end_generation(self) -> None:
        """End a batch in the background of the steps: the last one ends the stage."""
        with self._lock:
            self.generations = max(0, self.generations - 1)
            self.end_rollout()

    def renew_generation(self) -> None:
        """End the stage of generation in the background, and begin it again for the watch."""
        with self._lock:
            if self.generations:
                self._end(failed=False)
                self._begin_generation(self.watched())

    def record_generation(self) -> None:
        """Begin the stage of generation, if nothing recorded when its first batch began."""
        with self._lock:
            if self.generations and self.rollout is None:
                self._begin_generation(self.sink)

    def _begin_generation(self, log: SpanLog | None) -> None:
        if log is not None:
            # No stage of this task nests inside it.
            self.rollout = Context().run(log.begin, ROLLOUT)

    def end_watched_step(self) -> None:
        """End the step for the watch, and with the step an open rollout of the loop itself."""
        watch = self._watch
        if watch is None:
            return
        if watch.step is not None:
            self.end_rollout(failed=True)
        watch.step_ends()
