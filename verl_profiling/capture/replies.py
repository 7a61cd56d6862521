"""The answers of a recorded process, and the sentences of its refusals."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiling import clock
from verl_profiling.capture.messages import CaptureRequest, StartReply, StartStatus, StopReply
from verl_profiling.errors import CaptureStateError
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult

__all__ = [
    "cannot_be_had",
    "not_set_up",
    "nothing_to_stop",
    "skipped",
    "start_reply",
    "stop_reply",
    "switched_off",
]


def start_reply(
    identity: WorkerIdentity,
    status: StartStatus,
    received_ns: int,
    *,
    reason: str = "",
    expected: Sequence[Artifact] = (),
) -> StartReply:
    """Return the answer to ``start_capture``, given now; see :class:`StartReply`."""
    return StartReply(
        identity=identity,
        process=ProcessId.current(),
        status=status,
        reason=reason,
        expected=list(expected),
        received_ns=received_ns,
        replied_ns=clock.now_ns(),
    )


def stop_reply(result: CaptureResult, received_ns: int) -> StopReply:
    """Return the answer to ``stop_capture``, given now; see :class:`StopReply`."""
    return StopReply(
        result=result,
        process=ProcessId.current(),
        received_ns=received_ns,
        replied_ns=clock.now_ns(),
    )


def skipped(identity: WorkerIdentity, reason: str, capture_id: str | None = None) -> CaptureResult:
    """Return the result of a worker that was not to record."""
    return CaptureResult(identity=identity, capture_id=capture_id or "", status="skipped", reason=reason)


def switched_off(identity: WorkerIdentity) -> str:
    """Return why a worker takes no part whose own settings say that it should not."""
    return f"switched off for role {identity.role} in the settings that init_capture was given"


def cannot_be_had(request: CaptureRequest, problem: object) -> str:
    """Return why a worker refuses a capture that is aimed at something that it does not have."""
    aim = request.aim.in_words() if request.aim is not None else ""
    return f"asked for {aim}, which this process cannot: {problem}"


def nothing_to_stop(
    identity: WorkerIdentity, capture_id: str | None, request: CaptureRequest | None
) -> CaptureResult:
    """Return the result of a stop for a capture that this worker does not have.

    Args:
        identity: The worker.
        capture_id: The capture that was to be stopped.
        request: The capture that is open, if there is one.
    """
    open_now = f"capture {request.capture_id} is open" if request else "nothing is open"
    return skipped(identity, f"stop_capture: {open_now}; call start_capture(...) first", capture_id)


def not_set_up(request: CaptureRequest, who: object, arguments: str) -> CaptureStateError:
    """Return the refusal of a start on a worker that was not set up.

    Args:
        request: The request to start.
        who: The worker, or its class.
        arguments: Arguments to suggest for ``init_capture``.
    """
    return CaptureStateError(
        f"start_capture(step={request.step}): {who} is not set up; call init_capture({arguments}) first"
    )
