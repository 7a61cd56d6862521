"""What a person and a running job write to each other: requests for captures, answers, a sign of life.

They are files in ``control`` inside the run's folder, or bytes in an actor of Ray
(:mod:`~verl_profiling.ray_mailbox`). Whoever may write there may ask, so a message is read as if anybody had
written it: only of bounded size, of a fixed schema, and nothing in it is a path or a program.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from verl_profiling.aim import Aim
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import CaptureStatus, Ns

__all__ = [
    "ANSWERS",
    "CANCEL_SUFFIX",
    "CONTROL",
    "FINAL",
    "LOOP_NAME",
    "MOST_ANSWERS",
    "MOST_PENDING",
    "MOST_STEPS",
    "REQUESTS",
    "Answer",
    "AnsweredWorker",
    "Demand",
    "LoopState",
    "decode_message",
    "encode_message",
    "new_request_id",
    "read_message",
    "write_message",
]

CONTROL = "control"
REQUESTS, ANSWERS = "requests", "answers"
LOOP_NAME = "loop.json"
CANCEL_SUFFIX = ".cancel"
MOST_STEPS = 100
"""How many steps one request may ask for."""
MOST_PENDING = 32
"""How many requests may wait in a job."""
MOST_ANSWERS = 200
"""How many answers are kept; the eldest go."""

_MOST_BYTES = {"Demand": 16 << 10, "Answer": 4 << 20, "LoopState": 64 << 10}

RequestId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12}\Z")]
AnswerState = Literal["accepted", "refused", "done", "cancelled"]
FINAL: tuple[AnswerState, ...] = ("done", "refused", "cancelled")
"""States after which nothing comes."""


class Demand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for captures.

    Attributes:
        id: Made up by whoever asks; also the name of its file.
        by: Who asks, e.g. ``root@node1``.
        asked_ns: When, by their clock.
        steps: How many consecutive steps.
        at: The first of them; ``None`` for the next one that begins.
        aim: What the captures do differently from the settings.
    """

    id: RequestId
    by: Annotated[str, msgspec.Meta(max_length=200)] = ""
    asked_ns: Ns = 0
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = 1
    at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None
    aim: Aim = Aim()


class AnsweredWorker(msgspec.Struct, frozen=True):
    """What became of one worker's part of a capture that was asked for."""

    name: str
    status: CaptureStatus
    reason: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the job says to a request; it is written anew as things go on.

    Attributes:
        demand: The request.
        state: ``accepted``, then ``done``; or ``refused`` or ``cancelled``.
        reason: Why it was refused, or what to know of it.
        folders: Names of the step folders in the run's folder: those that were made, then those to come.
        made: How many of them were made.
        complete: Whether all steps were recorded to their end; of a request that is done.
        policy_versions: Versions of the weights in these steps, where the loop reports them.
        workers: What became of the workers that took part, the last word of each.
        answered_ns: When it was written.
    """

    demand: Demand
    state: AnswerState
    reason: str = ""
    folders: list[str] = []
    made: int = 0
    complete: bool | None = None
    policy_versions: list[int | None] = []
    workers: list[AnsweredWorker] = []
    answered_ns: Ns = 0


class LoopState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sign of life of the process that runs the loop.

    Attributes:
        process: The process.
        run_id: The run.
        place: The URL that it records to, or its folder on the host of the process.
        step: The step that began last.
        begun_ns: When it began, or when training did if none has begun yet.
        step_s: How long a step takes from its begin to the next one's, as the median of the last ones; 0.0
            before there are two.
        ended_ns: When training ended; ``None`` while it runs.
    """

    process: ProcessId
    run_id: str
    place: str = ""
    step: int | None = None
    begun_ns: Ns = 0
    step_s: float = 0.0
    ended_ns: Ns | None = None


Message = TypeVar("Message", Demand, Answer, LoopState)


def new_request_id() -> str:
    """Return an id that no other request has."""
    return uuid.uuid4().hex[:12]


def read_message(path: Path, kind: type[Message]) -> Message:
    """Read a message.

    Raises:
        FileNotFoundError: There is none.
        TraceFormatError: It is not a regular file, too large, or not a message of that kind.
        OSError: It cannot be read.
    """
    most = _MOST_BYTES[kind.__name__]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise TraceFormatError(path, "is a link") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TraceFormatError(path, "is not a regular file")
        data = os.read(descriptor, most + 1)
    finally:
        os.close(descriptor)
    return decode_message(data, kind, path)


def decode_message(data: bytes, kind: type[Message], source: str | os.PathLike[str]) -> Message:
    """Return the message that bytes are.

    Args:
        data: The bytes.
        kind: What they should be.
        source: Where they come from, for the error.

    Raises:
        TraceFormatError: They are too many, or not a message of that kind.
    """
    most = _MOST_BYTES[kind.__name__]
    if not isinstance(data, bytes) or len(data) > most:
        size = f"has more than {most:,} bytes" if isinstance(data, bytes) else f"is a {type(data).__name__}"
        raise TraceFormatError(source, size)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(source, f"is no {kind.__name__}: {error}") from error


def encode_message(message: Demand | Answer | LoopState) -> bytes:
    """Return a message as bytes."""
    return msgspec.json.format(msgspec.json.encode(message), indent=2)


def write_message(path: Path, message: Demand | Answer | LoopState, beside: Path | None = None) -> None:
    """Write a message, so that readers see the old one or the new one. It is not waited for the disk.

    Args:
        path: The file.
        message: The message.
        beside: Where its parts are written, if not beside the file.

    Raises:
        OSError: The folder cannot be written.
    """
    part = (beside or path.parent) / f".{path.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.write_bytes(encode_message(message))
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
