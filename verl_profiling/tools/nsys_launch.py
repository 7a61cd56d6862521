"""How a process is started under Nsight Systems."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.tools.launch import Launch
from verl_profiling.tools.opened_ranges import OpenedRanges, nsys_variables, process_ranges

__all__ = ["NsysLaunch", "NsysOptions"]

_MISSING = (
    "tool 'nsys': there is no nsys on PATH; install NVIDIA Nsight Systems on every node that runs workers "
    "(package nsight-systems-cli), or record with another tool"
)


@dataclass(frozen=True, kw_only=True)
class NsysOptions:
    """Options of the ``nsys`` tool.

    Attributes:
        trace: APIs that are traced.
        cuda_graph: Record a CUDA graph as one entry, or as one per node (costly).
        cuda_memory: Trace the use of device memory.
        sampling: Sample CPU stacks.
        ranges: Number of ranges that a process will open; by default computed from the schedule and
            the selected stages.
        arguments: Further arguments of ``nsys profile``: ``{"gpu-metrics-devices": "all"}``.
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


class NsysLaunch(Launch):
    """Starts processes under ``nsys profile``, with Ray's runtime environment for it.

    Args:
        options: The tool's options.
        check_device: Raises ``ToolUnavailableError`` if there is no device to record.
    """

    range_api: ClassVar[str] = "cuda"

    def __init__(self, options: NsysOptions, check_device: Callable[[], object]) -> None:
        self._options = options
        self._check_device = check_device
        self.range_count = options.ranges

    def check_machine(self) -> None:
        nsys = shutil.which("nsys")
        if nsys is None:
            raise ToolUnavailableError(_MISSING)
        self._check_device()
        done = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolUnavailableError(f"tool 'nsys': {nsys} does not run: {done.stderr.strip()}")

    def runtime_env(self, output: Path, ranges: int, *, forks: bool) -> dict[str, Any]:
        if shutil.which("nsys") is None:
            raise ToolUnavailableError(_MISSING)
        options = self._options
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
                "force-overwrite": "true",  # left by an earlier run, whose process had the same id
                **({"trace-fork-before-exec": "true"} if forks else {}),
                **options.arguments,
            },
            "env_vars": nsys_variables(output, ranges),
        }

    def ranges(self) -> OpenedRanges:
        return process_ranges()


def _shell_safe(path: str) -> str:
    """Escape a path for the shell command of Ray; a quoted path would not count as absolute."""
    return re.sub(r"([^\w/.%+-])", r"\\\1", path)
