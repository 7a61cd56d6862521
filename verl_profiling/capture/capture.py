"""One capture in one process: its tools, its stage spans, and its result."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.capture.finishing import BackgroundWork, finish
from verl_profiling.capture.protocol import CaptureStart, result_of
from verl_profiling.capture.result_file import measured
from verl_profiling.capture.stage_spans import OpenStage, SpanLog
from verl_profiling.files.machine import no_memory, no_room, process_peak_bytes, used_devices
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    Artifact,
    CaptureResult,
    CaptureStatus,
    StageSpan,
    ToolSpan,
    worst_status,
)
from verl_profiling.settings.roles import RoleConfig
from verl_profiling.tools import Destination, Output, Recording, Tool

logger = logging.getLogger(__name__)

HANDOVER_S = 30.0
"""Longest wait (s) of a stop for the thread that started the tools."""

_LOOK_S = 0.2
"""Least time (s) between two checks whether a stop would need too much memory: each reads /proc."""

T = TypeVar("T")


class _Running(NamedTuple):
    tool: Tool
    recording: Recording
    destination: Destination


@dataclass(eq=False)
class Capture:
    """Receives stages (as a ``StageSink``), and starts and stops the tools of one worker.

    In e2e mode the tools record from :meth:`open` to :meth:`close`. In discrete mode they record
    inside each outermost selected stage; a nested stage becomes a span of its artifact. The tools
    start and stop together; if one tool fails to stop, the others are still stopped.

    Some tools must be stopped on the thread that started them, the owner. A stop on another thread
    waits until the owner begins or ends a stage.

    Attributes:
        completions: Functions that change the result at the end, e.g. to add a log of requests.
        whole: Whether the tools make one recording of the whole capture, not one per stage.
        drives: Whether tools start or stop at a stage: in discrete mode, or because only their
            owner may stop them. If so, this object must receive the stages, else ``log`` does.

    Args:
        request: The callback's request.
        role: The worker's settings.
        identity: Role, rank and process of the worker.
        background: Compresses and uploads artifacts.
        done: Called with each artifact after its stage, and when it is finished in the background.
        log: Receives the stages.
        handover_s: Seconds for which a stop on another thread waits for the owner.
    """

    request: CaptureStart
    role: RoleConfig
    identity: WorkerIdentity
    background: BackgroundWork
    done: Callable[[Artifact], object]
    log: SpanLog
    handover_s: float = HANDOVER_S

    def __post_init__(self) -> None:
        self.roles = [self.identity.role]
        self.completions: list[Callable[[CaptureResult], CaptureResult]] = []
        self.whole = self.role.mode == "e2e" or self.request.stage is not None
        self._lock = threading.RLock()
        self._running: list[_Running] = []
        self._recorded: OpenStage | None = None
        self._owner = 0
        self._stop_asked = False
        self._stopped = threading.Event()
        self._occurrences: Counter[str] = Counter()
        self._artifacts: dict[str, Artifact] = {}
        self._metrics: dict[str, float] = {}
        self._truncated = ""
        self._looked_s = 0.0
        self._tool_spans: list[ToolSpan] = []
        self.log.long_stage_ended = self._long_stage_ended
        self._spans: list[StageSpan] = []
        self._anchors = [clock.read_anchor()]

    def open(self) -> list[Artifact]:
        """Start recording, or in discrete mode wait for a stage; return the expected artifacts.

        Raises:
            Exception: The exception of a tool; nothing is recorded then.
        """
        if self.request.keep:
            self.request.make_folder()
        if self.whole:
            self._start_tools(self.request.stage, self.request.occurrence)
        self.drives = not self.whole or not all(map(attrgetter("any_thread"), self.role.tools))
        return list(self._artifacts.values())

    def close(self) -> CaptureResult:
        """Stop recording and return the result; errors of tools are in its artifacts."""
        self._stop_asked = True
        self._stop_for_good()
        deadline_s = time.monotonic() + self.handover_s
        owner = Path("/proc/self/task", str(self._owner))
        while not self._stopped.wait(_LOOK_S) and time.monotonic() < deadline_s:
            if owner.parent.exists() and not owner.exists():  # the thread ended before its tools
                break
        with self._lock:
            if not self._stopped.is_set():
                self._give_up()
        self._anchors.append(clock.read_anchor())
        return self._result()

    def step(self) -> None:
        """Record the end of a mini-batch."""
        if self._stop_asked:
            self._stop_for_good()
        with self._lock:
            for running in self._running:
                self._guarded(running, running.recording.step)
        self._end_what_is_too_large()

    def begin(self, name: str) -> OpenStage:
        """Begin a stage; in discrete mode, start the tools for it."""
        if self._stop_asked:
            self._stop_for_good()
        recorded = self._recorded
        selected = self.role.stages is None or name in self.role.stages
        is_exported = recorded is not None and recorded.end_ns  # tools hold the lock as they export
        if self.whole or not selected or is_exported:
            return self.log.begin(name)
        with self._lock:
            starts = self._recorded is None and not self._stopped.is_set()
            if starts:
                self._occurrences[name] += 1
                try:
                    self._start_tools(name, self._occurrences[name])
                except Exception:  # it is logged, and in the status of the artifact
                    starts = False
            span = self.log.begin(name)
            if starts:
                self._recorded = span
            return span

    def end(self, name: str, failed: bool) -> None:
        """End a stage; in discrete mode, stop the tools that the stage started."""
        span = self.log.end(name, failed)
        if self._stop_asked:
            self._stop_for_good()
        if span is not None and span is self._recorded and self._may_stop_here():
            with self._lock:
                self._stop_tools()
                self._recorded = None

    def _may_stop_here(self) -> bool:
        here = self._owner == threading.get_native_id()
        return here or all(running.tool.any_thread for running in self._running)

    def _stop_for_good(self) -> None:
        """Stop the tools for the rest of the capture,
        if the tools may be stopped on this thread.
        """
        with self._lock:  # a stage may be starting a recording on another thread
            if self._may_stop_here() and not self._stopped.is_set():
                self._stop_tools()
                self._stopped.set()

    def _give_up(self) -> None:
        """Discard recordings that the owner thread never stopped,
        so that the process can record again.
        """
        problem = (
            f"stop_capture(step={self.request.step}) arrived on another thread than the one that "
            f"started recording, which passed no stage for {self.handover_s:.1f} s "
            f"({self.identity}); start and stop on one thread"
        )
        logger.error("%s: %s", self.identity, problem)
        for tool, _, destination in self._running:
            self._enter(tool, destination, status="failed", reason=problem)
        self._discard()
        self._stop_tools()
        self._stopped.set()

    def _start_tools(self, stage: str | None, occurrence: int) -> None:
        """Start all tools.

        Raises:
            Exception: The exception of a tool. The recordings of the other tools are discarded as
                failed.
        """
        self._owner = threading.get_native_id()
        destination = self._destination(stage, occurrence)
        limits = self.role.limits
        with measured(self._tool_spans, "start", stage), self._lock:
            for tool in self.role.tools:
                writes = tool.suffix and self.request.keep
                if writes and (refusal := no_room(destination.folder, limits.min_free_bytes)):
                    logger.warning(
                        "%s: step %d: %s: %s", self.identity, self.request.step, tool.name, refusal
                    )
                    self._enter(tool, destination, status="skipped", reason=refusal)
                    continue
                self._enter(tool, destination)
                try:
                    self._running.append(_Running(tool, tool.start(destination), destination))
                except Exception as error:
                    self._failed(tool, destination, "start", error)
                    self._discard()
                    for other in self.role.tools:
                        if other is not tool and other.suffix:
                            reason = (
                                f"not recorded, because tool {tool.name} failed to start beside it"
                            )
                            self._enter(other, destination, status="failed", reason=reason)
                    raise
            self._mark_spans()
            begin_ns = clock.now_ns()
            for running in self._running:
                self._enter(running.tool, destination, begin_ns=begin_ns)

    def _stop_tools(self) -> None:
        """Stop all tools, and record errors in the artifacts."""
        self.log.stop_marking()
        if self.whole:
            self._spans += self.log.close()
        stopping, self._running = self._running, []
        if stopping:
            with measured(self._tool_spans, "stop", stopping[0].destination.stage):
                for running in stopping:
                    self._stop(running)

    def _long_stage_ended(self, stage: OpenStage) -> None:
        if stage.depth():
            return
        if self.whole:  # else the recording ends now anyway
            self._end_what_is_too_large()
        self._metrics[f"stage/{stage.name}/process_peak_rss_bytes"] = float(process_peak_bytes())

    def _end_what_is_too_large(self) -> None:
        """Stop each tool whose recording would need too much memory to be written.

        The limit is the setting ``limits.memory_share``. Stages and other tools are still recorded.
        """
        now_s = time.monotonic()
        if not self.request.keep or now_s < self._looked_s + _LOOK_S or not self._may_stop_here():
            return
        self._looked_s = now_s
        share = self.role.limits.memory_share
        with self._lock:
            for running in list(self._running):
                needed = self._guarded(running, running.recording.bytes_to_stop)
                if needed and (reason := no_memory(needed, share, self.request.workers)):
                    logger.warning(
                        "%s: step %d: recording ends: %s", self.identity, self.request.step, reason
                    )
                    self._running.remove(running)
                    self.log.stop_marking()
                    self._truncated = reason
                    with measured(self._tool_spans, "stop", running.destination.stage):
                        self._stop(running, reason)
                    self._mark_spans()

    def _guarded(self, running: _Running, call: Callable[[], T]) -> T | None:
        """Call a method of a recording; an exception is logged, and the result is ``None``."""
        try:
            return call()
        except Exception:
            method = getattr(call, "__name__", call)
            logger.exception("%s: tool %s failed in %s()", self.identity, running.tool.name, method)
            return None

    def _stop(self, running: _Running, truncated: str = "") -> None:
        """Stop one tool; ``truncated`` is the reason for an early stop, else empty."""
        tool, recording, destination = running
        end_ns = clock.now_ns()
        try:
            if not self.request.keep:
                recording.discard()
                return
            for output in recording.stop():
                self._keep(output, end_ns, truncated)
            for name, value in recording.metrics().items():
                self._metrics[name] = max(value, self._metrics.get(name, value))
        except Exception as error:
            self._failed(tool, destination, "stop", error)

    def _keep(self, output: Output, end_ns: int, truncated: str) -> None:
        """Add the artifact of a recording to the result, and queue its compression and upload."""
        expected = output.artifact
        for artifact in self._artifacts.values():
            if artifact.status == "missing" and artifact.is_run_of(output.artifact):
                expected = artifact
                break

        def complete(artifact: Artifact) -> Artifact:
            """Add begin, end and truncation to the artifact of a tool."""
            artifact = replace(artifact, begin_ns=expected.begin_ns, end_ns=end_ns)
            if truncated and artifact.status == "ok":
                artifact = replace(artifact, status="truncated", reason=truncated)
            return artifact

        artifact = finish(output, self.background, self.request, self.done, complete)
        if artifact.path != expected.path:
            self._artifacts.pop(expected.path, None)
        self._artifacts[artifact.path] = artifact
        if artifact.stage is not None:  # this process may be killed before the next stage
            self.done(artifact)

    def _discard(self) -> None:
        """Discard all recordings, the last one first; errors are logged."""
        discarded, self._running = self._running, []
        for running in reversed(discarded):
            self._guarded(running, running.recording.discard)

    def _mark_spans(self) -> None:
        """Let each tool that can (``Recording.marks``) show stages in its artifact as ranges."""
        marks = list(filter(None, (running.recording.marks for running in self._running)))
        if len(marks) == 1:
            self.log.begin_mark, self.log.end_mark = marks[0]
        elif marks:
            self.log.begin_mark = lambda name: [kind.begin(name) for kind in marks]
            self.log.end_mark = lambda begun: [
                kind.end(mark) for kind, mark in zip(marks, begun, strict=True)
            ]

    def _failed(self, tool: Tool, destination: Destination, doing: str, error: Exception) -> None:
        """Handle the error of a tool: log the error once, and record it in the artifact."""
        step = self.request.step
        logger.error(
            "%s: tool %s failed to %s in step %d: %s", self.identity, tool.name, doing, step, error
        )
        reason = f"{doing} raised {type(error).__name__}: {error}"
        self._enter(tool, destination, status="failed", reason=reason)

    def _enter(self, tool: Tool, destination: Destination, **fields: Any) -> None:
        """Add a tool's artifact, or replace the one with the same path.

        A tool that writes no file, such as ``spans``, has an artifact only after a failure.
        """
        if tool.suffix or fields.get("status") == "failed":
            artifact = replace(destination.artifact(type(tool)), **fields)
            self._artifacts[artifact.path] = artifact

    def _destination(self, stage: str | None, occurrence: int) -> Destination:
        request = self.request
        return Destination(
            folder=Path(request.folder),
            lane=self.identity.lane(),
            stage=stage,
            occurrence=occurrence,
            metadata={
                "run_id": request.run_id,
                "capture_id": request.capture_id,
                "step": request.step,
                "policy_version": request.policy_version,
                "stage": stage,
                "worker": msgspec.to_builtins(self.identity),
            },
        )

    def _result(self) -> CaptureResult:
        stages = self._spans if self.whole else self.log.close()
        artifacts = list(self._artifacts.values())
        status, reason = worst_status(artifacts)
        if status == "ok" and self._truncated:
            status, reason = "truncated", self._truncated
        if artifacts and all(artifact.status == "skipped" for artifact in artifacts):
            status, reason = "skipped", artifacts[0].reason
        elif not self.whole and not artifacts and any(tool.suffix for tool in self.role.tools):
            status, reason = self._without_stage({span.name for span in stages})
        return result_of(
            self.request,
            self.role,
            self.identity,
            roles=self.roles,
            status=status,
            reason=reason,
            artifacts=artifacts,
            stages=stages,
            pauses=self.log.pauses,
            notes=self.log.notes(),
            metrics=self._metrics,
            anchors=self._anchors,
            tool_spans=self._tool_spans,
            devices=used_devices(),
        )

    def _without_stage(self, ran: set[str]) -> tuple[CaptureStatus, str]:
        """Return status and reason of a capture in which no selected stage ran."""
        stages = self.role.stages
        selected = "any" if stages is None else ", ".join(sorted(stages))
        names = ", ".join(sorted(ran)) or "none"
        reason = f"no selected stage ran (selected: {selected}; ran: {names})"
        selection = self.request.selection
        if selection is None or selection.stages is None:
            return "empty", reason
        if not ran:
            reason += (
                ": the loop's own stages do not count; mark one in the worker with "
                "verl_profiling.stage"
            )
        return "skipped", reason  # the request may select stages that other processes run
