"""The capture that is open: what the workers were asked and answered, and the loop's part of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.stage import OpenSpan, SpanLog
from verl_profiling.controller.answers import Answers
from verl_profiling.controller.requests import Decision
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.targets import Round, Target, Waits
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Manifest, StepSpan, finite_numbers
from verl_profiling.settings.limits import Timeouts

__all__ = ["ROLLOUT", "OpenCapture", "OpenStep"]

ROLLOUT = "rollout"
"""The stage that lies between ``on_rollout_begin`` and ``on_rollout_end``."""
HANDSHAKES = 8


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
        decision: The steps that it covers, and who asked for it.
        request: What the workers were asked for.
        answers: The workers' answers.
        steps: The steps that have begun.
        outside: The pauses in which the capture starts and stops, and the loop's stages after the step.
        spans: The controller's stages.
        metrics: Numbers of the loop.
        notes: What a user should know of it.
        rollout_request: The rollout window that is open.
        rollout_span: The stage of the rollout that runs.
    """

    decision: Decision
    request: CaptureRequest
    answers: Answers
    steps: list[OpenStep]
    outside: SpanLog
    notes: list[str]
    roster: Roster
    timeouts: Timeouts
    spans: SpanLog = field(default_factory=SpanLog)
    metrics: dict[str, float] = field(default_factory=dict)
    rollout_request: CaptureRequest | None = None
    rollout_span: OpenSpan | None = None
    _windows: int = 0

    @property
    def step(self) -> OpenStep:
        """The step that began last."""
        return self.steps[-1]

    @property
    def folder(self) -> Path:
        """Its step folder."""
        return Path(self.request.folder)

    def goes_on(self, step: int) -> bool:
        """Return whether the capture covers the step that begins, too."""
        return self.step.step < step <= self.decision.step_range.last

    def start(self, request: CaptureRequest) -> Waits[None]:
        """Start what a request is for: the engines of a rollout window, or all others that are driven."""
        targets = self._concerned(request, self.roster.driven(request.aim))
        self.answers.called(targets)
        round_ = yield from self.roster.ask(targets, "start_capture", request, self.timeouts.start_s)
        self.answers.take_starts(round_, request)
        yield from self._shake_hands(
            "start_capture", request, self.answers.remote_clocks(targets, HANDSHAKES)
        )

    def stop(self) -> Waits[None]:
        """Stop all that was started, at the same time."""
        window, self.rollout_request = self.rollout_request, None
        yield from self._stop(*([window] if window is not None else []), self.request)

    def begin_rollout(self) -> Waits[None]:
        """Open a window on the rollout engines that are captured by stage."""
        yield from self.end_rollout()
        if any(
            self.roster.has_windows(target, self.request.aim)
            for target in self.roster.driven(self.request.aim)
        ):
            self._windows += 1
            self.rollout_request = msgspec.structs.replace(
                self.request,
                capture_id=f"{self.request.capture_id}/{self._windows}",
                stage=ROLLOUT,
                occurrence=self._windows,
                step=self.step.step,
            )
            yield from self.start(self.rollout_request)

    def end_rollout(self) -> Waits[None]:
        """Close that window, and end the stage."""
        self.end_rollout_stage()
        request, self.rollout_request = self.rollout_request, None
        if request is not None:
            yield from self._stop(request)

    def begin_rollout_stage(self, beside: bool = False) -> None:
        """Begin the rollout's stage; one that runs beside this task's has none of its stages inside."""
        begin = self.spans.begin
        self.rollout_span = copy_context().run(begin, ROLLOUT) if beside else begin(ROLLOUT)

    def end_rollout_stage(self) -> None:
        """End the rollout's stage, which may have begun in another task or thread."""
        span, self.rollout_span = self.rollout_span, None
        if span is not None:
            self.spans.end_span(span, failed=False)

    def end_step(self) -> None:
        """Note that the step ends now, unless it has ended."""
        self.step.end_ns = self.step.end_ns or clock.now_ns()

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
            trigger=self.decision.trigger,
            notes=[*notes, *self.notes, *self.answers.notes, *self.spans.notes()],
        )

    def _stop(self, *requests: CaptureRequest) -> Waits[None]:
        stop_s = min(self.timeouts.stop_s, self.roster.most_s)
        remote = self.answers.remote_clocks(self.answers.targets, HANDSHAKES)
        rounds = []
        for request in requests:
            targets = self._concerned(request, self.answers.targets)
            rounds.append(Round(self.roster.send(targets, "stop_capture", request.capture_id), stop_s))
        yield Round([call for round_ in rounds for call in round_.calls], stop_s).wait
        for round_, request in zip(rounds, requests, strict=True):
            self.roster.remember_unanswered(round_)
            self.answers.take_stops(round_, request)
        yield from self._shake_hands("stop_capture", requests[-1].capture_id, remote)

    def _concerned(self, request: CaptureRequest, targets: Iterable[Target]) -> list[Target]:
        windowed = request.stage is not None
        return [target for target in targets if self.roster.has_windows(target, request.aim) is windowed]

    def _shake_hands(self, method: str, argument: object, times: Counter[Target]) -> Waits[None]:
        """Repeat a call, which changes nothing, to measure clocks that are not the controller's.

        Args:
            method: The method.
            argument: Its argument.
            times: How often each target is called; a group can only be called as a whole.
        """
        while times:
            targets, times = list(times), times - Counter(dict.fromkeys(times, 1))
            round_ = yield from self.roster.ask(targets, method, argument, self.timeouts.start_s)
            self.answers.take_handshakes(round_, closing=method == "stop_capture")
