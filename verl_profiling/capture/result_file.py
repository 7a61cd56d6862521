"""The result of one capture in this process, and its file in the step folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.metrics import finite_numbers
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureCost, CaptureResult, CaptureStatus, worst_fate
from verl_profiling.run_files import RESULT_SUFFIX, write_json_atomically
from verl_profiling.settings.config import RoleConfig

__all__ = ["NOT_STOPPED", "ResultFile", "merged"]

logger = logging.getLogger(__name__)

NOT_STOPPED = "never stopped"
_WORST_FIRST: tuple[CaptureStatus, ...] = ("failed", "truncated", "empty", "ok", "skipped")


class ResultFile:
    """Keeps ``<name>.result.json`` up to date: at the stop, and whenever an artifact is finished.

    Several windows of one step share it.

    Attributes:
        request: The capture, or its last window.
        result: The result so far.
    """

    def __init__(self) -> None:
        self.request = CaptureRequest(capture_id="", run_id="", step=0, folder="")
        self.result = CaptureResult(identity=WorkerIdentity(role="unknown"))
        self._lock = threading.Lock()
        self._before: CaptureResult | None = None
        self._window = self.result

    def opened(self, request: CaptureRequest, role: RoleConfig, identity: WorkerIdentity) -> ResultFile:
        """Return the file of a capture that begins: this one, if it is another window of the same step."""
        if _step_of(self.request) != _step_of(request):
            return ResultFile()._open(request, role, identity)
        return self._open(request, role, identity)

    def _open(self, request: CaptureRequest, role: RoleConfig, identity: WorkerIdentity) -> ResultFile:
        with self._lock:
            self._before = self.result if self.request.capture_id else None
            self.request = request
            self._window = CaptureResult(
                identity=identity,
                roles=[identity.role],
                capture_id=request.capture_id,
                step=request.step,
                mode=role.mode,
                tools=[tool.name for tool in role.tools],
                status="failed",
                reason=NOT_STOPPED,
                stopped=False,
            )
        return self

    def holds(self, capture_id: str | None) -> bool:
        """Return whether this is the result of a capture that was stopped; ``None`` for any."""
        own = self.request.capture_id
        return bool(own) and self._window.stopped and capture_id in (None, own)

    def is_settled(self) -> bool:
        """Return whether no artifact waits for this process; one with a reason is collected by a command."""
        return not any(one.status == "pending" and not one.reason for one in self.result.artifacts)

    def close(self, result: CaptureResult) -> CaptureResult:
        """Write the result of the stopped capture; return it."""
        result = msgspec.structs.replace(
            result,
            roles=list(dict.fromkeys([*result.roles, *self.request.roles])),
            artifacts=[
                msgspec.structs.replace(
                    artifact, step=self.request.step, policy_versions=result.policy_versions
                )
                for artifact in result.artifacts
            ],
        )
        with self._lock:
            for artifact in self._window.artifacts:
                result = _with_artifact(result, artifact)
            self._window = result
            return self._write()

    def finished(self, artifact: Artifact) -> None:
        """Enter the status of an artifact of this window, or of one before: pending, and then final."""
        with self._lock:
            window, stopped = self._window, self._window.stopped
            if stopped and artifact.status == "pending":
                return
            if self._before is not None and _has(self._before, artifact):
                self._before = _with_artifact(self._before, artifact)
            elif stopped or _has(window, artifact):
                self._window = _with_artifact(window, artifact)
            else:
                own = msgspec.structs.replace(artifact, step=self.request.step)
                self._window = msgspec.structs.replace(window, artifacts=[*window.artifacts, own])
            self._write(upload=stopped)

    def amend(self, change: Callable[[CaptureResult], CaptureResult]) -> CaptureResult:
        """Change the whole result; return it."""
        with self._lock:
            self._before, self._window = None, change(self.result)
            return self._write()

    def _write(self, upload: bool = False) -> CaptureResult:
        request = self.request
        result = self._window if self._before is None else merged([self._before, self._window])
        numbers, notes = finite_numbers(result.metrics)
        self.result = result = msgspec.structs.replace(
            result,
            metrics=numbers,
            notes=list(dict.fromkeys([*result.notes, *(f"{result.name}: {note}" for note in notes)])),
            process=ProcessId.current(),
            folder=request.folder if request.upload is None else request.upload.url,
            revision=self.result.revision + 1,
        )
        if not request.keep:
            return result
        path = Path(request.folder) / f"{result.name}{RESULT_SUFFIX}"
        try:
            write_json_atomically(path, result, durable=result.stopped)
            pending = any(artifact.status == "pending" for artifact in result.artifacts)
            if upload and request.upload is not None and not pending:
                request.upload.move(path, path.name)
        except FileNotFoundError:
            logger.info("%s is gone, so the result of %s is not kept", path.parent, result.name)
        except Exception as error:  # each file system raises errors of its own
            logger.error("step %d: %s cannot be written: %s", result.step, path, error)
        return result


def merged(results: list[CaptureResult]) -> CaptureResult:
    """Return one result for several windows of a worker; the last one names the capture."""
    worst = min(results, key=lambda result: _WORST_FIRST.index(result.status))
    last = results[-1]
    return msgspec.structs.replace(
        last,
        step=min(result.step for result in results),
        status=worst.status,
        reason=worst.reason,
        roles=list(dict.fromkeys(role for result in results for role in result.roles)),
        artifacts=[artifact for result in results for artifact in result.artifacts],
        stages=[span for result in results for span in result.stages],
        tool_spans=[span for result in results for span in result.tool_spans],
        anchors=[anchor for result in results for anchor in result.anchors],
        requests=[request for result in results for request in result.requests],
        notes=list(dict.fromkeys(note for result in results for note in result.notes)),
        policy_versions=list(dict.fromkeys(v for result in results for v in result.policy_versions)),
        metrics={name: value for result in results for name, value in result.metrics.items()},
        cost=CaptureCost(
            start_s=sum(result.cost.start_s for result in results),
            stop_s=sum(result.cost.stop_s for result in results),
            export_s=sum(result.cost.export_s for result in results),
        ),
    )


def _step_of(request: CaptureRequest) -> str:
    return request.capture_id.partition("/")[0]


def _has(result: CaptureResult, artifact: Artifact) -> bool:
    return any(known.is_run_of(artifact) for known in result.artifacts)


def _with_artifact(result: CaptureResult, finished: Artifact) -> CaptureResult:
    """Return a result with an artifact's final status, and the status that follows if artifacts decide it."""

    def updated(artifact: Artifact) -> Artifact:
        if not artifact.is_run_of(finished):
            return artifact
        late = artifact.status in ("failed", "missing") and finished.status in ("ok", "truncated", "empty")
        if artifact.status != "pending" and not late:
            return artifact
        reason = f"it came late: {artifact.reason}" if late and finished.status == "ok" else finished.reason
        return msgspec.structs.replace(
            finished, step=artifact.step, policy_versions=artifact.policy_versions, reason=reason
        )

    artifacts = [updated(artifact) for artifact in result.artifacts]
    status, reason = result.status, result.reason
    if (status, reason) == worst_fate(result.artifacts):
        status, reason = worst_fate(artifacts)
    return msgspec.structs.replace(result, artifacts=artifacts, status=status, reason=reason)
