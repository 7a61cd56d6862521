"""The uncompressed content of trace files, in bounded memory.

A small compressed file can unpack to any size, so :class:`Limits` bounds the content. Reading stops
at a limit with a warning, and the content before the limit is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO

import msgspec
from isal import isal_zlib

from verl_profiling.files.machine import available_bytes, own_bytes
from verl_profiling.files.opener import opened, reading
from verl_profiling.steps.databases import MAGIC, trace_of_database
from verl_profiling.units import byte_size

BLOCK_BYTES = 1 << 18
"""Size of a block in bytes, small enough for a core's L2 cache."""

_READ_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_LEAST_BYTES = 1 << 30


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on reading one trace.

    Attributes:
        content_bytes: Bytes of content, uncompressed.
        memory_bytes: Memory of the reading process (bytes). The default is three quarters of the
            memory that is available at the first check, and at least 1 GiB.
    """

    content_bytes: int = 64 << 30
    memory_bytes: int | None = None

    def reached(self, events: int) -> str:
        """Return a sentence if this process exceeds its memory limit, else ``""``.

        Args:
            events: Number of events read so far, for the sentence.
        """
        allowed = _allowed_bytes() if self.memory_bytes is None else self.memory_bytes
        if (used := own_bytes() or 0) <= allowed:
            return ""
        return (
            f"stopped after {events:,} events: the process takes {byte_size(used)} of memory, "
            f"and the limit is {byte_size(allowed)} (Limits.memory_bytes raises it)"
        )


@cache
def _allowed_bytes() -> int:
    free = available_bytes()
    return sys.maxsize if free is None else max((free + (own_bytes() or 0)) * 3 // 4, _LEAST_BYTES)


class Blocks:
    """The uncompressed content of one file, in blocks of at most ``BLOCK_BYTES``.

    A gzip file may have several members (RFC 1952, section 2.2). Iteration over a damaged file ends
    early without an exception, and :attr:`damage` has the reason.

    Attributes:
        path: The file.
        position: Bytes of uncompressed content yielded so far.
        damage: Reason why the content ended early, or ``""``.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        self.position = 0
        self.damage = ""
        self._limit = limits.content_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield the content.

        Raises:
            TraceFormatError: The file cannot be opened or read, or is a pipe or a device.
        """
        with reading(self.path), opened(self.path) as file:
            for block in self._unlimited(file):
                if self.position + len(block) > self._limit:
                    most = f"the limit of {self._limit:,} bytes of content"
                    self.damage = f"stopped at {most} (Limits.content_bytes raises it)"
                    return
                self.position += len(block)
                yield block

    def _unlimited(self, file: BinaryIO) -> Iterator[bytes]:
        """Return the content of a database, of a gzip file, or of any other file."""
        head = file.read(len(MAGIC))
        file.seek(0)
        if head == MAGIC:
            return trace_of_database(self.path, {})
        if head.startswith(_GZIP_MAGIC):
            return self._gzip(file)
        return iter(partial(file.read, BLOCK_BYTES), b"")

    def _gzip(self, file: BinaryIO) -> Iterator[bytes]:
        member = isal_zlib.decompressobj(wbits=31)
        pending = b""
        started = False
        try:
            while pending or (pending := file.read(_READ_BYTES)):
                if member.eof:
                    pending += file.read(_READ_BYTES) if len(pending) < len(_GZIP_MAGIC) else b""
                    if not pending.startswith(_GZIP_MAGIC):
                        return  # bytes behind the last member are no content, as for gzip(1)
                    member = isal_zlib.decompressobj(wbits=31)
                started = True
                block = member.decompress(pending, BLOCK_BYTES)
                pending = member.unused_data if member.eof else member.unconsumed_tail
                if block:
                    yield block
        except isal_zlib.error as error:  # type: ignore[misc]  # the stub does not declare it as an exception
            self.damage = f"corrupt gzip data ({error})"
            return
        if started and not member.eof:
            self.damage = "the gzip stream is cut off"
