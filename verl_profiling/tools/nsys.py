"""The ``nsys`` tool: NVIDIA Nsight Systems, one report per recording.

Nsight Systems has to start the process, and writes its reports at any time until the process ends.
So recording takes three parts: :func:`nsys_runtime_env` starts the worker under
it (:mod:`~verl_profiling.tools.nsys_launch`), this tool opens and closes ranges, and
``verl-profiling collect`` fetches the reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.manifest import Artifact
from verl_profiling.settings.runtime_env import worker_runtime_env as nsys_runtime_env
from verl_profiling.tools.base import Destination, Marks, Output, Recording, Tool
from verl_profiling.tools.nsys_launch import NsysLaunch, NsysOptions
from verl_profiling.tools.opened_ranges import process_ranges

__all__ = ["DOMAIN", "CudaProfiler", "NsysOptions", "NsysTool", "nsys_runtime_env"]

DOMAIN = "verl_profiling"
"""Domain of the NVTX ranges of stages."""


class CudaProfiler(Protocol):
    """Opens and closes a range."""

    def start(self) -> None:
        """Open a range."""

    def stop(self) -> None:
        """Close it."""


class _TorchCudaProfiler:
    def start(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def stop(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class NsysTool(Tool):
    """Opens a range of Nsight Systems per recording, and shows stages as NVTX ranges.

    The tool waits for the GPU when a range opens and when it closes, so that kernels are in the range
    in which they were launched.
    """

    name: ClassVar[str] = "nsys"
    suffix: ClassVar[str] = ".nsys-rep"
    options_class: ClassVar[type] = NsysOptions
    conflicts: ClassVar[frozenset[str]] = frozenset({"torch", "npu"})
    options: NsysOptions

    @property
    def launch(self) -> NsysLaunch:
        return NsysLaunch(self.options, self.cuda_profiler)

    def prepare(self) -> None:
        """Check that this process runs under Nsight Systems, and has a GPU and NVTX."""
        process_ranges().require()
        self.cuda_profiler()
        try:
            import nvtx  # noqa: F401
        except ImportError as error:
            raise ToolUnavailableError("tool 'nsys' shows stages with NVTX: pip install nvtx") from error

    def cuda_profiler(self) -> CudaProfiler:
        """Return the object that opens and closes ranges.

        Raises:
            ToolUnavailableError: There is no CUDA device.
        """
        try:
            import torch
        except ImportError as error:
            raise ToolUnavailableError(
                "tool 'nsys' needs torch; install it with: pip install 'verl-profiling[train]'"
            ) from error
        if not torch.cuda.is_available():
            raise ToolUnavailableError(
                f"tool 'nsys' records CUDA devices, and torch {torch.__version__} sees none; "
                "record with torch or spans here"
            )
        return _TorchCudaProfiler()

    def start(self, destination: Destination) -> Recording:
        self.prepare()
        process_ranges().check(destination.lane)
        return _NsysRecording(self.cuda_profiler(), destination)


class _NsysRecording(Recording):
    def __init__(self, profiler: CudaProfiler, destination: Destination) -> None:
        import nvtx

        self._profiler = profiler
        self._destination = destination
        self._domain = nvtx.get_domain(DOMAIN)
        self._attributes: dict[str, Any] = {}
        profiler.start()
        try:
            process_ranges().note_opened(destination.folder, destination.path(NsysTool.suffix).name)
        except OSError:
            profiler.stop()
            raise

    @property
    def marks(self) -> Marks:
        return Marks(self._begin_mark, self._end_mark)

    def _begin_mark(self, name: str) -> object:
        attributes = self._attributes.get(name)
        if attributes is None:
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
        return self._domain.start_range(attributes)

    def _end_mark(self, mark: Any) -> object:
        self._domain.end_range(mark)
        return None

    def stop(self) -> Sequence[Output]:
        return [Output(self._close(keep=True))]

    def discard(self) -> None:
        self._close(keep=False)

    def _close(self, keep: bool) -> Artifact:
        artifact = self._destination.artifact(NsysTool)
        try:
            self._profiler.stop()
        finally:
            artifact = process_ranges().note_closed(artifact, self._destination.folder.parent, keep=keep)
        return artifact
