"""The open capture: calls to the workers, their replies,
and the loop's own records of the captured steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.capture.protocol import CaptureRequest, StartReply, StopReply, result_of
from verl_profiling.capture.stage import SpanLog
from verl_profiling.clock import Handshake
from verl_profiling.controller.spmd import HANDSHAKES, Decision, Ranks, measured_clock
from verl_profiling.controller.targets import Call, Roster, Target, Waits, Worker, wait_for
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import (
    CaptureResult,
    HostClock,
    Manifest,
    Rpc,
    StageSpan,
    StepSpan,
    finite_numbers,
)

logger = logging.getLogger(__name__)

NOT_WRITTEN = "the capture has begun, and nothing was written since"


@dataclass
class OpenCapture:
    """The capture that is open.

    Attributes:
        roster: The workers.
        decision: The steps of the capture, and its requester.
        request: The request that was sent to the workers.
        folder: Step folder of the capture.
        ranks: The ranks of the loop, if there are several; each rank captures its own workers.
        leads: Whether this process writes the manifest.
        steps: The begun steps; ``end_ns`` of the current step is 0.
        log: Receives the loop's stages in the steps.
        outside: Receives the pauses for the start and the stop of the capture, and the loop's
            stages after the steps.
        run_notes: Notes on the run for the user, in the manifest.
        notes: Notes on this capture.
        end_ns: Time of the capture's end (ns); 0 before.
        complete: Whether the last step of the capture has ended.
        workers: Placeholder results of the workers; at the end their real results.
        stages: The stages of ``log``, once the capture has ended.
        around: The stages of ``outside``, from the begin of the next step on.
        rpcs: All calls to workers.
    """

    roster: Roster
    decision: Decision
    request: CaptureRequest
    folder: Path
    ranks: Ranks | None
    leads: bool
    steps: list[StepSpan]
    log: SpanLog
    outside: SpanLog
    run_notes: list[str]
    notes: list[str]
    end_ns: int = 0
    complete: bool = False
    workers: list[CaptureResult] = field(default_factory=list)
    stages: list[StageSpan] = field(default_factory=list)
    around: list[StageSpan] = field(default_factory=list)
    rpcs: list[Rpc] = field(default_factory=list)
    _windows: int = 0
    _open: list[tuple[CaptureRequest, list[Target]]] = field(default_factory=list)
    _started: dict[Worker, StartReply | None] = field(default_factory=dict)
    _results: dict[Worker, CaptureResult] = field(default_factory=dict)
    _failures: dict[Worker, CaptureResult] = field(default_factory=dict)
    _handshakes: dict[str, tuple[str, list[Handshake], list[Handshake]]] = field(
        default_factory=dict
    )

    @property
    def step(self) -> StepSpan:
        """The step that began last."""
        return self.steps[-1]

    def goes_on(self, step: int) -> bool:
        """Return whether the capture also covers a later step."""
        return self.step.step < step <= self.decision.step_range.last

    # The loop's part.

    def go_on(self, step: int, policy_version: int | None) -> None:
        """Begin the next step of a capture that covers several."""
        version, notes = whole_version(policy_version)
        self.notes += notes
        self.end_step()
        self.steps.append(StepSpan(step=step, begin_ns=0, end_ns=0, policy_version=version))

    def begin_step(self) -> None:
        """Set the begin of the current step to now."""
        self.steps[-1] = msgspec.structs.replace(self.step, begin_ns=clock.now_ns())

    def end_step(self) -> None:
        """Set the end of the current step to now, unless the step has ended."""
        if not self.step.end_ns:
            self.steps[-1] = msgspec.structs.replace(self.step, end_ns=clock.now_ns())

    def keep(self, metrics: Mapping[str, Any] | None, step: StepSpan | None = None) -> None:
        """Keep the finite numbers among the loop's metrics, and note those that are not finite.

        Args:
            metrics: The metrics.
            step: The step that they belong to; by default the one that began last.
        """
        numbers, notes = finite_numbers(metrics)
        (step or self.step).metrics.update(numbers)
        self.notes += [note for note in notes if note not in self.notes]

    def manifest(self) -> Manifest:
        """Return the manifest with all that is known of the capture so far."""
        end_ns = self.end_ns or self.steps[0].begin_ns
        last_ns = self.step.end_ns or max(end_ns, self.step.begin_ns)
        metrics: dict[str, float] = {}
        for step in self.steps:
            metrics |= step.metrics
        notes = [
            *self.run_notes,
            *self.roster.notes,
            *self.notes,
            *self.log.notes(),
            *self.outside.notes(),
        ]
        return Manifest(
            run_id=self.request.run_id,
            capture_id=self.request.capture_id,
            state="written" if self.end_ns else "begun",
            step=self.request.step,
            steps=[step.step for step in self.steps],
            step_spans=[*self.steps[:-1], msgspec.structs.replace(self.step, end_ns=last_ns)],
            policy_version=self.request.policy_version,
            begin_ns=self.steps[0].begin_ns,
            end_ns=end_ns,
            complete=self.complete,
            controller=WorkerIdentity(role="controller"),
            process=ProcessId.current(),
            stages=self.stages,
            pauses=[*self.log.pauses, *self.outside.pauses],
            outside=self.around or self.outside.so_far(),
            rpcs=list(self.rpcs),
            workers=self.workers,
            clocks=self._clocks(),
            metrics=metrics,
            trigger=self.decision.trigger,
            notes=notes,
        )

    # The calls.

    def start(self, request: CaptureRequest) -> Waits[None]:
        """Start the requested workers.

        At the begin of a rollout, these are the engines in discrete mode; else they are all others.
        """
        targets = self.roster.driven(request.selection, windowed=request.stage is not None)
        self._open.append((request, targets))  # to be stopped even if the start fails
        for target in targets:
            for worker in target.workers:
                self._started[worker] = None
        start_s = self.roster.config.timeouts.start_s
        calls = self.roster.call(targets, "start_capture", request, timeout_s=start_s)
        yield partial(wait_for, calls)
        for call in calls:
            self._take_start(call, request)
        self._note_twins()
        if self.ranks is None or request.selection is None or request.selection.ranks is None:
            self._note_idle_roles(calls)
        yield from self._shake_hands("start_capture", request, targets)

    def begin_rollout(self) -> Waits[None]:
        """Start the rollout engines in discrete mode, which record one rollout."""
        yield from self.stop(ROLLOUT)
        selection = self.request.selection
        if self.roster.driven(selection, windowed=True):
            self._windows += 1
            window = msgspec.structs.replace(
                self.request,
                capture_id=f"{self.request.capture_id}/{self._windows}",
                stage=ROLLOUT,
                occurrence=self._windows,
                step=self.step.step,
            )
            yield from self.start(window)

    def end_rollout(self, metrics: Mapping[str, Any] | None) -> Waits[None]:
        """Stop the engines that :meth:`begin_rollout` started, and keep metrics."""
        self.keep(metrics)
        yield from self.stop(ROLLOUT)

    def stop(self, stage: str | None = None) -> Waits[None]:
        """Stop all started workers concurrently; with a stage,
        only workers that record nothing else.
        """
        stopping = [one for one in self._open if stage in (None, one[0].stage)]
        if not stopping:
            return
        stop_s = self.roster.config.timeouts.stop_s
        calls: dict[Call, CaptureRequest] = {}
        for request, targets in stopping:
            stops = self.roster.call(targets, "stop_capture", request.capture_id, timeout_s=stop_s)
            calls |= dict.fromkeys(stops, request)
        yield partial(wait_for, calls)
        self._open = [one for one in self._open if one not in stopping]
        for call, request in calls.items():
            self._take_stop(call, request)
        asked = [call.target for call in calls]
        yield from self._shake_hands("stop_capture", stopping[0][0].capture_id, asked)

    def _shake_hands(self, method: str, argument: object, targets: Iterable[Target]) -> Waits[None]:
        """Measure the clock offsets of other hosts by repeated calls, which have no further effect.

        One target per clock is called, and each of its workers with this clock adds a handshake.
        """
        asked, here = set(targets), clock.domain()
        reached: Counter[tuple[str, Target]] = Counter()
        for worker, started in self._started.items():
            domain, target = worker.identity.clock_domain, worker.target
            if started is not None and domain != here and target in asked:
                reached[domain, target] += 1
        chosen = dict(reached.keys())
        for turn in range(HANDSHAKES if chosen else 0):
            again = {
                target
                for domain, target in chosen.items()
                if turn * reached[domain, target] < HANDSHAKES
            }
            if not again:
                return
            calls = self.roster.call(
                again, method, argument, timeout_s=self.roster.config.timeouts.start_s
            )
            yield partial(wait_for, calls)
            for call in calls:
                self._take(call, noted=False)

    # The answers.

    def _take_start(self, call: Call, request: CaptureRequest) -> None:
        reply = self._take(call)
        if not isinstance(reply, StartReply):
            self._fail(call.worker, request, call.problem(), stopped=False)
            return
        self._started[call.worker] = reply
        call.worker.identity = reply.identity
        if reply.status == "refused":
            logger.warning(
                "step %d: %s is not captured: %s", request.step, call.worker.identity, reply.reason
            )
            self._failures[call.worker] = self._lost(
                call.worker, request, reply.reason, status="skipped"
            )

    def _take_stop(self, call: Call, request: CaptureRequest) -> None:
        """Keep the reply to ``stop_capture``; a worker
        that replies too late still writes its result file.
        """
        reply, started = self._take(call), self._started[call.worker]
        if not isinstance(reply, StopReply):
            self.roster.owing.add(call.target)
            self._fail(call.worker, request, call.problem())
            return
        result = reply.result
        if started is not None and started.status in ("skipped", "refused"):
            return  # it recorded nothing, as its start reply said
        if started is None and result.status == "skipped":
            return  # its start failed
        if started is not None and reply.process != started.process:
            reason = (
                f"{started.process} recorded, but {reply.process} answered the stop: the "
                "worker was restarted, and its recording is lost"
            )
            self._fail(call.worker, request, reason)
        elif result.status == "skipped" and not result.revision:
            self._fail(call.worker, request, result.reason)  # another capture closed it
        else:
            call.worker.identity = result.identity
            self._results[call.worker] = result
            for artifact in result.artifacts:
                if artifact.status == "pending":
                    self.roster.owing.add(call.target)

    def _take(self, call: Call, noted: bool = True) -> StartReply | StopReply | None:
        """Return the reply to a call; keep its clock handshake and, if ``noted``,
        the call's times.
        """
        reply: StartReply | StopReply = call.reply()
        answered = isinstance(reply, StartReply | StopReply)
        if noted:
            name, end_ns = call.worker.identity.name, call.returned_ns or call.sent_ns
            self.rpcs.append(Rpc(name, call.method, call.sent_ns, end_ns, answered))
        if not answered:
            return None
        identity = reply.identity if isinstance(reply, StartReply) else reply.result.identity
        _, opening, closing = self._handshakes.setdefault(
            identity.clock_domain, (identity.host, [], [])
        )
        handshake = Handshake(call.sent_ns, reply.received_ns, reply.replied_ns, call.returned_ns)
        (opening if isinstance(reply, StartReply) else closing).append(handshake)
        return reply

    def _fail(
        self, worker: Worker, request: CaptureRequest, reason: str, stopped: bool = True
    ) -> None:
        """Record the failure of a worker.

        Unless the worker is ``stopped``, a delayed request may still start it.
        """
        logger.error("step %d: %s was not captured: %s", request.step, worker.identity, reason)
        lost = self._lost(worker, request, reason, stopped=stopped)
        self._failures.setdefault(worker, lost)  # the first holds

    def _note_twins(self) -> None:
        seen: dict[str, WorkerIdentity] = {}
        for worker in self._started:
            own = worker.identity
            twin = seen.setdefault(own.name, own)
            if (twin.host, twin.pid) != (own.host, own.pid):
                self._note(
                    f"two workers are called {twin.name} and overwrite each other: pass "
                    "rank= to init_capture"
                )

    def _note_idle_roles(self, calls: list[Call]) -> None:
        """Add a note for each role whose workers were all called, but none records."""
        reasons: dict[str, list[str]] = {}
        for call in calls:
            started = self._started[call.worker]
            skipped = started is not None and started.status == "skipped"
            reasons.setdefault(call.target.roles[0], []).append(
                started.reason if started and skipped else ""
            )
        for role, found in reasons.items():
            if set(found) == {"not selected"}:
                self._note(
                    f"the selection of ranks or replicas matches none of {len(found)} "
                    f"workers of role {role}"
                )
            elif all(found):
                self._note(
                    f"no worker of role {role} is captured: {', '.join(dict.fromkeys(found))}"
                )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            logger.warning("%s", text)
            self.notes.append(text)

    # What became of it.

    def expected(self) -> list[CaptureResult]:
        """Return one placeholder result per worker, with the artifacts that its start reply lists.

        Placeholders for the other ranks of the loop follow.
        """
        found: dict[str, CaptureResult] = {}
        for target in self.roster.driven(self.request.selection):
            for worker in target.workers:
                started = self._started.get(worker)
                if started is None or started.status in ("recording", "armed"):
                    result = self._failures.get(worker) or self._lost(
                        worker, self.request, NOT_WRITTEN
                    )
                    found.setdefault(result.identity.name, result)
        return [*found.values(), *self.others()]

    def results(self) -> list[CaptureResult]:
        """Return one result per process: its latest, or a result ``failed`` with the reason."""
        found: dict[str, CaptureResult] = {}
        for worker in self._started:
            failure = self._failures.get(worker)
            result = self._results.get(worker, failure)
            if result is None:
                continue
            if failure is not None and result is not failure:  # one of its windows failed
                artifacts = [*result.artifacts, *failure.artifacts]
                result = msgspec.structs.replace(
                    result, status=failure.status, reason=failure.reason, artifacts=artifacts
                )
            name = result.identity.name
            if name not in found or found[name].revision < result.revision:
                found[name] = result
        return list(found.values())

    def others(self) -> list[CaptureResult]:
        """Return empty results for the other ranks of the loop,
        which write the real ones themselves.
        """
        if self.ranks is None:
            return []
        [target, *_] = self.roster.driven(self.request.selection) or self.roster.targets
        model = self._lost(target.workers[0], self.request, NOT_WRITTEN, artifacts=[])
        return self.ranks.expected(model, self.request.selection)

    def _lost(
        self, worker: Worker, request: CaptureRequest, reason: str, **fields: Any
    ) -> CaptureResult:
        role = self.roster.config.for_role(worker.target.roles[0], self.request.selection)
        process, artifacts = None, []
        if (started := self._started.get(worker)) is not None:
            process = started.process
            for one in started.expected:
                one = msgspec.structs.replace(
                    one, status="missing", step=request.step, reason=reason
                )
                artifacts.append(one)
        fields = {"status": "failed", "artifacts": artifacts, **fields}
        roles = list(worker.target.roles)
        return result_of(
            request, role, worker.identity, roles=roles, reason=reason, process=process, **fields
        )

    def _clocks(self) -> list[HostClock]:
        """Return the measured clock offset of each clock domain."""
        clocks = []
        for domain, (host, opening, closing) in self._handshakes.items():
            if domain == clock.domain():
                clocks.append(HostClock(host=host, clock_domain=domain))
            elif opening:
                clocks.append(measured_clock(host, domain, opening, closing))
        return clocks


def whole_version(policy_version: object) -> tuple[int | None, list[str]]:
    """Return a policy version as an integer; ``None`` and a note for another number."""
    try:
        return None if policy_version is None else index(policy_version), []  # type: ignore[arg-type]
    except TypeError:
        return None, [
            f"policy_version is a {type(policy_version).__name__}, not a whole number: left out"
        ]
