"""The ``nsys`` tool: NVIDIA Nsight Systems, one report per recording.

Nsight Systems has to start the process, and may write reports until the end of the process. So
:func:`nsys_runtime_env` starts the worker under Nsight Systems. The tool opens and closes ranges,
and logs each range in a file next to the reports. ``verl-profiling collect`` fetches the reports.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.files.opener import appended, remove_file
from verl_profiling.manifest import NOTES_SUFFIX, Artifact, NsysRange
from verl_profiling.tools.base import Destination, Marks, Output, Recording, Tool, imported
from verl_profiling.typed_values import Positive

DOMAIN = "verl_profiling"
"""Domain of the NVTX ranges of stages."""

_OUTPUT_VARIABLE = "VERL_PROFILING_NSYS_OUTPUT"
_RANGES_VARIABLE = "VERL_PROFILING_NSYS_RANGES"
_OWNED_ARGUMENTS = {"o", "output", "capture-range", "capture-range-end"}
_MISSING = (
    "tool 'nsys': there is no nsys on PATH; install NVIDIA Nsight Systems on every node that runs "
    "workers (package nsight-systems-cli), or record with another tool"
)


@dataclass(frozen=True, kw_only=True)
class NsysOptions:
    """Options of the ``nsys`` tool.

    Attributes:
        trace: APIs to trace, as in ``nsys profile --trace``.
        ranges: Number of recordings that a process makes, as Nsight Systems has to know it at its
            start; by default computed from the schedule and the selected stages.
        arguments: Further arguments of ``nsys profile``, or other values for the arguments that the
            tool sets: ``{"gpu-metrics-devices": "all", "cuda-graph-trace": "node", "sample":
                "process-tree"}``.
    """

    trace: tuple[str, ...] = ("cuda", "nvtx", "cublas")
    ranges: Positive | None = None
    arguments: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if owned := sorted(_OWNED_ARGUMENTS.intersection(self.arguments)):
            raise ConfigError(f"arguments.{owned[0]}", "is set by the tool itself; remove it")


class NsysTool(Tool):
    """Opens a range of Nsight Systems per recording, and shows stages as NVTX ranges.

    The tool waits for the GPU at the begin and end of a range, so that kernels are in the range of
    their launch.
    """

    name = "nsys"
    suffix = ".nsys-rep"
    options_class = NsysOptions
    conflicts = frozenset({"torch", "npu"})
    engine_profiler = "nsys"
    starts_process = True
    options: NsysOptions

    def check_machine(self) -> None:
        """Check that this machine has ``nsys`` and a CUDA device."""
        if shutil.which("nsys") is None:
            raise ToolUnavailableError(_MISSING)
        self.check_device()

    def check_device(self) -> None:
        """Check that there is a CUDA device.

        Raises:
            ToolUnavailableError: There is no CUDA device.
        """
        torch = imported("torch", self.name)
        if not torch.cuda.is_available():
            raise ToolUnavailableError(
                f"tool 'nsys' records CUDA devices, and torch {torch.__version__} sees none; "
                "record with torch or spans here"
            )

    def prepare(self) -> None:
        """Check that this process runs under Nsight Systems, and has a GPU and NVTX."""
        process_ranges().require()
        self.check_device()
        imported("nvtx", self.name, "nvtx")

    def start(self, destination: Destination) -> Recording:
        process_ranges().check(destination.lane)
        return _NsysRecording(self, destination)

    def engine_ranges(self) -> Ranges:
        """Return the ranges of this process, which Nsight Systems has to have started."""
        process_ranges().require()
        return process_ranges()

    def open_range(self) -> None:
        """Begin a range that Nsight Systems records."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def close_range(self) -> None:
        """End the range, after which Nsight Systems writes its report."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class _NsysRecording(Recording):
    def __init__(self, tool: NsysTool, destination: Destination) -> None:
        import nvtx

        self._tool = tool
        self._destination = destination
        domain = nvtx.get_domain(DOMAIN)
        attributes = cache(lambda name: domain.get_event_attributes(message=name))
        self._marks = Marks(lambda name: domain.start_range(attributes(name)), domain.end_range)
        tool.open_range()
        process_ranges().note_opened(destination.folder, destination.path(NsysTool.suffix).name)

    @property
    def marks(self) -> Marks:
        return self._marks

    def stop(self, keep: bool = True) -> Sequence[Output]:
        artifact, run = self._destination.artifact(NsysTool), self._destination.folder.parent
        try:
            self._tool.close_range()
        finally:
            artifact = process_ranges().note_closed(artifact, run, keep=keep)
        return [Output(artifact)]

    def discard(self) -> None:
        self.stop(keep=False)


class Ranges:
    """The ranges, i.e. recorded periods, of this process and its children.

    At most one range is open. Nsight Systems counts ranges, and numbers its reports alike.
    """

    def __init__(self) -> None:
        self._opened = 0
        self._open: NsysRange | None = None

    def require(self) -> None:
        """Check that this process was started under Nsight Systems.

        Raises:
            ToolUnavailableError: The process was started without Nsight Systems.
        """
        if _OUTPUT_VARIABLE not in os.environ:
            raise ToolUnavailableError(
                "tool 'nsys': this process was not started under Nsight Systems; create the worker "
                "with .options(runtime_env=nsys_runtime_env(config, role=...))"
            )

    def check(self, who: str) -> None:
        """Check that Nsight Systems records another range, and that the file of ranges can be
        written.

        Args:
            who: Lane of the range, for errors.

        Raises:
            CaptureStateError: A range is open, or Nsight Systems expects no more ranges.
            OSError: The file cannot be written.
        """
        if self._open is not None:
            raise CaptureStateError(
                f"{who}: a range is open in this process, for {self._open.artifact}, and Nsight "
                "Systems records one range at a time; stop that capture first"
            )
        expected = int(os.environ[_RANGES_VARIABLE])
        if self._opened >= expected:
            raise CaptureStateError(
                f"{who}: range {self._opened + 1}: Nsight Systems expected {expected} and records "
                "no further ranges; set tools.nsys.ranges to the number that this process opens"
            )
        self._notes = Path(f"{os.environ[_OUTPUT_VARIABLE]}.{os.getpid()}{NOTES_SUFFIX}")
        if not self._opened:  # an earlier process may have had this id
            with suppress(FileNotFoundError):
                remove_file(self._notes)
        appended(self._notes).close()

    def note_opened(self, folder: Path, artifact: str) -> None:
        """Log the begin of a range.

        Args:
            folder: Step folder of the range.
            artifact: Name of the artifact for the report.
        """
        self._opened += 1
        root = self._notes.parent.parent
        name = str(folder.relative_to(root)) if folder.is_relative_to(root) else folder.name
        self._open = NsysRange(
            number=self._opened, folder=name, artifact=artifact, begin_ns=clock.now_ns()
        )
        self._note(self._open)

    def note_closed(self, artifact: Artifact, run: Path, *, keep: bool) -> Artifact:
        """Log the end of the open range, whose report Nsight Systems writes later.

        Args:
            artifact: The expected artifact, not written yet.
            run: The run's folder.
            keep: ``False`` for a warm-up, whose report is discarded.

        Returns:
            The artifact, ``pending`` until the report is collected.

        Raises:
            OSError: The record cannot be written.
        """
        assert self._open is not None
        closed = msgspec.structs.replace(self._open, end_ns=clock.now_ns(), keep=keep)
        self._open = None
        self._note(closed)
        reason = (
            f"range {closed.number} of this process; nsys writes its report by the end of the "
            f"process; fetch it with: verl-profiling collect {run}"
        )
        return artifact.with_status("pending", reason)

    def _note(self, noted: NsysRange) -> None:
        with appended(self._notes) as file:
            file.write(msgspec.json.encode(noted) + b"\n")


_ranges = Ranges()


def process_ranges() -> Ranges:
    """Return the only :class:`Ranges` object of this process."""
    return _ranges


def nsys_variables(output: Path, ranges: int) -> dict[str, str]:
    """Return the environment variables with the report names and range count of Nsight Systems.

    Args:
        output: Stem of the reports' names, without the process id.
        ranges: Number of ranges that Nsight Systems expects.
    """
    return {_OUTPUT_VARIABLE: str(output), _RANGES_VARIABLE: str(ranges)}
