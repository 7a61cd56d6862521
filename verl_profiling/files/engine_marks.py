"""The marks of an engine's processes: parts of their start, and of the engine's sleep and wake.

These processes have no connection to the loop. Each one appends its marks to a file of its own, in
a folder that the process which starts the engine makes, reads, and removes.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

import msgspec

from verl_profiling.files.opener import UNDECODABLE, appended, opened
from verl_profiling.manifest import StageSpan

VARIABLE = "VERL_PROFILING_MARKS"
"""Environment variable with the folder; without it, nothing is marked."""

SLEEP, WAKE, RESET = "sleep", "wake", "reset_cache"


class EngineMark(msgspec.Struct, frozen=True, array_like=True):
    """A call of an engine, or a part of a call.

    Attributes:
        name: Name of the call, e.g. ``sleep``; of a part, e.g. ``sleep/offload``.
        begin_ns: Begin (unix ns). Parts of a call are in order, from its begin on.
        end_ns: End; of a part, the begin and the sum of its durations.
        size: Bytes that it moved, released or reserved; 0 if unknown.
    """

    name: str
    begin_ns: int
    end_ns: int
    size: int = 0

    @property
    def is_of_step(self) -> bool:
        """Whether the mark is of a sleep or a wake, and not of the start."""
        return self.name.partition("/")[0] in (SLEEP, WAKE, RESET)


_own = ""


def collect_marks() -> None:
    """Let engines that this process starts from now on mark their calls."""
    global _own
    if not _own:
        _own = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="verl-profiling-marks-")
        atexit.register(_remove, os.getpid())


def _remove(pid: int) -> None:
    if os.getpid() == pid:  # not at the exit of a forked child
        rmtree(_own, ignore_errors=True)


def is_collecting() -> bool:
    """Return whether this process started the engine, and does not only compute for it."""
    return bool(_own)


def write_marks(marks: Iterable[EngineMark]) -> None:
    """Append marks of this process to its file, if its folder is still known."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    lines = msgspec.json.Encoder().encode_lines([*marks])
    with suppress(OSError), appended(Path(folder, str(os.getpid()))) as file:
        file.write(lines)


def stages_since(begin_ns: int) -> list[StageSpan]:
    """Return the sleeps and wakes of engines since a time, and their parts, as stages."""
    stages = []
    for mark in MarkReader().read():
        if mark.is_of_step and mark.begin_ns >= begin_ns:
            depth = mark.name.count("/")
            span = StageSpan(mark.name, mark.begin_ns, mark.end_ns, depth=depth, bytes=mark.size)
            stages.append(span)
    return stages


class MarkReader:
    """Reads the marks of the engines that this process has started; each call yields new marks."""

    def __init__(self) -> None:
        self._read_bytes: dict[str, int] = {}

    def read(self) -> Iterator[EngineMark]:
        """Yield the marks since the last call."""
        if not _own:
            return
        with suppress(OSError):
            for path in sorted(Path(_own).iterdir()):
                yield from self._of(path)

    def _of(self, path: Path) -> Iterator[EngineMark]:
        begin = self._read_bytes.get(path.name, 0)
        if path.stat().st_size == begin:
            return
        with opened(path) as file:
            file.seek(begin)
            content = file.read()
        whole, end, _ = content.rpartition(b"\n")
        self._read_bytes[path.name] = begin + len(whole + end)
        for line in whole.splitlines():
            with suppress(*UNDECODABLE):
                yield msgspec.json.decode(line, type=EngineMark)
