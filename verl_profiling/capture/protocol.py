"""Requests and replies between callback and workers, as plain picklable values;
reasons of refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_profiling import clock
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.errors import CaptureStateError
from verl_profiling.files.opener import make_folder, make_private_folder
from verl_profiling.files.remote import Upload
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult
from verl_profiling.settings.roles import RoleConfig

StartStatus = Literal["recording", "armed", "joined", "skipped", "refused"]


class CaptureStart(msgspec.Struct, frozen=True, kw_only=True):
    """The message that starts a capture; a further one with the same ``capture_id`` joins it.

    Attributes:
        capture_id: Unique within the run. In discrete mode, each rollout of an engine has its own:
            ``<id of the capture>/1``, ``/2``, ...
        run_id: Name of the run.
        step: First step of the capture.
        folder: Absolute path of the step folder; a missing folder is created.
        policy_version: Version of the weights, if the loop reports one.
        stage: The only stage of the capture: ``rollout`` for engines in discrete mode, else
            ``None``.
        occurrence: Index of the rollout in this capture, from 1, if ``stage`` is set.
        keep: ``False`` for a warm-up, which is discarded.
        last: Whether this is the last capture of the schedule; then ``after`` hooks with
            ``when: last`` run.
        upload: The upload target of the files, if ``folder`` only stages them.
        roles: The roles under which the worker was added to the callback, in order.
        workers: The number of workers that get the message, for the limit of memory per worker.
        selection: Overrides of the settings; ``None`` for the settings as they are.
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
    selection: CaptureSelection | None = None

    def make_folder(self) -> None:
        """Make the step folder, unless it exists.

        Raises:
            OSError: The folder cannot be made, is a link, or lies in a staging folder that others
                may write.
        """
        folder = Path(self.folder)
        if self.upload is not None:
            make_private_folder(folder.parent.parent)
        make_folder(folder)


class StartReply(msgspec.Struct, frozen=True):
    """The reply to ``start_capture``.

    Attributes:
        identity: The worker; workers with the same host and ``pid`` share a process.
        status: ``recording``, ``armed`` (waits for a stage), ``joined`` (a colocated role
            started this capture already), ``skipped`` (not selected, or switched off) or
            ``refused`` (this process cannot make a capture with the selection of the request).
        received_ns: Arrival of the call, on the worker's clock.
        reason: Reason why the worker is skipped or refuses.
        expected: The expected artifacts, as far as known at the start.
        process: The replying process.
        replied_ns: Sending of the reply, on the worker's clock.
    """

    identity: WorkerIdentity
    status: StartStatus
    received_ns: int = msgspec.field(default_factory=lambda: clock.now_ns())
    reason: str = ""
    expected: list[Artifact] = []
    process: ProcessId = msgspec.field(default_factory=ProcessId.current)
    replied_ns: int = msgspec.field(default_factory=lambda: clock.now_ns())


class StopReply(msgspec.Struct, frozen=True):
    """The reply to ``stop_capture``.

    Attributes:
        result: The worker's result, as in its result file; the status is ``skipped`` if nothing was
            recorded.
        received_ns: Arrival of the call, on the worker's clock.
        process: The replying process; after a restart of the worker, another process than at the
            start.
        replied_ns: Sending of the reply, on the worker's clock.
    """

    result: CaptureResult
    received_ns: int = msgspec.field(default_factory=lambda: clock.now_ns())
    process: ProcessId = msgspec.field(default_factory=ProcessId.current)
    replied_ns: int = msgspec.field(default_factory=lambda: clock.now_ns())


def result_of(
    request: CaptureStart, role: RoleConfig, identity: WorkerIdentity, **fields: Any
) -> CaptureResult:
    """Return a result with the capture id, step, mode and tools of a request and its settings.

    Args:
        request: The request of the capture.
        role: The worker's settings.
        identity: Role, rank and process of the worker.
        **fields: Further fields of the result, e.g. roles and tools other than those of the
            request.
    """
    fields = {"roles": [identity.role], "tools": role.tool_names, **fields}
    return CaptureResult(
        identity=identity,
        capture_id=request.capture_id,
        step=request.step,
        mode=role.mode,
        **fields,
    )


def skipped(identity: WorkerIdentity, reason: str, capture_id: str | None) -> CaptureResult:
    """Return the result of a worker that does not take part."""
    return CaptureResult(
        identity=identity, capture_id=capture_id or "", status="skipped", reason=reason
    )


def switched_off(identity: WorkerIdentity) -> str:
    """Return the reason for skipping a worker that its own settings switch off."""
    return f"switched off for role {identity.role} in the settings passed to init_capture"


def cannot_be_had(request: CaptureStart, problem: object) -> str:
    """Return the reason for refusing a capture whose selection this process cannot make."""
    if request.selection is None:
        return str(problem)
    return f"{request.selection.in_words()} cannot be captured by this process: {problem}"


NOT_SET_UP = "is not set up"
"""Part of each refusal of :func:`not_set_up`."""


def not_set_up(call: str, who: object, arguments: str) -> CaptureStateError:
    """Return the refusal of a call of a worker that was not set up.

    Args:
        call: The call, e.g. ``start_capture(step=3)``.
        who: The worker, or its class.
        arguments: Arguments to suggest for ``init_capture``.
    """
    return CaptureStateError(f"{call}: {who} {NOT_SET_UP}; call init_capture({arguments}) first")
