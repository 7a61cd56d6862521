"""What the callback and the workers say to each other: plain, picklable values."""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult

__all__ = ["CaptureRequest", "Finished", "StartReply", "StopReply"]

StartStatus = Literal["recording", "armed", "joined", "skipped"]


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to capture. Sent again with the same ``capture_id``, it joins the running capture.

    Attributes:
        capture_id: Unique within the run; different for each window of a rollout.
        run_id: The run.
        step: First step of the capture.
        folder: Absolute path of the step folder; made if it does not exist.
        policy_version: Version of the weights, where the loop reports one.
        stage: The whole capture is this stage (a rollout's window in discrete mode).
        occurrence: Which run of that stage in this step, from 1.
        keep: ``False`` for a warm-up, which is thrown away.
        roles: Under which roles the callback knows the worker, the first one first.
    """

    capture_id: str
    run_id: str
    step: int
    folder: str
    policy_version: int | None = None
    stage: str | None = None
    occurrence: int = 1
    keep: bool = True
    roles: list[str] = []


class Finished(msgspec.Struct, frozen=True):
    """An artifact of an earlier capture whose background work is done since the last reply."""

    capture_id: str
    artifact: Artifact


class StartReply(msgspec.Struct, frozen=True, kw_only=True):
    """How starting went.

    Attributes:
        identity: The worker; its ``pid`` tells the callback which names share a process.
        status: ``recording``, ``armed`` (waits for a stage), ``joined`` (a colocated role
            started this capture already) or ``skipped`` (not selected, or switched off).
        reason: Why it was skipped.
        expected: The artifacts that will exist when all goes well, as far as known now.
        process: The process that answered.
        finished: Artifacts of earlier captures that were finished since.
        received_ns: When the call arrived, on the worker's clock.
        replied_ns: When it returned, on the worker's clock.
    """

    identity: WorkerIdentity
    status: StartStatus
    reason: str = ""
    expected: list[Artifact] = []
    process: ProcessId
    finished: list[Finished] = []
    received_ns: int
    replied_ns: int


class StopReply(msgspec.Struct, frozen=True, kw_only=True):
    """How stopping went.

    Attributes:
        result: What was recorded. Status ``skipped`` when nothing was recording.
        process: The process that answered; another one than started, where a worker was restarted.
        finished: Artifacts of this and earlier captures that were finished since.
        received_ns: When the call arrived, on the worker's clock.
        replied_ns: When it returned, on the worker's clock.
    """

    result: CaptureResult
    process: ProcessId
    finished: list[Finished] = []
    received_ns: int
    replied_ns: int
