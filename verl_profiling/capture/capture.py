"""One capture in one process: its recordings, its stage spans, and its result."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from verl_profiling import clock
from verl_profiling.capture.background import Finisher
from verl_profiling.capture.cost import CostMeter
from verl_profiling.capture.ledger import ArtifactLedger
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.recording_thread import OwnerAbsentError, OwnerThread
from verl_profiling.capture.running_tools import RunningTools
from verl_profiling.capture.stage import OpenSpan, SpanLog, StageSink
from verl_profiling.capture.states import TRANSITIONS, Event, State, StateMachine
from verl_profiling.devices import given_devices, used_devices
from verl_profiling.errors import CaptureStateError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult, StageSpan, worst_fate
from verl_profiling.settings.config import RoleConfig
from verl_profiling.tools.peaks import process_peak_bytes
from verl_profiling.trajectories.spans import unrecorded_trajectories

__all__ = ["Capture"]

logger = logging.getLogger(__name__)

HANDOVER_S = 30.0
LOOK_AGAIN_S = 0.2


class Capture:
    """Receives stages (it is a ``StageSink``) and drives the tools of one worker.

    In e2e mode the tools record from :meth:`open` to :meth:`close`. In discrete mode they
    record inside each outermost selected stage; a stage inside it is a span of that artifact.

    Args:
        request: The callback's request.
        role: The worker's settings.
        identity: The worker.
        finisher: Does the background work on artifacts.
        done: Called with the final status of an artifact that was finished in the background.
        handover_s: How long a stop on another thread waits for the thread that owns the recording, in
            seconds.
    """

    def __init__(
        self,
        request: CaptureRequest,
        role: RoleConfig,
        identity: WorkerIdentity,
        finisher: Finisher,
        done: Callable[[Artifact], object],
        handover_s: float = HANDOVER_S,
    ) -> None:
        self.request = request
        self.identity = identity
        self.roles = [identity.role]
        self.notes: list[str] = []
        self._machine = StateMachine(TRANSITIONS, f"step {request.step}, {identity}")
        self._role = role
        self._handover_s = handover_s
        self._whole = role.mode == "e2e" or request.stage is not None
        self._spans = SpanLog()
        self._spans.long_stage_ended = self._stage_ended
        self._lock = threading.RLock()
        self._recorded: OpenSpan | None = None
        self._owner = OwnerThread()
        self._ledger = ArtifactLedger(request, finisher, done)
        self._stages: list[StageSpan] = []
        self._occurrences: Counter[str] = Counter()
        self._skipped: set[str] = set()
        self._anchors = [clock.read_anchor()]
        self._cost = CostMeter()
        self._unrecorded = unrecorded_trajectories()
        self._given = given_devices()
        self._tools = RunningTools(
            request,
            role,
            identity,
            ledger=self._ledger,
            cost=self._cost,
            spans=self._spans,
            lock=self._lock,
        )

    @property
    def state(self) -> State:
        """State of the capture."""
        return self._machine.state

    def open(self) -> list[Artifact]:
        """Start recording, or arm; return the expected artifacts, as far as they are known.

        Raises:
            Exception: Whatever the tool raised; nothing records then.
        """
        if self.request.keep:
            Path(self.request.folder).mkdir(parents=True, exist_ok=True)
        if not self._whole:
            self._machine.move(Event.ARM)
            return []
        self._owner.claim()
        self._tools.start(self.request.stage, self.request.occurrence)
        self._machine.move(Event.START)
        return self._ledger.artifacts()

    @property
    def sink(self) -> StageSink:
        """The receiver of stages: the span log itself, if stages do not start and stop tools."""
        bound = any(not tool.any_thread for tool in self._role.tools)
        return self._spans if self._whole and not bound else self

    def close(self) -> CaptureResult:
        """Stop recording and return the result, of which the tools' errors are a part."""
        try:
            self._on_owner_thread(self._stop_for_good)
        except CaptureStateError as error:
            self._give_up(str(error))
        self._anchors.append(clock.read_anchor())
        return self._result()

    def step(self) -> None:
        """Note that a mini-batch is done."""
        self._owner.serve()
        self._tools.step()
        self._end_what_is_too_large()

    def begin(self, name: str) -> None:
        """Begin a stage; in discrete mode, start the tools for it."""
        if self._owner.waiting:
            self._owner.serve()
        records = self.state is State.ARMED and self._begin_recorded_stage(name)
        span = self._spans.begin(name)
        if records:
            self._recorded = span
        elif self._misses(span):
            self._skip(name)

    def end(self, name: str, failed: bool) -> None:
        """End a stage; in discrete mode, stop the tools that were started for it."""
        span = self._spans.end(name, failed)
        if self._owner.waiting:
            self._owner.serve()
        if span is not None and span is self._recorded and self._may_stop_here():
            with self._lock:
                self._stop_tools()
                self._recorded = None
                if self.state is State.RECORDING:
                    self._machine.move(Event.STAGE_END)

    def _selects(self, name: str) -> bool:
        return self._role.stages is None or name in self._role.stages

    def _misses(self, span: OpenSpan) -> bool:
        """Return whether a selected stage begins beside the one that is recorded, not inside of it.

        Runs of one stage at once share a recording.
        """
        recorded = self._recorded
        if self._whole or recorded is None or recorded.end_ns or recorded.name == span.name:
            return False
        if not self._selects(span.name):
            return False
        outer = span.parent
        while outer is not None and outer is not recorded:
            outer = outer.parent
        return outer is None

    def _skip(self, name: str) -> None:
        """Say, once of each stage, that it was not recorded because another thread's or task's was."""
        with self._lock:
            if name in self._skipped:
                return
            self._skipped.add(name)
            recorded = self._recorded
            self._occurrences[name] += 1
            other = recorded.name if recorded is not None else "another stage"
            reason = f"stage {other!r} of another thread or task was being recorded; a process records one"
            self._tools.skip(name, self._occurrences[name], reason)

    def _may_stop_here(self) -> bool:
        return self._owner.is_current() or self._tools.any_thread

    def _begin_recorded_stage(self, name: str) -> bool:
        """Start the tools if the stage is selected and no other thread did; return whether."""
        if not self._selects(name):
            return False
        with self._lock:
            if self.state is not State.ARMED:
                return False
            self._occurrences[name] += 1
            try:
                self._owner.claim()
                self._tools.start(name, self._occurrences[name])
            except Exception:
                self._machine.move(Event.FAIL)
                return False
            self._machine.move(Event.STAGE_BEGIN)
            return True

    def _stop_for_good(self) -> None:
        with self._lock:
            self._stop_tools()
            if self.state is not State.IDLE:
                self._machine.move(Event.STOP)

    def _stop_tools(self) -> None:
        with self._lock:
            self._spans.stop_marking()
            if self._whole:
                self._stages += self._spans.close()
            self._tools.stop()

    def _stage_ended(self, stage: str) -> None:
        if self._whole:  # else the recording ends now anyway
            self._end_what_is_too_large()
        self._tools.metrics[f"stage/{stage}/process_peak_rss_bytes"] = float(process_peak_bytes())

    def _end_what_is_too_large(self) -> None:
        if self._may_stop_here():
            self._tools.end_what_is_too_large()

    def _give_up(self, reason: str) -> None:
        """Discard recordings that cannot be stopped properly, so that the process can record again."""
        logger.error("%s: %s", self.identity, reason)
        with self._lock:
            self._tools.give_up(reason)
            self._stop_for_good()

    def _on_owner_thread(self, action: Callable[[], None]) -> None:
        """Run ``action`` here, or on the thread that owns the recording if a tool requires that.

        Raises:
            CaptureStateError: That thread did not run it.
        """
        deadline = time.monotonic() + self._handover_s
        while True:
            with self._lock:  # a stage may be starting a recording on another thread
                if self._may_stop_here():
                    action()
                    return
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                self._owner.hand_over(action, min(left_s, LOOK_AGAIN_S))
                return
            except OwnerAbsentError as absence:
                alive = self._owner.is_alive()
                if alive and left_s:
                    continue
                why = f"which passed no stage for {self._handover_s:.1f} s" if alive else "which has ended"
                raise CaptureStateError(
                    f"stop_capture(step={self.request.step}) arrived on another thread than the one that "
                    f"started recording, {why} ({self.identity}); start and stop on one thread"
                ) from absence

    def _result(self) -> CaptureResult:
        stages = self._stages if self._whole else self._spans.close()
        artifacts = self._ledger.artifacts()
        status, reason = worst_fate(artifacts)
        if status == "ok" and self._tools.truncated:
            status, reason = "truncated", self._tools.truncated
        if not self.request.keep:
            status, reason, artifacts = "skipped", "warm-up", []
        elif artifacts and all(artifact.status == "skipped" for artifact in artifacts):
            status, reason = "skipped", artifacts[0].reason
        elif not self._whole and not artifacts and any(tool.suffix for tool in self._role.tools):
            ran = ", ".join(sorted({span.name for span in stages})) or "none"
            wanted = "any" if self._role.stages is None else ", ".join(sorted(self._role.stages))
            asked = self.request.aim is not None and self.request.aim.stages is not None
            status = "skipped" if asked else "empty"  # who asks for a stage need not know who runs it
            reason = f"no selected stage ran (selected: {wanted}; ran: {ran})"
        return CaptureResult(
            identity=self.identity,
            roles=self.roles,
            capture_id=self.request.capture_id,
            step=self.request.step,
            mode=self._role.mode,
            tools=[tool.name for tool in self._role.tools],
            status=status,
            reason=reason,
            artifacts=artifacts,
            stages=stages,
            notes=[*self.notes, *self._spans.notes(), *self._trajectory_notes()],
            metrics=self._tools.metrics,
            anchors=self._anchors,
            cost=self._cost.cost(),
            tool_spans=self._cost.spans,
            cores=os.cpu_count() or 0,
            devices=used_devices() or self._given,
        )

    def _trajectory_notes(self) -> list[str]:
        missed = unrecorded_trajectories() - self._unrecorded
        if not missed or any(tool.name == "trajectories" for tool in self._role.tools):
            return []
        role = self.identity.role
        return [
            f"{missed:,} trajectories began here and were not recorded: inherit AgentLoopCaptureMixin, or "
            f"add trajectories to the tool of role {role}"
        ]
