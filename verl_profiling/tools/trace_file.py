"""Turning a tool's raw JSON trace into a verified, compressed artifact."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from isal import igzip

from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import Output

__all__ = ["output_of_raw_trace"]

_CHUNK_BYTES = 4 << 20
_PHASE = b'"ph"'
_SPAN = b'"ph": "X"'


@dataclass(frozen=True)
class _RawTrace:
    bytes: int
    whole: bool


def _look_at(path: Path) -> _RawTrace | None:
    """Return what a raw trace is from its last bytes, or ``None`` when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 64))
            tail = file.read()
    except OSError:
        return None
    return _RawTrace(size, tail.rstrip().endswith(b"}"))


def output_of_raw_trace(part: Path, final: Path, expected: Artifact, level: int) -> Output:
    """Verify a raw trace that a profiler has just written, and name it.

    Profilers have been seen to report success for a file that is missing or cut off (a full
    disk, a folder without write permission), so the file itself is the only evidence.

    Args:
        part: The raw JSON file under its temporary name.
        final: Path of the compressed artifact, ending in ``.json.gz``.
        expected: The artifact as expected.
        level: isal compression level, 0 (fastest) to 3.

    Returns:
        A ``pending`` output whose ``finish`` compresses and verifies, or a final one that is
        ``failed`` (no file) or ``truncated`` (cut off; the part is kept for a reader to salvage).
    """
    raw = _look_at(part)
    if raw is None or raw.bytes == 0:
        part.unlink(missing_ok=True)
        reason = f"the profiler wrote no file into {final.parent} ({_why_not_writable(final.parent)})"
        return Output(msgspec.structs.replace(expected, status="failed", reason=reason))
    kept = final.with_suffix("")
    part.replace(kept)
    if not raw.whole:
        reason = f"cut off after {raw.bytes} bytes ({_why_not_writable(final.parent)})"
        return Output(
            msgspec.structs.replace(
                expected, path=kept.name, status="truncated", bytes=raw.bytes, reason=reason
            )
        )
    pending = msgspec.structs.replace(expected, status="pending")
    return Output(pending, lambda: _compress(kept, final, pending, level))


def _why_not_writable(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"
    if not os.access(folder, os.W_OK):
        return "no write permission"
    return f"{room.f_bavail * room.f_frsize >> 20} MiB free there"


def _compress(raw: Path, final: Path, pending: Artifact, level: int) -> Artifact:
    """Compress ``raw`` to ``final``, read it back, and remove ``raw`` only then.

    When that fails, the raw file stays and becomes the artifact: nothing recorded is lost.
    """
    part = final.with_name(f".{final.name}.part")
    try:
        size, events, spans = _copy_counting(raw, part, level)
        if _size_inside(part) != size:
            raise OSError("the compressed file does not read back whole")
        part.replace(final)
        raw.unlink()
    except OSError as error:
        part.unlink(missing_ok=True)
        return msgspec.structs.replace(
            pending,
            path=raw.name,
            status="ok",
            bytes=raw.stat().st_size if raw.exists() else None,
            reason=f"left uncompressed: {error}",
        )
    status, reason = ("ok", "") if spans else ("empty", "the trace holds no spans")
    return msgspec.structs.replace(
        pending, status=status, reason=reason, bytes=final.stat().st_size, events=events
    )


def _copy_counting(raw: Path, part: Path, level: int) -> tuple[int, int, int]:
    """Compress a file; return its size and its numbers of events and of spans (complete events)."""
    size = events = spans = 0
    overlap = b""
    with raw.open("rb") as source, igzip.open(part, "wb", compresslevel=level) as target:
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
            size += len(chunk)
            window = overlap + chunk
            events += window.count(_PHASE) - overlap.count(_PHASE)
            spans += window.count(_SPAN) - overlap.count(_SPAN)
            overlap = window[-(len(_SPAN) - 1) :]
    return size, events, spans


def _size_inside(path: Path) -> int:
    size = 0
    with igzip.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
    return size
