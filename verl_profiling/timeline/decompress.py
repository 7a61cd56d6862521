"""Reads the bytes of a trace file in bounded blocks, compressed or not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.limits import Limits

__all__ = ["BLOCK_BYTES", "Blocks", "is_gzip"]

BLOCK_BYTES = 1 << 18
"""What is worked on at a time stays in a processor's own cache."""

_READ_BYTES = 1 << 16
_FIRST_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"


def is_gzip(file: BinaryIO) -> bool:
    """Return whether a file is compressed; its position must be 0, and stays there."""
    head = file.read(2)
    file.seek(0)
    return head == _GZIP_MAGIC


class Blocks:
    """The content of one file as blocks of at most ``BLOCK_BYTES``; the first is small.

    A gzip file may have several members (RFC 1952, section 2.2). Iterating over a damaged file does
    not raise: it ends early, and :attr:`damage` says why.

    Attributes:
        path: The file.
        position: Bytes of uncompressed content handed out so far.
        damage: Why the content ended early, or ``""``.
        limited: Whether that is because of the limit.
    """

    def __init__(self, path: Path, *, limit: int | None = None, from_end: int | None = None) -> None:
        """Name the file.

        Args:
            path: The file.
            limit: End after so many bytes; by default, what :class:`Limits` says.
            from_end: Skip all but these last bytes, if the file can be read from there.
        """
        self.path = path
        self.position = 0
        self.damage = ""
        self.limited = False
        self._limit = Limits().content_bytes if limit is None else limit
        self._from_end = from_end

    def __iter__(self) -> Iterator[bytes]:
        """Yield the content.

        Raises:
            TraceFormatError: The file cannot be opened or read, or is a pipe or a device.
        """
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # opening a pipe waits for a writer
                raise TraceFormatError(self.path, "is not a regular file")
            with self.path.open("rb") as file:
                for block in self._gzip(file) if is_gzip(file) else self._plain(file):
                    if self.position + len(block) > self._limit:
                        self.limited = True
                        most = f"the limit of {self._limit:,} bytes of content"
                        self.damage = f"stopped at {most} (--max-content raises it)"
                        return
                    self.position += len(block)
                    yield block
        except OSError as error:
            raise TraceFormatError(self.path, f"cannot be read ({error.strerror or error})") from error

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        if self._from_end is not None:
            file.seek(max(0, os.fstat(file.fileno()).st_size - self._from_end))
        if block := file.read(_FIRST_BYTES):
            yield block
        while block := file.read(BLOCK_BYTES):
            yield block

    def _gzip(self, file: BinaryIO) -> Iterator[bytes]:
        member = isal_zlib.decompressobj(wbits=31)
        pending = b""
        limit = _FIRST_BYTES
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
