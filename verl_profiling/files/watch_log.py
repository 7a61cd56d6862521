"""Reads the log of a run's watch, which has one step summary per line, in a current and an older
file.

If a step has several lines, the last line counts. Both files have a limited size, so a long run
keeps its latest steps. :mod:`verl_profiling.watch.log_writer` writes the log; ``top`` follows the
growing files with
:class:`WatchLogReader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import msgspec

from verl_profiling.files.opener import UNDECODABLE, opened, reading
from verl_profiling.files.step_summary import StepSummary

WATCH_LOG = "watch.jsonl"
OLDER_WATCH_LOG = "watch.1.jsonl"
MAX_LINE = 1 << 20


def has_watch_log(run: Path) -> bool:
    """Return whether the folder of a run contains a watch log."""
    return (run / WATCH_LOG).is_file() or (run / OLDER_WATCH_LOG).is_file()


def read_watch_log(run: Path) -> Sequence[StepSummary]:
    """Return the lines of a run's watch log, which are cached until the size of a file changes.

    Raises:
        TraceFormatError: The log is a link to a file outside the run's folder, or cannot be
                read.
    """
    sizes = []
    for part in (run / OLDER_WATCH_LOG, run / WATCH_LOG):
        with suppress(OSError):  # a missing file; of circular links, the reader below reports more
            sizes.append(part.lstat().st_size)
    return _lines(run, tuple(sizes))


@lru_cache(maxsize=1)
def _lines(run: Path, sizes: tuple[int, ...]) -> Sequence[StepSummary]:
    return [*WatchLogReader(run).read()]


def latest_step(lines: Iterable[StepSummary]) -> list[StepSummary]:
    """Return a list with the last line of the latest step, or an empty list.

    The last line of the log may be about an earlier step.
    """
    return sorted(lines, key=lambda line: line.step)[-1:]


class WatchLogReader:
    """Reads the watch log of a run, and follows new lines; invalid lines are left out.

    Args:
        run: Folder of the run; the log may appear later.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._first, self._position = (
            b"",
            0,
        )  # first line of the last part, and end of its last whole line
        self._decoder = msgspec.json.Decoder(StepSummary)

    def read(self) -> Iterator[StepSummary]:
        """Yield the steps logged since the last call; the first call yields all steps in the log.

        Raises:
            TraceFormatError: The log is a link to a file outside the run's folder, or cannot be
                read.
        """
        with reading(self._run / WATCH_LOG), ExitStack() as stack:
            # The newer file is opened first. If it is rotated now, it is opened again as the older
            # file, so no line is missed.
            parts: list[tuple[bytes, BinaryIO]] = []
            for name in (WATCH_LOG, OLDER_WATCH_LOG):
                with suppress(FileNotFoundError):
                    file = stack.enter_context(opened(self._run / name))
                    parts.insert(0, (file.readline(MAX_LINE), file))
            firsts = [first for first, _ in parts]
            since = firsts.index(self._first) if self._first in firsts else 0
            for first, part in parts[since:]:
                yield from self._steps(first, part)

    def _steps(self, first: bytes, part: BinaryIO) -> Iterator[StepSummary]:
        """Yield the unread steps of one of the files."""
        part.seek(self._position if first == self._first else 0)
        within_a_line = False
        while line := part.readline(MAX_LINE):
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < MAX_LINE:
                return  # the line is not written to its end yet
            self._first, self._position = first, part.tell()
            is_first, within_a_line = not within_a_line, not is_whole
            if is_first and is_whole:
                with suppress(*UNDECODABLE):
                    yield self._decoder.decode(line)
