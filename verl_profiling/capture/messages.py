"""The messages between callback and workers: plain, picklable values."""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_profiling.afterwards.uploads import Upload
from verl_profiling.aim import Aim
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult
from verl_profiling.watch.reading import WatchReading

__all__ = ["Aim", "CaptureRequest", "StartReply", "StopReply"]

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
        watch: What the watch kept since it was read last.
        received_ns: When the call arrived, on the worker's clock.
        replied_ns: When it returned, on the worker's clock.
    """

    result: CaptureResult
    process: ProcessId
    watch: WatchReading | None = None
    received_ns: int
    replied_ns: int
