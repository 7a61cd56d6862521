"""One capture in one process: its recordings, its stage spans, and its result."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from verl_profiling import clock
from verl_profiling.capture.finishing import BackgroundWork
from verl_profiling.capture.messages import CaptureRequest, result_of
from verl_profiling.capture.recordings import Recordings
from verl_profiling.capture.stage import OpenSpan, SpanLog, StageSink
from verl_profiling.devices import given_devices, used_devices
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

    Some tools must be stopped on the thread that started them, the owner. A stop that arrives elsewhere
    waits until the owner passes a stage.

    Attributes:
        state: ``armed`` waits for a stage that is selected.
        completions: Enter into the result what other parts of the process know.

    Args:
        request: The callback's request.
        role: The worker's settings.
        identity: The worker.
        background: Does the rest of the work on artifacts.
        done: Called with the status of an artifact that was finished in the background, or left by a stage.
        handover_s: How long a stop on another thread waits for the owner, in seconds.
    """

    def __init__(
        self,
        request: CaptureRequest,
        role: RoleConfig,
        identity: WorkerIdentity,
        background: BackgroundWork,
        done: Callable[[Artifact], object],
        handover_s: float = HANDOVER_S,
    ) -> None:
        self.request = request
        self.identity = identity
        self.roles = [identity.role]
        self.notes: list[str] = []
        self.completions: list[Callable[[CaptureResult], CaptureResult]] = []
        self.state: Literal["armed", "recording", "closed"] = "armed"
        self._role = role
        self._handover_s = handover_s
        self._whole = role.mode == "e2e" or request.stage is not None
        self._spans = SpanLog()
        self._spans.long_stage_ended = self._stage_ended
        self._recorded: OpenSpan | None = None
        self._owner = 0
        self._stop_asked = False
        self._stopped = threading.Event()
        self._stages: list[StageSpan] = []
        self._occurrences: Counter[str] = Counter()
        self._skipped: set[str] = set()
        self._anchors = [clock.read_anchor()]
        self._unrecorded = unrecorded_trajectories()
        self._given = given_devices()
        self._tools = Recordings(request, role, identity, self._spans, background, done)

    def open(self) -> list[Artifact]:
        """Start recording, or arm; return the expected artifacts, as far as they are known.

        Raises:
            Exception: Whatever the tool raised; nothing records then.
        """
        if self.request.keep:
            Path(self.request.folder).mkdir(parents=True, exist_ok=True)
        if self._whole:
            self._owner = threading.get_native_id()
            self._tools.start(self.request.stage, self.request.occurrence)
            self.state = "recording"
        return self._tools.artifacts()

    @property
    def sink(self) -> StageSink:
        """The receiver of stages: the span log itself, if stages do not start and stop tools."""
        bound = any(not tool.any_thread for tool in self._role.tools)
        return self._spans if self._whole and not bound else self

    def close(self) -> CaptureResult:
        """Stop recording and return the result, of which the tools' errors are a part."""
        if problem := self._stop_on_owner_thread():
            logger.error("%s: %s", self.identity, problem)
            with self._tools.lock:
                self._tools.give_up(problem)
                self._stop_for_good()
        self._anchors.append(clock.read_anchor())
        return self._result()

    def step(self) -> None:
        """Note that a mini-batch is done."""
        self._serve()
        self._tools.step()
        self._end_what_is_too_large()

    def begin(self, name: str) -> None:
        """Begin a stage; in discrete mode, start the tools for it."""
        if self._stop_asked:
            self._serve()
        records = self.state == "armed" and self._begin_recorded_stage(name)
        span = self._spans.begin(name)
        if records:
            self._recorded = span
        elif self._misses(span):
            self._skip(name)

    def end(self, name: str, failed: bool) -> None:
        """End a stage; in discrete mode, stop the tools that were started for it."""
        span = self._spans.end(name, failed)
        if self._stop_asked:
            self._serve()
        if span is not None and span is self._recorded and self._may_stop_here():
            with self._tools.lock:
                self._stop_tools()
                self._recorded = None
                if self.state == "recording":
                    self.state = "armed"

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
        with self._tools.lock:
            if name in self._skipped:
                return
            self._skipped.add(name)
            recorded = self._recorded
            self._occurrences[name] += 1
            other = recorded.name if recorded is not None else "another stage"
            reason = f"stage {other!r} of another thread or task was being recorded; a process records one"
            self._tools.skip(name, self._occurrences[name], reason)

    def _begin_recorded_stage(self, name: str) -> bool:
        """Start the tools if the stage is selected and no other thread did; return whether."""
        if not self._selects(name):
            return False
        with self._tools.lock:
            if self.state != "armed":
                return False
            self._occurrences[name] += 1
            self._owner = threading.get_native_id()
            try:
                self._tools.start(name, self._occurrences[name])
            except Exception:
                return False
            self.state = "recording"
            return True

    def _stop_for_good(self) -> None:
        with self._tools.lock:
            self._stop_tools()
            self.state = "closed"

    def _stop_tools(self) -> None:
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

    def _may_stop_here(self) -> bool:
        return self._owner == threading.get_native_id() or self._tools.any_thread

    def _serve(self) -> None:
        """Stop, if that was asked for on another thread, and this one may."""
        if self._stop_asked and self._may_stop_here():
            self._stop_asked = False
            self._stop_for_good()
            self._stopped.set()

    def _stop_on_owner_thread(self) -> str:
        """Stop here, or wait for the thread that owns the recording; return why neither was possible."""
        deadline_s = time.monotonic() + self._handover_s
        while True:
            with self._tools.lock:  # a stage may be starting a recording on another thread
                if self._may_stop_here():
                    self._stop_for_good()
                    return ""
                self._stop_asked = True
            if self._stopped.wait(LOOK_AGAIN_S):
                return ""
            tasks = Path("/proc/self/task")  # by its native id, because Python's own are reused at once
            ended = tasks.exists() and not (tasks / str(self._owner)).exists()
            if not ended and time.monotonic() < deadline_s:
                continue
            with self._tools.lock:
                self._stop_asked = False
            why = "which has ended" if ended else f"which passed no stage for {self._handover_s:.1f} s"
            return (
                f"stop_capture(step={self.request.step}) arrived on another thread than the one that "
                f"started recording, {why} ({self.identity}); start and stop on one thread"
            )

    def _result(self) -> CaptureResult:
        stages = self._stages if self._whole else self._spans.close()
        artifacts = self._tools.artifacts()
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
        return result_of(
            self.request,
            self._role,
            self.identity,
            roles=self.roles,
            status=status,
            reason=reason,
            artifacts=artifacts,
            stages=stages,
            notes=[*self.notes, *self._spans.notes(), *self._trajectory_notes()],
            metrics=self._tools.metrics,
            anchors=self._anchors,
            cost=self._tools.cost.cost(),
            tool_spans=self._tools.cost.spans,
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
