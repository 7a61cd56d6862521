"""The ranges of Nsight Systems that this process opens, and its record of them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.errors import CaptureStateError, ToolUnavailableError
from verl_profiling.manifest import Artifact
from verl_profiling.nsys_ranges import NOTES_SUFFIX, NsysRange

__all__ = ["OpenedRanges", "nsys_variables", "process_ranges"]

_OUTPUT_VARIABLE = "VERL_PROFILING_NSYS_OUTPUT"
_RANGES_VARIABLE = "VERL_PROFILING_NSYS_RANGES"


def nsys_variables(output: Path, ranges: int) -> dict[str, str]:
    """Return the environment variables that tell a process how Nsight Systems was started for it.

    Args:
        output: Stem of its reports' names, without the process id.
        ranges: Number of ranges that Nsight Systems expects.
    """
    return {_OUTPUT_VARIABLE: str(output), _RANGES_VARIABLE: str(ranges)}


class OpenedRanges:
    """The ranges of this process and its children, one at a time, numbered like Nsight Systems does."""

    def __init__(self) -> None:
        self._opened = 0
        self._open: NsysRange | None = None

    def require(self) -> None:
        """Check that this process was started under Nsight Systems.

        Raises:
            ToolUnavailableError: It was not.
        """
        if _OUTPUT_VARIABLE not in os.environ:
            raise ToolUnavailableError(
                "tool 'nsys': this process was not started under Nsight Systems; create the worker with "
                ".options(runtime_env=nsys_runtime_env(config, role=...))"
            )

    def check(self, who: str) -> None:
        """Check that Nsight Systems will record another range.

        Raises:
            CaptureStateError: A range is open, or Nsight Systems does not expect as many.
        """
        if self._open is not None:
            raise CaptureStateError(
                f"{who}: a range is open in this process, for {self._open.artifact}, and Nsight Systems "
                "would not see another; stop that capture first"
            )
        expected = int(os.environ[_RANGES_VARIABLE])
        if self._opened >= expected:
            raise CaptureStateError(
                f"{who}: range {self._opened + 1}: Nsight Systems was told to expect {expected} and has "
                "stopped listening; set tools.nsys.ranges to the number that this process opens"
            )

    def note_opened(self, folder: Path, artifact: str) -> None:
        """Record that a range was opened just now.

        Args:
            folder: The step folder that it belongs to.
            artifact: Name of the artifact that its report becomes.

        Raises:
            OSError: The record cannot be written.
        """
        self._opened += 1
        self._open = NsysRange(
            number=self._opened, folder=_in_save_path(folder), artifact=artifact, begin_ns=clock.now_ns()
        )
        try:
            self._note(self._open)
        except OSError:
            self._open = None
            raise

    def note_closed(self, artifact: Artifact, run: Path, *, keep: bool) -> Artifact:
        """Record that the open range was closed just now; Nsight Systems has yet to write its report.

        Args:
            artifact: The artifact as expected.
            run: The run's folder.
            keep: ``False`` for a warm-up.

        Returns:
            The artifact, ``pending`` until it is collected.

        Raises:
            CaptureStateError: No range is open.
            OSError: The record cannot be written.
        """
        if self._open is None:
            raise CaptureStateError(f"{artifact.path}: no range is open in this process")
        closed = msgspec.structs.replace(self._open, end_ns=clock.now_ns(), keep=keep)
        self._open = None
        self._note(closed)
        reason = (
            f"range {closed.number} of this process; nsys writes its report by the end of the process; "
            f"fetch it with: verl-profiling collect {run}"
        )
        return msgspec.structs.replace(artifact, status="pending", reason=reason)

    def _note(self, noted: NsysRange) -> None:
        """Append a line; the first replaces a file that an earlier process of the same id may have left."""
        notes = Path(f"{os.environ[_OUTPUT_VARIABLE]}.{os.getpid()}{NOTES_SUFFIX}")
        with notes.open("wb" if noted.number == 1 and not noted.end_ns else "ab") as file:
            file.write(msgspec.json.encode(noted) + b"\n")


def _in_save_path(folder: Path) -> str:
    """Return a step folder's path below the folder that holds the reports' own folder."""
    root = Path(os.environ[_OUTPUT_VARIABLE]).parent.parent
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else folder.name


_ranges = OpenedRanges()


def process_ranges() -> OpenedRanges:
    """Return the ranges of this process."""
    return _ranges
