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
        self._inode, self._position = 0, 0  # the last part, and the end of its last whole line
        self._decoder = msgspec.json.Decoder(StepSummary)

    def read(self) -> Iterator[StepSummary]:
        """Yield the steps logged since the last call; the first call yields all steps in the log.

        Raises:
            TraceFormatError: The log leads out of the run's folder, or cannot be read.
        """
        parts: dict[int, BinaryIO] = {}
        try:
            with ExitStack() as opened:
                # The newer one first: rotated meanwhile, it is the older one, too, and no part is missed.
                for name in (WATCH_LOG, OLDER_WATCH_LOG):
                    with suppress(FileNotFoundError):
                        part = opened.enter_context(named_file(self._run, name).open("rb"))
                        parts[os.fstat(part.fileno()).st_ino] = part
                known = [*reversed(parts)]
                for inode in known[known.index(self._inode) if self._inode in parts else 0 :]:
                    yield from self._steps(inode, parts[inode])
        except OSError as error:
            raise TraceFormatError(self._run / WATCH_LOG, f"cannot be read ({error.strerror})") from error

    def _steps(self, inode: int, part: BinaryIO) -> Iterator[StepSummary]:
        """Yield the steps of one part behind what was read of it."""
        if inode != self._inode or os.fstat(part.fileno()).st_size < self._position:
            self._inode, self._position = inode, 0
        part.seek(self._position)
        for line in part:
            if not line.endswith(b"\n"):
                return  # its end is still to come
            self._position += len(line)
            with suppress(*_UNREADABLE):
                yield self._decoder.decode(line)
