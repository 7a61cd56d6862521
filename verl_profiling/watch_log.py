"""The file that a run writes of its watch: one step summary a line, of which there is an older part, too.

Of a step that has several lines, the last one counts.
Both parts are bounded, so a long run keeps its latest steps. What writes them is
:mod:`verl_profiling.watch.log`; ``top`` and the report read them with :class:`WatchLogReader`, while they
grow and are rotated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.run_files import named_file
from verl_profiling.step_summary import StepSummary

WATCH_LOG = "watch.jsonl"
OLDER_WATCH_LOG = "watch.1.jsonl"
MAX_LINE = 1 << 20
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def has_watch_log(run: Path) -> bool:
    """Return whether a run's folder holds a log of its watch."""
    return (run / WATCH_LOG).exists() or (run / OLDER_WATCH_LOG).exists()


class WatchLogReader:
    """Reads the watch's log of a run, and follows it while it grows; lines that are no steps are left out.

    Args:
        run: The run's folder. A log that is not there yet is waited for.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._read_to = ((0, 0, b""), 0)  # identity of the last part, and the end of its last whole line
        self._decoder = msgspec.json.Decoder(StepSummary)

    def read(self) -> Iterator[StepSummary]:
        """Yield the steps logged since the last call; the first call yields all steps in the log.

        Raises:
            TraceFormatError: The log leads out of the run's folder, or cannot be read.
        """
        try:
            with ExitStack() as opened:
                # The newer one first: rotated meanwhile, it is the older one, too, and no part is missed.
                found: list[BinaryIO] = []
                for name in (WATCH_LOG, OLDER_WATCH_LOG):
                    with suppress(FileNotFoundError):
                        found.append(opened.enter_context(named_file(self._run, name).open("rb")))
                parts = {_identity(part): part for part in reversed(found)}
                known = list(parts)
                since = known.index(self._read_to[0]) if self._read_to[0] in parts else 0
                for identity in known[since:]:
                    yield from self._steps(identity, parts[identity])
        except OSError as error:
            raise TraceFormatError(self._run / WATCH_LOG, f"cannot be read ({error.strerror})") from error

    def _steps(self, identity: tuple[int, int, bytes], part: BinaryIO) -> Iterator[StepSummary]:
        """Yield the steps of one part behind what was read of it."""
        last, position = self._read_to
        if identity == last and position <= os.fstat(part.fileno()).st_size:
            part.seek(position)
        within_a_line = False
        while line := part.readline(MAX_LINE):
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < MAX_LINE:
                return  # its end is still to come
            self._read_to = (identity, part.tell())
            is_first, within_a_line = not within_a_line, not is_whole
            if is_first and is_whole:
                with suppress(*_UNREADABLE):
                    yield self._decoder.decode(line)


def _identity(part: BinaryIO) -> tuple[int, int, bytes]:
    found, first = os.fstat(part.fileno()), part.readline(MAX_LINE)
    part.seek(0)
    return found.st_dev, found.st_ino, first
