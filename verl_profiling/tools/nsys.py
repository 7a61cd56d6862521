"""The ``nsys`` tool: NVIDIA Nsight Systems, one report per recording.

Nsight Systems starts a process and writes its reports when it likes, at the latest when the
process ends. So three things belong together: :func:`nsys_runtime_env` starts the worker under
it, this tool opens and closes ranges, and ``verl-profiling collect`` fetches the reports.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.identity import safe_name
from verl_profiling.nsys_ranges import NSYS_FOLDER
from verl_profiling.settings.config import ProfilingConfig, RoleConfig
from verl_profiling.settings.schedule import Schedule
from verl_profiling.tools.base import Destination, Output, Recording, Tool
from verl_profiling.tools.opened_ranges import nsys_variables, pending_report, process_ranges

__all__ = ["DOMAIN", "CudaProfiler", "NsysOptions", "NsysTool", "nsys_ranges", "nsys_runtime_env"]

DOMAIN = "verl_profiling"
"""Domain of our NVTX ranges."""

_ENGINES = "rollout"


@dataclass(frozen=True, kw_only=True)
class NsysOptions:
    """Options of the ``nsys`` tool.

    Attributes:
        trace: APIs that are traced.
        cuda_graph: One entry per CUDA graph, or one per node in it (costly).
        cuda_memory: Trace the use of device memory.
        sampling: Sample the stacks of the CPU.
        ranges: Number of ranges that a process will open; computed from the schedule and the
            selected stages when left out.
        arguments: More arguments of ``nsys profile``: ``{"gpu-metrics-devices": "all"}``.
    """

    trace: tuple[str, ...] = ("cuda", "nvtx", "cublas")
    cuda_graph: Literal["graph", "node"] = "graph"
    cuda_memory: bool = False
    sampling: bool = False
    ranges: int | None = None
    arguments: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranges is not None and self.ranges < 1:
            raise ConfigError("ranges", f"must be at least 1, is {self.ranges}")
        if owned := sorted(
            {"o", "output", "capture-range", "capture-range-end"}.intersection(self.arguments)
        ):
            raise ConfigError(f"arguments.{owned[0]}", "is set by the tool itself; remove it")


def nsys_runtime_env(
    config: ProfilingConfig | Mapping[str, Any] | None, *, role: str, last_step: int | None = None
) -> dict[str, Any]:
    """Return the Ray runtime environment that starts a worker under Nsight Systems.

    ``Worker.options(runtime_env=nsys_runtime_env(config, role="actor", last_step=100)).remote(...)``.
    It is empty where the role does not record with ``nsys``.

    Args:
        config: The same settings as the callback's.
        role: Role of the worker.
        last_step: Number of the loop's last step; only needed for a schedule without an end.

    Raises:
        ConfigError: The settings are wrong, or do not say how many ranges there will be.
        ToolUnavailableError: There is no ``nsys`` on this machine.
    """
    settings = ProfilingConfig.from_any(config)
    chosen = settings.for_role(role)
    tool = next((tool for tool in chosen.tools if isinstance(tool, NsysTool)), None)
    if not chosen.enable or tool is None:
        return {}
    if shutil.which("nsys") is None:
        raise ToolUnavailableError(
            "tool 'nsys': there is no nsys on PATH; install NVIDIA Nsight Systems on every node that runs "
            "workers (package nsight-systems-cli), or record with another tool"
        )
    ranges = nsys_ranges(chosen, settings.schedule, tool.options.ranges, last_step)
    output = Path(settings.save_path).absolute() / NSYS_FOLDER / safe_name(role)
    output.parent.mkdir(parents=True, exist_ok=True)
    options = tool.options
    return {
        "nsight": {
            "t": ",".join(options.trace),
            "o": _shell_safe(f"{output}.%p"),
            "cuda-graph-trace": options.cuda_graph,
            "cuda-memory-usage": str(options.cuda_memory).lower(),
            "sample": "process-tree" if options.sampling else "none",
            "capture-range": "cudaProfilerApi",
            "capture-range-end": f"repeat-shutdown:{ranges}",
            "kill": "none",
            "force-overwrite": "true",  # of an earlier run, whose process had the same id
            # An engine computes in processes that its server forks.
            **({"trace-fork-before-exec": "true"} if role == _ENGINES else {}),
            **options.arguments,
        },
        "env_vars": nsys_variables(output, ranges),
    }


def _shell_safe(path: str) -> str:
    """Escape a path for the command line that Ray has a shell read; quoted, it would not be absolute."""
    return re.sub(r"([^\w/.%+-])", r"\\\1", path)


def nsys_ranges(
    role: RoleConfig, schedule: Schedule, given: int | None = None, last_step: int | None = None
) -> int:
    """Return how many ranges a worker will open: after that many, Nsight Systems stops listening.

    A rollout engine opens one per step; in discrete mode that is one per generation, of which a step
    is expected to have one.

    Args:
        role: Settings of the worker's role.
        schedule: The schedule.
        given: The number, where it is known better.
        last_step: Number of the loop's last step.

    Raises:
        ConfigError: It cannot be known.
    """
    if given is not None:
        return given
    if (last := schedule.last_step(last_step)) is None:
        raise ConfigError(
            "schedule",
            "has no end, so the number of ranges is unknown; pass last_step, or set repeat or steps",
        )
    windows = {step: window for step in range(last + 1) if (window := schedule.window(step)) is not None}
    if role.role == _ENGINES:
        count = len({window.first for window in windows.values()} if role.mode == "e2e" else windows)
    elif role.mode == "e2e":
        count = len({window.first for window in windows.values()})
    elif role.stages is None:
        raise ConfigError(
            "select.stages",
            "must list the stages, so that the number of ranges is known; or set tools.nsys.ranges",
        )
    else:
        count = len(windows) * len(role.stages)
    if not count:
        raise ConfigError("schedule", f"captures no step up to step {last}, so nsys would record nothing")
    return count


class CudaProfiler(Protocol):
    """What opens and closes a range."""

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

    The work on the GPU is waited for when a range opens and closes, so that kernels are in the
    range that launched them.
    """

    name: ClassVar[str] = "nsys"
    suffix: ClassVar[str] = ".nsys-rep"
    options_class: ClassVar[type] = NsysOptions
    conflicts: ClassVar[frozenset[str]] = frozenset({"torch", "npu"})
    options: NsysOptions

    def prepare(self) -> None:
        """Check that this process runs under Nsight Systems, and has a GPU and NVTX."""
        process_ranges().require()
        self.cuda_profiler()
        try:
            import nvtx  # noqa: F401
        except ImportError as error:
            raise ToolUnavailableError("tool 'nsys' shows stages with NVTX: pip install nvtx") from error

    def cuda_profiler(self) -> CudaProfiler:
        """Return what opens and closes ranges.

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

    def begin_mark(self, name: str) -> object:
        attributes = self._attributes.get(name)
        if attributes is None:
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
        return self._domain.start_range(attributes)

    def end_mark(self, mark: Any) -> object:
        self._domain.end_range(mark)
        return None

    def stop(self) -> Sequence[Output]:
        number = self._close(keep=True)
        artifact = self._destination.artifact(NsysTool)
        return [Output(pending_report(artifact, number, self._destination.folder.parent))]

    def discard(self) -> None:
        self._close(keep=False)

    def _close(self, keep: bool) -> int:
        try:
            self._profiler.stop()
        finally:
            number = process_ranges().note_closed(keep)
        return number
