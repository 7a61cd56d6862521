"""What the controller knows of the capture that is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.metrics import finite_numbers
from verl_profiling.capture.stage import OpenSpan, SpanLog
from verl_profiling.controller.answers import Answers
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Manifest, StepSpan
from verl_profiling.settings.schedule import StepRange
from verl_profiling.trigger import Trigger

__all__ = ["ROLLOUT", "OpenCapture", "OpenStep"]

ROLLOUT = "rollout"
"""The stage that lies between ``on_rollout_begin`` and ``on_rollout_end``."""


@dataclass
class OpenStep:
    """One step of the capture; ``end_ns`` is 0 while it runs."""

    step: int
    policy_version: int | None
    begin_ns: int
    end_ns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class OpenCapture:
    """The capture that is open.

    Attributes:
        step_range: The steps that it covers.
        trigger: Who asked for it.
        request: What the workers were asked for.
        folder: Its step folder.
        answers: The workers' answers.
        steps: The steps that have begun.
        rollout_requests: The requests of the rollout windows that are still to come.
        outside: The pauses in which the capture starts and stops, and the loop's stages after the step.
        spans: The controller's stages.
        metrics: Numbers of the loop.
        notes: What a user should know of it.
        rollout_request: The rollout window that is open.
        rollout_span: The stage of the rollout that runs.
    """

    step_range: StepRange
    trigger: Trigger
    request: CaptureRequest
    folder: Path
    answers: Answers
    steps: list[OpenStep]
    rollout_requests: Iterator[CaptureRequest]
    outside: SpanLog
    spans: SpanLog = field(default_factory=SpanLog)
    metrics: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rollout_request: CaptureRequest | None = None
    rollout_span: OpenSpan | None = None

    @property
    def step(self) -> OpenStep:
        """The step that began last."""
        return self.steps[-1]

    def manifest(self, controller: WorkerIdentity, end_ns: int, notes: list[str]) -> Manifest:
        """Return what is known but for the workers' results: the manifest of a step that has not ended.

        Args:
            controller: The process that runs the loop.
            end_ns: When the step ended.
            notes: Notes on the run.
        """
        return Manifest(
            run_id=self.request.run_id,
            capture_id=self.request.capture_id,
            step=self.request.step,
            steps=[step.step for step in self.steps],
            step_spans=[
                StepSpan(
                    step=step.step,
                    begin_ns=step.begin_ns,
                    end_ns=step.end_ns or max(end_ns, step.begin_ns),
                    policy_version=step.policy_version,
                    metrics=dict(step.metrics),
                )
                for step in self.steps
            ],
            policy_version=self.request.policy_version,
            begin_ns=self.steps[0].begin_ns,
            end_ns=end_ns,
            complete=False,
            controller=controller,
            outside=self.outside.so_far(),
            rpcs=list(self.answers.rpcs),
            clocks=self.answers.clocks(),
            metrics=dict(self.metrics),
            trigger=self.trigger,
            notes=[*notes, *self.notes, *self.answers.notes, *self.spans.notes()],
        )

    def keep(self, metrics: Mapping[str, Any] | None, step: int | None = None) -> None:
        """Keep the finite numbers among the loop's metrics, and name the others.

        Args:
            metrics: The metrics.
            step: The step that they are of; ``None`` for the one that began last.
        """
        numbers, notes = finite_numbers(metrics)
        owner = next((one for one in self.steps if one.step == step), self.step)
        owner.metrics.update(numbers)
        self.metrics.update(numbers)
        self.notes += notes

    def begin_rollout(self, beside: bool = False) -> None:
        """Begin the rollout's stage; one that runs beside this task's has none of its stages inside."""
        begin = self.spans.begin
        self.rollout_span = copy_context().run(begin, ROLLOUT) if beside else begin(ROLLOUT)

    def end_rollout(self) -> None:
        """End the rollout, which may have begun in another task or thread."""
        span, self.rollout_span = self.rollout_span, None
        if span is not None:
            self.spans.end_span(span, failed=False)
