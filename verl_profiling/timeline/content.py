"""Reads the bytes of a trace file in bounded blocks, compressed or not.

A small compressed file can unpack to any number of bytes, so :class:`Limits` bounds the content. Reading
stops at a limit; the content up to there is kept, and a warning is added.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
from isal import isal_zlib

from verl_profiling.errors import TraceFormatError
from verl_profiling.units import byte_size

BLOCK_BYTES = 1 << 18
"""Size of a block, small enough for a core's L2 cache."""

_READ_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_LEAST_BYTES = 1 << 30
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUPS = (  # folder, limit, usage; version 2 and version 1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


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
        if (used := _resident_bytes()) <= allowed:
            return ""
        return (
            f"stopped after {events:,} events: the process takes {byte_size(used)} of memory, "
            f"and the limit is {byte_size(allowed)} (--max-memory raises it)"
        )


@cache
def _allowed_bytes() -> int:
    return max(memory_available() * 3 // 4, _LEAST_BYTES)


def memory_available() -> int:
    """Return the bytes of memory this process can use in all: its present use plus the free memory."""
    free = [_counted(_MEMINFO).get("MemAvailable:", sys.maxsize >> 10) << 10]
    for folder, limit, usage in _CGROUPS:
        bound, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if bound.isdecimal() and used.isdecimal():
            cached = _counted(folder / "memory.stat")
            kept = int(used) - cached.get("inactive_file", 0) - cached.get("active_file", 0)
            free.append(max(int(bound) - kept, 0))
    return min(free) + _resident_bytes()


def _resident_bytes() -> int:
    """Return the memory of this process (bytes); 0 without /proc, which switches the limit off."""
    try:
        with _STATM.open("rb", buffering=0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _counted(path: Path) -> dict[str, int]:
    """Return the number in the second column of each line, by the word in the first."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
