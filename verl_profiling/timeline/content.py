"""Reads the bytes of a trace file in bounded blocks, compressed or not.

A small compressed file can unpack to any number of bytes, so :class:`Limits` bounds the content. Reading
stops at a limit; the content up to there is kept, and a warning is added.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
from isal import isal_zlib

from verl_profiling.errors import TraceFormatError
from verl_profiling.memory import available_bytes, own_bytes
from verl_profiling.units import byte_size

BLOCK_BYTES = 1 << 18
"""Size of a block, small enough for a core's L2 cache."""

_READ_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_LEAST_BYTES = 1 << 30


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on reading one trace. The commands have an option for each limit.

    Attributes:
        content_bytes: Bytes of content, uncompressed.
        memory_bytes: Memory of the reading process (bytes). The default is three quarters of the memory
            that is available at the first check, and at least 1 GiB.
    """

    content_bytes: int = 64 << 30
    memory_bytes: int | None = None

    def reached(self, events: int) -> str:
        """Return a sentence if this process is over its memory limit, else ``""``."""
        allowed = _allowed_bytes() if self.memory_bytes is None else self.memory_bytes
        if (used := own_bytes() or 0) <= allowed:
            return ""
        return (
            f"stopped after {events:,} events: the process takes {byte_size(used)} of memory, "
            f"and the limit is {byte_size(allowed)} (--max-memory raises it)"
        )


@cache
def _allowed_bytes() -> int:
    free = available_bytes()
    return sys.maxsize if free is None else max((free + (own_bytes() or 0)) * 3 // 4, _LEAST_BYTES)


class Blocks:
    """The uncompressed content of one file, in blocks of at most ``BLOCK_BYTES``; the first block is small.

    A gzip file may have several members (RFC 1952, section 2.2). Iterating over a damaged file does
    not raise: it ends early, and :attr:`damage` has the reason.

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
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # opening a pipe waits for a writer
                raise TraceFormatError(self.path, "is not a regular file")
            with self.path.open("rb") as file:
                is_gzip = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                for block in self._gzip(file) if is_gzip else self._plain(file):
                    if self.position + len(block) > self._limit:
                        most = f"the limit of {self._limit:,} bytes of content"
                        self.damage = f"stopped at {most} (--max-content raises it)"
                        return
                    self.position += len(block)
                    yield block
        except OSError as error:
            raise TraceFormatError(self.path, f"cannot be read ({error.strerror or error})") from error

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        size = _READ_BYTES
        while block := file.read(size):
            yield block
            size = BLOCK_BYTES

    def _gzip(self, file: BinaryIO) -> Iterator[bytes]:
        member = isal_zlib.decompressobj(wbits=31)
        pending = b""
        limit = _READ_BYTES
        started = False
        try:
            while pending or (pending := file.read(_READ_BYTES)):
                if member.eof:
                    if not pending.strip(b"\0"):  # padding after the last member is allowed
                        pending = b""
                        continue
                    member = isal_zlib.decompressobj(wbits=31)
                started = True
                block = member.decompress(pending, limit)
                limit = BLOCK_BYTES
                pending = member.unused_data if member.eof else member.unconsumed_tail
                if block:
                    yield block
        except isal_zlib.error as error:  # type: ignore[misc]  # the stub does not declare it as an exception
            self.damage = f"corrupt gzip data ({error})"
            return
        if started and not member.eof:
            self.damage = "the gzip stream is cut off"
