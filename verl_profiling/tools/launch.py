"""The seam for tools that must be there before a process starts, as Nsight Systems must.

Such a tool is started with the process, and then records the ranges that the process opens and
closes. What it writes is fetched after the run (``verl-profiling collect``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from verl_profiling.manifest import Artifact

__all__ = ["Launch", "Ranges"]


class Ranges(Protocol):
    """The ranges that this process has the tool record, one at a time."""

    def require(self) -> None:
        """Check that this process was started under the tool.

        Raises:
            ToolUnavailableError: It was not; the message says how to start it.
        """

    def check(self, who: str) -> None:
        """Check that another range can be opened now.

        Args:
            who: Who wants to, for the message.

        Raises:
            CaptureStateError: One is open, or the tool was told to expect no more.
        """

    def note_opened(self, folder: Path, artifact: str) -> None:
        """Note a range that was opened just now.

        Args:
            folder: The step folder that it belongs to.
            artifact: Name of the artifact that its report becomes.

        Raises:
            OSError: It cannot be noted.
        """

    def note_closed(self, artifact: Artifact, run: Path, *, keep: bool) -> Artifact:
        """Note that the open range was closed just now.

        Args:
            artifact: The artifact as expected.
            run: The run's folder.
            keep: ``False`` for a warm-up.

        Returns:
            The artifact, ``pending`` until it is collected.

        Raises:
            OSError: It cannot be noted.
        """


class Launch(ABC):
    """How a process is started under a tool, and what the machine needs for that.

    Attributes:
        range_api: API whose calls open and close ranges, by the name that engines have for it
            (vLLM's ``profiler="cuda"``).
        range_count: Number of ranges that a process opens, where the user gave it.
    """

    range_api: ClassVar[str]
    range_count: int | None

    @abstractmethod
    def check_machine(self) -> None:
        """Check that processes can be started under the tool here.

        Raises:
            ToolUnavailableError: They cannot; the message says what to install.
        """

    @abstractmethod
    def runtime_env(self, output: Path, ranges: int, *, forks: bool) -> dict[str, Any]:
        """Return the Ray runtime environment that starts a process under the tool.

        Args:
            output: What reports are named after, without the process id.
            ranges: Number of ranges that the process will open.
            forks: The process computes in children of its own.

        Raises:
            ToolUnavailableError: The tool is not on this machine.
        """

    @abstractmethod
    def ranges(self) -> Ranges:
        """Return the ranges of this process."""
