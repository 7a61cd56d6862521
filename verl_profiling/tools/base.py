"""The interface of recording tools, which third parties may implement.

A :class:`Tool` holds options; :meth:`Tool.start` returns a :class:`Recording`, which lasts until
its stop. A process has at most one recording of a tool at a time, so no locks are needed. The least
tool, ``spans``, records nothing itself.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.files.opener import move_file
from verl_profiling.identity import artifact_name
from verl_profiling.manifest import Artifact, expected_artifact


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """A tool without options."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a recording is written, and under which name.

    Attributes:
        folder: The existing step folder.
        lane: Lane of the recording rank, e.g. ``actor_rank0``.
        stage: The recorded stage, in discrete mode; ``None`` in e2e mode.
        occurrence: 1 for the first time that the stage runs in the step, 2 for the second, ...
        metadata: Plain values that a tool may store in the artifact.
    """

    folder: Path
    lane: str
    stage: str | None = None
    occurrence: int = 1
    metadata: dict[str, Any]

    def path(self, suffix: str) -> Path:
        """Return the artifact's path for a tool's suffix."""
        return self.folder / artifact_name(self.lane, suffix, self.stage, self.occurrence)

    def artifact(self, tool: type[Tool]) -> Artifact:
        """Return the expected artifact."""
        return expected_artifact(self.lane, tool.name, tool.suffix, self.stage, self.occurrence)


@dataclass(frozen=True)
class Output:
    """One artifact that a recording wrote.

    Attributes:
        artifact: The artifact in its current state; ``pending`` before ``finish`` has run.
        finish: The rest of the work, such as compression. The function runs on a background thread
            during training, and returns the artifact's final state.
    """

    artifact: Artifact
    finish: Callable[[], Artifact] | None = None


class Marks(NamedTuple):
    """The functions by which stages appear inside a recording's artifact, e.g. as NVTX ranges.

    Both functions are called for every stage, on the stage's thread, and may take about a
    microsecond.

    Attributes:
        begin: Called with the name of a stage at its begin; returns the argument of ``end``, or
            ``None``.
        end: Called with the result of ``begin`` at the end of the stage.
    """

    begin: Callable[[str], object]
    end: Callable[[Any], object]


class Recording(ABC):
    """A tool that records a process, from :meth:`Tool.start` to :meth:`stop` or :meth:`discard`."""

    @property
    def marks(self) -> Marks | None:
        """The functions by which stages appear inside the artifact; ``None`` if they do not
        appear there.
        """
        return None

    def step(self) -> None:
        """Note the end of a mini-batch, for tools that record a window of mini-batches."""

    def bytes_to_stop(self) -> int | None:
        """Return the additional memory (bytes) that a stop and export would need now; ``None`` if
        unknown.

        Called at the end of stages and mini-batches. If the memory exceeds ``limits.memory_share``,
        the recording is stopped, with a ``truncated`` artifact.
        """
        return None

    @abstractmethod
    def stop(self) -> Sequence[Output]:
        """Stop recording and write the artifacts.

        Returns:
            One output per artifact. An artifact without content has the status ``empty`` and a
            reason.
        """

    @abstractmethod
    def discard(self) -> None:
        """Stop recording and write nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the manifest, after the stop, named ``stage/<name>/<what>_<unit>``.

        For example ``stage/update_actor/peak_allocated_bytes``. If discrete mode records a stage
        several times, the highest value is kept.
        """
        return {}


class EngineRanges(Protocol):
    """The ranges, i.e. recorded periods, of a process and its children, under a tool that started
    the process, like Nsight Systems. At most one range is open.
    """

    def check(self, who: str) -> None:
        """Check that a range can be opened, and that the tool will record it.

        Args:
            who: Lane of the range, for errors.

        Raises:
            CaptureStateError: A range is open, or the tool records no more ranges.
            OSError: The begin of a range cannot be logged.
        """

    def note_opened(self, folder: Path, artifact: str) -> None:
        """Log the begin of a range.

        Args:
            folder: Step folder of the range.
            artifact: Name of the artifact for the range.
        """

    def note_closed(self, artifact: Artifact, run: Path, *, keep: bool) -> Artifact:
        """Log the end of the open range; return its artifact.

        Args:
            artifact: The expected artifact, not written yet.
            run: The run's folder.
            keep: ``False`` for a warm-up, whose report is discarded.
        """


class Tool(ABC):
    """A tool that records a process.

    Attributes:
        name: Name in the configuration, in file names and in the manifest.
        suffix: Suffix of the artifacts' names.
        options_class: A frozen dataclass of the tool's options.
        conflicts: Names of tools that cannot record at the same time in one process.
        starts_process: Whether the tool has to start the recorded process, like Nsight Systems.
        any_thread: Whether a recording may be stopped on another thread than the thread of its
            start.
        engine_profiler: Name of the profiler that rollout engines have for this tool, such as
            ``torch``; empty for a tool that does not record in engines. Engines read the options of
            the profiler from the tool's options.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]
    options_class: ClassVar[type] = NoOptions
    conflicts: ClassVar[frozenset[str]] = frozenset()
    starts_process: ClassVar[bool] = False
    engine_profiler: ClassVar[str] = ""
    any_thread: bool = True

    def __init__(self, options: Any) -> None:
        self.options = options

    def prepare(self) -> None:
        """Do slow work, such as imports and checks, once before the first capture.

        Raises:
            ToolUnavailableError: The tool cannot work on this machine; the message has the remedy.
        """

    def check_machine(self) -> None:
        """Check, in any process, that the tool can work on this machine; by default
        :meth:`prepare`.

        Raises:
            ToolUnavailableError: The tool cannot work on this machine; the message has the remedy.
        """
        self.prepare()

    @abstractmethod
    def start(self, destination: Destination) -> Recording:
        """Start recording.

        Raises:
            ToolUnavailableError: The tool cannot work here.
            CaptureStateError: Another profiler records this process already.
        """

    def engine_ranges(self) -> EngineRanges | None:
        """Return the ranges that record an engine which runs under the tool, as this process does;
        ``None`` for a tool with which the engine's ranks write files themselves.

        Raises:
            ToolUnavailableError: This process was not started under the tool.
        """
        return None

    def engine_output(self, written: Path, final: Path, expected: Artifact, device: str) -> Output:
        """Move what a rank of an engine wrote to the artifact's path; return the output.

        Args:
            written: The file or folder in the engine's own folder.
            final: Path of the artifact.
            expected: The expected artifact, not written yet.
            device: Device type of the engine in torch, e.g. ``cuda``.

        Raises:
            OSError: The file cannot be moved.
        """
        move_file(written, final)
        return Output(expected.with_status("ok", bytes=final.stat().st_size))


class SpansTool(Tool):
    """Writes no artifact: the manifest has the stage spans of every capture."""

    name = "spans"
    suffix = ""

    def start(self, destination: Destination) -> Recording:
        """Start no profiler, because the session records the stage spans."""
        return _SpansRecording()


class _SpansRecording(Recording):
    def stop(self) -> list[Output]:
        return []

    def discard(self) -> None:
        pass


def imported(module: str, tool: str, package: str = "'verl-profiling[train]'") -> Any:
    """Import and return a module that a tool needs.

    Args:
        module: Name of the module, e.g. ``torch``.
        tool: Name of the tool, for the error.
        package: The argument of ``pip install`` for the module, for the error.

    Raises:
        ToolUnavailableError: The module is not installed, or cannot be loaded.
    """
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # Without CANN, importing torch_npu raises an OSError or a RuntimeError.
        cause = str(error).partition("\n")[0]
        raise ToolUnavailableError(
            f"tool {tool!r} needs {module} ({cause}); install it with: pip install {package}"
        ) from error


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, and its parent folder if that is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # something else is in it
        folder.parent.rmdir()
