"""The state of the training loop, as its hooks report it.

:class:`LoopOrder` checks the order of steps, :class:`LoopStages` has the open stages, and
:class:`OpenCapture` collects what the manifest of a capture needs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any
from weakref import WeakSet

from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.capture.stage_spans import OpenStage, SpanLog, record_pauses
from verl_profiling.controller.captured_workers import CapturedWorkers
from verl_profiling.controller.watch import Watch
from verl_profiling.controller.worker_calls import Waits
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import (
    CUT_SHORT,
    CaptureResult,
    Manifest,
    StageSpan,
    StepSpan,
    finite_numbers,
)
from verl_profiling.settings.schedule import Decision, Schedule
from verl_profiling.tools.trajectories import statuses_between
from verl_profiling.trajectories.spans import later_statuses
from verl_profiling.units import step_list

logger = logging.getLogger(__name__)


class LoopOrder:
    """Tracks the steps and rollouts that the loop has begun and ended.

    Attributes:
        in_step: Whether a step has begun and not ended.
        in_rollout: Whether generation has begun and not ended.
        runs: Whether the loop has begun, and has not ended.
        is_shared: Whether a loop with another callback began during this step. If this step ends
            normally, two loops run at once, of which a process can record only one.
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
        # Steps of schedule.steps that never came are logged at the end of training.
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
        """Record the end of a step; warn of a step without a begin, or with another loop in it."""
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
        sink: Receiver of the loop's stages: a log for the watch, for a capture (until the next step
            begins), or for both; ``None`` if nothing is recorded.
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
        """Return a receiver that passes stages to the watch only; ``None`` without a watch."""
        return None if self._watch is None else SpanLog(self, self._watch.sums, None)

    def pass_to(self, log: SpanLog | None) -> None:
        """Record the stages and pauses from now on in a log; ``None`` records nothing."""
        if log is not None and self._watch is not None:
            log.sums = self._watch.sums
        self.sink = log
        record_pauses(self, log)

    def watch_only(self) -> None:
        """Record the stages from now on for the watch only, in no capture."""
        self.pass_to(self.watched())

    def begin_rollout(self, log: SpanLog) -> None:
        """Begin the stage ``rollout`` in a log."""
        if self.rollout is not None:
            self._end(failed=False)
        self.rollout = log.begin(ROLLOUT)

    def end_rollout(self, failed: bool = False) -> None:
        """End the stage ``rollout``, unless batches in the background of the steps keep it open."""
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
        """End the stage ``rollout`` of batches in the background, and begin it for the watch."""
        with self._lock:
            if self.generations:
                self._end(failed=False)
                self._begin_generation(self.watched())

    def record_generation(self) -> None:
        """Begin the stage ``rollout`` of batches in the background, if nothing recorded before."""
        with self._lock:
            if self.generations and self.rollout is None:
                self._begin_generation(self.sink)

    def _begin_generation(self, log: SpanLog | None) -> None:
        if log is not None:
            # In an empty context, so that no stage of this task nests inside it.
            self.rollout = Context().run(log.begin, ROLLOUT)

    def end_watched_step(self, watch: Watch) -> None:
        """End the step for the watch, and with the step an open rollout of the loop itself."""
        if watch.step is not None and self.rollout is not None:
            self.end_rollout(failed=True)
        watch.step_ends()


