"""The captures of a run that goes on: its step folders, and who asked for each."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verl_profiling.capture_request import Trigger
from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, ManifestState
from verl_profiling.run_files import named_file
from verl_profiling.timeline.inputs import step_folders, step_number

_UNREADABLE = (OSError, TraceFormatError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_MOST_BYTES = 64 << 20
_Version = tuple[int, int] | None
"""When a manifest was written, and its inode: a file system tells times in steps of milliseconds."""


class _Head(msgspec.Struct, frozen=True):
    state: ManifestState = "written"
    trigger: Trigger = Trigger()


class CaptureSoFar(msgspec.Struct, frozen=True, kw_only=True):
    """One step folder.

    Attributes:
        folder: Its name.
        step: Number of its first step.
        trigger: Who asked for it, and why; ``None`` if its manifest cannot be read.
        goes_on: Whether its capture has not ended.
    """

    folder: str
    step: int
    trigger: Trigger | None = None
    goes_on: bool = False

    @property
    def asked(self) -> str:
        """Who asked for it, and why, as words."""
        if self.trigger is None:
            return "no manifest yet"
        by = (
            f" by {self.trigger.by}" if self.trigger.by and self.trigger.by not in self.trigger.reason else ""
        )
        reason = f": {self.trigger.reason}" if self.trigger.reason else ""
        return f"{self.trigger.kind}{by}{reason}{' (goes on)' if self.goes_on else ''}"


class CapturesSoFar:
    """Follows the step folders of a run; a manifest is read when it changed.

    Args:
        run: The run's folder.
        most: How many of the latest are looked into.
    """

    def __init__(self, run: Path, most: int) -> None:
        self._run = run
        self._most = most
        self._read: dict[Path, tuple[_Version, CaptureSoFar]] = {}

    def look(self) -> tuple[int, list[CaptureSoFar]]:
        """Return how many step folders there are, and the latest of them, in order."""
        try:
            folders = step_folders(self._run)
        except OSError:
            return 0, []
        latest = folders[-self._most :]
        self._read = {folder: self._capture(folder) for folder in latest}
        return len(folders), [capture for _, capture in self._read.values()]

    def _capture(self, folder: Path) -> tuple[_Version, CaptureSoFar]:
        capture = CaptureSoFar(folder=folder.name, step=step_number(folder))
        try:
            path = named_file(folder, MANIFEST_NAME)
            found = path.stat()
            version = (found.st_mtime_ns, found.st_ino)
            if folder in self._read and self._read[folder][0] == version:
                return self._read[folder]
            if not path.is_file() or found.st_size > _MOST_BYTES:
                return None, capture
            head = msgspec.json.decode(path.read_bytes(), type=_Head)
        except _UNREADABLE:
            return None, capture
        goes_on = head.state == "begun"
        return version, msgspec.structs.replace(capture, trigger=head.trigger, goes_on=goes_on)
