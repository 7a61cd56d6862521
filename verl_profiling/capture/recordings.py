"""The recordings of one capture: tools are started together and stopped together, and each fails alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from verl_profiling import clock
from verl_profiling.capture.finishing import BackgroundWork, finish
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.stage import SpanLog
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureCost, ToolSpan
from verl_profiling.settings.config import RoleConfig
from verl_profiling.tools import Destination, Output, Recording, Tool
from verl_profiling.tools.process_memory import memory_overrun

__all__ = ["CostMeter", "Recordings"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class CostMeter:
    """Measures the starts and stops of one capture's tools.

    Attributes:
        spans: When tools were started and stopped, in order of their end.
        export_s: Seconds that writing took; a part of the stops.
    """

    def __init__(self) -> None:
        self.spans: list[ToolSpan] = []
        self.export_s = 0.0
        self._seconds = {"start": 0.0, "stop": 0.0}

    @contextmanager
    def measured(self, name: Literal["start", "stop"], stage: str | None) -> Iterator[None]:
        """Measure a start or stop; ``stage`` is what is recorded, in discrete mode."""
        begin_ns, begin = clock.now_ns(), time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begin
            self.spans.append(ToolSpan(name, begin_ns, clock.now_ns(), stage))

    def cost(self) -> CaptureCost:
        """Return the seconds so far."""
        return CaptureCost(
            start_s=self._seconds["start"], stop_s=self._seconds["stop"], export_s=self.export_s
        )


class _Running(NamedTuple):
    tool: Tool
    recording: Recording
    destination: Destination


class Recordings:
    """Starts and stops the tools of a worker, and keeps one entry per artifact.

    Attributes:
        lock: Held while any tool is started or stopped.
        cost: What starts and stops took.
        metrics: What the tools counted; of several recordings, the largest.
        truncated: Why a recording was ended before its time; empty if none was.

    Args:
        request: The callback's request.
        role: The worker's settings.
        identity: The worker.
        spans: Shows stages in what is recorded.
        background: Does the rest of the work on artifacts.
        done: Called with an artifact that a stage has left, and with the final status of what is finished
            in the background.
    """

    def __init__(
        self,
        request: CaptureRequest,
        role: RoleConfig,
        identity: WorkerIdentity,
        spans: SpanLog,
        background: BackgroundWork,
        done: Callable[[Artifact], object],
    ) -> None:
        self.lock = threading.RLock()
        self.cost = CostMeter()
        self.metrics: dict[str, float] = {}
        self.truncated = ""
        self._request = request
        self._role = role
        self._identity = identity
        self._spans = spans
        self._background = background
        self._done = done
        self._running: list[_Running] = []
        self._artifacts: dict[str, Artifact] = {}
        self._looked_s = 0.0

    @property
    def any_thread(self) -> bool:
        """Whether each tool that records may be stopped on any thread."""
        return all(running.tool.any_thread for running in self._running)

    def artifacts(self) -> list[Artifact]:
        """Return one entry per artifact, in the order in which they were expected."""
        return list(self._artifacts.values())

    def start(self, stage: str | None, occurrence: int) -> None:
        """Start all tools.

        Raises:
            Exception: What one of them raised. Those already started are discarded, and each has its reason.
        """
        destination = self._destination(stage, occurrence)
        with self.cost.measured("start", stage), self.lock:
            for tool in self._role.tools:
                writes = tool.suffix and self._request.keep
                if writes and (refusal := self._role.limits.no_room(destination.folder)):
                    logger.warning(
                        "%s: step %d: %s: %s", self._identity, self._request.step, tool.name, refusal
                    )
                    self._enter(tool, destination, status="skipped", reason=refusal)
                    continue
                self._enter(tool, destination)
                try:
                    recording = tool.start(destination)
                except Exception as error:
                    self._failed(tool, destination, "start", error)
                    self._discard()
                    for other in self._role.tools:
                        if other is not tool and other.suffix:
                            reason = f"not recorded, because tool {tool.name} failed to start beside it"
                            self._enter(other, destination, status="failed", reason=reason)
                    raise
                self._running.append(_Running(tool, recording, destination))
            self._mark_spans()
            begin_ns = clock.now_ns()
            for running in self._running:
                self._enter(running.tool, destination, begin_ns=begin_ns)

    def skip(self, stage: str, occurrence: int, reason: str) -> None:
        """Note that a stage was not recorded."""
        for tool in self._role.tools:
            self._enter(tool, self._destination(stage, occurrence), status="skipped", reason=reason)

    def step(self) -> None:
        """Note that a mini-batch is done."""
        with self.lock:
            for tool, recording, _ in self._running:
                try:
                    recording.step()
                except Exception:
                    logger.exception("%s: tool %s failed in step()", self._identity, tool.name)

    def end_what_is_too_large(self) -> None:
        """Stop tools that would need more memory to be written than there is: ``limits.memory_share``.

        Stages are noted as before, and other tools go on.
        """
        now_s = time.monotonic()
        if not self._request.keep or now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        with self.lock:
            for running in list(self._running):
                if reason := self._overrun(running):
                    step = self._request.step
                    logger.warning("%s: step %d: recording ends: %s", self._identity, step, reason)
                    self._running.remove(running)
                    self._spans.stop_marking()
                    self.truncated = reason
                    with self.cost.measured("stop", running.destination.stage):
                        self._stop(running, reason)
                    self._mark_spans()

    def stop(self) -> None:
        """Stop all tools; an error of one is its artifact's."""
        with self.lock:
            stopping, self._running = self._running, []
            if stopping:
                with self.cost.measured("stop", stopping[0].destination.stage):
                    for running in stopping:
                        self._stop(running)

    def give_up(self, reason: str) -> None:
        """Discard recordings that cannot be stopped properly, so that the process can record again."""
        for tool, _, destination in self._running:
            self._enter(tool, destination, status="failed", reason=reason)
        self._discard()

    def _stop(self, running: _Running, truncated: str = "") -> None:
        """Stop one; ``truncated`` says why it ends before its time."""
        tool, recording, destination = running
        end_ns = clock.now_ns()
        try:
            if not self._request.keep:
                recording.discard()
                return
            for output in recording.stop():
                self.cost.export_s += output.export_s
                self._keep(output, end_ns, truncated)
            for name, value in recording.metrics().items():
                self.metrics[name] = max(value, self.metrics.get(name, value))
        except Exception as error:
            self._failed(tool, destination, "stop", error)

    def _keep(self, output: Output, end_ns: int, truncated: str) -> None:
        """Enter what a recording wrote, and queue the rest of the work for the background."""
        written = output.artifact
        expected = next(
            (one for one in self.artifacts() if one.status == "missing" and one.is_run_of(written)), written
        )

        def complete(artifact: Artifact) -> Artifact:
            """Add what the tool does not know."""
            artifact = msgspec.structs.replace(artifact, begin_ns=expected.begin_ns, end_ns=end_ns)
            if truncated and artifact.status == "ok":
                artifact = msgspec.structs.replace(artifact, status="truncated", reason=truncated)
            return artifact

        artifact = finish(
            output,
            self._background,
            folder=self._request.folder,
            upload=self._request.upload,
            complete=complete,
            done=self._done,
        )
        if artifact.path != expected.path:
            self._artifacts.pop(expected.path, None)
        self._artifacts[artifact.path] = artifact
        if artifact.stage is not None:  # more follows, and this process may be killed meanwhile
            self._done(artifact)

    def _discard(self) -> None:
        """Discard all recordings, the last one first, whatever one of them raises."""
        discarded, self._running = self._running, []
        for tool, recording, _ in reversed(discarded):
            try:
                recording.discard()
            except Exception:
                logger.exception("%s: tool %s cannot be stopped", self._identity, tool.name)

    def _overrun(self, running: _Running) -> str:
        try:
            needed = running.recording.bytes_to_stop()
        except Exception:
            logger.exception("%s: tool %s failed in bytes_to_stop()", self._identity, running.tool.name)
            return ""
        return memory_overrun(needed, self._role.limits.memory_share, self._request.workers) if needed else ""

    def _mark_spans(self) -> None:
        """Show stages in the artifacts of the tools that can."""
        kinds = [marks for running in self._running if (marks := running.recording.marks) is not None]
        if len(kinds) == 1:
            self._spans.begin_mark, self._spans.end_mark = kinds[0]
        elif kinds:
            self._spans.begin_mark = lambda name: [kind.begin(name) for kind in kinds]
            self._spans.end_mark = lambda marks: [
                kind.end(mark) for kind, mark in zip(kinds, marks, strict=True)
            ]

    def _failed(self, tool: Tool, destination: Destination, doing: str, error: Exception) -> None:
        """The one failure boundary around tools: log the error once and record it in the artifact."""
        step = self._request.step
        logger.error("%s: tool %s failed to %s in step %d: %s", self._identity, tool.name, doing, step, error)
        reason = f"{doing} raised {type(error).__name__}: {error}"
        self._enter(tool, destination, status="failed", reason=reason)

    def _enter(self, tool: Tool, destination: Destination, **fields: Any) -> None:
        """Enter what is known of a tool's artifact; one that writes none has no entry, unless it failed."""
        if tool.suffix or fields.get("status") == "failed":
            artifact = msgspec.structs.replace(destination.artifact(type(tool)), **fields)
            self._artifacts[artifact.path] = artifact

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
