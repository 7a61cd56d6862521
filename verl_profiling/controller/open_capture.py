"""The open capture: the loop's own records of the captured steps, and the manifest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.capture.stage import SpanLog
from verl_profiling.controller.captured_workers import CapturedWorkers
from verl_profiling.controller.targets import Waits
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
from verl_profiling.settings.schedule import Decision

logger = logging.getLogger(__name__)


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
        """Whether this process writes the manifest."""
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
            metrics: The metrics.
            step: The step that they belong to; by default the one that began last.
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
        )

    def begin_rollout(self) -> Waits[None]:
        """Start the rollout engines in discrete mode, which record one rollout."""
        yield from self.workers.begin_rollout(self.step.step)

    def end_rollout(self, metrics: Mapping[str, Any] | None) -> Waits[None]:
        """Stop the engines that :meth:`begin_rollout` started, and keep metrics."""
        self.keep(metrics)
        yield from self.workers.stop(ROLLOUT)

    def expect(self) -> None:
        """Set the results to placeholders, while the workers record."""
        self.results = self.workers.expected()

    def is_cut_short(self, why: str) -> None:
        """Note why the last step of the capture is not whole."""
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
    """Return a policy version as an integer; ``None`` and a note for another number."""
    try:
        return None if policy_version is None else index(policy_version), []  # type: ignore[arg-type]
    except TypeError:
        return None, [
            f"policy_version is a {type(policy_version).__name__}, not a whole number: left out"
        ]
