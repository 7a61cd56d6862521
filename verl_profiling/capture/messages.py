"""The messages between callback and workers: plain, picklable values, and the sentences of refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from verl_profiling import clock
from verl_profiling.capture_request import Aim
from verl_profiling.errors import CaptureStateError
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult
from verl_profiling.remote import Upload

__all__ = [
    "Aim",
    "CaptureRequest",
    "StartReply",
    "StopReply",
    "cannot_be_had",
    "not_set_up",
    "nothing_to_stop",
    "skipped",
    "start_reply",
    "stop_reply",
    "switched_off",
]

StartStatus = Literal["recording", "armed", "joined", "skipped", "refused"]


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to capture. Sent again with the same ``capture_id``, it joins the running capture.

    Attributes:
        capture_id: Unique within the run; different for each window of a rollout.
        run_id: The run.
        step: First step of the capture.
        folder: Absolute path of the step folder; it is created if it does not exist.
        policy_version: Version of the weights, if the loop reports one.
        stage: Stage that the whole capture is (a rollout's window in discrete mode).
        occurrence: Which run of that stage in this step, from 1.
        keep: ``False`` for a warm-up, which is discarded.
        last: No capture comes after this one, as far as the schedule says.
        upload: Where the files go that are written into ``folder``, if it only stages them.
        roles: Under which roles the callback knows the worker, the first one first.
        workers: How many workers are asked in all.
        aim: What this capture does differently from the settings.
    """

    capture_id: str
    run_id: str
    step: int
    folder: str
    policy_version: int | None = None
    stage: str | None = None
    occurrence: int = 1
    keep: bool = True
    last: bool = False
    upload: Upload | None = None
    roles: list[str] = []
    workers: int = 1
    aim: Aim | None = None


class StartReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``start_capture``.

    Attributes:
        identity: The worker; its ``pid`` tells the callback which names share a process.
        status: ``recording``, ``armed`` (waits for a stage), ``joined`` (a colocated role
            started this capture already), ``skipped`` (not selected, or switched off) or ``refused`` (what
            the capture is aimed at cannot be had in this process).
        reason: Why it was skipped or refused.
        expected: The artifacts that will exist if all goes well, as far as they are known now.
        process: The process that answered.
        received_ns: When the call arrived, on the worker's clock.
        replied_ns: When it returned, on the worker's clock.
    """

    identity: WorkerIdentity
    status: StartStatus
    reason: str = ""
    expected: list[Artifact] = []
    process: ProcessId
    received_ns: int
    replied_ns: int


class StopReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``stop_capture``.

    Attributes:
        result: The worker's result, as in its file. Its status is ``skipped`` if nothing was recording.
        process: The process that answered; another one than at the start if a worker was restarted.
        received_ns: When the call arrived, on the worker's clock.
        replied_ns: When it returned, on the worker's clock.
    """

    result: CaptureResult
    process: ProcessId
    received_ns: int
    replied_ns: int


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
