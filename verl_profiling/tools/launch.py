"""The interface of tools that must start the process which they record, such as Nsight Systems.

Such a tool records the ranges that the process opens and closes. What it writes is fetched after
the run (``verl-profiling collect``).
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
            who: The worker, to be named in the message.

        Raises:
            CaptureStateError: A range is open, or the tool does not expect another.
        """

    def note_opened(self, folder: Path, artifact: str) -> None:
        """Record that a range was opened just now.

        Args:
            folder: The step folder that it belongs to.
            artifact: Name of the artifact that its report becomes.

        Raises:
            OSError: The record cannot be written.
        """

    def note_closed(self, artifact: Artifact, run: Path, *, keep: bool) -> Artifact:
        """Record that the open range was closed just now.

        Args:
            artifact: The artifact as expected.
            run: The run's folder.
            keep: ``False`` for a warm-up.

        Returns:
            The artifact, ``pending`` until it is collected.

        Raises:
            OSError: The record cannot be written.
        """


class Launch(ABC):
    """How a process is started under a tool, and what the machine needs for that.

    Attributes:
        range_api: API whose calls open and close ranges, by its name in engines (vLLM's
            ``profiler="cuda"``).
        range_count: Number of ranges that a process opens, if the user set it.
    """

    range_api: ClassVar[str]
    range_count: int | None

    @abstractmethod
    def check_machine(self) -> None:
        """Check that processes can be started under the tool here.

        Raises:
            ToolUnavailableError: They cannot be; the message says what to install.
        """

    @abstractmethod
    def runtime_env(self, output: Path, ranges: int, *, forks: bool) -> dict[str, Any]:
        """Return the Ray runtime environment that starts a process under the tool.

        Args:
            output: Stem of the reports' names, without the process id.
            ranges: Number of ranges that the process will open.
            forks: Whether the process computes in child processes.

        Raises:
            ToolUnavailableError: The tool is not on this machine.
        """

    @abstractmethod
    def ranges(self) -> Ranges:
        """Return the ranges of this process."""
