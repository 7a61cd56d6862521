"""Writes the log of the watch into the run's folder: a line a step, in two bounded parts."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import msgspec

from verl_profiling.step_account import StepAccount
from verl_profiling.watch_log import OLDER_WATCH_LOG, WATCH_LOG, logged

__all__ = ["MAX_PART_BYTES", "WatchLog"]

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 8 << 20
"""Bytes of each of the two parts."""
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK


class WatchLog:
    """The log of a run; call it with the accounts of steps.

    Their lines are appended with one write, and the file is closed after it, so that readers on other hosts
    see them. What goes wrong is said once and does not reach the loop; the log goes on as soon as it can.

    Args:
        folder: The run's folder.
        max_part_bytes: Size at which the log begins its next part; the part before is kept, others are not.
    """

    def __init__(self, folder: Path, max_part_bytes: int = MAX_PART_BYTES) -> None:
        self._path = folder / WATCH_LOG
        self._older = folder / OLDER_WATCH_LOG
        self._max_part_bytes = max_part_bytes
        self._is_torn = True  # what was written before may have ended within a line
        self._encoder = msgspec.json.Encoder()
        self._complained = False

    def __call__(self, *accounts: StepAccount) -> None:
        """Log steps."""
        try:
            self._append(b"".join(self._encoder.encode(logged(account)) + b"\n" for account in accounts))
        except OSError as error:
            if not self._complained:
                logger.warning("the log of the watch cannot be written: %s: %s", self._path, error)
            self._complained = True

    def _append(self, lines: bytes) -> None:
        size = self._size()
        if size and size + len(lines) > self._max_part_bytes:
            self._path.replace(self._older)
            size = 0
        if self._is_torn and size:
            lines = b"\n" + lines
        descriptor = os.open(self._path, _FLAGS, 0o644)
        try:
            self._is_torn = os.write(descriptor, lines) < len(lines)
        finally:
            os.close(descriptor)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0
