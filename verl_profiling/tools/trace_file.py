"""Turns a tool's raw JSON trace into a verified, compressed artifact."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from isal import igzip

from verl_profiling.devices import lost_kernels
from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import Output

logger = logging.getLogger(__name__)

CUDA = "cuda"
"""Kind of the devices that torch records by CUPTI or, for ROCm, by what stands in its place."""

_CHUNK_BYTES = 4 << 20
_LEVEL = 1  # isal's, from 0 (fastest) to 3 (smallest)
_PHASE = b'"ph"'
_SPAN = b'"ph": "X"'
_OF_A_DEVICE = (b'"cat": "kernel"', b'"cat": "gpu_')
_TAIL_BYTES = 8192  # more than a path can be long
# Kineto writes the trace's name behind the events, and then, by version, other plain values
# ("finalizeTrace" in its output_json.cpp). Other writers close the list of events last.
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_VALUES = rb"(?:,\s*" + _TEXT + rb":\s*(?:" + _TEXT + rb"|[-+.\w]+))*"
_END = re.compile(rb'(?:"traceName":\s*' + _TEXT + _VALUES + rb"\s*|\])\}\s*\Z")


class _EventCount:
    """Counts what a trace in Kineto's text holds while it is read.

    Args:
        device: Kind of the device whose events are looked for; empty for none.

    Attributes:
        events: Events so far.
        spans: Those of them that have a duration.
        lost_device: The device, as long as there was no event of one.
        tail: The last bytes so far.
    """

    def __init__(self, device: str = "") -> None:
        self.events = 0
        self.spans = 0
        self.lost_device = device
        self.tail = b""

    def read(self, source: BinaryIO) -> Iterator[bytes]:
        """Yield a file in large pieces, cut before a ``"ph"``, which is the first key of Kineto's events."""
        rest = b""
        while chunk := source.read(_CHUNK_BYTES):
            events, phase, begun = (rest + chunk).rpartition(_PHASE)
            if events:
                yield self._counted(events)
            rest = phase + begun
        if rest:
            yield self._counted(rest)

    @property
    def whole(self) -> bool:
        """Whether the trace was read to its end."""
        return _ends(self.tail)

    def _counted(self, piece: bytes) -> bytes:
        self.events += piece.count(_PHASE)
        self.spans += piece.count(_SPAN)
        if self.lost_device and any(mark in piece for mark in _OF_A_DEVICE):
            self.lost_device = ""
        self.tail = piece[-_TAIL_BYTES:]
        return piece


