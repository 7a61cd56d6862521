"""Converts the JSON trace of a profiler into a verified, compressed artifact."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from isal import igzip

from verl_profiling.files.machine import lost_kernels
from verl_profiling.files.opener import move_file, opened, remove_file, whole_file
from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import Output

logger = logging.getLogger(__name__)

CUDA = "cuda"
"""Type of the devices that torch records with CUPTI, or with its counterpart on ROCm."""

_CHUNK_BYTES = 4 << 20
_LEVEL = 1  # isal's, from 0 (fastest) to 3 (smallest)
_PHASE = b'"ph"'
_SPAN = b'"ph": "X"'
_OF_A_DEVICE = (b'"cat": "kernel"', b'"cat": "gpu_')
# Kineto synchronizes the device at the stop: with CUPTI, even an idle device has a call in the
# trace.
_CALL = b'"cat": "cuda_runtime"'
_LAUNCH = re.compile(rb'"cat": "cuda_(?:runtime|driver)",\s+"name": "\w*Launch')
_TAIL_BYTES = 8192  # more than a path can be long
# Kineto writes the trace's name behind the events, and then, by version, other plain values
# ("finalizeTrace" in its output_json.cpp). Other writers close the list of events last.
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_VALUES = rb"(?:,\s*" + _TEXT + rb":\s*(?:" + _TEXT + rb"|[-+.\w]+))*"
_END = re.compile(rb'(?:"traceName":\s*' + _TEXT + _VALUES + rb"\s*|\])\}\s*\Z")


def output_of_trace(
    written: Path, final: Path, expected: Artifact, ranges: Iterable[str] = (), device: str = ""
) -> Output:
    """Move a new trace to its final name; ``finish`` of the output compresses and verifies it.

    Profilers have reported success for missing or cut off files (full disk, folder without write
    permission), so the file itself is checked.

    Args:
        written: The file under its temporary name: JSON, or compressed JSON that ends in ``.gz``.
        final: Path of the compressed artifact, ending in ``.json.gz``.
        expected: The artifact as expected.
        ranges: Names of user annotations that the profiler recorded as operators.
        device: Type of the used device, whose events must be in the trace; empty for none.

    Returns:
        A ``pending`` output whose ``finish`` compresses and verifies, or a final one that is
        ``failed`` (no file) or ``truncated`` (cut off; the written part is kept).
    """
    pending = expected.with_status("pending")
    if written.suffix == ".gz":
        move_file(written, final)
        return Output(pending, lambda: _read_packed(final, pending, device))
    unfinished = written.with_name(
        f"{written.name}.tmp"
    )  # torch renames the file once it is written
    if not written.exists() and unfinished.exists():
        unfinished.replace(written)
    tail = _tail(written)
    if not tail:
        with suppress(FileNotFoundError):
            remove_file(written)
        reason = (
            f"the profiler wrote no file into {final.parent} ({_why_not_writable(final.parent)})"
        )
        return Output(expected.with_status("failed", reason))
    raw = final.with_suffix("")
    move_file(written, raw)
    if not _END.search(tail):
        size = raw.stat().st_size
        reason = f"cut off after {size} bytes ({_why_not_writable(final.parent)})"
        return Output(expected.with_status("truncated", reason, path=raw.name, bytes=size))
    names = sorted(set(ranges))
    return Output(pending, lambda: _compressed(raw, final, pending, _annotations(names), device))


def _tail(path: Path) -> bytes:
    """Return the last bytes of a file; empty for an unreadable file."""
    try:
        with opened(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _why_not_writable(folder: Path) -> str:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"
    if not os.access(folder, os.W_OK):
        return "no write permission"
    return f"{room.f_bavail * room.f_frsize >> 20} MiB free there"


def _annotations(names: list[str]) -> re.Pattern[bytes] | None:
    """Return a pattern that matches operators with these names in Kineto's JSON."""
    if not names:
        return None
    alternatives = b"|".join(re.escape(msgspec.json.encode(name)) for name in names)
    return re.compile(rb'"cat": "cpu_op",(\s+)(?="name": (?:' + alternatives + rb"),)")


def _compressed(
    raw: Path, final: Path, pending: Artifact, annotations: re.Pattern[bytes] | None, device: str
) -> Artifact:
    """Compress ``raw`` to ``final``, read it back, and only then remove ``raw``.

    After a failure, the raw file is kept and becomes the artifact.
    """
    try:
        with opened(raw) as source, whole_file(final) as packed:
            _compress(source, packed, annotations)
            artifact = _read_through(packed, pending, device)
            if artifact.status == "truncated":
                raise OSError("the compressed file cannot be read back completely")
        remove_file(raw)
    except OSError as error:
        size = raw.stat().st_size if raw.exists() else None
        return pending.with_status("ok", f"left uncompressed: {error}", path=raw.name, bytes=size)
    return artifact


def _compress(source: BinaryIO, packed: BinaryIO, annotations: re.Pattern[bytes] | None) -> None:
    with igzip.open(packed, "wb", compresslevel=_LEVEL) as target:
        for piece in _pieces(source):
            if annotations is not None:
                piece = annotations.sub(rb'"cat": "user_annotation",\1', piece)
            target.write(piece)


def _read_packed(path: Path, pending: Artifact, device: str) -> Artifact:
    with opened(path) as packed:
        return _read_through(packed, pending, device)


def _read_through(packed: BinaryIO, pending: Artifact, device: str) -> Artifact:
    """Read a compressed trace to its end; return its artifact with status and number of events.

    torch records kernels with CUPTI, which serves one subscriber per process. If another subscriber
    was first, torch records only the host, without an error.
    """
    events, spans, tail, lost, calls, launches = 0, 0, b"", device, False, False
    size = packed.seek(0, os.SEEK_END)
    packed.seek(0)
    try:
        with igzip.open(packed, "rb") as file:
            for piece in _pieces(file):
                events += piece.count(_PHASE)
                spans += piece.count(_SPAN)
                tail = piece[-_TAIL_BYTES:]
                if lost and any(mark in piece for mark in _OF_A_DEVICE):
                    lost = ""
                if lost:
                    calls |= _CALL in piece
                    launches |= _LAUNCH.search(piece) is not None
    except (OSError, EOFError):
        tail = b""  # cut off inside of the compression
    artifact = pending.with_status("ok", bytes=size, events=events)
    if not _END.search(tail):
        reason = f"cut off after {size} bytes: the engine did not write the end"
        return artifact.with_status("truncated", reason)
    if not spans:
        return artifact.with_status("empty", "the trace holds no spans")
    if lost and (launches or not calls):
        reason = f"{lost} was in use, but none of its events was recorded: {lost_kernels()}"
        logger.warning("%s: %s", artifact.path, reason)
        return artifact.with_status("ok", reason, unrecorded_device=lost)
    return artifact


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    """Yield a file in large pieces; cuts are before ``"ph"``, the first key of Kineto's events."""
    rest = b""
    while chunk := source.read(_CHUNK_BYTES):
        events, phase, begun = (rest + chunk).rpartition(_PHASE)
        if events:
            yield events
        rest = phase + begun
    if rest:
        yield rest
