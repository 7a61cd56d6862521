"""The tools of one capture while they record: started together, stopped together, each failing alone."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from verl_profiling import clock
from verl_profiling.capture.cost import CostMeter
from verl_profiling.capture.ledger import ArtifactLedger
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.stage import SpanLog
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import RoleConfig
from verl_profiling.tools import Destination, Recording, Tool
from verl_profiling.tools.process_memory import memory_overrun

__all__ = ["RunningTools"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class RunningTool(NamedTuple):
    """A tool that records."""

    tool: Tool
    recording: Recording
    destination: Destination


class RunningTools:
    """Starts, watches and stops the tools of a worker.

    Attributes:
        running: Those that record now.
        metrics: What they counted; of several recordings, the largest.
        truncated: Why a recording was ended before its time; empty if none was.

    Args:
        request: The callback's request.
        role: The worker's settings.
        identity: The worker.
        ledger: Keeps what they write.
        cost: Measures their starts and stops.
        spans: Shows stages in what they record.
        lock: Held while any of them is started or stopped.
    """

    def __init__(
        self,
        request: CaptureRequest,
        role: RoleConfig,
        identity: WorkerIdentity,
        *,
        ledger: ArtifactLedger,
        cost: CostMeter,
        spans: SpanLog,
        lock: threading.RLock,
    ) -> None:
        self.running: list[RunningTool] = []
        self.metrics: dict[str, float] = {}
        self.truncated = ""
        self._looked_s = 0.0
        self._request = request
        self._role = role
        self._identity = identity
        self._ledger = ledger
        self._cost = cost
        self._spans = spans
        self._lock = lock

    @property
    def any_thread(self) -> bool:
        """Whether each that records may be stopped on any thread."""
        return all(running.tool.any_thread for running in self.running)

    def start(self, stage: str | None, occurrence: int) -> None:
        """Start all of them.

        Raises:
            Exception: What one of them raised. Those already started are discarded, and each has its reason.
        """
        destination = self._destination(stage, occurrence)
        with self._cost.starting(stage), self._lock:
            for tool in self._role.tools:
                if (
                    tool.suffix
                    and self._request.keep
                    and (refusal := self._role.limits.no_room(destination.folder))
                ):
                    logger.warning(
                        "%s: step %d: %s: %s", self._identity, self._request.step, tool.name, refusal
                    )
                    self._ledger.skip(tool, destination, refusal)
                    continue
                self._ledger.expect(tool, destination)
                try:
                    recording = tool.start(destination)
                except Exception as error:
                    self._report(tool, destination, "start", error)
                    self._discard()
                    for other in self._role.tools:
                        if other is not tool and other.suffix:
                            reason = f"not recorded, because tool {tool.name} failed to start beside it"
                            self._ledger.fail(other, destination, reason)
                    raise
                self.running.append(RunningTool(tool, recording, destination))
            self._mark_spans()
            self._ledger.begin(stage)

    def skip(self, stage: str, occurrence: int, reason: str) -> None:
        """Note that a stage was not recorded."""
        for tool in self._role.tools:
            self._ledger.skip(tool, self._destination(stage, occurrence), reason)

    def step(self) -> None:
        """Note that a mini-batch is done."""
        with self._lock:
            for running in self.running:
                try:
                    running.recording.step()
                except Exception:
                    logger.exception("%s: tool %s failed in step()", self._identity, running.tool.name)

    def end_what_is_too_large(self) -> None:
        """Stop tools whose recording could not be written otherwise: :attr:`Limits.memory_share`.

        Stages are noted as before, and other tools go on.
        """
        now_s = time.monotonic()
        if not self._request.keep or now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        with self._lock:
            for running in list(self.running):
                if reason := self._overrun(running.recording):
                    step = self._request.step
                    logger.warning("%s: step %d: recording ends: %s", self._identity, step, reason)
                    self.running.remove(running)
                    self._spans.stop_marking()
                    self.truncated = reason
                    with self._cost.stopping(running.destination.stage):
                        self._stop(running, reason)
                    self._mark_spans()

    def _overrun(self, recording: Recording) -> str:
        try:
            needed = recording.bytes_to_stop()
        except Exception:
            logger.exception("%s: a tool does not say how much memory it takes to stop", self._identity)
            return ""
        return memory_overrun(needed, self._role.limits.memory_share, self._request.workers) if needed else ""

    def stop(self) -> None:
        """Stop all of them; an error of one is its artifact's."""
        with self._lock:
            stopping, self.running = self.running, []
            if stopping:
                with self._cost.stopping(stopping[0].destination.stage):
                    for running in stopping:
                        self._stop(running)

    def give_up(self, reason: str) -> None:
        """Discard recordings that cannot be stopped properly, so that the process can record again."""
        for tool, _, destination in self.running:
            self._ledger.fail(tool, destination, reason)
        self._discard()

    def _stop(self, running: RunningTool, truncated: str = "") -> None:
        """Stop one; ``truncated`` says why it ends before its time."""
        tool, recording, destination = running
        end_ns = clock.now_ns()
        try:
            if self._request.keep:
                outputs = recording.stop()
                self._cost.export_s += sum(output.export_s for output in outputs)
                self._ledger.keep(outputs, end_ns, truncated)
                for name, value in recording.metrics().items():
                    self.metrics[name] = max(value, self.metrics.get(name, value))
            else:
                recording.discard()
        except Exception as error:
            self._report(tool, destination, "stop", error)

    def _discard(self) -> None:
        """Discard all recordings, the last one first, whatever one of them raises."""
        discarded, self.running = self.running, []
        for running in reversed(discarded):
            try:
                running.recording.discard()
            except Exception:
                logger.exception("%s: tool %s cannot be stopped", self._identity, running.tool.name)

    def _mark_spans(self) -> None:
        """Show stages in the artifacts of the tools that can."""
        kinds = [marks for running in self.running if (marks := running.recording.marks) is not None]
        if len(kinds) == 1:
            self._spans.begin_mark, self._spans.end_mark = kinds[0]
        elif kinds:
            self._spans.begin_mark = lambda name: [kind.begin(name) for kind in kinds]
            self._spans.end_mark = lambda marks: [
                kind.end(mark) for kind, mark in zip(kinds, marks, strict=True)
            ]

    def _report(self, tool: Tool, destination: Destination, doing: str, error: Exception) -> None:
        """The one failure boundary around tools: log the error once and record it in the artifact."""
        step = self._request.step
        logger.error("%s: tool %s failed to %s in step %d: %s", self._identity, tool.name, doing, step, error)
        self._ledger.fail(tool, destination, f"{doing} raised {type(error).__name__}: {error}")

    def _destination(self, stage: str | None, occurrence: int) -> Destination:
        request = self._request
        metadata: dict[str, Any] = {
            "run_id": request.run_id,
            "capture_id": request.capture_id,
            "step": request.step,
            "policy_version": request.policy_version,
            "stage": stage,
            "worker": msgspec.to_builtins(self._identity),
        }
        lane = self._identity.lane()
        return Destination(
            folder=Path(request.folder), lane=lane, stage=stage, occurrence=occurrence, metadata=metadata
        )