def _tail(path: Path) -> bytes:
    """Return the last bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _ends(tail: bytes) -> bool:
    """Return whether these are the last bytes of a whole trace; a cut may fall behind the end of an event."""
    return _END.search(tail) is not None


def _judged(pending: Artifact, count: _EventCount, size: int) -> Artifact:
    """Return the artifact of a whole trace, by what it holds.

    CUPTI, by which torch records kernels, serves one subscriber in a process. Where another one was first,
    torch says nothing, and records the host alone.
    """
    artifact = msgspec.structs.replace(pending, status="ok", bytes=size, events=count.events)
    if not count.spans:
        return msgspec.structs.replace(artifact, status="empty", reason="the trace holds no spans")
    if not count.lost_device:
        return artifact
    reason = f"{count.lost_device} was in use, and no event of it was recorded: {lost_kernels()}"
    logger.warning("%s: %s", artifact.path, reason)
    return msgspec.structs.replace(artifact, unrecorded_device=count.lost_device, reason=reason)


def output_of_compressed_trace(final: Path, expected: Artifact, device: str) -> Output:
    """Return the artifact of a trace that an engine compressed itself; it is read through in the background.

    Args:
        final: The file, under its final name.
        expected: The artifact as expected.
        device: Kind of the device that was in use and to be recorded; empty for none.
    """
    pending = msgspec.structs.replace(expected, status="pending")

    def verify() -> Artifact:
        count = _EventCount(device)
        size = final.stat().st_size
        try:
            with igzip.open(final, "rb") as file:
                for _ in count.read(file):
                    pass
            if count.whole:
                return _judged(pending, count, size)
        except (OSError, EOFError):
            pass  # cut off inside of the compression
        reason = f"cut off after {size} bytes: the engine did not write it to the end"
        return msgspec.structs.replace(
            pending, status="truncated", bytes=size, events=count.events, reason=reason
        )

    return Output(pending, verify)


def output_of_raw_trace(
    part: Path,
    final: Path,
    expected: Artifact,
    ranges: Iterable[str] = (),
    device: str = "",
) -> Output:
    """Verify a raw trace that a profiler has just written, and name it.

    Profilers have reported success for files that were missing or cut off (a full disk, a folder
    without write permission), so only the file itself is evidence.

    Args:
        part: The raw JSON file under its temporary name.
        final: Path of the compressed artifact, ending in ``.json.gz``.
        expected: The artifact as expected.
        ranges: Names of user annotations that the profiler recorded as operators.
        device: Kind of the device that was in use and to be recorded; empty for none.

    Returns:
        A ``pending`` output whose ``finish`` compresses and verifies, or a final one that is
        ``failed`` (no file) or ``truncated`` (cut off; the part is kept for a reader to salvage).
    """
    unfinished = part.with_name(f"{part.name}.tmp")  # torch renames the file once it is written completely
    if not part.exists() and unfinished.exists():
        unfinished.replace(part)
    tail = _tail(part)
    if not tail:
        part.unlink(missing_ok=True)
        reason = f"the profiler wrote no file into {final.parent} ({_why_not_writable(final.parent)})"
        return Output(msgspec.structs.replace(expected, status="failed", reason=reason))
    kept = final.with_suffix("")
    part.replace(kept)
    if not _ends(tail):
        size = kept.stat().st_size
        reason = f"cut off after {size} bytes ({_why_not_writable(final.parent)})"
        return Output(
            msgspec.structs.replace(expected, path=kept.name, status="truncated", bytes=size, reason=reason)
        )
    pending = msgspec.structs.replace(expected, status="pending")
    names = sorted(set(ranges))
    return Output(pending, lambda: _compress(kept, final, pending, _annotations(names), device))


def _why_not_writable(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"
    if not os.access(folder, os.W_OK):
        return "no write permission"
    return f"{room.f_bavail * room.f_frsize >> 20} MiB free there"


def _annotations(names: list[str]) -> re.Pattern[bytes] | None:
    """Return a pattern for the operators of those names in Kineto's text."""
    if not names:
        return None
    alternatives = b"|".join(re.escape(msgspec.json.encode(name)) for name in names)
    return re.compile(rb'"cat": "cpu_op",(\s+)(?="name": (?:' + alternatives + rb"),)")


def _compress(
    raw: Path,
    final: Path,
    pending: Artifact,
    annotations: re.Pattern[bytes] | None,
    device: str,
) -> Artifact:
    """Compress ``raw`` to ``final``, read it back, and only then remove ``raw``.

    If that fails, the raw file stays and becomes the artifact, so that nothing recorded is lost.
    """
    part = final.with_name(f".{final.name}.part")
    try:
        size, count = _copy_counting(raw, part, annotations, device)
        if _size_inside(part) != size:
            raise OSError("the compressed file does not read back whole")
        part.replace(final)
        raw.unlink()
    except OSError as error:
        if part.is_file():
            part.unlink()
        return msgspec.structs.replace(
            pending,
            path=raw.name,
            status="ok",
            bytes=raw.stat().st_size if raw.exists() else None,
            reason=f"left uncompressed: {error}",
        )
    return _judged(pending, count, final.stat().st_size)


def _copy_counting(
    raw: Path, part: Path, annotations: re.Pattern[bytes] | None, device: str
) -> tuple[int, _EventCount]:
    """Compress a file; return the size of its content, and what it holds."""
    size, count = 0, _EventCount(device)
    with raw.open("rb") as source, igzip.open(part, "wb", compresslevel=_LEVEL) as target:
        for piece in count.read(source):
            content = (
                piece if annotations is None else annotations.sub(rb'"cat": "user_annotation",\1', piece)
            )
            target.write(content)
            size += len(content)
    return size, count


def _size_inside(path: Path) -> int:
    size = 0
    with igzip.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
    return size
