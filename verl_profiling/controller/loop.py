"""The loop as its hooks report it: the order of its steps, and where its stages are recorded."""

from __future__ import annotations

import logging
import threading
from contextvars import Context
from weakref import WeakSet

from verl_profiling.capture.stage import OpenStage, SpanLog, record_pauses
from verl_profiling.controller.watch import Watch
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.settings.schedule import Schedule
from verl_profiling.units import step_list

logger = logging.getLogger(__name__)


class LoopOrder:
    """Tracks the steps and rollouts that the loop has begun and ended.

    Attributes:
        in_step: Whether a step has begun and not ended.
        in_rollout: Whether generation has begun and not ended.
        runs: Whether the loop has begun, and has not ended.
        is_shared: Whether another callback's loop began in this step; if the step then ends, both
            loops run.
        steps: The first and the last step that the loop began; empty before the first one.
    """

    def __init__(self) -> None:
        self.runs = False
        self.steps: list[int] = []
        self.in_step = False
        self.in_rollout = False
        self.is_shared = False
        self._newest: int | None = None
        self._rises = True
        self._captured: set[int] = set()
        self._said: set[str] = set()

    def begin(self, step: int, schedule: Schedule, last_step: int | None) -> None:
        """Record the begin of the loop; warn of a first step after the end of the schedule.

        Args:
            step: The first step.
            schedule: The steps to capture.
            last_step: The last step that may be captured, if there is one.
        """
        self.runs = True
        for other in _running:
            other.is_shared = other.in_step
        _running.add(self)
        # Listed steps are logged at the end.
        if schedule.steps is None and last_step is not None and step > last_step:
            logger.warning(
                "the loop begins with step %d, and the schedule ends with step %d (%s): nothing "
                "is captured; steps count from the first start of a resumed run",
                step,
                last_step,
                schedule.in_words(),
            )

    def end(self) -> None:
        """Record the end of training."""
        self.runs = False
        _running.discard(self)
        self.is_left()

    def step_begins(self, step: int, captured: bool) -> None:
        """Record the begin of a step; warn if the last step has not ended,
        or the number does not rise.
        """
        if self.in_step:
            self._say(
                "step %d begins and step %s has not ended: call on_step_end() last in every step, "
                "or on_exception(error) where it raised",
                step,
                self._newest,
            )
        if self._rises and self._newest is not None and step <= self._newest:
            self._rises = False
            logger.warning(
                "step %d begins after step %d: pass on_step_begin(step) a number that rises over "
                "the whole training, not over an epoch; the schedule chooses steps by it",
                step,
                self._newest,
            )
        self._newest = step
        self.in_step = True
        self.is_shared = False
        if self.steps:
            self.steps[1] = step
        else:
            self.steps = [step, step]
        if captured:
            self._captured.add(step)

    def step_ends(self) -> None:
        """Record the end of a step; warn of one without a begin,
        and of one in which another loop began.
        """
        if not self.in_step:
            self._say(
                "on_step_end without on_step_begin: nothing ends; call on_step_begin(step) first"
            )
        elif self.is_shared:
            self._say(
                "two callbacks of this process are in a step at the same time, and a process is "
                "recorded by one: call the hooks of one callback only"
            )
        self.in_step = False

    def rollout_without_begin(self) -> None:
        """Warn of the end of a rollout without a begin."""
        self._say(
            "on_rollout_end without on_rollout_begin: the rollout has no begin and is in no "
            "timeline; call on_rollout_begin() before generation"
        )

    def is_left(self) -> None:
        """Record that the loop raised or ended; the next loop may begin with any step."""
        self.in_step = False
        self._newest = None

    def train_ends(self, schedule: Schedule, resumes: bool) -> list[int]:
        """Warn of scheduled steps that never began; return those in ``schedule.steps``.

        Args:
            schedule: The steps to capture.
            resumes: Whether an earlier run of the same name may have run the steps before this
                run's first step.
        """
        if not self.steps:
            self._say(
                "training ends and on_step_begin(step) was never called: nothing was captured"
            )
            return []
        ran = "the loop ran from step {} to step {}".format(*self.steps)
        listed = [step for step in schedule.steps or () if step not in self._captured]
        never = [step for step in listed if not resumes or step >= self.steps[0]]
        if never:
            self._say(f"schedule.steps: {step_list(never)} never came; {ran}")
        elif not self._captured and not listed and schedule.steps != ():
            self._say(f"schedule: no step was captured; {ran}, and {schedule.in_words()}")
        return never

    def _say(self, text: str, *arguments: object) -> None:
        """Log a warning, once for each text."""
        if text not in self._said:
            self._said.add(text)
            logger.warning(text, *arguments)


_running: WeakSet[LoopOrder] = WeakSet()
"""The loops of this process that have begun, and have not ended."""


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

    def begin_rollout(self, log: SpanLog) -> None:
        """Begin the stage ``rollout`` in a log."""
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

    def end_watched_step(self, watch: Watch) -> None:
        """End the step for the watch, and with the step an open rollout of the loop itself."""
        if watch.step is not None:
            self.end_rollout(failed=True)
        watch.step_ends()