@dataclass
class OpenCapture:
    """The capture that is open.

    Attributes:
        workers: The workers that take part.
        decision: The steps of the capture, and its requester.
        folder: Step folder of the capture.
        steps: The begun steps; ``end_ns`` of the current step is 0.
        log: Receives the loop's stages in the steps.
        around_log: Receives the pauses for the start and the stop of the capture, and the loop's
            stages after the steps.
        run_notes: Notes on the run for the user, in the manifest.
        end_ns: Time of the capture's end (ns); 0 before.
        complete: Whether the last step of the capture has ended.
        results: Placeholder results of the workers; at the end their real results.
        stages: The stages of ``log``, once the capture has ended.
        around: The stages of ``around_log``, from the begin of the next step on.
    """

    workers: CapturedWorkers
    decision: Decision
    folder: Path
    steps: list[StepSpan]
    log: SpanLog
    around_log: SpanLog
    run_notes: list[str]
    end_ns: int = 0
    complete: bool = False
    results: list[CaptureResult] = field(default_factory=list)
    stages: list[StageSpan] = field(default_factory=list)
    around: list[StageSpan] = field(default_factory=list)

    @property
    def request(self) -> CaptureStart:
        """The request that was sent to the workers."""
        return self.workers.request

    @property
    def leads(self) -> bool:
        """Whether this process writes the manifest: in a loop of several ranks, rank 0 does."""
        ranks = self.workers.ranks
        return self.request.keep and (ranks is None or ranks.leads)

    @property
    def notes(self) -> list[str]:
        """Notes on this capture."""
        return self.workers.notes

    @property
    def step(self) -> StepSpan:
        """The step that began last."""
        return self.steps[-1]

    @property
    def in_last_step(self) -> bool:
        """Whether the capture covers no step after the one that began last."""
        return self.step.step >= self.decision.step_range.last

    def goes_on(self, step: int) -> bool:
        """Return whether the capture also covers a later step."""
        return self.step.step < step <= self.decision.step_range.last

    def go_on(self, step: int, policy_version: int | None) -> None:
        """Begin the next step of a capture that covers several."""
        version, notes = whole_version(policy_version)
        self.notes.extend(notes)
        self.end_step()
        self.steps.append(StepSpan(step=step, begin_ns=0, end_ns=0, policy_version=version))

    def begin_step(self) -> None:
        """Set the begin of the current step to now."""
        self.steps[-1] = replace(self.step, begin_ns=clock.now_ns())

    def end_step(self) -> None:
        """Set the end of the current step to now, unless the step has ended."""
        if not self.step.end_ns:
            self.steps[-1] = replace(self.step, end_ns=clock.now_ns())

    def keep(self, metrics: Mapping[str, Any] | None, step: StepSpan | None = None) -> None:
        """Keep the finite numbers among the loop's metrics, and note those that are not finite.

        Args:
            metrics: The loop's metrics, by name.
            step: The step that they belong to; by default the step that began last.
        """
        numbers, notes = finite_numbers(metrics)
        (step or self.step).metrics.update(numbers)
        self.notes.extend(note for note in notes if note not in self.notes)

    def manifest(self) -> Manifest:
        """Return the manifest with all that is known of the capture so far."""
        end_ns = self.end_ns or self.steps[0].begin_ns
        last_ns = self.step.end_ns or max(end_ns, self.step.begin_ns)
        metrics: dict[str, float] = {}
        for step in self.steps:
            metrics |= step.metrics
        notes = [
            *self.run_notes,
            *self.workers.roster.notes,
            *self.notes,
            *self.log.notes(),
            *self.around_log.notes(),
        ]
        return Manifest(
            run_id=self.request.run_id,
            capture_id=self.request.capture_id,
            state="written" if self.end_ns else "begun",
            step=self.request.step,
            steps=[step.step for step in self.steps],
            step_spans=[*self.steps[:-1], replace(self.step, end_ns=last_ns)],
            policy_version=self.request.policy_version,
            begin_ns=self.steps[0].begin_ns,
            end_ns=end_ns,
            complete=self.complete,
            controller=WorkerIdentity(role="controller"),
            process=ProcessId.current(),
            stages=self.stages,
            pauses=[*self.log.pauses, *self.around_log.pauses],
            around_the_step=self.around or self.around_log.so_far(),
            rpcs=list(self.workers.rpcs),
            workers=self.results,
            clocks=self.workers.clocks(),
            metrics=metrics,
            trigger=self.decision.trigger,
            notes=notes,
            statuses=statuses_between(self.steps[0].begin_ns, end_ns) if later_statuses else [],
        )

    def end_rollout(self, metrics: Mapping[str, Any] | None) -> Waits[None]:
        """Stop the rollout engines in discrete mode, and keep metrics."""
        self.keep(metrics)
        yield from self.workers.stop(ROLLOUT)

    def expect(self) -> None:
        """Set the results to placeholders, while the workers record."""
        self.results = self.workers.expected()

    def is_cut_short(self, why: str) -> None:
        """Note why the last step of the capture was not recorded to its end."""
        self.complete = False
        self.notes.append(f"{CUT_SHORT}: {why}")

    def close(self, why: str) -> Waits[list[CaptureResult]]:
        """End the capture: stop all workers, and keep their results.

        Args:
            why: Reason why the step has not ended; empty if the step has ended.

        Returns:
            The results of the workers of this process.
        """
        workers = self.workers
        ranks = workers.ranks
        self.end_ns = self.step.end_ns or clock.now_ns()
        self.complete = True
        if why:
            self.is_cut_short(why)
        self.stages = self.stages or self.log.close()  # Ctrl-C may interrupt, and the close repeat
        yield from workers.stop()
        results = workers.results()
        workers.roster.check_results(results, self.stages, self.decision.selection)
        if ranks is not None:
            notes = [*workers.roster.notes, *self.notes]
            self.stages, results = ranks.joined(self.stages, results, notes, why)
        if self.leads:
            self.results = [*results, *workers.others()]
        return results


def whole_version(policy_version: object) -> tuple[int | None, list[str]]:
    """Return a policy version as an integer; ``None`` and a note if it is no whole number."""
    try:
        return None if policy_version is None else index(policy_version), []  # type: ignore[arg-type]
    except TypeError:
        return None, [
            f"policy_version is a {type(policy_version).__name__}, not a whole number: left out"
        ]
