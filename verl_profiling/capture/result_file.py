"""The results of captures in this process, and their files in the step folders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.capture.finishing import AfterHooks, BackgroundWork
from verl_profiling.capture.protocol import CaptureStart, result_of, skipped
from verl_profiling.files.run_files import RESULT_SUFFIX, capture_of, write_json_atomically
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import (
    Artifact,
    CaptureResult,
    CaptureStatus,
    ToolSpan,
    finite_numbers,
    with_artifacts,
)
from verl_profiling.settings.config import AfterHook
from verl_profiling.settings.roles import RoleConfig

logger = logging.getLogger(__name__)

NOT_STOPPED = "never stopped"
_JOINED = (
    "roles",
    "artifacts",
    "stages",
    "tool_spans",
    "anchors",
    "requests",
    "notes",
    "policy_versions",
)
_NO_REQUEST = CaptureStart(capture_id="", run_id="", step=0, folder="")
_NO_RESULT = CaptureResult(identity=WorkerIdentity(role="unknown"))
_WRITTEN = ("ok", "truncated", "empty")
_WORST_FIRST: tuple[CaptureStatus, ...] = ("failed", "truncated", "empty", "ok", "skipped")


class Slot:
    """The result, hooks and background work of a process's session, or of an engine's recorder.

    Both make one capture at a time.

    Attributes:
        file: The result file of the open capture, or else of the last capture.
        background: Compresses and uploads artifacts.
        hooks: The hooks of ``after``.
    """

    def __init__(self, hooks: Mapping[str, AfterHook]) -> None:
        self.background = BackgroundWork("finisher")
        self.file = ResultFile(self.background)
        self.hooks = AfterHooks(hooks)

    def result(
        self, capture_id: str | None, identity: WorkerIdentity, open_now: CaptureStart | None
    ) -> CaptureResult:
        """Return the result for a stop without an open capture of that id.

        It is the result of the last capture again, if the id is the same; else ``skipped``.

        Args:
            capture_id: The capture to stop; ``None`` for any.
            identity: Role, rank and process of the worker.
            open_now: The open capture, if there is one.
        """
        if self.file.holds(capture_id):
            return self.file.result
        state = f"capture {open_now.capture_id} is open" if open_now else "nothing is open"
        return skipped(
            identity, f"stop_capture: {state}; call start_capture(...) first", capture_id
        )

    def settle(
        self, result: CaptureResult, capture_id: str | None, finish_s: float
    ) -> CaptureResult:
        """Run the hooks of an ended capture; wait for background work, and return the result.

        Args:
            result: Result at the stop.
            capture_id: The capture to stop; ``None`` at the end of training.
            finish_s: Seconds to wait; 0 returns at once.
        """
        self.hooks.ended(
            result.capture_id if capture_id is None else capture_id, self.file.is_settled
        )
        if not finish_s:
            return result
        self.background.drain(finish_s)
        if capture_id is None:
            self.hooks.train_ends()
            self.hooks.background.drain(self.hooks.longest_s)
        same = result.capture_id and result.capture_id == self.file.result.capture_id
        return self.file.result if same else result


@contextmanager
def measured(
    spans: list[ToolSpan], name: Literal["start", "stop"], stage: str | None
) -> Iterator[None]:
    """Measure a start or stop of the tools as a span;
    ``stage`` is the recorded stage in discrete mode.
    """
    begin_ns = clock.now_ns()
    try:
        yield
    finally:
        spans.append(ToolSpan(name, begin_ns, clock.now_ns(), stage))


@dataclass(eq=False)
class ResultFile:
    """Writes ``<name>.result.json`` at the stop, and again after each artifact is finished.

    An engine in discrete mode makes a recording (window) of each rollout; all share one file.

    Args:
        background: Thread that uploads the file.

    Attributes:
        request: The request of the capture, or of its last window.
        result: The result so far.
    """

    background: BackgroundWork
    request: CaptureStart = _NO_REQUEST
    result: CaptureResult = _NO_RESULT
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _windows: list[CaptureResult] = field(default_factory=list)

    def opened(
        self, request: CaptureStart, role: RoleConfig, identity: WorkerIdentity
    ) -> ResultFile:
        """Return the file for a new capture, or this file for a further window of the capture."""
        same_step = capture_of(self.request.capture_id) == capture_of(request.capture_id)
        file = self if same_step else ResultFile(self.background)
        window = result_of(
            request, role, identity, status="failed", reason=NOT_STOPPED, stopped=False
        )
        with file._lock:
            file.request = request
            if file._windows and not file._windows[-1].stopped:  # its start failed
                file._windows.pop()
            file._windows.append(window)
        return file

    def holds(self, capture_id: str | None) -> bool:
        """Return whether the file has the result of a stopped capture with this id;
        ``None`` for any id.
        """
        stopped = bool(self._windows) and self._windows[-1].stopped
        return stopped and capture_id in (None, self.request.capture_id)

    def is_settled(self) -> bool:
        """Return whether no artifact is being compressed or uploaded any more.

        Artifacts that wait for ``verl-profiling collect`` do not count: only they are ``pending``
        with a ``reason``.
        """
        return not any(
            artifact.status == "pending" and not artifact.reason
            for artifact in self.result.artifacts
        )

    def close(self, result: CaptureResult, failed: str = "") -> CaptureResult:
        """Write and return the result of the stopped capture, and upload the file in the
        background.

        Args:
            result: The result.
            failed: Reason why the whole capture failed; empty if it did not.
        """
        if not self.request.keep:
            result = replace(result, status="skipped", reason="warm-up", artifacts=[])
        if failed:
            result = replace(result, status="failed", reason=failed)
        step = self.request.step
        versions = result.policy_versions
        artifacts = [
            replace(artifact, step=step, policy_versions=versions) for artifact in result.artifacts
        ]
        roles = list(dict.fromkeys([*result.roles, *self.request.roles]))
        result = replace(result, roles=roles, artifacts=artifacts)
        with self._lock:
            for artifact in self._windows[-1].artifacts:
                result = _with_artifact(result, artifact)
            self._windows[-1] = result
            result = self._write()
        if self.request.upload is not None and self.is_settled():
            self.background.submit(self.upload)
        return result

    def finished(self, artifact: Artifact) -> None:
        """Update the status of an artifact of any window, from pending to final."""
        with self._lock:
            last = self._windows[-1]
            if last.stopped and artifact.status == "pending":
                return
            listed = [listed for window in self._windows for listed in window.artifacts]
            if any(map(artifact.is_run_of, listed)):
                self._windows = [_with_artifact(window, artifact) for window in self._windows]
            elif not last.stopped:
                artifact = replace(artifact, step=self.request.step)
                self._windows[-1] = replace(last, artifacts=[*last.artifacts, artifact])
            self._write(upload=last.stopped)

    def amend(self, change: Callable[[CaptureResult], CaptureResult]) -> CaptureResult:
        """Replace the whole result with ``change(result)``; write and return it."""
        with self._lock:
            self._windows = [change(self.result)]
            return self._write()

    def upload(self) -> None:
        """Upload the result file, if no artifact is pending."""
        with self._lock:
            self._write(upload=True)

    def _write(self, upload: bool = False) -> CaptureResult:
        request = self.request
        result = self._windows[0] if len(self._windows) == 1 else _merged(self._windows)
        name = result.identity.name
        notes = result.notes
        numbers, infinite = finite_numbers(result.metrics)
        if infinite:
            notes = list(dict.fromkeys([*notes, f"{name}: {infinite[0]}"]))
        self.result = result = replace(
            result,
            metrics=numbers,
            notes=notes,
            process=ProcessId.current(),
            folder=request.folder if request.upload is None else request.upload.url,
            revision=self.result.revision + 1,
        )
        if not request.keep:
            return result
        path = Path(request.folder) / f"{name}{RESULT_SUFFIX}"
        try:
            write_json_atomically(path, result, durable=result.stopped)
            statuses = [artifact.status for artifact in result.artifacts]
            if request.upload is not None and upload and "pending" not in statuses:
                # --ray reads artifacts that are left here beside this file.
                is_left_here = any(artifact.where for artifact in result.artifacts)
                request.upload.move(path, path.name, keep=is_left_here)
        except FileNotFoundError:
            logger.info("%s was removed, so the result of %s is not written", path.parent, name)
        except Exception as error:  # each file system raises errors of its own
            logger.error("step %d: %s cannot be written: %s", result.step, path, error)
        return result


def _merged(results: list[CaptureResult]) -> CaptureResult:
    """Return one result for several windows of an engine, with the last window's capture id."""
    worst = min(results, key=lambda result: _WORST_FIRST.index(result.status))
    last = results[-1]
    joined: dict[str, list[Any]] = {}
    for name in _JOINED:
        joined[name] = [part for result in results for part in getattr(result, name)]
    for name in ("roles", "notes", "policy_versions"):
        joined[name] = list(dict.fromkeys(joined[name]))
    metrics: dict[str, float] = {}
    for result in results:
        metrics |= result.metrics
    return replace(
        last,
        step=min(result.step for result in results),
        status=worst.status,
        reason=worst.reason,
        metrics=metrics,
        **joined,
    )


def _with_artifact(result: CaptureResult, finished: Artifact) -> CaptureResult:
    """Return a result with an artifact's final status, which may change the result's own status."""

    def updated(artifact: Artifact) -> Artifact:
        if not artifact.is_run_of(finished):
            return artifact
        is_late = artifact.status in ("failed", "missing") and finished.status in _WRITTEN
        if artifact.status != "pending" and not is_late:
            return artifact
        reason = finished.reason
        if is_late and finished.status == "ok":
            reason = f"artifact late: {artifact.reason}"
        return replace(
            finished, step=artifact.step, policy_versions=artifact.policy_versions, reason=reason
        )

    return with_artifacts(result, [updated(artifact) for artifact in result.artifacts])
